//! The verdict on one result: its error against the bound, element by element.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use ndarray::ArrayD;
use rayon::prelude::*;

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

    let numbers = Numbers {
        values: in_order(&stored.values),
        truth: in_order(truth),
        bound: in_order(bound),
        largest: stored.dtype.largest(),
    };
    let places = Places { output, shape, axis_1 };
    // Each piece is of whole indices of the first axis; a vector is one.
    let of_first = if shape.len() < 2 { truth.len() } else { shape[1..].iter().product() }.max(1);
    let piece = of_first * (PIECE / of_first).max(1);
    let pieces: Vec<Range<usize>> =
        (0..truth.len()).step_by(piece).map(|from| from..truth.len().min(from + piece)).collect();
    let seen: Vec<Seen> = pieces.into_par_iter().map(|range| numbers.see(range, &places)).collect();
    let mut all = places.unseen();
    seen.into_iter().for_each(|seen| all.join(seen));

    let Seen { judged, largest_error, floor, squares, worst, tally, heat } = all;
    let rms = (squares / judged as f64).sqrt();
    let worst = worst.map(|(ratio, _, place)| {
        let (value, reference, bound) = (numbers.values[place], numbers.truth[place], numbers.bound[place]);
        Worst { at: places.coordinates(place), value, reference, bound, ratio }
    });
    Ok(Judgement {
        output,
        elements: truth.len(),
        skipped: truth.len() - judged,
        failing: tally.failing(),
        worst,
        largest_error,
        floor,
        median_bound_over_rms: numbers.median_bound(judged) / rms,
        clusters: tally.clusters(output),
        heat,
    })
}

/// Elements that are looked at in one go.
const PIECE: usize = 1 << 18;

/// Values, truth and bound in row-major order.
struct Numbers<'n> {
    values: Cow<'n, [f64]>,
    truth: Cow<'n, [f64]>,
    bound: Cow<'n, [f64]>,
    largest: f64,
}

/// The values in row-major order, copied only where they lie otherwise.
pub(super) fn in_order(values: &ArrayD<f64>) -> Cow<'_, [f64]> {
    match values.as_slice() {
        Some(values) => Cow::Borrowed(values),
        None => Cow::Owned(values.iter().copied().collect()),
    }
}

/// What the places of a result are called.
struct Places<'p> {
    output: Output,
    shape: &'p [usize],
    axis_1: Option<&'p [usize]>,
}

impl Places<'_> {
    fn coordinates(&self, place: usize) -> Vec<usize> {
        let mut at = coordinates(place, self.shape);
        if let (Some(axis_1), Some(at)) = (self.axis_1, at.get_mut(1)) {
            *at = axis_1[*at];
        }
        at
    }

    fn unseen(&self) -> Seen {
        Seen {
            judged: 0,
            largest_error: 0.0,
            floor: f64::INFINITY,
            squares: 0.0,
            worst: None,
            tally: Tally::new(self.shape),
            heat: map_of(self.output, self.shape),
        }
    }
}

/// What some elements have shown.
struct Seen {
    judged: usize,
    largest_error: f64,
    floor: f64,
    squares: f64,
    /// Ratio, error, place.
    worst: Option<(f64, f64, usize)>,
    tally: Tally,
    heat: HeatMap,
}

impl Seen {
    fn join(&mut self, later: Self) {
        self.judged += later.judged;
        self.largest_error = self.largest_error.max(later.largest_error);
        self.floor = self.floor.min(later.floor);
        self.squares += later.squares;
        if let Some(worst) = later.worst {
            self.meet(worst);
        }
        self.tally.join(&later.tally);
        self.heat.join(&later.heat);
    }

    fn meet(&mut self, (ratio, error, place): (f64, f64, usize)) {
        if self.worst.is_none_or(|(worst_ratio, worst_error, _)| (ratio, error) > (worst_ratio, worst_error)) {
            self.worst = Some((ratio, error, place));
        }
    }
}

