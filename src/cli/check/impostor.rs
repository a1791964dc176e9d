//! Wrong results in the place of a right one: a check that lets one pass could not have failed.

use std::collections::BTreeMap;

use ndarray::{ArrayD, Axis, Slice, concatenate};

use crate::element::DType;
use crate::engine::{Numerics, Output, Stored};
use crate::error::Result;
use crate::oracle::{Bounded, bound, judge};
use crate::problem::{Biases, Gating, Problem, Router};
use crate::routing::Routing;

/// An impostor nearer to the truth than this, relative to the largest number, is the truth.
const SAME: f64 = 1e-9;

/// The impostors that would have passed for `bounded`: zeros, a constant, the sign flipped, rows
/// shifted by one, gate and up swapped.
pub(super) fn passing(
    output: Output,
    dtype: DType,
    bounded: &Bounded,
    swapped: Option<&ArrayD<f64>>,
) -> Result<Vec<&'static str>> {
    let truth = &bounded.truth;
    let constant = if truth.is_empty() { 0.0 } else { (truth.mapv(|v| v * v).sum() / truth.len() as f64).sqrt() };
    let constant = if constant == 0.0 { 1.0 } else { constant };
    let mut impostors = vec![
        ("zeros", ArrayD::zeros(truth.shape())),
        ("a constant", ArrayD::from_elem(truth.shape(), constant)),
        ("the sign flipped", truth.mapv(|value| -value)),
        ("rows shifted by one", shifted(truth)),
    ];
    impostors.extend(swapped.map(|swapped| ("gate and up swapped", swapped.clone())));
    let scale = truth.fold(0.0f64, |largest, value| largest.max(value.abs()));
    let mut passing = Vec::new();
    for (name, values) in impostors {
        let differs = values.iter().zip(truth).any(|(a, b)| (a - b).abs() > SAME * scale);
        let values = values.mapv(|value| dtype.round(value));
        if differs && judge(output, &Stored { dtype, values }, bounded)?.passes() {
            passing.push(name);
        }
    }
    Ok(passing)
}

fn shifted(truth: &ArrayD<f64>) -> ArrayD<f64> {
    if truth.len_of(Axis(0)) < 2 {
        return truth.clone();
    }
    let tail = truth.slice_axis(Axis(0), Slice::from(1..));
    let head = truth.slice_axis(Axis(0), Slice::from(..1));
    concatenate(Axis(0), &[tail, head]).unwrap_or_else(|_| truth.clone())
}

/// What an engine computes that takes gate rows for up rows and the other way round: results of the
/// layer in the order of the file's rows. Empty without a gate.
pub(super) fn swapped_halves(
    problem: &Problem<'_, f64>,
    routing: &Routing,
    numerics: &Numerics,
) -> Result<BTreeMap<Output, ArrayD<f64>>> {
    if !problem.activation().gated() {
        return Ok(BTreeMap::new());
    }
    let order: Vec<usize> = (0..problem.h_width()).map(|row| row ^ 1).collect();
    let gating = match problem.gating() {
        Gating::Router(Router { w, b, k, convention }) => Gating::Router(Router {
            w: w.view().into(),
            b: b.as_ref().map(|b| b.view().into()),
            k: *k,
            convention: *convention,
        }),
        Gating::Given { routing, scores } => Gating::Given { routing: routing.clone(), scores: scores.clone() },
    };
    let swapped = Problem::new(
        problem.x(),
        problem.w1().select(Axis(1), &order),
        problem.w2(),
        problem.b1().zip(problem.b2()).map(|(b1, b2)| Biases { b1: b1.select(Axis(1), &order).into(), b2: b2.into() }),
        gating,
        problem.activation(),
        problem.dout(),
    )?;
    let bounds = bound::layer(&swapped, routing, numerics)?;
    let results = bounds.into_iter().map(|(output, Bounded { truth, .. })| match output {
        Output::Dw1 | Output::Db1 | Output::H | Output::Dh => (output, truth.select(Axis(1), &order)),
        _ => (output, truth),
    });
    Ok(results.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::arr2;

    fn passing_under(bound: f64) -> Vec<&'static str> {
        let truth = arr2(&[[1.0, -2.0], [3.0, 0.5]]).into_dyn();
        let bounded = Bounded { bound: truth.mapv(|_| bound), truth };
        passing(Output::O, DType::F32, &bounded, None).unwrap()
    }

    #[test]
    fn a_wide_bound_lets_impostors_pass_and_a_narrow_one_none() {
        assert!(passing_under(0.01).is_empty());
        assert_eq!(passing_under(3.5), ["zeros", "rows shifted by one"]);
    }

    #[test]
    fn the_truth_itself_is_no_impostor() {
        let zeros = ArrayD::zeros(vec![3, 2]);
        let bounded = Bounded { truth: zeros.clone(), bound: zeros };
        assert!(passing(Output::Dw1, DType::BF16, &bounded, None).unwrap().is_empty());
    }
}
