//! A layer with a shared expert beside it: a second layer of one expert, to which every token goes with
//! score 1, on the same x and dout.
//!
//! ```text
//! o  = store(o of the experts + o of the shared one)
//! dx = the sum, in any order, of the experts' part, the router's, and what the shared expert's gate and
//!      up projections give; each is stored, and each partial sum
//! ```

use std::collections::BTreeMap;

use ndarray::{Axis, Slice};

use super::ball::Measure;
use super::matrix::{Balls2, Operand};
use super::pass::{OfTokens, Whole, whole};
use super::{Model, bounds_of};
use crate::engine::{Numerics, Output};
use crate::error::{Error, Result};
use crate::oracle::judge::Bounded;
use crate::problem::{Gating, Problem};
use crate::routing::Routing;

/// [`layer`](super::layer) of `problem` with the layer `shared` beside it: o and dx are those of both
/// together, and the shared expert's gradients are there under their own names.
///
/// # Errors
/// As [`layer`](super::layer), or a `shared` that is no gated layer without biases of one expert, given
/// every token once, on x and dout of the same shape.
pub fn layer_beside(
    problem: &Problem<'_, f64>,
    shared: &Problem<'_, f64>,
    routing: &Routing,
    numerics: &Numerics,
) -> Result<BTreeMap<Output, Bounded>> {
    propagate_beside(problem, shared, routing, numerics, Measure::Worst)
}

/// The truth of both layers as an engine has it that takes gate rows for up rows.
pub(crate) fn swapped_beside(
    problem: &Problem<'_, f64>,
    shared: &Problem<'_, f64>,
    routing: &Routing,
    numerics: &Numerics,
) -> Result<BTreeMap<Output, Bounded>> {
    beside(problem, shared, routing, (numerics, Measure::Midpoint), true)
}

/// Balls of every result of both layers, radii joined by `measure`.
pub(crate) fn propagate_beside(
    problem: &Problem<'_, f64>,
    shared: &Problem<'_, f64>,
    routing: &Routing,
    numerics: &Numerics,
    measure: Measure,
) -> Result<BTreeMap<Output, Bounded>> {
    beside(problem, shared, routing, (numerics, measure), false)
}

fn beside(
    problem: &Problem<'_, f64>,
    shared: &Problem<'_, f64>,
    routing: &Routing,
    (numerics, measure): (&Numerics, Measure),
    swapped: bool,
) -> Result<BTreeMap<Output, Bounded>> {
    let every_token = match shared.gating() {
        Gating::Given { routing, .. } if routing.routed() == shared.t() && shared.e() == 1 => routing,
        _ => return Err(Error::size("the experts of a shared layer", shared.e(), "one is given every token")),
    };
    if shared.x().dim() != problem.x().dim() {
        return Err(Error::shape("x of the shared expert", problem.x().shape(), shared.x().shape(), "x of the layer"));
    }
    let mut model = Model::new(problem, routing, numerics, measure);
    let mut beside = Model::new(shared, every_token, numerics, measure);
    if swapped {
        (model, beside) = (model.taking_gate_for_up(), beside.taking_gate_for_up());
    }
    let (mut bounds, OfTokens { o, dx_of_experts, dx_of_router }) = all_of(&model)?;
    let (of_shared, OfTokens { o: o_of_shared, .. }) = all_of(&beside)?;
    let arithmetic = &model.arithmetic;
    let (Some(o), Some(o_of_shared), Some(dx_of_experts)) = (o, o_of_shared, dx_of_experts) else {
        return Err(Error::internal("a layer has o and dx"));
    };

    let o = o.map_indexed(|token, column, o| {
        arithmetic.round(&arithmetic.storage, arithmetic.add(o, o_of_shared.at(token, column)))
    });
    bounds.insert(Output::O, o.bounded());

    let (Some(dh), Some(dw1), Some(dw2)) =
        (of_shared.get(&Output::Dh), of_shared.get(&Output::Dw1), of_shared.get(&Output::Dw2))
    else {
        return Err(Error::internal("a layer has dh, dw1 and dw2"));
    };
    let mut terms = vec![dx_of_experts];
    terms.extend(dx_of_router);
    terms.extend([0, 1].map(|half| through_half(&beside, dh, half)));
    let dx = Balls2::from_fn(problem.t(), problem.d(), |token, column| {
        let sum = arithmetic.sum(&arithmetic.partial, terms.iter().map(|term| term.at(token, column)), terms.len() - 1);
        if sum.magnitude() > arithmetic.storage.largest { super::Ball { rad: f64::INFINITY, ..sum } } else { sum }
    });
    bounds.insert(Output::Dx, dx.bounded());

    let only = |bounded: &Bounded| Bounded {
        truth: bounded.truth.index_axis(Axis(0), 0).to_owned(),
        bound: bounded.bound.index_axis(Axis(0), 0).to_owned(),
    };
    let half = |bounded: &Bounded, first: isize| {
        let rows = Slice::new(first, None, 2);
        Bounded {
            truth: bounded.truth.slice_axis(Axis(0), rows).to_owned(),
            bound: bounded.bound.slice_axis(Axis(0), rows).to_owned(),
        }
    };
    let dw1 = only(dw1);
    bounds.insert(Output::DsharedGate, half(&dw1, 0));
    bounds.insert(Output::DsharedUp, half(&dw1, 1));
    bounds.insert(Output::DsharedDown, only(dw2));
    Ok(bounds)
}

