//! Times candidates on the device, and lets the witness judge what is to be chosen.

use std::collections::BTreeMap;
use std::sync::Arc;

use half::bf16;

use crate::engine::{Engine, Output};
use crate::error::{Error, Result};
use crate::sonic::gpu::GpuEngine;
use crate::sonic::gpu::compile::KernelName;
use crate::sonic::gpu::device::{Buffer, Device, Graph, Guards, Stopwatch};
use crate::sonic::gpu::measure::{GEMMS, Subject, Times, recorded};
use crate::sonic::gpu::plan::Plan;
use crate::sonic::gpu::routing::DeviceRouting;
use crate::sonic::gpu::witness::{Witnessed, witness_backward, witness_forward};
use crate::sonic::gpu::workload::{Loaded, Workload};

use super::setting::Setting;

/// What a setting must gain over the kernel's own before it is chosen: kernels with the same instructions have
/// differed by 2% in one run.
const LEAST_GAIN: f64 = 0.03;
/// How many meet in the last comparison, the kernel's own setting apart.
const FINALISTS: usize = 3;

/// A setting, and the time that it took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The setting.
    pub setting: Setting,
    /// Its time over that of the kernel's own setting in the same rounds.
    pub ratio: f64,
}

/// What was found for one kernel.
#[derive(Clone, Debug)]
pub struct Tuned {
    /// The kernel.
    pub kernel: KernelName,
    /// What its source says.
    pub own: Setting,
    /// Median of the kernel's own setting, in ms.
    pub own_ms: f64,
    /// All that were timed, fastest first.
    pub candidates: Vec<Candidate>,
    /// The fastest that was judged right, if it gains 3%; otherwise the kernel's own.
    pub chosen: Candidate,
    /// Those that would have been chosen, with what the witness said.
    pub rejected: Vec<(Setting, String)>,
}

/// One layer on the device.
pub struct Search {
    device: Arc<Device>,
    plan: Plan,
    routing: DeviceRouting,
    x: Buffer<bf16>,
    dout: Buffer<bf16>,
    rounds: usize,
}

impl Search {
    /// Loads the workload and runs it once, so that every kernel reads what it reads in a step.
    ///
    /// # Errors
    /// Not enough device memory, or a device that fails.
    pub fn load(device: &Arc<Device>, workload: &Workload, rounds: usize) -> Result<Self> {
        let Loaded { layer, x, dout, on_device: routing, .. } = workload.load(device, Guards::NAN)?;
        let mut plan = Plan::allocate(layer.with_own_settings(), &routing)?;
        plan.forward(&routing, &x)?;
        plan.backward(&routing, &x, &dout)?;
        Ok(Self { device: Arc::clone(device), plan, routing, x, dout, rounds })
    }

    /// Every kernel's settings, axis by axis from the kernel's own; what is chosen has been judged.
    ///
    /// # Errors
    /// A device that fails, a kernel that does not compile, or one whose own setting is wrong.
    pub fn run(mut self) -> Result<Vec<Tuned>> {
        let mut found = Vec::new();
        for kernel in GEMMS {
            found.push(self.search(kernel)?);
        }
        self.judge(found)
    }

    fn search(&mut self, kernel: KernelName) -> Result<Tuned> {
        let own = Setting::own(kernel).ok_or_else(|| Error::internal("a GEMM without settings"))?;
        let mut seen = BTreeMap::from([(own, 1.0)]);
        let mut best = own;
        for axis in Setting::AXES {
            let n = self.plan.layer().n() as u32;
            // Another number of parts of ds would be another computation.
            let same_parts = |setting: &Setting| {
                kernel != KernelName::DownBackwardActivation || n.div_ceil(setting.columns) == n.div_ceil(own.columns)
            };
            let unseen = axis(best, kernel).into_iter().filter(|setting| !seen.contains_key(setting));
            let unseen: Vec<Setting> = unseen.filter(same_parts).collect();
            seen.extend(self.compare(kernel, own, &unseen, self.rounds)?.1);
            best = fastest(&seen).map_or(own, |first| first.setting);
        }
        let mut finalists: Vec<Setting> = ranked(&seen).iter().map(|candidate| candidate.setting).collect();
        finalists.retain(|&setting| setting != own);
        finalists.truncate(FINALISTS);
        let (own_ms, ratios) = self.compare(kernel, own, &finalists, 3 * self.rounds)?;
        seen.extend(ratios);
        self.plan.retune(kernel, own.constants(kernel))?;
        let chosen = Candidate { setting: own, ratio: 1.0 };
        Ok(Tuned { kernel, own, own_ms, candidates: ranked(&seen), chosen, rejected: Vec::new() })
    }

