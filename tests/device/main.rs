//! The CUDA path on a Hopper GPU, judged as the CPU path is: kernel by kernel from stored inputs, the
//! whole layer against its bound, and everything that only memory on a device can get wrong.
//!
//! Every test asks for the device first and prints `skipped: reason` where there is none. The binary
//! needs no Rust on the machine that it runs on, and no NVRTC where compiled kernels lie in
//! `SONICMOE_CUBIN_DIR`.

mod agreement;
mod buffers;
mod full_size;
mod machine;
mod repetition;
mod router;
mod routing;
mod settings;
mod size;
mod step;
mod tuning;

use std::sync::OnceLock;

use half::bf16;
use ndarray::{ArrayD, ArrayViewD, Axis};

use sonicmoe::engine::{Engine, Outcome, Output, Record, run};
use sonicmoe::oracle::{bound, judge, kernel};
use sonicmoe::sonic::gpu::device::Guards;
use sonicmoe::sonic::gpu::{Absence, GEMMS, GpuEngine, Tuning};
use sonicmoe::{Gating, Problem};

/// The engine on the first Hopper device, with red zones and NaN in every result before it is
/// written.
fn engine() -> Result<&'static GpuEngine, &'static Absence> {
    static ENGINE: OnceLock<Result<GpuEngine, Absence>> = OnceLock::new();
    ENGINE.get_or_init(|| GpuEngine::open().map(|engine| engine.guarded(Guards::NAN))).as_ref()
}

/// The engine, or the end of the test with the reason why there is none.
#[macro_export]
macro_rules! engine_or_skip {
    () => {
        match $crate::engine() {
            Ok(engine) => engine,
            Err(absence) => {
                eprintln!("skipped: {absence}");
                return;
            }
        }
    };
}

/// The GEMMs as their sources have them, whatever suits a layer: small layers would never see their tiles.
fn own_settings() -> Tuning {
    GEMMS.into_iter().map(|kernel| (kernel, Default::default())).collect()
}

/// What a run of one problem was worth.
#[derive(Clone, Copy, Debug, Default)]
struct Judged {
    elements: usize,
    /// The worst error over bound, of kernels from stored inputs and of the whole layer.
    kernel_ratio: f64,
    layer_ratio: f64,
}

impl Judged {
    fn and(self, other: Self) -> Self {
        Self {
            elements: self.elements + other.elements,
            kernel_ratio: self.kernel_ratio.max(other.kernel_ratio),
            layer_ratio: self.layer_ratio.max(other.layer_ratio),
        }
    }
}

/// Runs `problem` and holds every result to its bounds; the message names the kernel and the worst
/// element.
fn run_and_judge(engine: &dyn Engine<bf16>, problem: &Problem<'_, bf16>) -> Result<(Outcome, Judged), String> {
    let outcome = run(engine, problem, Record::Intermediates).map_err(|error| error.to_string())?;
    let judged = judge_outcome(engine, problem, &outcome)?;
    Ok((outcome, judged))
}

fn judge_outcome(engine: &dyn Engine<bf16>, problem: &Problem<'_, bf16>, outcome: &Outcome) -> Result<Judged, String> {
    let text = |error: sonicmoe::Error| error.to_string();
    let (truth, numerics) = (problem.widen(), engine.numerics());
    let mut judged = Judged::default();
    let kernels = kernel::kernels(&truth, &outcome.routing, &outcome.results, &numerics).map_err(text)?;
    for kernel::KernelBound { kernel, output, bounded } in &kernels {
        let judgement = judge(*output, &outcome.results[output], bounded).map_err(text)?;
        if !judgement.passes() {
            return Err(format!("kernel {kernel}: {judgement}"));
        }
        judged.kernel_ratio = judged.kernel_ratio.max(judgement.ratio());
        judged.elements += judgement.judged();
    }
    for (output, bounded) in bound::layer(&truth, &outcome.routing, &numerics).map_err(text)? {
        let Some(stored) = outcome.results.get(&output) else { continue };
        let judgement = judge(output, stored, &bounded).map_err(text)?;
        if !judgement.passes() {
            return Err(format!("layer: {judgement}"));
        }
        judged.layer_ratio = judged.layer_ratio.max(judgement.ratio());
    }
    empties_are_positive_zero(outcome)?;
    Ok(judged)
}

/// An expert without tokens has +0 in every gradient, a token without pairs +0 in o: written, not
/// left over.
fn empties_are_positive_zero(outcome: &Outcome) -> Result<(), String> {
    let zero = |values: ArrayViewD<'_, f64>| values.iter().all(|value| value.to_bits() == 0);
    let counts = outcome.routing.expert_offsets().windows(2).map(|pair| pair[1] - pair[0]);
    for (expert, _) in counts.enumerate().filter(|&(_, count)| count == 0) {
        for output in [Output::Dw1, Output::Dw2, Output::Db1, Output::Db2] {
            let Some(stored) = outcome.results.get(&output) else { continue };
            if !zero(stored.values.index_axis(Axis(0), expert)) {
                return Err(format!("{output} of expert {expert}, which has no token, is not +0 throughout"));
            }
        }
    }
    let counts = outcome.routing.token_offsets().windows(2).map(|pair| pair[1] - pair[0]);
    for (token, _) in counts.enumerate().filter(|&(_, count)| count == 0) {
        if !zero(outcome.results[&Output::O].values.index_axis(Axis(0), token)) {
            return Err(format!("o of token {token}, which has no expert, is not +0 throughout"));
        }
    }
    Ok(())
}

/// The first result in which two runs differ in a bit, and where.
fn first_difference(first: &Outcome, second: &Outcome) -> Option<String> {
    let bits = |values: &ArrayD<f64>| values.mapv(f64::to_bits);
    first.results.iter().find_map(|(output, stored)| {
        let other = second.results.get(output)?;
        let (one, two) = (bits(&stored.values), bits(&other.values));
        let (at, _) = one.indexed_iter().find(|(at, bits)| two.get(at.clone()) != Some(bits))?;
        Some(format!("{output} at {at:?}: {:e} and {:e}", stored.values[&at], other.values[&at]))
    })
}

/// The experts' routing of a problem with given pairs.
fn given<'p>(problem: &'p Problem<'_, bf16>) -> &'p sonicmoe::routing::Routing {
    match problem.gating() {
        Gating::Given { routing, .. } => routing,
        Gating::Router(_) => panic!("this test gives its pairs"),
    }
}
