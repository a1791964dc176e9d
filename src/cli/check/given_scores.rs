//! The experts behind a router, judged by the scores that they were given.
//!
//! A router's roundings enter every row of an expert: they lean one way there, and what leans one way
//! hides a bias. Where the file has the scores (and with them the ids), they are judged against a bound
//! of their own, and then the experts are a layer of given routing: its results depend on the scores as
//! stored, and no rounding of the router is left in their errors.

use super::trial::Judged;
use crate::dump::Dump;
use crate::engine::Output;
use crate::error::{Error, Result};
use crate::problem::{Biases, Gating, Problem};
use crate::routing::Routing;

/// What the experts compute by themselves; dx has the router's part too, and ds belongs to it.
const OF_EXPERTS: [Output; 5] = [Output::O, Output::Dw1, Output::Dw2, Output::Db1, Output::Db2];

/// The experts as a layer that the file's scores are given to; none without a router, and none without them.
///
/// # Errors
/// Scores that are not one for each pair.
pub(super) fn experts<'d>(dump: &'d Dump, routing: &Routing) -> Result<Option<Problem<'d, f64>>> {
    let whole = &dump.problem;
    let (Gating::Router(_), Some(scores), None) = (whole.gating(), dump.results.get(&Output::Scores), &dump.shared)
    else {
        return Ok(None);
    };
    if scores.values.shape() != [routing.routed()] {
        return Err(Error::shape("scores", &[routing.routed()], scores.values.shape(), "one for each pair"));
    }
    let experts = Problem::new(
        whole.x(),
        whole.w1(),
        whole.w2(),
        whole.b1().zip(whole.b2()).map(|(b1, b2)| Biases { b1: b1.into(), b2: b2.into() }),
        Gating::Given { routing: routing.clone(), scores: scores.values.iter().copied().collect() },
        whole.activation(),
        whole.dout(),
    )?;
    Ok(Some(experts))
}

/// Whether it speaks of this result.
pub(super) fn judges(output: Output) -> bool {
    OF_EXPERTS.contains(&output)
}

/// Whether the file leaves out scores that would tell more of this result.
pub(super) fn needs_scores(dump: &Dump, judged: &Judged) -> bool {
    let behind_router = matches!(dump.problem.gating(), Gating::Router(_));
    let without_scores = dump.shared.is_none() && !dump.results.contains_key(&Output::Scores);
    behind_router && without_scores && judges(judged.judgement.output)
}
