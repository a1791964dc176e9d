//! The judgement of a result that nobody holds whole: piece by piece.

use std::ops::Range;

use rayon::prelude::*;

use super::{Judgement, Worst, compare};
use crate::element::DType;
use crate::engine::Output;
use crate::oracle::cluster::{Tally, axes, coordinates};
use crate::oracle::heat::HeatMap;
use crate::oracle::median::Median;

/// One result on its way to its judgement, piece by piece.
pub(crate) struct Judging {
    places: Places,
    largest: f64,
    seen: Seen,
    bounds: Median,
    /// What has been seen of elements that are to be looked at in one go, before the rest of them is there.
    open: Option<Seen>,
}

impl Judging {
    /// Of a result of this shape, place i of whose axis 1 is to be reported as place `axis_1[i]`.
    pub(crate) fn new(output: Output, dtype: DType, shape: &[usize], axis_1: Option<Vec<usize>>) -> Self {
        let places = Places { output, shape: shape.to_vec(), axis_1 };
        let seen = places.unseen();
        let bounds = Median::of(shape.iter().product());
        Self { places, largest: dtype.largest(), seen, bounds, open: None }
    }

    /// Looks at the elements from `place` on, in row-major order; the pieces of a result begin and end with
    /// lines of its last axis.
    pub(crate) fn look(&mut self, place: usize, values: &[f64], truth: &[f64], bound: &[f64]) {
        let piece = self.places.piece();
        let pieces = (0..truth.len()).step_by(piece).map(|from| from..truth.len().min(from + piece));
        let pieces = pieces.map(|range| (range, self.places.unseen())).collect();
        self.look_at(place, [values, truth, bound], pieces).into_iter().for_each(|seen| self.seen.join(seen));
    }

    /// The same, so that sums round as if the whole were looked at in one go: each look begins where the last
    /// one ended.
    pub(crate) fn continue_at(&mut self, place: usize, values: &[f64], truth: &[f64], bound: &[f64]) {
        let piece = self.places.piece();
        let (mut from, end) = (place, place + truth.len());
        let mut pieces = Vec::new();
        let mut begun = self.open.take();
        while from < end {
            let to = end.min((from / piece + 1) * piece);
            pieces.push((from - place..to - place, begun.take().unwrap_or_else(|| self.places.unseen())));
            from = to;
        }
        let mut all = self.look_at(place, [values, truth, bound], pieces);
        if !end.is_multiple_of(piece) {
            self.open = all.pop().or(begun);
        }
        all.into_iter().for_each(|seen| self.seen.join(seen));
    }

    /// Each range with what was seen before it.
    fn look_at(
        &mut self,
        place: usize,
        [values, truth, bound]: [&[f64]; 3],
        pieces: Vec<(Range<usize>, Seen)>,
    ) -> Vec<Seen> {
        let Self { places, largest, bounds, .. } = self;
        let numbers = Numbers { from: place, values, truth, bound, largest: *largest };
        let (all, of_bounds): (Vec<Seen>, Vec<Median>) = pieces
            .into_par_iter()
            .map(|(range, seen)| {
                let mut of_piece = bounds.empty();
                let judged = truth[range.clone()].iter().zip(&bound[range.clone()]);
                let judged = judged.filter(|(truth, bound)| truth.abs() + **bound <= *largest);
                of_piece.extend(judged.map(|(_, bound)| bound.abs()));
                (numbers.see(range, places, seen), of_piece)
            })
            .unzip();
        // In their order, whatever the number of threads.
        of_bounds.into_iter().for_each(|piece| bounds.join(piece));
        all
    }

    /// Whether an element has failed.
    pub(crate) fn fails(&self) -> bool {
        self.seen.tally.failing() > 0
    }

