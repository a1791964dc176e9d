//! The verdict on one result: its error against the bound, element by element.

use std::fmt;

use ndarray::ArrayD;

use crate::engine::{Output, Stored};
use crate::error::{Error, Result};
use crate::oracle::cluster::{Cluster, Tally, axes, coordinates};
use crate::oracle::heat::HeatMap;

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
    /// The median bound over the root mean square of the truth, judged elements only; near 1 a zero
    /// result would pass. NaN where the truth is 0 throughout or nothing was judged.
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
    let Bounded { truth, bound } = bounded;
    if stored.values.shape() != truth.shape() {
        return Err(Error::shape(output.name(), truth.shape(), stored.values.shape(), "the shape of the truth"));
    }
    if bound.shape() != truth.shape() {
        return Err(Error::internal(format!("{output}: truth of {:?}, bound of {:?}", truth.shape(), bound.shape())));
    }

    let largest = stored.dtype.largest();
    let mut judged_bounds = Vec::with_capacity(truth.len());
    let mut tally = Tally::new(truth.shape());
    let (mut largest_error, mut floor, mut squares) = (0.0f64, f64::INFINITY, 0.0);
    let mut worst: Option<(f64, f64, usize)> = None;
    let mut heat = map_of(output, truth.shape());
    // Rows of the last axis; the first index of a row is its number over the rows in one.
    let width = truth.shape().last().copied().unwrap_or(1);
    let rows_of_first: usize = if truth.ndim() < 2 { 1 } else { truth.shape()[1..truth.ndim() - 1].iter().product() };
    let (mut row, mut column) = (0, 0);
    for (place, ((&value, &truth), &bound)) in stored.values.iter().zip(truth).zip(bound).enumerate() {
        let at = [row / rows_of_first, column];
        column += 1;
        if column == width {
            (row, column) = (row + 1, 0);
        }
        let Some((error, ratio)) = compare(value, truth, bound, largest) else { continue };
        judged_bounds.push(bound);
        squares += truth * truth;
        if truth != 0.0 {
            floor = floor.min(bound / truth.abs());
        }
        heat.add(at, ratio);
        largest_error = largest_error.max(error);
        if worst.is_none_or(|(worst_ratio, worst_error, _)| (ratio, error) > (worst_ratio, worst_error)) {
            worst = Some((ratio, error, place));
        }
        if error > bound {
            tally.fail(place);
        }
    }

    let judged = judged_bounds.len();
    let rms = (squares / judged as f64).sqrt();
    let worst = worst.map(|(ratio, _, place)| {
        let at = coordinates(place, truth.shape());
        Worst { value: stored.values[&at[..]], reference: truth[&at[..]], bound: bound[&at[..]], at, ratio }
    });
    Ok(Judgement {
        output,
        elements: truth.len(),
        skipped: truth.len() - judged,
        failing: tally.failing(),
        worst,
        largest_error,
        floor,
        median_bound_over_rms: median(judged_bounds) / rms,
        clusters: tally.clusters(output),
        heat,
    })
}

/// |value − truth| and its ratio to the bound; none if the truth may lie beyond `largest`.
pub(crate) fn compare(value: f64, truth: f64, bound: f64, largest: f64) -> Option<(f64, f64)> {
    let within_range = truth.abs() + bound <= largest;
    within_range.then(|| {
        let error = if value.is_finite() { (value - truth).abs() } else { f64::INFINITY };
        (error, if error == 0.0 { 0.0 } else { error / bound })
    })
}

/// An empty map over the first axis and the last; a vector is one row.
fn map_of(output: Output, shape: &[usize]) -> HeatMap {
    match (axes(output), shape) {
        ([first, .., last], [rows, .., columns]) => HeatMap::new([*first, *last], [*rows, *columns]),
        ([only, ..], _) => HeatMap::new(["", *only], [1, shape.iter().product()]),
        ([], _) => HeatMap::new(["", ""], [1, shape.iter().product()]),
    }
}

/// The upper median; NaN of nothing.
fn median(mut values: Vec<f64>) -> f64 {
    if values.is_empty() {
        return f64::NAN;
    }
    let middle = values.len() / 2;
    *values.select_nth_unstable_by(middle, f64::total_cmp).1
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array2, arr1};

    fn judged(values: &[f32], truth: &[f64], bound: &[f64]) -> Judgement {
        let bounded = Bounded { truth: arr1(truth).into_dyn(), bound: arr1(bound).into_dyn() };
        judge(Output::Ds, &Stored::of(&arr1(values)), &bounded).unwrap()
    }

    #[test]
    fn a_bound_of_zero_demands_equality_and_zeros_of_both_signs_are_equal() {
        assert!(judged(&[-0.0, 2.0], &[0.0, 2.0], &[0.0, 0.0]).passes());
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
    fn a_result_of_another_shape_is_refused_by_name() {
        let bounded = Bounded { truth: arr1(&[1.0]).into_dyn(), bound: arr1(&[1.0]).into_dyn() };
        let error = judge(Output::Dw1, &Stored::of(&arr1(&[1.0f32, 2.0])), &bounded).unwrap_err();
        assert!(error.to_string().contains("`dw1` has shape [2], expected [1]"), "{error}");
    }
}