impl Numbers<'_> {
    /// Judges a range of whole lines along the last axis.
    fn see(&self, range: Range<usize>, places: &Places<'_>) -> Seen {
        let mut seen = places.unseen();
        let width = places.shape.last().copied().unwrap_or(1).max(1);
        let named = |column: usize| match places.axis_1 {
            Some(axis_1) if places.shape.len() == 2 => axis_1[column],
            _ => column,
        };
        let bins: Vec<usize> = (0..width).map(|column| seen.heat.bin(1, named(column))).collect();
        // The first index of a line is its number over the lines in one.
        let lines_of_first = match places.shape {
            [_, middle @ .., _] => middle.iter().product::<usize>().max(1),
            _ => 1,
        };
        for line in range.step_by(width) {
            // A vector is one line.
            let first = if places.shape.len() < 2 { 0 } else { line / width / lines_of_first };
            let bin = seen.heat.bin(0, first);
            for (column, &column_bin) in bins.iter().enumerate() {
                let place = line + column;
                let (truth, bound) = (self.truth[place], self.bound[place]);
                let Some((error, ratio)) = compare(self.values[place], truth, bound, self.largest) else { continue };
                seen.judged += 1;
                seen.squares += truth * truth;
                if truth != 0.0 {
                    seen.floor = seen.floor.min(bound / truth.abs());
                }
                seen.heat.raise([bin, column_bin], ratio);
                seen.largest_error = seen.largest_error.max(error);
                seen.meet((ratio, error, place));
                if error > bound {
                    seen.tally.fail(&places.coordinates(place));
                }
            }
        }
        seen
    }

    /// The upper median bound of the `judged` elements; NaN of nothing.
    ///
    /// Bounds are ≥ 0, so their bits are in their order: counting by the leading bits finds the few among
    /// which the median is, without a copy of all.
    fn median_bound(&self, judged: usize) -> f64 {
        const BINS: usize = 1 << 15;
        let bin = |bound: f64| (bound.to_bits() >> 48) as usize % BINS;
        let judged_in = |range: Range<usize>| {
            let numbers = self.truth[range.clone()].iter().zip(&self.bound[range]);
            numbers.filter(|(truth, bound)| truth.abs() + **bound <= self.largest).map(|(_, bound)| bound.abs())
        };
        let len = self.bound.len();
        let mut before = judged / 2;
        let candidates: Vec<f64> = if len <= PIECE {
            judged_in(0..len).collect()
        } else {
            let starts: Vec<usize> = (0..len).step_by(16 * PIECE).collect();
            let range = |from: usize| from..len.min(from + 16 * PIECE);
            let counts = starts
                .par_iter()
                .map(|&from| {
                    let mut counts = vec![0usize; BINS];
                    judged_in(range(from)).for_each(|bound| counts[bin(bound)] += 1);
                    counts
                })
                .reduce(
                    || vec![0; BINS],
                    |mut all, counts| {
                        all.iter_mut().zip(counts).for_each(|(all, count)| *all += count);
                        all
                    },
                );
            let mut at = 0;
            while at < BINS - 1 && before >= counts[at] {
                before -= counts[at];
                at += 1;
            }
            starts.par_iter().flat_map_iter(|&from| judged_in(range(from)).filter(|&bound| bin(bound) == at)).collect()
        };
        upper(candidates, before)
    }
}

/// The value with `before` others before it in order; NaN where there are not so many.
fn upper(mut values: Vec<f64>, before: usize) -> f64 {
    if before >= values.len() {
        return f64::NAN;
    }
    *values.select_nth_unstable_by(before, f64::total_cmp).1
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

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array1, Array2, arr1};

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
    fn the_median_of_many_bounds_is_that_of_all_in_order() {
        let count = 2 * PIECE + 7;
        let bound = ArrayD::from_shape_fn(vec![count], |at| ((at[0] * 7919) % count) as f64 * 1e-7);
        let bounded = Bounded { truth: ArrayD::ones(vec![count]), bound };
        let stored = Stored::of(&Array1::<f64>::ones(count));
        let judgement = judge(Output::Ds, &stored, &bounded).unwrap();
        assert_eq!(judgement.median_bound_over_rms, (count / 2) as f64 * 1e-7);
        assert_eq!((judgement.judged(), judgement.failing), (count, 0));
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
    fn a_result_of_another_shape_is_refused_by_name() {
        let bounded = Bounded { truth: arr1(&[1.0]).into_dyn(), bound: arr1(&[1.0]).into_dyn() };
        let error = judge(Output::Dw1, &Stored::of(&arr1(&[1.0f32, 2.0])), &bounded).unwrap_err();
        assert!(error.to_string().contains("`dw1` has shape [2], expected [1]"), "{error}");
    }
}
