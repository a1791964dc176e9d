//! The verdict on one result: its error against the bound, element by element.

mod pieces;

use std::borrow::Cow;
use std::fmt;

use ndarray::ArrayD;

use crate::engine::{Output, Stored};
use crate::error::{Error, Result};
use crate::oracle::cluster::Cluster;
use crate::oracle::heat::HeatMap;
pub(crate) use pieces::Judging;

/// The truth of one result, and what a correct engine's error cannot exceed.
#[derive(Clone, Debug, PartialEq)]
pub struct Bounded {
    /// The f64 truth.
    pub truth: ArrayD<f64>,
    /// The bound on |result − truth|, element by element; 0 demands equality, ∞ or NaN says that
    /// nothing is known.
    pub bound: ArrayD<f64>,
}

/// The element with the largest ratio of error to bound.
#[derive(Clone, Debug, PartialEq)]
pub struct Worst {
    /// Its coordinates.
    pub at: Vec<usize>,
    /// What the engine has there.
    pub value: f64,
    /// The truth.
    pub reference: f64,
    /// The bound.
    pub bound: f64,
    /// |value − reference| / bound; 0 for an exact value under a bound of 0, ∞ for any other and for
    /// a value that is not finite.
    pub ratio: f64,
}

/// How one result compares with its bound.
#[derive(Clone, Debug, PartialEq)]
pub struct Judgement {
    /// Which result.
    pub output: Output,
    /// All elements.
    pub elements: usize,
    /// Elements that were not judged: truth and bound reach beyond the range of the stored type.
    pub skipped: usize,
    /// Judged elements beyond their bound.
    pub failing: usize,
    /// The worst judged element; none where nothing was judged.
    pub worst: Option<Worst>,
    /// The largest |value − truth| over the judged elements; ∞ if a value is not finite.
    pub largest_error: f64,
    /// The smallest uniform relative error that would have failed: (1 + ε)·truth leaves some bound if
    /// and only if ε > min bound/|truth| over the judged elements with a truth other than 0. ∞ where
    /// there are none: no relative error could have failed.
    pub floor: f64,
    /// The median bound (of more than 2¹⁸ elements to one part in 2¹⁵) over the root mean square of the
    /// truth, judged elements only; near 1 a zero result would pass. NaN where the truth is 0 throughout or nothing was judged.
    pub median_bound_over_rms: f64,
    /// Where the failing elements sit.
    pub clusters: Vec<Cluster>,
    /// The worst ratio by place, over the first axis and the last.
    pub heat: HeatMap,
}

impl Judgement {
    /// Elements that were judged.
    pub fn judged(&self) -> usize {
        self.elements - self.skipped
    }

    /// Whether every judged element is within its bound. A judgement of nothing passes; look at
    /// [`Judgement::judged`] too.
    pub fn passes(&self) -> bool {
        self.failing == 0
    }

    /// The ratio of the worst element, 0 where nothing was judged.
    pub fn ratio(&self) -> f64 {
        self.worst.as_ref().map_or(0.0, |worst| worst.ratio)
    }
}

impl fmt::Display for Judgement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { output, elements, skipped, failing, .. } = self;
        write!(f, "{output}: {failing} of {elements} elements fail")?;
        if *skipped > 0 {
            write!(f, ", {skipped} were not judged (beyond the type's range)")?;
        }
        if let Some(Worst { at, value, reference, bound, ratio }) = &self.worst {
            write!(f, "; worst at {at:?}: {value:e}, truth {reference:e}, bound {bound:.3e}, ratio {ratio:.3}")?;
        }
        for cluster in &self.clusters {
            write!(f, "; {cluster}")?;
        }
        Ok(())
    }
}

