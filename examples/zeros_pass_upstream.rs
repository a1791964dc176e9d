//! An all-zero kernel before SonicMoE's own test, and before this crate.
//!
//! `tests/moe_test.py` of SonicMoE draws x, dout and all weights at scale 0.02 and accepts
//! |result − reference| ≤ atol + 0.02·|reference| with atol 1.4e-2 forward and 2e-2 for gradients. At
//! that scale no number of the layer is as large as atol: a kernel that writes nothing but zeros passes.
//!
//! ```text
//! cargo run --release --example zeros_pass_upstream
//! ```

use half::bf16;
use sonicmoe::case::{Case, Scale};
use sonicmoe::engine::{Output, Record, Stored};
use sonicmoe::oracle::{bound, judge};
use sonicmoe::sonic::cpu::CpuEngine;
use sonicmoe::{Engine, Result};

/// What both make of zeros in the place of one result.
#[derive(Clone, Debug)]
pub struct Compared {
    pub output: Output,
    /// The largest number of the right result.
    pub largest: f64,
    /// Upstream's absolute tolerance.
    pub tolerance: f64,
    /// Elements of the zeros that upstream's test rejects.
    pub rejected_upstream: usize,
    pub elements: usize,
    /// Elements that are beyond what a correct kernel can be off, and by how much.
    pub rejected_here: usize,
    pub ratio: f64,
}

/// Zeros in every result of a layer of upstream's test, without biases.
pub fn zeros(shape: &str) -> Result<Vec<Compared>> {
    let problem = Case::new(shape.parse()?).with_scale(Scale::Small).with_seed(42).problem::<bf16>()?;
    let engine = CpuEngine::<f32>::new();
    let routing = engine.forward(&problem, Record::Results)?.pass.routing().clone();
    let bounds = bound::layer(&problem.widen(), &routing, &Engine::<bf16>::numerics(&engine))?;
    let compared = [Output::O, Output::Dx, Output::Dw1, Output::Dw2, Output::DrouterW].map(|output| {
        let bounded = &bounds[&output];
        let tolerance = if output == Output::O { 1.4e-2 } else { 2e-2 };
        let rejected = |truth: &&f64| truth.abs() > tolerance + 2e-2 * truth.abs();
        let zeros = Stored { dtype: sonicmoe::DType::BF16, values: bounded.truth.mapv(|_| 0.0) };
        let judgement = judge(output, &zeros, bounded)?;
        Ok(Compared {
            output,
            largest: bounded.truth.fold(0.0, |largest: f64, truth| largest.max(truth.abs())),
            tolerance,
            rejected_upstream: bounded.truth.iter().filter(rejected).count(),
            elements: judgement.elements,
            rejected_here: judgement.failing,
            ratio: judgement.ratio(),
        })
    });
    compared.into_iter().collect()
}

fn main() -> Result<()> {
    // The first sizes of upstream's list, d, n, E, K as they are, with 64 tokens in the place of 8192.
    for shape in ["64,768,256,128,8", "64,768,512,64,4", "64,768,1024,32,2"] {
        println!("{shape}, scale 0.02, an all-zero kernel:");
        for Compared { output, largest, tolerance, rejected_upstream, elements, rejected_here, ratio } in zeros(shape)?
        {
            println!(
                "  {output:<10} largest {largest:.2e}, upstream allows {tolerance:.1e}: rejects {rejected_upstream} of \
                 {elements}; here {rejected_here} fail, the worst {ratio:.0}× its bound"
            );
        }
    }
    Ok(())
}