    /// What all pieces together have come to.
    pub(crate) fn finish(self) -> Judgement {
        let Self { places, mut seen, bounds, open, .. } = self;
        open.into_iter().for_each(|open| seen.join(open));
        let Seen { judged, largest_error, floor, squares, worst, tally, heat } = seen;
        let rms = (squares / judged as f64).sqrt();
        let elements = places.shape.iter().product();
        Judgement {
            output: places.output,
            elements,
            skipped: elements - judged,
            failing: tally.failing(),
            worst: worst.map(|Extreme { ratio, place, value, reference, bound, .. }| Worst {
                at: places.coordinates(place),
                value,
                reference,
                bound,
                ratio,
            }),
            largest_error,
            floor,
            median_bound_over_rms: bounds.value() / rms,
            clusters: tally.clusters(places.output),
            heat,
        }
    }
}

/// Elements that are looked at in one go.
pub(super) const PIECE: usize = 1 << 18;

/// Values, truth and bound of the elements from a place on, in row-major order.
struct Numbers<'n> {
    from: usize,
    values: &'n [f64],
    truth: &'n [f64],
    bound: &'n [f64],
    largest: f64,
}

/// What the places of a result are called.
struct Places {
    output: Output,
    shape: Vec<usize>,
    axis_1: Option<Vec<usize>>,
}

impl Places {
    fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1).max(1)
    }

    /// Elements of whole lines that are looked at in one go.
    fn piece(&self) -> usize {
        self.width() * (PIECE / self.width()).max(1)
    }

    fn coordinates(&self, place: usize) -> Vec<usize> {
        let mut at = coordinates(place, &self.shape);
        if let (Some(axis_1), Some(at)) = (&self.axis_1, at.get_mut(1)) {
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
            tally: Tally::new(&self.shape),
            heat: map_of(self.output, &self.shape),
        }
    }
}

/// What some elements have shown.
struct Seen {
    judged: usize,
    largest_error: f64,
    floor: f64,
    squares: f64,
    worst: Option<Extreme>,
    tally: Tally,
    heat: HeatMap,
}

/// The worst element so far.
#[derive(Clone, Copy)]
struct Extreme {
    ratio: f64,
    error: f64,
    place: usize,
    value: f64,
    reference: f64,
    bound: f64,
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

    fn meet(&mut self, other: Extreme) {
        if self.worst.is_none_or(|worst| (other.ratio, other.error) > (worst.ratio, worst.error)) {
            self.worst = Some(other);
        }
    }
}