/// Compares a result with its truth and bound.
///
/// An element is judged if |truth| + bound lies within the range of the type that it is stored in.
/// A judged value fails if it is not finite or |value − truth| > bound; −0 equals +0.
///
/// ```
/// use ndarray::arr1;
/// use sonicmoe::engine::{Output, Stored};
/// use sonicmoe::oracle::{Bounded, judge};
///
/// let bounded = Bounded { truth: arr1(&[1.0, 0.0]).into_dyn(), bound: arr1(&[0.25, 0.0]).into_dyn() };
/// let judgement = judge(Output::O, &Stored::of(&arr1(&[1.125f32, -0.0])), &bounded)?;
/// assert!(judgement.passes());
/// assert_eq!((judgement.ratio(), judgement.floor), (0.5, 0.25));
/// # Ok::<(), sonicmoe::Error>(())
/// ```
///
/// # Errors
/// A shape of the result other than that of the truth.
pub fn judge(output: Output, stored: &Stored, bounded: &Bounded) -> Result<Judgement> {
    judge_with(output, stored, bounded, None)
}

/// The same, where place i of axis 1 is to be reported as place `axis_1[i]`.
pub(crate) fn judge_with(
    output: Output,
    stored: &Stored,
    bounded: &Bounded,
    axis_1: Option<&[usize]>,
) -> Result<Judgement> {
    let Bounded { truth, bound } = bounded;
    let shape = truth.shape();
    if stored.values.shape() != shape {
        return Err(Error::shape(output.name(), shape, stored.values.shape(), "the shape of the truth"));
    }
    if bound.shape() != shape {
        return Err(Error::internal(format!("{output}: truth of {shape:?}, bound of {:?}", bound.shape())));
    }
    if let Some(axis_1) = axis_1
        && shape.get(1) != Some(&axis_1.len())
    {
        return Err(Error::internal(format!("{output} of {shape:?} in an order of {}", axis_1.len())));
    }

    let mut judging = Judging::new(output, stored.dtype, shape, axis_1.map(<[usize]>::to_vec));
    judging.look(0, &in_order(&stored.values), &in_order(truth), &in_order(bound));
    Ok(judging.finish())
}

/// The values in row-major order, copied only where they lie otherwise.
pub(crate) fn in_order(values: &ArrayD<f64>) -> Cow<'_, [f64]> {
    match values.as_slice() {
        Some(values) => Cow::Borrowed(values),
        None => Cow::Owned(values.iter().copied().collect()),
    }
}

/// |value − truth| and its ratio to the bound; none if the truth may lie beyond `largest`.
pub(crate) fn compare(value: f64, truth: f64, bound: f64, largest: f64) -> Option<(f64, f64)> {
    let within_range = truth.abs() + bound <= largest;
    within_range.then(|| {
        let error = if value.is_finite() { (value - truth).abs() } else { f64::INFINITY };
        (error, if error == 0.0 { 0.0 } else { error / bound })
    })
}

#[cfg(test)]
mod tests {
    use super::pieces::PIECE;
    use super::*;
    use ndarray::{Array1, Array2, arr1};

    fn judged(values: &[f32], truth: &[f64], bound: &[f64]) -> Judgement {
        let bounded = Bounded { truth: arr1(truth).into_dyn(), bound: arr1(bound).into_dyn() };
        judge(Output::Ds, &Stored::of(&arr1(values)), &bounded).unwrap()
    }

    #[test]
    fn a_bound_of_zero_demands_equality_and_zeros_of_both_signs_are_equal() {
        let equal = judged(&[-0.0, 2.0], &[0.0, 2.0], &[0.0, 0.0]);
        assert!(equal.passes());
        assert_eq!(equal.worst.unwrap().ratio, 0.0);
        let off = judged(&[f32::from_bits(1)], &[0.0], &[0.0]);
        assert_eq!((off.failing, off.ratio()), (1, f64::INFINITY));
    }

