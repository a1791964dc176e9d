//! One engine on one problem, before every oracle.

use ndarray::{Array2, ArrayD, Axis};

use super::claim::{Claim, Finding, Section};
use crate::element::Element;
use crate::engine::{Engine, Numerics, Outcome, Output, Record, Results, run};
use crate::error::Result;
use crate::oracle::{bound, judge, kernel};
use crate::problem::{Gating, Problem};
use crate::routing::Convention;
use crate::routing::Routing;
use crate::routing::certificate::{RoutingArrays, Violation, certify_choice, certify_grouped_choice, certify_metadata};
use crate::shape::{ExpertId, TokenId};

/// What the oracles found on one problem.
#[derive(Clone, Debug)]
pub struct Examination {
    /// The routing that the engine used.
    pub routing: Routing,
    /// One finding per claim.
    pub findings: Vec<Finding>,
    /// What the engine gave.
    pub results: Results,
}

/// Runs `engine` on `problem` and judges all that it gives.
///
/// # Errors
/// What the engine returns, or results of the wrong shape.
pub fn examine<S: Element>(engine: &dyn Engine<S>, problem: &Problem<'_, S>) -> Result<Examination> {
    let outcome = run(engine, problem, Record::Intermediates)?;
    let again = run(engine, problem, Record::Intermediates)?;
    let wide = problem.widen();
    let numerics = engine.numerics();

    let mut findings = Vec::new();
    let kernels = kernel::kernels(&wide, &outcome.routing, &outcome.results, &numerics)?;
    for judged in &kernels {
        let Some(stored) = outcome.results.get(&judged.output) else { continue };
        let subject = format!("{}: {}", judged.kernel, judged.output).into();
        let claim = Claim { section: Section::Kernel, place: place_of(judged.output), subject };
        findings.push(Finding::bounded(claim, &judge(judged.output, stored, &judged.bounded)?));
    }
    drop(kernels);

    let mut layer = bound::layer(&wide, &outcome.routing, &numerics)?;
    for (place, output) in Output::RESULTS.into_iter().enumerate() {
        let (Some(stored), Some(bounded)) = (outcome.results.get(&output), layer.remove(&output)) else { continue };
        let claim = Claim { section: Section::Layer, place, subject: output.name().into() };
        findings.push(Finding::bounded(claim, &judge(output, stored, &bounded)?));
    }

    findings.push(certified(problem, &outcome, &numerics));
    findings.push(kept_bytes(problem, &outcome));
    findings.push(empty_experts(&outcome));
    findings.push(pairless_tokens(&outcome));
    findings.push(repeats(&outcome.results, &again.results));
    Ok(Examination { routing: outcome.routing, findings, results: outcome.results })
}

/// The kernels' results in the order of the method: kernels 1 to 8, bias gradients, router.
fn place_of(output: Output) -> usize {
    match output {
        Output::H => 0,
        Output::A => 1,
        Output::Y => 2,
        Output::O => 3,
        Output::Dh => 4,
        Output::APrime => 5,
        Output::Ds => 6,
        Output::Dw2 => 7,
        Output::DxExpanded => 8,
        Output::Dw1 => 9,
        Output::Dx => 10,
        Output::Db1 => 11,
        Output::Db2 => 12,
        Output::Logits => 13,
        Output::Scores => 14,
        Output::Dlogits => 15,
        Output::DrouterW => 16,
        Output::DrouterB => 17,
        Output::DsharedGate => 18,
        Output::DsharedUp => 19,
        Output::DsharedDown => 20,
    }
}

fn exact(place: usize, subject: &'static str) -> Claim {
    Claim { section: Section::Exact, place, subject: subject.into() }
}

