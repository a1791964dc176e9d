//! Where errors sit, in a picture's worth of memory: the worst ratio of error to bound in every bin
//! of two axes.

/// Most bins along the first and the second axis.
const MOST: [usize; 2] = [48, 96];

/// The worst ratio by place, over the first axis of a result and its last.
#[derive(Clone, Debug, PartialEq)]
pub struct HeatMap {
    /// What the axes count: token, expert, row, column, pair.
    pub axes: [&'static str; 2],
    /// How long the axes are.
    pub lengths: [usize; 2],
    bins: [usize; 2],
    worst: Vec<f32>,
}

impl HeatMap {
    /// A map on which nothing was judged.
    pub fn new(axes: [&'static str; 2], lengths: [usize; 2]) -> Self {
        let bins = [lengths[0].min(MOST[0]), lengths[1].min(MOST[1])];
        Self { axes, lengths, bins, worst: vec![f32::NAN; bins[0] * bins[1]] }
    }

    /// Rows and columns of bins.
    pub fn bins(&self) -> [usize; 2] {
        self.bins
    }

    /// The worst ratio of a bin; none where nothing in it was judged.
    pub fn worst(&self, row: usize, column: usize) -> Option<f64> {
        let ratio = self.worst[row * self.bins[1] + column];
        (!ratio.is_nan()).then_some(f64::from(ratio))
    }

    /// The indices of an axis (0 or 1) that fall into a bin.
    pub fn extent(&self, axis: usize, bin: usize) -> std::ops::Range<usize> {
        let (length, bins) = (self.lengths[axis], self.bins[axis]);
        let edge = |bin: usize| (bin * length).div_ceil(bins);
        edge(bin)..edge(bin + 1)
    }

    /// The bin of an index of an axis (0 or 1).
    pub(crate) fn bin(&self, axis: usize, index: usize) -> usize {
        index * self.bins[axis] / self.lengths[axis].max(1)
    }

    /// Adds an element, by its two indices. A ratio is 0 or above.
    pub fn add(&mut self, at: [usize; 2], ratio: f64) {
        self.raise([self.bin(0, at[0]), self.bin(1, at[1])], ratio);
    }

    /// Adds an element, by its two bins.
    pub(crate) fn raise(&mut self, bins: [usize; 2], ratio: f64) {
        let place = bins[0] * self.bins[1] + bins[1];
        // f32::max takes the number where the other is NaN.
        self.worst[place] = self.worst[place].max(ratio as f32);
    }

    /// Adds the elements of a map of the same axes.
    pub(crate) fn join(&mut self, other: &Self) {
        self.worst.iter_mut().zip(&other.worst).for_each(|(worst, other)| *worst = worst.max(*other));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_columns_are_axes_of_their_own() {
        let mut map = HeatMap::new(["token", "column"], [2, 3]);
        map.add([1, 2], 0.5);
        map.add([0, 1], 0.25);
        let worst = |row| [0, 1, 2].map(|column| map.worst(row, column));
        assert_eq!([worst(0), worst(1)], [[None, Some(0.25), None], [None, None, Some(0.5)]]);
    }

    #[test]
    fn every_index_falls_into_the_bin_whose_extent_holds_it() {
        let wide = HeatMap::new(["token", "column"], [3, 1000]);
        assert_eq!((wide.bins(), HeatMap::new(["token", "column"], [1000, 3]).bins()), ([3, 96], [48, 3]));
        for length in [1, 2, 47, 48, 49, 97, 1000] {
            let mut map = HeatMap::new(["token", "column"], [length, length]);
            for index in 0..length {
                map.add([index, length - 1 - index], index as f64);
            }
            let [rows, columns] = map.bins();
            for (axis, bins) in [(0, rows), (1, columns)] {
                let covered: Vec<usize> = (0..bins).flat_map(|bin| map.extent(axis, bin)).collect();
                assert_eq!(covered, (0..length).collect::<Vec<_>>());
            }
            for row in 0..rows {
                let last = map.extent(0, row).end - 1;
                let worst = (0..columns).filter_map(|column| map.worst(row, column)).fold(0.0, f64::max);
                assert_eq!(worst, last as f64, "row {row} of {rows} over {length}");
            }
        }
    }
}
