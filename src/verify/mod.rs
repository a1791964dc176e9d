//! The main job: random problems through both paths, every result judged by every oracle.
//!
//! ```text
//! case ─ problem ─┬─ standard autograd, f64 ─┐
//!                 ├─ SonicMoE, f64 ──────────┴─▶ two derivations of the truth agree
//!                 └─ SonicMoE, storage type ───▶ examine: kernels, layer, exact claims
//! ```
//!
//! [`examine`] judges one engine on one problem; [`suite()`] feeds an engine (a GPU, one's own) to
//! everything there is; [`campaign()`] draws the problems and adds the findings up, claim by claim.

mod agreement;
mod claim;
mod exact;
mod examine;
mod function;
mod identity;
mod laws;
mod museum;
mod shard;
mod shrink;
mod suite;

pub use agreement::agreement;
pub use claim::{Claim, Finding, Section, Tally};
pub use exact::exact_regime;
pub use examine::{Examination, examine};
pub(crate) use examine::{empty_experts, pairless_tokens};
pub use function::{FunctionEngine, Layer};
pub use identity::{CaseId, EngineName, Oracle, Replay, Task};
pub use laws::laws;
pub use museum::{Skipped, museum, show};
pub use shard::Shard;
pub use shrink::{Shrunk, shrink, shrink_case, shrink_values};
pub use suite::{Report, suite};

use std::collections::BTreeMap;

use half::{bf16, f16};
use rayon::prelude::*;

use crate::case::campaign::{self, Fixed};
use crate::case::strategy::Limits;
use crate::case::{Case, Class};
use crate::element::{DType, Element};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::oracle::{self, Verdict};
use crate::sonic::cpu::CpuEngine;
use crate::sonic::gpu::GpuEngine;

/// What a campaign draws.
#[derive(Clone, Copy, Debug)]
pub struct Campaign {
    /// The seed of all cases.
    pub seed: u64,
    /// The index of the first case.
    pub first: u64,
    /// How many cases, before they are split.
    pub cases: u64,
    /// Which of them are drawn here.
    pub shard: Shard,
    /// What every case has in common.
    pub fixed: Fixed,
    /// The storage type under judgement.
    pub dtype: DType,
}

/// A claim that failed on a case.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The index of the case in its campaign.
    pub index: u64,
    /// The case.
    pub case: Case,
    /// What was found.
    pub finding: Finding,
}

/// What a campaign found.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// Cases that ran.
    pub cases: u64,
    /// How many of them belong to each class.
    pub classes: BTreeMap<Class, u64>,
    /// Every claim with what its cases came to.
    pub claims: BTreeMap<Claim, Tally>,
    /// Every failure, in the order of cases.
    pub failures: Vec<Failure>,
}

impl Failure {
    /// The line that repeats it.
    pub fn id(&self, engine: EngineName) -> CaseId {
        CaseId { case: self.case.clone(), engine, oracle: Oracle::of(&self.finding.claim) }
    }
}

impl Findings {
    /// One verdict on everything; incomplete if the cases met no claim at all.
    pub fn verdict(&self) -> Verdict {
        self.claims.values().filter(|tally| tally.met()).map(Tally::verdict).max().unwrap_or(Verdict::Incomplete)
    }

    fn add(&mut self, index: u64, case: &Case, examined: Vec<Finding>, classes: impl IntoIterator<Item = Class>) {
        for class in classes {
            *self.classes.entry(class).or_default() += 1;
        }
        for finding in examined {
            if finding.failing > 0 {
                self.failures.push(Failure { index, case: case.clone(), finding: finding.clone() });
            }
            self.claims.entry(finding.claim.clone()).or_default().add(finding);
        }
    }
}

/// What a campaign puts before the oracles.
#[derive(Clone, Copy, Debug)]
pub enum Subject<'e> {
    /// SonicMoE on the CPU, with f32 sums (f64 beside f64 storage); the two f64 derivations of the
    /// truth are compared on every case too.
    Cpu,
    /// SonicMoE on a Hopper GPU, bf16 storage.
    Cuda(&'e GpuEngine),
}