impl Numbers<'_> {
    /// Judges a range of whole lines along the last axis.
    fn see(&self, range: Range<usize>, places: &Places, mut seen: Seen) -> Seen {
        let width = places.width();
        let named = |column: usize| match &places.axis_1 {
            Some(axis_1) if places.shape.len() == 2 => axis_1[column],
            _ => column,
        };
        let bins: Vec<usize> = (0..width).map(|column| seen.heat.bin(1, named(column))).collect();
        // The first index of a line is its number over the lines in one.
        let lines_of_first = match places.shape[..] {
            [_, ref middle @ .., _] => middle.iter().product::<usize>().max(1),
            _ => 1,
        };
        for line in range.step_by(width) {
            // A vector is one line.
            let first = if places.shape.len() < 2 { 0 } else { (self.from + line) / width / lines_of_first };
            let bin = seen.heat.bin(0, first);
            for (column, &column_bin) in bins.iter().enumerate() {
                let here = line + column;
                let (value, truth, bound) = (self.values[here], self.truth[here], self.bound[here]);
                let Some((error, ratio)) = compare(value, truth, bound, self.largest) else { continue };
                seen.judged += 1;
                seen.squares += truth * truth;
                if truth != 0.0 {
                    seen.floor = seen.floor.min(bound / truth.abs());
                }
                seen.heat.raise([bin, column_bin], ratio);
                seen.largest_error = seen.largest_error.max(error);
                let place = self.from + here;
                seen.meet(Extreme { ratio, error, place, value, reference: truth, bound });
                if error > bound {
                    seen.tally.fail(&places.coordinates(place));
                }
            }
        }
        seen
    }
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

    /// Numbers of all sizes, a bound that some exceed, and some that may be beyond f16.
    fn numbers(count: usize) -> [Vec<f64>; 3] {
        let drawn = |place: usize, factor: f64| libm::sin(factor * (place + 1) as f64);
        let truth = |place: usize| drawn(place, 1.3) * libm::exp2(12.0 * drawn(place, 0.7) + 4.0);
        let bound = |place: usize| libm::exp2(16.0 * drawn(place, 0.9).powi(9)) * 0.01;
        let value = |place: usize| truth(place) + 1.5 * bound(place) * drawn(place, 2.1);
        [(0..count).map(value).collect(), (0..count).map(truth).collect(), (0..count).map(bound).collect()]
    }

    fn judging(shape: &[usize]) -> Judging {
        Judging::new(Output::O, DType::F16, shape, None)
    }

    /// Even where sums round: each part of a piece is added to what the parts before it came to.
    #[test]
    fn a_result_in_parts_is_judged_as_in_one_go_to_the_last_bit() {
        let (rows, columns) = (PIECE / 64 * 2 + 100, 64);
        let [values, truth, bound] = numbers(rows * columns);
        let look = |judging: &mut Judging, range: Range<usize>, continued: bool| {
            let [values, truth, bound] = [&values, &truth, &bound].map(|numbers| &numbers[range.clone()]);
            match continued {
                true => judging.continue_at(range.start, values, truth, bound),
                false => judging.look(range.start, values, truth, bound),
            }
        };
        let mut whole = judging(&[rows, columns]);
        assert!(!whole.fails());
        look(&mut whole, 0..truth.len(), false);
        assert!(whole.fails());
        let whole = whole.finish();
        assert!(whole.failing > 0 && whole.skipped > 0 && whole.median_bound_over_rms > 0.0);
        for ends in [
            vec![0, PIECE, 2 * PIECE, truth.len()],
            vec![0, 64, PIECE - 128, PIECE + 64, PIECE + 64, truth.len()],
            vec![0, PIECE / 2, PIECE, 2 * PIECE + 640, truth.len()],
            (0..=truth.len() / 6400).map(|part| part * 6400).chain([truth.len()]).collect(),
        ] {
            let mut parts = judging(&[rows, columns]);
            ends.windows(2).for_each(|ends| look(&mut parts, ends[0]..ends[1], true));
            let parts = parts.finish();
            assert_eq!(parts.median_bound_over_rms.to_bits(), whole.median_bound_over_rms.to_bits(), "{ends:?}");
            assert_eq!(parts, whole, "{ends:?}");
        }
    }

    #[test]
    fn the_median_is_of_the_bounds_of_what_is_judged() {
        let mut judging = judging(&[1, 6]);
        let most = DType::F16.largest();
        // Nothing is known of the last two; the one before them may be the largest number itself.
        let truth = [1.0, -1.0, 1.0, most - 8.0, most - 8.0, 8.0 - most];
        judging.look(0, &truth, &truth, &[1.0, 2.0, 3.0, 8.0, 9.0, 9.0]);
        let rms = ((3.0 + (most - 8.0).powi(2)) / 4.0f64).sqrt();
        let judged = judging.finish();
        assert_eq!((judged.skipped, judged.median_bound_over_rms), (2, 3.0 / rms));
    }

    #[test]
    fn of_equally_bad_elements_the_first_is_the_worst_and_of_equal_ratios_the_larger_error() {
        for (values, worst) in
            [([1.0, 3.0, 3.0, 0.0], 1), ([3.0, 1.0, 5.0, 0.0], 2), ([5.0, 3.0, 5.0, 0.0], 0), ([3.0, 3.0, 1.0, 0.0], 0)]
        {
            let mut judging = judging(&[2, 2]);
            judging.look(0, &values, &[1.0, 1.0, 1.0, 0.0], &[1.0, 1.0, 2.0, 1.0]);
            let at = judging.finish().worst.unwrap().at;
            assert_eq!(at[0] * 2 + at[1], worst, "{values:?}");
        }
    }
}
