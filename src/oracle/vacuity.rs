//! Vacuity: wrong results in the place of a right one. A check that lets one pass could not have failed.
//!
//! | impostor | a fault like it |
//! | --- | --- |
//! | zeros | a kernel that was never launched |
//! | a constant | a buffer filled once |
//! | the sign flipped | a subtraction the wrong way round |
//! | rows shifted by one | an index that is off by one |
//! | the previous case's output | a stale buffer |
//! | gate and up swapped | the other layout of w1 |
//!
//! Results are drawn at unit scale for this reason: at 0.02, as SonicMoE's own tests have it, SwiGLU is
//! so nearly bilinear that a swapped gate stays within every elementwise bound.

use std::collections::BTreeMap;

use ndarray::{ArrayD, Axis, Slice, concatenate};

use super::judge::{Bounded, compare};
use super::{Verdict, bound};
use crate::element::DType;
use crate::engine::{Numerics, Output, Stored};
use crate::error::{Error, Result};
use crate::problem::{Biases, Gating, Problem};
use crate::routing::Routing;

/// An impostor nearer to the truth than this, relative to the largest number, is the truth.
const SAME: f64 = 1e-9;

/// A wrong result, and what it is.
pub type Impostor<'a> = (&'static str, &'a ArrayD<f64>);

/// The impostors that pass for `bounded`: zeros, a constant, the sign flipped, rows shifted by one, and
/// those of `others` that have its shape and are not the truth. `dtype` is the type that the result is
/// stored in. One passes if it is within the bound and `other_oracles` accept it too.
///
/// ```
/// use ndarray::arr2;
/// use sonicmoe::DType;
/// use sonicmoe::engine::Output;
/// use sonicmoe::oracle::{Bounded, vacuity};
///
/// let truth = arr2(&[[1.0, -2.0], [3.0, 0.5]]).into_dyn();
/// let wide = Bounded { bound: truth.mapv(|_| 3.5), truth };
/// assert_eq!(vacuity::passing(Output::O, DType::F32, &wide, &[], |_| Ok(true))?, ["zeros", "rows shifted by one"]);
/// # Ok::<(), sonicmoe::Error>(())
/// ```
///
/// # Errors
/// A bound of another shape than its truth.
pub fn passing(
    output: Output,
    dtype: DType,
    bounded: &Bounded,
    others: &[Impostor<'_>],
    other_oracles: impl Fn(&Stored) -> Result<bool>,
) -> Result<Vec<&'static str>> {
    let truth = &bounded.truth;
    if bounded.bound.shape() != truth.shape() {
        let (truth, bound) = (truth.shape(), bounded.bound.shape());
        return Err(Error::internal(format!("{output}: truth of {truth:?}, bound of {bound:?}")));
    }
    let rms = (truth.iter().map(|value| value * value).sum::<f64>() / truth.len() as f64).sqrt();
    let constant = if rms > 0.0 { rms } else { 1.0 };
    let scale = truth.fold(0.0f64, |largest, value| largest.max(value.abs()));
    let mut passing = Vec::new();
    let mut attempt = |name: &'static str, values: &mut dyn Iterator<Item = f64>, again: &dyn Fn() -> ArrayD<f64>| {
        if !within(dtype, bounded, values, scale) {
            return Ok(());
        }
        let stored = Stored { dtype, values: again().mapv_into(|value| dtype.round(value)) };
        if other_oracles(&stored)? {
            passing.push(name);
        }
        Ok::<(), Error>(())
    };
    attempt("zeros", &mut std::iter::repeat(0.0), &|| ArrayD::zeros(truth.shape()))?;
    attempt("a constant", &mut std::iter::repeat(constant), &|| ArrayD::from_elem(truth.shape(), constant))?;
    attempt("the sign flipped", &mut truth.iter().map(|value| -value), &|| truth.mapv(|value| -value))?;
    if truth.ndim() > 0 && truth.len_of(Axis(0)) > 1 {
        let row = truth.len() / truth.len_of(Axis(0));
        let mut shifted = truth.iter().skip(row).chain(truth.iter().take(row)).copied();
        attempt("rows shifted by one", &mut shifted, &|| shifted_by_one(truth))?;
    }
    for (name, values) in others.iter().filter(|(_, values)| values.shape() == truth.shape()) {
        attempt(name, &mut values.iter().copied(), &|| (*values).clone())?;
    }
    Ok(passing)
}

/// Whether these values, once stored, are within the bound throughout, and not the truth. Most impostors
/// fail within a few elements.
fn within(dtype: DType, bounded: &Bounded, values: &mut dyn Iterator<Item = f64>, scale: f64) -> bool {
    let mut differs = false;
    let within = values.zip(&bounded.truth).zip(&bounded.bound).all(|((value, &truth), &bound)| {
        differs |= (value - truth).abs() > SAME * scale;
        compare(dtype.round(value), truth, bound, dtype.largest()).is_none_or(|(error, _)| error <= bound)
    });
    within && differs
}