/// Every result of one layer, but for o and dx as their parts.
fn all_of(model: &Model<'_, '_>) -> Result<(BTreeMap<Output, Bounded>, OfTokens)> {
    let Whole { found, mut of_tokens } = whole(std::slice::from_ref(model), &|_| true)?;
    let of_tokens = of_tokens.pop().ok_or_else(|| Error::internal("a layer has kernels"))?;
    Ok((bounds_of(found)?, of_tokens))
}

/// dX̃ through the gate rows of w1 alone, or the up rows: the other columns of dH are 0, so that the bound
/// holds for one product of all rows too.
fn through_half(model: &Model<'_, '_>, dh: &Bounded, half: usize) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let dh = Balls2::from_fn(model.problem.t(), model.problem.h_width(), |row, column| {
        if column % 2 == half {
            super::Ball { mid: dh.truth[[row, column]], rad: dh.bound[[row, column]] }
        } else {
            super::Ball::default()
        }
    });
    let w1 = model.w1(crate::shape::ExpertId(0));
    arithmetic.matrix_product(dh.operand(), Operand::exact(w1), None).rounded(arithmetic, &arithmetic.storage)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{Case, Pairing};
    use crate::element::DType;
    use crate::engine::RoundingModel;
    use crate::oracle::bound::numerics_of;
    use crate::shape::{ExpertId, TokenId};
    use ndarray::Array3;

    /// The same layer with gate rows where up rows are.
    fn with_rows_swapped(problem: &Problem<'_, f64>) -> Problem<'static, f64> {
        let mut w1: Array3<f64> = problem.w1().to_owned();
        for mut rows in w1.axis_chunks_iter_mut(Axis(1), 2) {
            let (gate, up) = (rows.index_axis(Axis(1), 0).to_owned(), rows.index_axis(Axis(1), 1).to_owned());
            rows.index_axis_mut(Axis(1), 0).assign(&up);
            rows.index_axis_mut(Axis(1), 1).assign(&gate);
        }
        let Gating::Given { routing, scores } = problem.gating() else { panic!("given pairs") };
        let gating = Gating::Given { routing: routing.clone(), scores: scores.clone() };
        let (x, w2, dout) = (problem.x().to_owned(), problem.w2().to_owned(), problem.dout().to_owned());
        Problem::new(x, w1, w2, None, gating, problem.activation(), dout).unwrap()
    }

    #[test]
    fn a_shared_layer_of_two_experts_or_of_some_tokens_or_of_another_width_is_refused() {
        let case = |shape: &str| Case::new(shape.parse().unwrap()).with_pairing(Pairing::TopK);
        let problem = case("4,8,6,3,2").problem::<f64>().unwrap();
        let Gating::Given { routing, .. } = problem.gating() else { panic!("given pairs") };
        let numerics = numerics_of(DType::BF16, RoundingModel::Eager);
        let beside = |shared: &Problem<'_, f64>| layer_beside(&problem, shared, routing, &numerics).map(|_| ());
        let of = |shape: &str| case(shape).problem::<f64>().unwrap();
        assert!(beside(&of("4,8,5,1,1")).is_ok());
        // Two experts that together have as many pairs as there are tokens.
        assert!(beside(&of("4,8,5,2,1")).is_err());
        assert!(beside(&of("4,8,5,2,2")).is_err());
        assert!(beside(&of("3,8,5,1,1")).is_err() && beside(&of("4,16,5,1,1")).is_err());
        let some = Case::new("0,8,5,1,1".parse().unwrap()).with_counts(&[3]).problem::<f64>().unwrap();
        assert!(beside(&some).is_err());
    }

    /// Whoever takes gate for up, in both layers, has what a right engine has of weights with those rows swapped.
    #[test]
    fn gate_and_up_are_swapped_in_both_layers() {
        let case = Case::new("9,8,6,3,2".parse().unwrap()).with_pairing(Pairing::TopK);
        let problem = case.problem::<f64>().unwrap();
        let Gating::Given { routing, .. } = problem.gating() else { panic!("given pairs") };
        let every_token = Routing::new(9, 1, (0..9).map(|token| (TokenId(token), ExpertId(0)))).unwrap();
        let drawn = Case::new("1,8,5,1,1".parse().unwrap()).with_seed(7).problem::<f64>().unwrap();
        let gating = Gating::Given { routing: every_token, scores: vec![1.0; 9] };
        let (x, dout) = (problem.x().to_owned(), problem.dout().to_owned());
        let (w1, w2) = (drawn.w1().to_owned(), drawn.w2().to_owned());
        let shared = Problem::new(x, w1, w2, None, gating, problem.activation(), dout).unwrap();
        let numerics = numerics_of(DType::BF16, RoundingModel::Eager);
        let swapped = swapped_beside(&problem, &shared, routing, &numerics).unwrap();
        let expected =
            layer_beside(&with_rows_swapped(&problem), &with_rows_swapped(&shared), routing, &numerics).unwrap();
        let right = layer_beside(&problem, &shared, routing, &numerics).unwrap();
        for output in [Output::O, Output::Dx, Output::Dw2, Output::Ds, Output::DsharedDown] {
            let [swapped, expected, right] = [&swapped, &expected, &right].map(|of| &of[&output].truth);
            let off =
                |other: &ndarray::ArrayD<f64>| (swapped - other).mapv(f64::abs).sum() / swapped.mapv(f64::abs).sum();
            assert!(off(expected) < 1e-12, "{output}: {}", off(expected));
            assert!(off(right) > 1e-2, "{output}: {}", off(right));
        }
    }
}
