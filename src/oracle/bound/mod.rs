//! What a correct engine cannot exceed: an a-priori bound of every element of every result,
//! propagated beside the f64 truth.
//!
//! With u the roundoff of the accumulator, γ_m = m·u/(1 − m·u), and E_v the bound on an engine's v:
//!
//! | step | bound |
//! | --- | --- |
//! | dot product of m terms, any order | γ_m Σ(\|a\| + E_a)(\|b\| + E_b) + Σ(E_a\|b\| + \|a\|E_b + E_aE_b) |
//! | store to a type of roundoff u_S | E += max(u_S·2^⌊log₂(\|v\| + E)⌋, η), η half its smallest subnormal |
//! | store of h before ds | max(\|RN(v − E) − v\|, \|RN(v + E) − v\|), as rounding is monotone |
//! | f(v) | \|f′\|E + ½ sup\|f″\| E², plus the evaluation; at a kink within reach the whole jump |
//! | scores | the largest and smallest softmax of logits within E_l |
//! | dlogits | E_s\|g − Σgs\| + s(\|1 − s\|E_g + Σ_others E_g s + Σ\|g\|E_s) and second-order terms |
//!
//! A bias counts as a term of its dot product. The f64 evaluation of the truth is one more roundoff
//! in each step, so the bound holds against the truth as computed. Where a number may leave its
//! type's range the bound is infinite: nothing is known of it, nor of what it feeds. A bound of 0
//! demands equality: an expert without tokens has gradients of exactly 0.
//!
//! The choice of experts is an input. It is not judged here.

pub(crate) mod accumulation;
pub(crate) mod ball;
mod between;
pub(crate) mod buffers;
pub(crate) mod curve;
pub(crate) mod eager;
pub(crate) mod fused;
mod gpt_oss;
mod grouped;
pub(crate) mod layer;
mod line;
pub(crate) mod matrix;
pub(crate) mod midpoints;
mod model;
mod pass;
mod product;
pub(crate) mod router;
mod shared;
mod silu;
pub(crate) mod sums;

use std::collections::BTreeMap;

pub(crate) use model::Model;
pub use shared::layer_beside;
pub(crate) use shared::{propagate_beside, swapped_beside};

use ndarray::ArrayD;

use crate::engine::{Numerics, Output};
use crate::error::{Error, Result};
use crate::oracle::judge::Bounded;
use crate::problem::{Gating, Problem};
use crate::routing::Routing;
use ball::{Ball, Measure};
pub use layer::Keep;
#[cfg(test)]
use layer::in_parts;
pub(crate) use layer::{Found, Part, Parts, place_of};
use matrix::{Balls2, Operand};
pub(crate) use pass::{Pass, propagate_all, run};

/// What the tests of the parts assume: results stored as `storage`, sums and scores in f32.
#[cfg(test)]
pub(crate) fn numerics_of(storage: crate::DType, rounding: crate::engine::RoundingModel) -> Numerics {
    Numerics {
        storage,
        score: crate::DType::F32,
        accumulator: crate::DType::F32.unit_roundoff(),
        rounding,
        router: crate::engine::RouterRounding::Score,
        function_ulps: 4.0,
        flushes_denormals: false,
    }
}

/// The truth and the bound of every result and intermediate of a layer, by the routing that an
/// engine chose and the arithmetic that it declares.
///
/// `problem` holds the numbers as stored, widened ([`Problem::widen`]). Under the eager model there is
/// no a′.
///
/// ```
/// use sonicmoe::engine::{Numerics, Output, RouterRounding, RoundingModel};
/// use sonicmoe::oracle::bound;
/// use sonicmoe::{Activation, DType, ExpertId, Gating, Problem, TokenId, routing::Routing};
/// use ndarray::{arr2, arr3};
///
/// // One token, one expert, a = relu(3·1) = 3, y = 2·3, o = 6; expert 1 gets no token.
/// let routing = Routing::new(1, 2, [(TokenId(0), ExpertId(0))])?;
/// let gating = Gating::Given { routing: routing.clone(), scores: vec![1.0] };
/// let problem = Problem::new(
///     arr2(&[[3.0]]),
///     arr3(&[[[1.0]], [[1.0]]]),
///     arr3(&[[[2.0]], [[2.0]]]),
///     None,
///     gating,
///     Activation::Relu,
///     arr2(&[[1.0]]),
/// )?;
/// let numerics = Numerics {
///     storage: DType::BF16,
///     score: DType::F32,
///     accumulator: DType::F32.unit_roundoff(),
///     rounding: RoundingModel::Fused,
///     router: RouterRounding::Score,
///     function_ulps: 4.0,
///     flushes_denormals: false,
/// };
/// let bounds = bound::layer(&problem, &routing, &numerics)?;
/// assert_eq!(bounds[&Output::O].truth[[0, 0]], 6.0);
/// assert_eq!(bounds[&Output::Dw1].bound[[1, 0, 0]], 0.0);
/// # Ok::<(), sonicmoe::Error>(())
/// ```
///
/// # Errors
/// A routing of other T or E than the problem's, or, with given routing, other pairs.
pub fn layer(problem: &Problem<'_, f64>, routing: &Routing, numerics: &Numerics) -> Result<BTreeMap<Output, Bounded>> {
    propagate(problem, routing, numerics, Measure::Worst)
}