/// The choice follows the logits, and the metadata follow the choice.
fn certified<S: Element>(problem: &Problem<'_, S>, outcome: &Outcome, numerics: &Numerics) -> Finding {
    let routing = &outcome.routing;
    let pairs: Vec<_> = routing.pair_token().iter().copied().zip(routing.pair_expert().iter().copied()).collect();
    let mut violations: Vec<Violation> = Vec::new();
    let arrays = RoutingArrays::from(routing);
    violations.extend(certify_metadata(problem.t(), problem.e(), &pairs, arrays).err().unwrap_or_default());
    if let (Gating::Router(router), Some(logits)) = (problem.gating(), outcome.results.get(&Output::Logits)) {
        let shape = (problem.t(), router.k);
        let ids = Array2::from_shape_vec(shape, routing.pair_expert().to_vec());
        let logits = logits.values.view().into_dimensionality();
        match (ids, logits) {
            (Ok(ids), Ok(logits)) => {
                let certified = match router.convention {
                    Convention::GroupedSigmoid(groups) => {
                        let bias = router.selection_bias.as_ref().map(|bias| bias.mapv(S::to_f64));
                        let bias = bias.as_ref().map(|bias| bias.view());
                        // σ within the engine's ulps, and the sum with the bias.
                        let error = (numerics.function_ulps + 2.0) * numerics.score.unit_roundoff();
                        certify_grouped_choice(logits, bias, &groups, error, router.k, ids.view())
                    }
                    _ => certify_choice(logits, router.k, ids.view()),
                };
                violations.extend(certified.err().unwrap_or_default());
            }
            _ => violations.push(Violation::Length {
                array: "pairs",
                expected: shape.0 * shape.1,
                found: routing.routed(),
            }),
        }
    }
    Finding::exact(exact(0, "the routing is certified"), 1, &violations)
}

/// x and h, and nothing else: T·d + R·2n elements, 2Td + 4Rn bytes in a 2-byte type with a gate. An engine
/// with an empty ledger states nothing of what it keeps, and is not judged.
fn kept_bytes<S: Element>(problem: &Problem<'_, S>, outcome: &Outcome) -> Finding {
    let elements = problem.t() * problem.d() + outcome.routing.routed() * problem.h_width();
    let (expected, found) = (elements * S::DTYPE.bytes(), outcome.ledger.activations());
    let broken: Vec<String> =
        (expected != found).then(|| format!("{found} bytes are kept, x and h have {expected}")).into_iter().collect();
    let stated = u64::from(!outcome.ledger.0.is_empty());
    let broken = if stated == 0 { Vec::new() } else { broken };
    Finding::exact(exact(1, "kept: x and h, 2Td + 4Rn bytes (2-byte type, gate)"), stated, &broken)
}

/// Weight gradients of experts without tokens are +0, bit by bit.
pub(crate) fn empty_experts(outcome: &Outcome) -> Finding {
    let routing = &outcome.routing;
    let (mut judged, mut broken) = (0, Vec::new());
    for expert in (0..routing.experts()).filter(|&e| routing.rows_of_expert(ExpertId(e as u32)).is_empty()) {
        for output in [Output::Dw1, Output::Dw2, Output::Db1, Output::Db2] {
            check_zero_row(&outcome.results, output, expert, &mut judged, &mut broken);
        }
    }
    Finding::exact(exact(2, "an expert without tokens gets +0 gradients"), judged, &broken)
}

/// o of tokens without pairs is +0, bit by bit.
pub(crate) fn pairless_tokens(outcome: &Outcome) -> Finding {
    let routing = &outcome.routing;
    let (mut judged, mut broken) = (0, Vec::new());
    for token in (0..routing.tokens()).filter(|&t| routing.rows_of_token(TokenId(t as u32)).is_empty()) {
        check_zero_row(&outcome.results, Output::O, token, &mut judged, &mut broken);
    }
    Finding::exact(exact(3, "a token without pairs gets o = +0"), judged, &broken)
}

fn check_zero_row(results: &Results, output: Output, row: usize, judged: &mut u64, broken: &mut Vec<String>) {
    let Some(stored) = results.get(&output) else { return };
    *judged += 1;
    let values = stored.values.index_axis(Axis(0), row);
    if let Some(value) = values.iter().find(|value| value.to_bits() != 0) {
        broken.push(format!("{output}[{row}] holds {value:e}"));
    }
}

/// The same problem gives the same bits again.
fn repeats(first: &Results, second: &Results) -> Finding {
    let bits = |values: &ArrayD<f64>| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    let broken: Vec<String> = first
        .iter()
        .filter(|(output, stored)| second.get(output).is_none_or(|other| bits(&stored.values) != bits(&other.values)))
        .map(|(output, _)| format!("{output} differs in a second run"))
        .collect();
    Finding::exact(exact(4, "a second run gives the same bits"), first.len() as u64, &broken)
}