    /// The kernel's own setting and the others in turn: its median, and each one's over it.
    fn compare(
        &mut self,
        kernel: KernelName,
        own: Setting,
        others: &[Setting],
        rounds: usize,
    ) -> Result<(f64, Vec<(Setting, f64)>)> {
        let settings: Vec<Setting> = [&[own], others].concat();
        let layer = self.plan.layer();
        let variants = settings.iter().map(|setting| layer.variant_with(kernel, &setting.constants(kernel)));
        self.device.prepare(&variants.collect::<Vec<_>>())?;
        let graphs = settings.iter().map(|setting| {
            self.plan.retune(kernel, setting.constants(kernel))?;
            self.record(kernel)
        });
        let graphs = graphs.collect::<Result<Vec<_>>>()?;
        let mut times = vec![Vec::with_capacity(rounds); settings.len()];
        for round in 0..rounds + 2 {
            for ((graph, launches), times) in graphs.iter().zip(&mut times) {
                let watch = Stopwatch::start(&self.device)?;
                // SAFETY: what was recorded names buffers of `self` alone, which lends none of them.
                unsafe { graph.launch() }?;
                let ms = watch.stop()? / *launches as f64;
                if round >= 2 {
                    times.push(ms);
                }
            }
        }
        let medians: Vec<f64> = times.into_iter().map(|ms| Times::of(Subject::Kernel(kernel), ms).median()).collect();
        Ok((medians[0], settings.into_iter().zip(medians.iter().map(|ms| ms / medians[0])).skip(1).collect()))
    }

    fn record(&mut self, kernel: KernelName) -> Result<(Graph, usize)> {
        let Self { device, plan, routing, x, dout, .. } = self;
        recorded(device, || plan.kernel(kernel, routing, x, dout))
    }

    /// Runs the fastest settings of all kernels on poisoned buffers and judges every element; a kernel whose
    /// results are wrong falls back to its next candidate, until all are right.
    fn judge(self, mut found: Vec<Tuned>) -> Result<Vec<Tuned>> {
        let Self { device, plan, routing, x, dout, .. } = self;
        let mut layer = plan.into_layer();
        let numerics = Engine::<bf16>::numerics(&GpuEngine::on(Arc::clone(&device)));
        loop {
            found.iter_mut().for_each(Tuned::choose);
            let tuning = found.iter().map(|tuned| (tuned.kernel, tuned.chosen.setting.constants(tuned.kernel)));
            let mut plan = Plan::allocate(layer.tuned(tuning.collect()), &routing)?;
            plan.forward(&routing, &x)?;
            let mut witnessed = witness_forward(&plan, &routing, &x, &numerics)?;
            plan.backward(&routing, &x, &dout)?;
            witnessed.extend(witness_backward(&plan, &routing, &x, &dout, &numerics)?);
            plan.check_untouched()?;
            layer = plan.into_layer();
            if !reject(&mut found, &witnessed)? {
                return Ok(found);
            }
        }
    }
}

impl Tuned {
    /// The fastest that gains enough and was not rejected, or the kernel's own.
    fn choose(&mut self) {
        let Self { own, candidates, chosen, rejected, .. } = self;
        let wrong = |setting| rejected.iter().any(|(rejected, _)| *rejected == setting);
        let allowed = |candidate: &&Candidate| candidate.ratio <= 1.0 - LEAST_GAIN && !wrong(candidate.setting);
        let next = candidates.iter().find(allowed).copied();
        *chosen = next.unwrap_or(Candidate { setting: *own, ratio: 1.0 });
    }
}