/// The same of the results that `keep` names; what only others need is not computed.
///
/// # Errors
/// As [`layer`].
pub fn layer_of(
    problem: &Problem<'_, f64>,
    routing: &Routing,
    numerics: &Numerics,
    keep: Keep<'_>,
) -> Result<BTreeMap<Output, Bounded>> {
    propagate_of(problem, routing, numerics, Measure::Worst, keep)
}

/// The truth of the results that `keep` names, as [`layer`] has it, without a bound.
///
/// # Errors
/// As [`layer`].
pub fn truth_of(
    problem: &Problem<'_, f64>,
    routing: &Routing,
    numerics: &Numerics,
    keep: Keep<'_>,
) -> Result<BTreeMap<Output, ArrayD<f64>>> {
    Ok(propagate_all(problem, routing, &[(*numerics, Measure::Midpoint)], keep)?.truths)
}

/// Balls of every result, radii joined by `measure`.
pub(crate) fn propagate(
    problem: &Problem<'_, f64>,
    routing: &Routing,
    numerics: &Numerics,
    measure: Measure,
) -> Result<BTreeMap<Output, Bounded>> {
    propagate_of(problem, routing, numerics, measure, &|_| true)
}

/// Balls of the results that `keep` names.
pub(crate) fn propagate_of(
    problem: &Problem<'_, f64>,
    routing: &Routing,
    numerics: &Numerics,
    measure: Measure,
    keep: Keep<'_>,
) -> Result<BTreeMap<Output, Bounded>> {
    bounds_of(propagate_all(problem, routing, &[(*numerics, measure)], keep)?)
}

/// The first arithmetic's radii as bounds.
fn bounds_of(found: Found) -> Result<BTreeMap<Output, Bounded>> {
    let Found { truths, radii } = found;
    let mut radii = radii.into_iter().next().unwrap_or_default();
    let bounds = truths.into_iter().map(|(output, truth)| match radii.remove(&output) {
        Some(bound) => Ok((output, Bounded { truth, bound })),
        None => Err(Error::internal(format!("{output} has a truth and no radius"))),
    });
    bounds.collect()
}

/// dx = store(store(experts) + store(router)).
pub(crate) fn add_router_part(model: &Model<'_, '_>, mut experts: Balls2, router: Operand<'_>) -> Balls2 {
    let arithmetic = &model.arithmetic;
    for (token, (mids, rads)) in experts.each_row_mut().enumerate() {
        let (of_router, errors) = router.row(token);
        mids.iter_mut().zip(&*of_router).for_each(|(mid, &of_router)| *mid += of_router);
        if let Some(errors) = errors {
            arithmetic.join_all(rads, &errors);
        }
        arithmetic.round_all(&arithmetic.accumulate, mids, rads);
        arithmetic.round_all(&arithmetic.storage, mids, rads);
    }
    experts
}

/// The routing fits the problem: its T and E, and with given routing its very pairs.
pub(crate) fn check_routing(problem: &Problem<'_, f64>, routing: &Routing) -> Result<()> {
    let (expected, found) = ([problem.t(), problem.e()], [routing.tokens(), routing.experts()]);
    if expected != found {
        return Err(Error::shape("routing", &expected, &found, "T and E of the problem"));
    }
    match problem.gating() {
        Gating::Given { routing: given, .. } if given != routing => Err(Error::shape(
            "routing",
            &[given.routed()],
            &[routing.routed()],
            "the problem supplies the pairs; pass its own routing",
        )),
        _ => Ok(()),
    }
}