    #[test]
    fn a_value_that_is_not_finite_fails_unless_the_truth_may_be_beyond_the_range() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(judged(&[value], &[1.0], &[1e30]).failing, 1);
            for unknown in [1e39, f64::INFINITY, f64::NAN] {
                let beyond = judged(&[value, 1.0], &[unknown, 1.0], &[0.0, 0.5]);
                assert_eq!((beyond.skipped, beyond.failing), (1, 0));
                assert!(judged(&[value], &[1.0], &[unknown]).passes());
            }
        }
    }

    #[test]
    fn where_nothing_is_judged_no_element_is_the_worst_and_the_ratio_is_zero() {
        for judgement in [judged(&[], &[], &[]), judged(&[f32::NAN], &[f64::INFINITY], &[0.0])] {
            assert_eq!((judgement.judged(), judgement.ratio(), judgement.worst.is_none()), (0, 0.0, true));
            assert!(judgement.passes() && judgement.median_bound_over_rms.is_nan());
        }
    }

    #[test]
    fn the_largest_error_is_that_of_some_judged_element_and_0_where_there_is_none() {
        assert_eq!(judged(&[1.125, -4.0, 7.0], &[1.0, -4.25, f64::INFINITY], &[1.0, 0.5, 0.0]).largest_error, 0.25);
        assert_eq!(judged(&[1.0, -4.0], &[1.0, -4.0], &[0.5, 0.5]).largest_error, 0.0);
        assert_eq!(judged(&[7.0], &[f64::INFINITY], &[0.0]).largest_error, 0.0);
    }

    #[test]
    fn the_floor_is_the_smallest_relative_error_that_fails() {
        let (truth, bound) = ([1.0, -4.0, 0.0], [0.5, 1.0, 0.0]);
        let floor = judged(&[1.0, -4.0, 0.0], &truth, &bound).floor;
        assert_eq!(floor, 0.25);
        let scaled = |factor: f64| judged(&truth.map(|truth| (truth * factor) as f32), &truth, &bound);
        assert!(scaled(1.0 + floor).passes());
        assert!(!scaled(1.0 + floor + 1e-6).passes());
    }

    #[test]
    fn a_failing_row_is_found_and_the_worst_element_named() {
        let truth = Array2::from_elem((8, 32), 1.0);
        let bounded = Bounded { bound: truth.mapv(|_| 0.5).into_dyn(), truth: truth.clone().into_dyn() };
        let mut values = truth.mapv(|truth| truth as f32);
        values.row_mut(5).fill(3.0);
        values[[5, 7]] = 4.0;
        let judgement = judge(Output::O, &Stored::of(&values), &bounded).unwrap();
        assert_eq!(judgement.worst.as_ref().map(|worst| (&worst.at[..], worst.ratio)), Some((&[5, 7][..], 6.0)));
        assert_eq!(judgement.failing, 32);
        assert!(judgement.to_string().contains("all 32 in token 5"), "{judgement}");
    }

    #[test]
    fn pieces_come_to_what_the_whole_comes_to() {
        let shape = [3, 4, 5];
        let number = |factor: f64| {
            ArrayD::from_shape_fn(shape.to_vec(), move |at| libm::sin(factor * (at[0] * 20 + at[1] * 5 + at[2]) as f64))
        };
        let (truth, bound) = (number(0.37), number(0.11).mapv(|bound| 0.3 + bound.abs()));
        let stored = Stored::of(&(&truth + &number(0.73)));
        let whole = judge(Output::Dw1, &stored, &Bounded { truth: truth.clone(), bound: bound.clone() }).unwrap();
        let mut judging = Judging::new(Output::Dw1, stored.dtype, &shape, None);
        let [values, truth, bound] = [&stored.values, &truth, &bound].map(in_order);
        for range in [0..20, 20..25, 25..60] {
            judging.look(range.start, &values[range.clone()], &truth[range.clone()], &bound[range]);
        }
        let pieces = judging.finish();
        assert!(whole.failing > 0 && (whole.median_bound_over_rms - pieces.median_bound_over_rms).abs() < 1e-12);
        let median_bound_over_rms = whole.median_bound_over_rms;
        assert_eq!(Judgement { median_bound_over_rms, ..pieces }, whole);
    }

    /// The worst element, the largest error and the smallest floor may lie in pieces of their own.
    #[test]
    fn what_is_worst_is_found_in_whichever_piece_it_lies() {
        let count = 3 * PIECE;
        for [worst, largest, floor] in [[0, 1, 2], [1, 2, 0], [2, 0, 1]].map(|pieces| pieces.map(|at| at * PIECE + 5)) {
            let mut truth = Array1::ones(count);
            let mut bound = Array1::from_elem(count, 0.5);
            let mut values = truth.clone();
            (values[worst], bound[worst]) = (1.75, 0.125);
            (values[largest], bound[largest]) = (3.0, 1.0);
            (truth[floor], values[floor], bound[floor]) = (16.0, 16.0, 0.25);
            let bounded = Bounded { truth: truth.into_dyn(), bound: bound.into_dyn() };
            let judgement = judge(Output::Ds, &Stored::of(&values), &bounded).unwrap();
            assert_eq!(judgement.worst.as_ref().map(|worst| (worst.at[0], worst.ratio)), Some((worst, 6.0)));
            assert_eq!((judgement.largest_error, judgement.floor, judgement.failing), (2.0, 0.25 / 16.0, 2));
        }
    }

    #[test]
    fn places_of_axis_1_go_by_the_order_that_is_given() {
        let truth = Array2::from_elem((4, 64), 1.0);
        let bounded = Bounded { bound: truth.mapv(|_| 0.5).into_dyn(), truth: truth.clone().into_dyn() };
        let mut values = truth.mapv(|truth| truth as f32);
        values.column_mut(3).fill(3.0);
        values[[2, 3]] = 4.0;
        let reversed: Vec<usize> = (0..64).rev().collect();
        let judgement = judge_with(Output::H, &Stored::of(&values), &bounded, Some(&reversed)).unwrap();
        assert_eq!(judgement.worst.as_ref().map(|worst| &worst.at[..]), Some(&[2, 60][..]));
        assert_eq!(judgement.heat.worst(2, judgement.heat.bin(1, 60)), Some(6.0));
        assert!(judgement.to_string().contains("4 of 64 in columns 48..64"), "{judgement}");
    }

    #[test]
    fn what_was_not_judged_and_the_worst_element_are_said() {
        assert_eq!(
            judged(&[1.0, -2.0], &[1.0, -2.0], &[0.5, 0.25]).to_string().split(';').next(),
            Some("ds: 0 of 2 elements fail")
        );
        let some = judged(&[1.0, 3.0, 5.0], &[1.0, 2.0, f64::INFINITY], &[0.5, 0.25, 0.0]).to_string();
        let said = "ds: 1 of 3 elements fail, 1 were not judged (beyond the type's range); worst at [1]: 3e0, \
                    truth 2e0, bound 2.500e-1, ratio 4.000";
        assert!(some.starts_with(said), "{some}");
    }

    #[test]
    fn an_order_that_does_not_fit_axis_1_is_refused() {
        let bounded = Bounded { truth: Array2::zeros((2, 3)).into_dyn(), bound: Array2::zeros((2, 3)).into_dyn() };
        let stored = Stored::of(&Array2::<f32>::zeros((2, 3)));
        assert!(judge_with(Output::H, &stored, &bounded, Some(&[2, 1, 0])).is_ok());
        assert!(judge_with(Output::H, &stored, &bounded, Some(&[1, 0])).is_err());
    }

    #[test]
    fn a_bound_of_another_shape_than_its_truth_is_refused() {
        let bounded = Bounded { truth: arr1(&[1.0, 2.0]).into_dyn(), bound: arr1(&[1.0]).into_dyn() };
        let error = judge(Output::Ds, &Stored::of(&arr1(&[1.0f32, 2.0])), &bounded).unwrap_err().to_string();
        assert!(error.contains("ds: truth of [2], bound of [1]"), "{error}");
    }

    #[test]
    fn a_result_of_another_shape_is_refused_by_name() {
        let bounded = Bounded { truth: arr1(&[1.0]).into_dyn(), bound: arr1(&[1.0]).into_dyn() };
        let error = judge(Output::Dw1, &Stored::of(&arr1(&[1.0f32, 2.0])), &bounded).unwrap_err();
        assert!(error.to_string().contains("`dw1` has shape [2], expected [1]"), "{error}");
    }
}
