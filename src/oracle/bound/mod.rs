//! What a correct engine cannot exceed: an a-priori bound of every element of every result,
//! propagated beside the f64 truth.
//!
//! With u the roundoff of the accumulator, γ_m = m·u/(1 − m·u), and E_v the bound on an engine's v:
//!
//! | step | bound |
//! | --- | --- |
//! | dot product of m terms, any order | γ_m Σ(\|a\| + E_a)(\|b\| + E_b) + Σ(E_a\|b\| + \|a\|E_b + E_aE_b) |
//! | store to a type of roundoff u_S | E += max(u_S·2^⌊log₂(\|v\| + E)⌋, η), η half its smallest subnormal |
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

pub(crate) mod ball;
pub(crate) mod curve;
pub(crate) mod eager;
pub(crate) mod fused;
mod gpt_oss;
mod grouped;
pub(crate) mod matrix;
mod model;
pub(crate) mod router;
mod shared;

use std::collections::BTreeMap;

pub(crate) use model::Model;
pub use shared::layer_beside;
pub(crate) use shared::propagate_beside;

use crate::engine::{Numerics, Output, RoundingModel};
use crate::error::{Error, Result};
use crate::oracle::judge::Bounded;
use crate::problem::{Gating, Problem};
use crate::routing::Routing;
use ball::{Ball, Measure};
use matrix::{Balls1, Balls2};

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

/// Balls of every result, radii joined by `measure`.
pub(crate) fn propagate(
    problem: &Problem<'_, f64>,
    routing: &Routing,
    numerics: &Numerics,
    measure: Measure,
) -> Result<BTreeMap<Output, Bounded>> {
    let model = Model::new(problem, routing, numerics, measure);
    let Parts { mut bounds, o, dx_of_experts, dx_of_router } = parts(&model)?;
    bounds.insert(Output::O, o.bounded());
    let dx = match dx_of_router {
        Some(dx_of_router) => add_router_part(&model, dx_of_experts, &dx_of_router),
        None => dx_of_experts,
    };
    bounds.insert(Output::Dx, dx.bounded());
    Ok(bounds)
}

/// The results of a layer, but for o and dx as their parts.
struct Parts {
    bounds: BTreeMap<Output, Bounded>,
    o: Balls2,
    dx_of_experts: Balls2,
    dx_of_router: Option<Balls2>,
}

fn parts(model: &Model<'_, '_>) -> Result<Parts> {
    let (problem, routing) = (model.problem, model.routing);
    check_routing(problem, routing)?;
    let mut bounds = BTreeMap::new();

    let logits = match problem.gating() {
        Gating::Router(router) => Some(router::logits(model, router)),
        Gating::Given { .. } => None,
    };
    let scores = match (problem.gating(), &logits) {
        (Gating::Router(router), Some(logits)) => router::scores(model, router, logits),
        (Gating::Given { scores, .. }, _) => scores.iter().copied().map(Ball::exact).collect(),
        (Gating::Router(_), None) => return Err(Error::internal("a router has logits")),
    };
    let score_of_row = routing.to_rows(&scores);

    let Kernels { o, dx: dx_of_experts, ds } = match model.rounding {
        RoundingModel::Fused => fused_layer(model, &score_of_row, &mut bounds),
        RoundingModel::Eager => eager_layer(model, &score_of_row, &mut bounds),
    };
    let ds = routing.to_pairs(&ds);

    let dx_of_router = match (problem.gating(), &logits) {
        (Gating::Router(router), Some(logits)) => {
            let dlogits = router::dlogits(model, router, logits, &scores, &ds);
            let dx = router::dx(model, router, &dlogits);
            bounds.insert(Output::DrouterW, router::w_gradient(model, &dlogits).bounded());
            if router.b.is_some() {
                bounds.insert(Output::DrouterB, router::b_gradient(model, &dlogits).bounded());
            }
            bounds.insert(Output::Dlogits, dlogits.bounded());
            Some(dx)
        }
        _ => None,
    };
    bounds.insert(Output::Ds, Balls1::from_balls(ds).bounded());
    if let Some(logits) = logits {
        bounds.insert(Output::Logits, logits.bounded());
        bounds.insert(Output::Scores, Balls1::from_balls(scores).bounded());
    }
    Ok(Parts { bounds, o, dx_of_experts, dx_of_router })
}

/// What the kernels give to the router: o, the experts' dx, ds by row.
struct Kernels {
    o: Balls2,
    dx: Balls2,
    ds: Vec<Ball>,
}

/// The eight kernels one after the other.
fn fused_layer(model: &Model<'_, '_>, scores: &[Ball], bounds: &mut BTreeMap<Output, Bounded>) -> Kernels {
    let [h, a] = fused::up_forward(model);
    let y = fused::down_forward(model, &a);
    bounds.insert(Output::A, a.bounded());
    let o = fused::combine(model, &y, scores);
    bounds.insert(Output::Y, y.bounded());

    let fused::DownBackward { dh, a_prime, ds } = fused::down_backward_activation(model, &h, scores);
    bounds.insert(Output::H, h.bounded());
    bounds.insert(Output::Dw2, fused::down_backward_weight(model, &a_prime).bounded());
    bounds.insert(Output::APrime, a_prime.bounded());
    let dx_expanded = fused::up_backward_activation(model, &dh);
    bounds.insert(Output::Dw1, fused::up_backward_weight(model, &dh).bounded());
    if model.problem.b1().is_some() {
        bounds.insert(Output::Db1, fused::b1_gradient(model, &dh).bounded());
        bounds.insert(Output::Db2, fused::b2_gradient(model, scores).bounded());
    }
    bounds.insert(Output::Dh, dh.bounded());
    let dx = fused::combine_gradient(model, &dx_expanded);
    bounds.insert(Output::DxExpanded, dx_expanded.bounded());
    Kernels { o, dx, ds }
}

/// The same layer op by op.
fn eager_layer(model: &Model<'_, '_>, scores: &[Ball], bounds: &mut BTreeMap<Output, Bounded>) -> Kernels {
    let h = eager::up_forward(model);
    let a = eager::activate(model, &h);
    let y = eager::down_forward(model, &a);
    let o = eager::combine(model, &y, scores);

    let eager::DownBackward { dh, ds } = eager::down_backward_activation(model, &h, &y, scores);
    bounds.insert(Output::H, h.bounded());
    bounds.insert(Output::Y, y.bounded());
    bounds.insert(Output::Dw2, eager::down_backward_weight(model, &a, scores).bounded());
    bounds.insert(Output::A, a.bounded());
    let dx_expanded = fused::up_backward_activation(model, &dh);
    bounds.insert(Output::Dw1, fused::up_backward_weight(model, &dh).bounded());
    if model.problem.b1().is_some() {
        bounds.insert(Output::Db1, fused::b1_gradient(model, &dh).bounded());
        bounds.insert(Output::Db2, eager::b2_gradient(model, scores).bounded());
    }
    bounds.insert(Output::Dh, dh.bounded());
    let dx = eager::combine_gradient(model, &dx_expanded);
    bounds.insert(Output::DxExpanded, dx_expanded.bounded());
    Kernels { o, dx, ds }
}

/// dx = store(store(experts) + store(router)).
pub(crate) fn add_router_part(model: &Model<'_, '_>, experts: Balls2, router: &Balls2) -> Balls2 {
    let arithmetic = &model.arithmetic;
    experts.map_indexed(|token, column, experts| {
        arithmetic.round(&arithmetic.storage, arithmetic.add(experts, router.at(token, column)))
    })
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
