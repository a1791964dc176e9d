//! The statistical twin of the bound: what a correct engine does not exceed on random data.
//!
//! The propagation of [`bound`](super::bound) in squares. Errors of different roundings are taken as
//! independent, and one store of v as uniform within ±u|v|, of standard deviation u|v|/√3; a result may
//! be [`LIMIT`] deviations off. Where the worst case of a sum of m terms grows as m, this grows
//! as √m, so it sees what the bound cannot: under the eager model the bound of drouter_w is larger
//! than drouter_w itself, and this is not.
//!
//! It holds for random data only. With dependent data (identical tokens) errors add up instead of
//! cancelling, and a correct engine exceeds it; so it stands beside the bound, never in its place.

use std::collections::BTreeMap;

use super::bound::ball::Measure;
use super::bound::{Keep, propagate, propagate_beside, propagate_of};
use super::judge::Bounded;
use crate::engine::{Numerics, Output};
use crate::error::Result;
use crate::problem::Problem;
use crate::routing::Routing;

/// λ, the deviations that a correct result may be off: a normal error exceeds six of them once in
/// 5·10⁸ elements. Correct engines reach 3.7 in real bf16 runs, a wrong rounding model 7 to 435.
pub const LIMIT: f64 = 6.0;

/// The truth of every result and intermediate, with λ times the standard deviation of a correct
/// engine's error as its bound; arguments as for [`bound::layer`](super::bound::layer).
///
/// # Errors
/// As [`bound::layer`](super::bound::layer).
pub fn layer(problem: &Problem<'_, f64>, routing: &Routing, numerics: &Numerics) -> Result<BTreeMap<Output, Bounded>> {
    Ok(limits(deviations(problem, routing, numerics)?))
}

/// The same of the results that `keep` names.
///
/// # Errors
/// As [`bound::layer`](super::bound::layer).
pub fn layer_of(
    problem: &Problem<'_, f64>,
    routing: &Routing,
    numerics: &Numerics,
    keep: Keep<'_>,
) -> Result<BTreeMap<Output, Bounded>> {
    Ok(limits(propagate_of(problem, routing, numerics, Measure::Deviation, keep)?))
}

/// The same with a shared expert beside; arguments as for
/// [`bound::layer_beside`](super::bound::layer_beside).
///
/// # Errors
/// As [`bound::layer_beside`](super::bound::layer_beside).
pub fn layer_beside(
    problem: &Problem<'_, f64>,
    shared: &Problem<'_, f64>,
    routing: &Routing,
    numerics: &Numerics,
) -> Result<BTreeMap<Output, Bounded>> {
    Ok(limits(propagate_beside(problem, shared, routing, numerics, Measure::Deviation)?))
}

fn limits(mut deviations: BTreeMap<Output, Bounded>) -> BTreeMap<Output, Bounded> {
    for Bounded { bound, .. } in deviations.values_mut() {
        *bound *= LIMIT;
    }
    deviations
}

/// The truth of every result and intermediate, with one standard deviation of a correct engine's
/// error as its bound.
///
/// # Errors
/// As [`bound::layer`](super::bound::layer).
pub fn deviations(
    problem: &Problem<'_, f64>,
    routing: &Routing,
    numerics: &Numerics,
) -> Result<BTreeMap<Output, Bounded>> {
    propagate(problem, routing, numerics, Measure::Deviation)
}