/// Takes from every kernel with a wrong result what was chosen for it; whether there was one.
///
/// # Errors
/// A kernel that is wrong with its own setting, or a result that no setting changes.
fn reject(found: &mut [Tuned], witnessed: &[Witnessed]) -> Result<bool> {
    let mut any = false;
    for kernel in GEMMS {
        let Some(wrong) = witnessed.iter().find(|one| one.failing > 0 && writes(kernel, one.output)) else { continue };
        let said = format!("{} of {} elements of {} are wrong", wrong.failing, wrong.judged, wrong.output);
        match found.iter_mut().find(|tuned| tuned.kernel == kernel) {
            Some(tuned) if tuned.chosen.setting != tuned.own => tuned.rejected.push((tuned.chosen.setting, said)),
            _ => return Err(Error::internal(format!("{} with its own setting: {said}", kernel.name()))),
        }
        any = true;
    }
    match witnessed.iter().find(|one| one.failing > 0) {
        Some(wrong) if !any => Err(Error::internal(format!("{} of {} are wrong", wrong.failing, wrong.output))),
        _ => Ok(any),
    }
}

fn writes(kernel: KernelName, output: Output) -> bool {
    match kernel {
        KernelName::UpForward => matches!(output, Output::H | Output::A),
        KernelName::DownForward => output == Output::Y,
        KernelName::DownBackwardActivation => matches!(output, Output::Dh | Output::APrime | Output::Ds),
        KernelName::DownBackwardWeight => output == Output::Dw2,
        KernelName::UpBackwardActivation => output == Output::DxExpanded,
        KernelName::UpBackwardWeight => output == Output::Dw1,
        _ => false,
    }
}

fn ranked(seen: &BTreeMap<Setting, f64>) -> Vec<Candidate> {
    let mut ranked: Vec<Candidate> = seen.iter().map(|(&setting, &ratio)| Candidate { setting, ratio }).collect();
    ranked.sort_by(|a, b| a.ratio.total_cmp(&b.ratio));
    ranked
}

fn fastest(seen: &BTreeMap<Setting, f64>) -> Option<Candidate> {
    ranked(seen).first().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tuned(kernel: KernelName, ratios: &[f64]) -> Tuned {
        let own = Setting::own(kernel).unwrap();
        let other = |(stages, &ratio): (u32, &f64)| Candidate { setting: Setting { stages, ..own }, ratio };
        let candidates: Vec<Candidate> = (10..).zip(ratios).map(other).collect();
        let chosen = Candidate { setting: own, ratio: 1.0 };
        Tuned { kernel, own, own_ms: 1.0, candidates, chosen, rejected: Vec::new() }
    }

    fn witnessed(output: Output, failing: u64) -> Witnessed {
        Witnessed { output, judged: 8, skipped: 0, failing, worst: 0.5, first: None }
    }

    #[test]
    fn what_gains_less_than_medians_differ_by_is_not_chosen() {
        let mut noise = tuned(KernelName::DownForward, &[0.98, 1.2]);
        noise.choose();
        assert_eq!(noise.chosen.setting, noise.own);
        let mut gain = tuned(KernelName::DownForward, &[0.9, 0.95]);
        gain.choose();
        assert_eq!(gain.chosen, gain.candidates[0]);
    }

    #[test]
    fn a_setting_with_a_wrong_element_is_replaced_by_the_next_and_at_last_by_the_kernels_own() {
        let mut found = [tuned(KernelName::DownForward, &[0.9, 0.95]), tuned(KernelName::UpForward, &[0.9])];
        for expected in [0.9, 0.95, 1.0] {
            found.iter_mut().for_each(Tuned::choose);
            assert_eq!((found[0].chosen.ratio, found[1].chosen.ratio), (expected, 0.9));
            if expected < 1.0 {
                assert!(reject(&mut found, &[witnessed(Output::H, 0), witnessed(Output::Y, 1)]).unwrap());
            }
        }
        assert!(!reject(&mut found, &[witnessed(Output::Y, 0)]).unwrap());
        assert_eq!(found[0].rejected.len(), 2);
    }

    #[test]
    fn a_kernel_that_is_wrong_with_its_own_setting_ends_the_search() {
        let mut found = [tuned(KernelName::UpBackwardWeight, &[])];
        let error = reject(&mut found, &[witnessed(Output::Dw1, 3)]).unwrap_err().to_string();
        assert!(error.contains("up_backward_weight") && error.contains("3 of 8"), "{error}");
        assert!(reject(&mut found, &[witnessed(Output::Dx, 1)]).is_err(), "no setting makes the combine right");
    }
}
