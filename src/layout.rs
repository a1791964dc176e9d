//! The order of gate and up rows in w1 and b1, as seen in the wild, and the way to ours.
//!
//! Inside the crate rows are **interleaved, gate first** (0, 2, 4, … gate; 1, 3, 5, … up). Other
//! orders are converted at the border. The order cannot be read off a shape, so it is never guessed.

use std::fmt;
use std::str::FromStr;

use ndarray::{Array, ArrayView, Axis, Dimension, RemoveAxis};

use crate::element::Element;
use crate::error::{Error, Result};

/// Where an expert's 2n rows of w1 keep gate and up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GateLayout {
    /// gate 0, up 0, gate 1, up 1, … (SonicMoE, gpt-oss).
    InterleavedGateFirst,
    /// gate 0 … n−1, then up 0 … n−1 (Hugging Face).
    ConcatenatedGateFirst,
    /// up 0 … n−1, then gate 0 … n−1 (ScatterMoE).
    ConcatenatedUpFirst,
}

impl GateLayout {
    /// Every layout.
    pub const ALL: [Self; 3] = [Self::InterleavedGateFirst, Self::ConcatenatedGateFirst, Self::ConcatenatedUpFirst];

    /// The name used on the command line and in dumps.
    pub fn name(self) -> &'static str {
        match self {
            Self::InterleavedGateFirst => "interleaved_gate_first",
            Self::ConcatenatedGateFirst => "concatenated_gate_first",
            Self::ConcatenatedUpFirst => "concatenated_up_first",
        }
    }

    /// The row of this layout that stands at `row` of the interleaved one; `n` gates, `row` < 2n.
    pub fn row_of_interleaved(self, row: usize, n: usize) -> usize {
        let (unit, up) = (row / 2, row % 2);
        match self {
            Self::InterleavedGateFirst => row,
            Self::ConcatenatedGateFirst => up * n + unit,
            Self::ConcatenatedUpFirst => (1 - up) * n + unit,
        }
    }

    /// Reorders axis 1 of w1 (E, 2n, d), b1 (E, 2n) or their gradients from this layout to the
    /// interleaved one.
    ///
    /// # Errors
    /// An odd number of rows, named with `tensor`.
    pub fn to_interleaved<S: Element, D: Dimension + RemoveAxis>(
        self,
        tensor: &str,
        values: ArrayView<'_, S, D>,
    ) -> Result<Array<S, D>> {
        self.reorder(tensor, values, |row, n| self.row_of_interleaved(row, n))
    }

    /// The inverse of [`GateLayout::to_interleaved`].
    ///
    /// # Errors
    /// An odd number of rows, named with `tensor`.
    pub fn from_interleaved<S: Element, D: Dimension + RemoveAxis>(
        self,
        tensor: &str,
        values: ArrayView<'_, S, D>,
    ) -> Result<Array<S, D>> {
        self.reorder(tensor, values, |row, n| match self {
            Self::InterleavedGateFirst => row,
            Self::ConcatenatedGateFirst => 2 * (row % n) + row / n,
            Self::ConcatenatedUpFirst => 2 * (row % n) + 1 - row / n,
        })
    }

    fn reorder<S: Element, D: Dimension + RemoveAxis>(
        self,
        tensor: &str,
        values: ArrayView<'_, S, D>,
        source: impl Fn(usize, usize) -> usize,
    ) -> Result<Array<S, D>> {
        let rows = values.shape().get(1).copied().unwrap_or(0);
        if rows == 0 || !rows.is_multiple_of(2) {
            let mut expected = values.shape().to_vec();
            if let Some(size) = expected.get_mut(1) {
                *size = rows + rows % 2;
            }
            return Err(Error::shape(tensor, &expected, values.shape(), "axis 1 holds 2n rows, gate and up"));
        }
        let order: Vec<usize> = (0..rows).map(|row| source(row, rows / 2)).collect();
        Ok(values.select(Axis(1), &order))
    }
}

impl fmt::Display for GateLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for GateLayout {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|layout| layout.name() == text)
            .ok_or_else(|| Error::unknown("layout of w1", text, Self::ALL.map(Self::name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array2, array};

    #[test]
    fn each_layout_names_the_same_gates_and_ups() {
        // Gates 1, 2, 3 and ups 10, 20, 30 in three orders.
        let interleaved: Array2<f32> = array![[1.0, 10.0, 2.0, 20.0, 3.0, 30.0]];
        let written =
            [interleaved.clone(), array![[1.0, 2.0, 3.0, 10.0, 20.0, 30.0]], array![[10.0, 20.0, 30.0, 1.0, 2.0, 3.0]]];
        for (layout, values) in GateLayout::ALL.into_iter().zip(written) {
            assert_eq!(layout.to_interleaved("b1", values.view()).unwrap(), interleaved, "{layout}");
            assert_eq!(layout.from_interleaved("b1", interleaved.view()).unwrap(), values, "{layout}");
        }
    }

    #[test]
    fn an_odd_number_of_rows_is_refused_by_name() {
        let odd = Array2::<f32>::zeros((2, 5));
        let error = GateLayout::ConcatenatedGateFirst.to_interleaved("b1", odd.view()).unwrap_err();
        assert!(error.to_string().contains("`b1`"), "{error}");
    }
}