/// Vacuous if an impostor passes, else a pass.
pub fn verdict(passing: &[&'static str]) -> Verdict {
    if passing.is_empty() { Verdict::Pass } else { Verdict::Vacuous }
}

fn shifted_by_one(truth: &ArrayD<f64>) -> ArrayD<f64> {
    let tail = truth.slice_axis(Axis(0), Slice::from(1..));
    let head = truth.slice_axis(Axis(0), Slice::from(..1));
    concatenate(Axis(0), &[tail, head]).unwrap_or_else(|_| truth.clone())
}

/// What an engine computes that takes gate rows for up rows and the other way round: results of the
/// layer in the order of the file's rows. Empty without a gate.
///
/// `shared` is the layer beside it, if there is one, as [`bound::layer_beside`] takes it; without it only
/// what `keep` names is computed.
///
/// # Errors
/// As [`bound::layer`].
pub fn gate_and_up_swapped(
    problem: &Problem<'_, f64>,
    shared: Option<&Problem<'_, f64>>,
    routing: &Routing,
    numerics: &Numerics,
    keep: bound::Keep<'_>,
) -> Result<BTreeMap<Output, ArrayD<f64>>> {
    if !problem.activation().gated() {
        return Ok(BTreeMap::new());
    }
    let order = swapped_order(problem);
    let swapped = with_halves_swapped(problem)?;
    let truths = match shared {
        None => bound::truth_of(&swapped, routing, numerics, keep)?,
        Some(shared) => {
            let bounds = bound::layer_beside(&swapped, &with_halves_swapped(shared)?, routing, numerics)?;
            bounds.into_iter().map(|(output, Bounded { truth, .. })| (output, truth)).collect()
        }
    };
    let results = truths.into_iter().map(|(output, truth)| match output {
        Output::DsharedGate => (Output::DsharedUp, truth),
        Output::DsharedUp => (Output::DsharedGate, truth),
        Output::Dw1 | Output::Db1 | Output::H | Output::Dh => (output, truth.select(Axis(1), &order)),
        _ => (output, truth),
    });
    Ok(results.collect())
}

fn swapped_order(problem: &Problem<'_, f64>) -> Vec<usize> {
    (0..problem.h_width()).map(|row| row ^ 1).collect()
}

fn with_halves_swapped<'p>(problem: &'p Problem<'_, f64>) -> Result<Problem<'p, f64>> {
    let order = swapped_order(problem);
    Problem::new(
        problem.x(),
        problem.w1().select(Axis(1), &order),
        problem.w2(),
        problem.b1().zip(problem.b2()).map(|(b1, b2)| Biases { b1: b1.select(Axis(1), &order).into(), b2: b2.into() }),
        Gating::borrowed(problem.gating()),
        problem.activation(),
        problem.dout(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::arr2;

    fn passing_under(bound: f64, others: &[Impostor<'_>]) -> Vec<&'static str> {
        let truth = arr2(&[[1.0, -2.0], [3.0, 0.5]]).into_dyn();
        let bounded = Bounded { bound: truth.mapv(|_| bound), truth };
        passing(Output::O, DType::F32, &bounded, others, |_| Ok(true)).unwrap()
    }

    #[test]
    fn a_wide_bound_lets_impostors_pass_and_a_narrow_one_none() {
        assert_eq!(verdict(&passing_under(0.01, &[])), Verdict::Pass);
        assert_eq!(passing_under(3.5, &[]), ["zeros", "rows shifted by one"]);
        assert_eq!(verdict(&passing_under(3.5, &[])), Verdict::Vacuous);
    }

    #[test]
    fn a_stale_output_passes_only_where_the_bound_is_wide_and_only_if_it_has_the_shape() {
        let stale = arr2(&[[2.0, -1.0], [2.0, 1.5]]).into_dyn();
        let other_shape = arr2(&[[2.0, -1.0]]).into_dyn();
        let others = [("the previous case's output", &stale), ("of another case", &other_shape)];
        assert!(passing_under(0.9, &others).is_empty());
        assert_eq!(passing_under(1.1, &others), ["the previous case's output"]);
    }

    #[test]
    fn an_impostor_that_another_oracle_sees_does_not_pass() {
        let truth = arr2(&[[1.0, -2.0], [3.0, 0.5]]).into_dyn();
        let bounded = Bounded { bound: truth.mapv(|_| 3.5), truth };
        let not_zero = |stored: &Stored| Ok(stored.values.iter().any(|&value| value != 0.0));
        let left = passing(Output::O, DType::F32, &bounded, &[], not_zero).unwrap();
        assert_eq!(left, ["rows shifted by one"]);
    }

    #[test]
    fn the_truth_itself_is_no_impostor() {
        let zeros = ArrayD::zeros(vec![3, 2]);
        let bounded = Bounded { truth: zeros.clone(), bound: zeros.clone() };
        let itself = [("the previous case's output", &zeros)];
        assert!(passing(Output::Dw1, DType::BF16, &bounded, &itself, |_| Ok(true)).unwrap().is_empty());
    }
}
