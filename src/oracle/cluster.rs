//! Where failing elements sit: tokens, experts, rows, tiles of columns.

use std::fmt;

use crate::engine::Output;

/// Columns are looked at in tiles of this width: the finest stripe that a tensor-core tile leaves.
const COLUMN_TILE: usize = 16;

/// More ranges than this along one axis are no cluster.
const MOST_RANGES: usize = 4;

/// A range of one axis in which failing elements sit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// What the axis counts: token, expert, row, column, pair.
    pub axis: &'static str,
    /// The first index.
    pub from: usize,
    /// One past the last index.
    pub to: usize,
    /// Failing elements inside.
    pub failing: usize,
    /// All elements inside.
    pub elements: usize,
}

impl fmt::Display for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { axis, from, to, failing, elements } = self;
        if failing == elements {
            write!(f, "all {failing}")?;
        } else {
            write!(f, "{failing} of {elements}")?;
        }
        if to - from == 1 { write!(f, " in {axis} {from}") } else { write!(f, " in {axis}s {from}..{to}") }
    }
}

/// Failures counted along every axis.
pub(crate) struct Tally {
    shape: Vec<usize>,
    failing: usize,
    by_axis: Vec<Vec<usize>>,
}

impl Tally {
    pub(crate) fn new(shape: &[usize]) -> Self {
        Self { shape: shape.to_vec(), failing: 0, by_axis: shape.iter().map(|&length| vec![0; length]).collect() }
    }

    /// The element at these coordinates fails.
    pub(crate) fn fail(&mut self, at: &[usize]) {
        self.failing += 1;
        for (counts, &at) in self.by_axis.iter_mut().zip(at) {
            counts[at] += 1;
        }
    }

    /// Adds the failures of other elements.
    pub(crate) fn join(&mut self, other: &Self) {
        self.failing += other.failing;
        for (counts, others) in self.by_axis.iter_mut().zip(&other.by_axis) {
            counts.iter_mut().zip(others).for_each(|(count, other)| *count += other);
        }
    }

    pub(crate) fn failing(&self) -> usize {
        self.failing
    }

    /// Along each axis the few ranges that hold all failures; none for an axis along which the
    /// failures touch more than half of the indices, or many separate ranges.
    pub(crate) fn clusters(&self, output: Output) -> Vec<Cluster> {
        let elements: usize = self.shape.iter().product();
        let mut clusters = Vec::new();
        for ((&axis, counts), &length) in axes(output).iter().zip(&self.by_axis).zip(&self.shape) {
            let tile = if axis == "column" { COLUMN_TILE } else { 1 };
            let mut ranges: Vec<Cluster> = Vec::new();
            for (index, counts) in counts.chunks(tile).enumerate() {
                let failing: usize = counts.iter().sum();
                let (from, to) = (index * tile, index * tile + counts.len());
                let inside = elements / length * counts.len();
                match ranges.last_mut() {
                    _ if failing == 0 => {}
                    Some(range) if range.to == from => {
                        range.to = to;
                        range.failing += failing;
                        range.elements += inside;
                    }
                    _ => ranges.push(Cluster { axis, from, to, failing, elements: inside }),
                }
            }
            let touched: usize = ranges.iter().map(|range| range.to - range.from).sum();
            if ranges.len() <= MOST_RANGES && 2 * touched <= length {
                clusters.extend(ranges);
            }
        }
        clusters
    }
}

/// The coordinates of an element counted in row-major order.
pub(crate) fn coordinates(place: usize, shape: &[usize]) -> Vec<usize> {
    let mut rest = place;
    let mut at: Vec<usize> = shape
        .iter()
        .rev()
        .map(|&length| {
            let here = rest % length.max(1);
            rest /= length.max(1);
            here
        })
        .collect();
    at.reverse();
    at
}

/// What each axis of a result counts.
pub(crate) fn axes(output: Output) -> &'static [&'static str] {
    match output {
        Output::O | Output::Dx => &["token", "column"],
        Output::Dlogits | Output::Logits => &["token", "expert"],
        Output::Dw1 | Output::Dw2 => &["expert", "row", "column"],
        Output::Db1 | Output::Db2 | Output::DrouterW => &["expert", "column"],
        Output::DrouterB => &["expert"],
        Output::DsharedGate | Output::DsharedUp | Output::DsharedDown => &["row", "column"],
        Output::Ds | Output::Scores => &["pair"],
        Output::H | Output::A | Output::Y | Output::Dh | Output::APrime | Output::DxExpanded => &["row", "column"],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_counted_in_row_major_order_whatever_the_lengths() {
        for shape in [[1, 1, 1], [2, 1, 3], [1, 4, 1], [3, 2, 2]] {
            let in_order = ndarray::indices(shape).into_iter().enumerate();
            in_order.for_each(|(place, (i, j, k))| assert_eq!(coordinates(place, &shape), [i, j, k], "{shape:?}"));
        }
    }

    #[test]
    fn a_stripe_of_columns_is_one_cluster_along_its_axis_only() {
        let shape = [2, 4, 64];
        let mut tally = Tally::new(&shape);
        for place in 0..2 * 4 * 64 {
            let at = coordinates(place, &shape);
            if (16..32).contains(&at[2]) {
                tally.fail(&at);
            }
        }
        let stripe = Cluster { axis: "column", from: 16, to: 32, failing: 128, elements: 128 };
        assert_eq!(tally.clusters(Output::Dw1), [stripe]);
    }

    /// The ranges of tokens, so many of width 3, of which some have a failing element.
    fn clusters_of(tokens: usize, rows: &[usize]) -> Vec<(usize, usize, usize, usize)> {
        let mut tally = Tally::new(&[tokens, 3]);
        rows.iter().for_each(|&row| tally.fail(&[row, 1]));
        let of_rows = tally.clusters(Output::O).into_iter().filter(|cluster| cluster.axis == "token");
        of_rows.map(|cluster| (cluster.from, cluster.to, cluster.failing, cluster.elements)).collect()
    }

    /// Rows that touch are one range, and what fails in most places is no cluster.
    #[test]
    fn neighbouring_rows_are_one_range_and_half_of_the_rows_in_four_ranges_the_most_that_is_named() {
        let clusters = |rows: &[usize]| clusters_of(8, rows);
        assert_eq!(clusters_of(12, &[0, 2, 4, 6, 8]), [], "five ranges");
        assert_eq!(clusters(&[2, 3, 6]), [(2, 4, 2, 6), (6, 7, 1, 3)]);
        assert_eq!(clusters(&[0, 1, 2, 3]), [(0, 4, 4, 12)]);
        assert_eq!(clusters(&[0, 1, 2, 3, 5]), []);
        let alone = |row: usize| (row, row + 1, 1, 3);
        assert_eq!(clusters(&[0, 2, 4, 6]), [0, 2, 4, 6].map(alone));
        assert_eq!(clusters(&[]), []);
    }
}