impl Subject<'_> {
    /// The name by which a case of it can be replayed.
    pub fn name(self, dtype: DType) -> EngineName {
        match self {
            Self::Cpu => EngineName::Cpu(dtype),
            Self::Cuda(_) => EngineName::Cuda,
        }
    }

    fn limits(self) -> Limits {
        match self {
            Self::Cpu => Limits::SMALL,
            Self::Cuda(_) => Limits::DEVICE,
        }
    }

    /// Cases examined side by side. A device takes one at a time, and the oracles are parallel.
    fn side_by_side(self) -> usize {
        match self {
            Self::Cpu => 16,
            Self::Cuda(_) => 1,
        }
    }

    /// The case of the exact regime that goes with case `index`, and what was found on it.
    fn exact_regime(self, of: &Campaign, index: u64) -> Result<Option<(Case, Vec<Finding>)>> {
        let Some(case) = campaign::exact_case(of.seed, index, self.limits(), of.fixed, of.dtype) else {
            return Ok(None);
        };
        let findings = match (self, of.dtype) {
            (Self::Cpu, DType::F64) => return Ok(None),
            (Self::Cpu, DType::F32) => exact_on::<f32>(&case, &CpuEngine::<f32>::new()),
            (Self::Cpu, DType::BF16) => exact_on::<bf16>(&case, &CpuEngine::<f32>::new()),
            (Self::Cpu, DType::F16) => exact_on::<f16>(&case, &CpuEngine::<f32>::new()),
            (Self::Cuda(engine), _) => exact_on::<bf16>(&case, engine),
        };
        Ok(Some((case, findings?)))
    }

    fn examine(self, case: &Case, dtype: DType) -> Result<(Vec<Finding>, Vec<Class>)> {
        match (self, dtype) {
            (Self::Cpu, DType::F64) => examine_on_cpu::<f64>(case, &CpuEngine::<f64>::new()),
            (Self::Cpu, DType::F32) => examine_on_cpu::<f32>(case, &CpuEngine::<f32>::new()),
            (Self::Cpu, DType::BF16) => examine_on_cpu::<bf16>(case, &CpuEngine::<f32>::new()),
            (Self::Cpu, DType::F16) => examine_on_cpu::<f16>(case, &CpuEngine::<f32>::new()),
            (Self::Cuda(engine), DType::BF16) => examine_stored::<bf16>(case, engine),
            (Self::Cuda(_), other) => Err(Error::unknown("dtype of the CUDA path", other.name(), [DType::BF16.name()])),
        }
    }
}

/// Runs a campaign; `progress` is told how many cases are done. The findings do not depend on the
/// number of threads.
///
/// # Errors
/// The first case that the engine refuses (cases are drawn so that none does), or a storage type
/// that it does not have.
pub fn campaign(campaign: &Campaign, subject: Subject<'_>, mut progress: impl FnMut(u64)) -> Result<Findings> {
    let mut findings = Findings::default();
    let end = campaign.first.saturating_add(campaign.cases);
    let indices: Vec<u64> = (campaign.first..end).filter(|index| campaign.shard.holds(*index)).collect();
    for indices in indices.chunks(subject.side_by_side()) {
        let batch: Vec<_> = indices
            .par_iter()
            .map(|&index| {
                let case = campaign::case(campaign.seed, index, subject.limits(), campaign.fixed);
                let (examined, classes) = subject.examine(&case, campaign.dtype)?;
                let exact = subject.exact_regime(campaign, index)?;
                Ok::<_, Error>((index, case, examined, classes, exact))
            })
            .collect();
        for examined in batch {
            let (index, case, examined, classes, exact) = examined?;
            findings.cases += 1;
            findings.add(index, &case, examined, classes);
            if let Some((case, examined)) = exact {
                findings.add(index, &case, examined, []);
            }
        }
        progress(findings.cases);
    }
    Ok(findings)
}

fn examine_on_cpu<S: Element>(case: &Case, engine: &dyn Engine<S>) -> Result<(Vec<Finding>, Vec<Class>)> {
    let (mut findings, classes) = examine_stored::<S>(case, engine)?;
    findings.extend(agreement(&case.problem::<f64>()?)?);
    Ok((findings, classes))
}

/// The findings of one exact case; none where the regime does not hold for what a user holds fixed, or
/// where a sum of this case leaves it.
fn exact_on<S: Element>(case: &Case, engine: &dyn Engine<S>) -> Result<Vec<Finding>> {
    let Ok(problem) = case.problem::<S>() else { return Ok(Vec::new()) };
    match oracle::exact::expected(&problem.widen(), S::DTYPE) {
        Ok(expected) => exact::against(engine, &problem, &expected),
        Err(_) => Ok(Vec::new()),
    }
}

fn examine_stored<S: Element>(case: &Case, engine: &dyn Engine<S>) -> Result<(Vec<Finding>, Vec<Class>)> {
    let Examination { routing, findings, .. } = examine(engine, &case.problem::<S>()?)?;
    Ok((findings, case.classes(&routing).into_iter().collect()))
}
