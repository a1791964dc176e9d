//! The exact regime on an engine: every bit, whatever the order in which it sums.

use super::claim::{Claim, Finding, Section};
use crate::element::{DType, Element};
use crate::engine::{Engine, Output, Record, Results, RoundingModel, run};
use crate::error::Result;
use crate::oracle::exact;
use crate::problem::Problem;

/// Whether the regime speaks of engines of this arithmetic: the fused rounding points, and a storage
/// type in which σ saturates.
pub(crate) fn applies<S: Element>(engine: &dyn Engine<S>) -> bool {
    engine.numerics().rounding == RoundingModel::Fused && S::DTYPE != DType::F64
}

/// One finding per result: whether all of its values are the only ones that a correct engine with
/// the fused rounding points has. `problem` is drawn at [`Scale::Exact`](crate::case::Scale::Exact);
/// an engine of other rounding points gets no finding.
///
/// # Errors
/// What the engine returns, or a problem for which the regime does not hold.
pub fn exact_regime<S: Element>(engine: &dyn Engine<S>, problem: &Problem<'_, S>) -> Result<Vec<Finding>> {
    if !applies(engine) {
        return Ok(Vec::new());
    }
    let expected = exact::expected(&problem.widen(), S::DTYPE)?;
    against(engine, problem, &expected)
}

/// One finding per result of `expected`.
pub(crate) fn against<S: Element>(
    engine: &dyn Engine<S>,
    problem: &Problem<'_, S>,
    expected: &Results,
) -> Result<Vec<Finding>> {
    let results = run(engine, problem, Record::Intermediates)?.results;
    let differences = exact::differences(&results, expected)?;
    let outputs = Output::RESULTS.into_iter().chain(Output::INTERMEDIATES).enumerate();
    let findings = outputs.filter(|(_, output)| results.contains_key(output) && expected.contains_key(output)).map(
        |(place, output)| {
            let claim = Claim { section: Section::ExactRegime, place, subject: output.name().into() };
            let difference = differences.iter().find(|difference| difference.output == output);
            let judged = expected[&output].values.len() as u64;
            let broken: Vec<_> = difference.into_iter().collect();
            Finding {
                failing: difference.map_or(0, |difference| difference.elements as u64),
                ..Finding::exact(claim, judged, &broken)
            }
        },
    );
    Ok(findings.collect())
}
