//! Two derivations of the truth: standard autograd, which keeps Y and takes dS = ⟨dO, Y⟩, and the
//! closed form of the method, which keeps H and takes dS = ⟨dA′, A⟩. Both in f64.

use super::claim::{Claim, Finding, Section};
use crate::engine::{Engine, Output, Record, RoundingModel, run};
use crate::error::Result;
use crate::oracle::{Bounded, bound, judge};
use crate::problem::Problem;
use crate::reference::StandardMoe;
use crate::sonic::cpu::CpuEngine;

/// Whether both derivations agree on `problem`, output by output.
///
/// Each may differ from the exact result by its own a-priori bound, so they may differ from each
/// other by the sum: the eager bound for the tape, the fused one for the closed form.
///
/// # Errors
/// What the engines return.
pub fn agreement(problem: &Problem<'_, f64>) -> Result<Vec<Finding>> {
    let (tape, closed_form) = (StandardMoe::<f64>::default(), CpuEngine::<f64>::new());
    let standard = run(&tape, problem, Record::Results)?;
    let sonic = run(&closed_form, problem, Record::Results)?;
    let same_routing = Claim { section: Section::Agreement, place: 0, subject: "the choice of experts".into() };
    if standard.routing != sonic.routing {
        return Ok(vec![Finding::exact(same_routing, 1, &["the two paths route differently"])]);
    }
    let mut findings = vec![Finding::exact(same_routing, 1, &[] as &[&str])];
    let fused = Engine::<f64>::numerics(&closed_form);
    let eager = crate::engine::Numerics { rounding: RoundingModel::Eager, ..fused };
    let mut fused = bound::layer(problem, &sonic.routing, &fused)?;
    let mut eager = bound::layer(problem, &sonic.routing, &eager)?;
    for (place, output) in Output::RESULTS.into_iter().enumerate() {
        let (Some(ours), Some(theirs)) = (sonic.results.get(&output), standard.results.get(&output)) else { continue };
        let (Some(fused), Some(eager)) = (fused.remove(&output), eager.remove(&output)) else { continue };
        let bounded = Bounded { truth: theirs.values.clone(), bound: fused.bound + eager.bound };
        let claim = Claim { section: Section::Agreement, place: place + 1, subject: output.name().into() };
        findings.push(Finding::bounded(claim, &judge(output, ours, &bounded)?));
    }
    Ok(findings)
}
