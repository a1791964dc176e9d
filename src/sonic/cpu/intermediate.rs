//! Tensors that one kernel writes and another reads, a row per routed pair.

use std::ops::Range;

use ndarray::{Array2, Axis, s};

use super::blocks::{RowBlock, split};
use super::matmul::Operand;
use crate::element::{Element, Real};

/// A tensor between two kernels.
#[derive(Clone, Debug)]
pub(in crate::sonic) enum Intermediate<S, A> {
    /// In the storage type, as the method has it.
    Rounded(Array2<S>),
    /// As the accumulator had it, where that rounding point is left out.
    Unrounded(Array2<A>),
}

impl<S: Element, A: Real> Intermediate<S, A> {
    pub(super) fn zeros(rows: usize, columns: usize, rounded: bool) -> Self {
        if rounded {
            Self::Rounded(Array2::from_elem((rows, columns), S::default()))
        } else {
            Self::Unrounded(Array2::zeros((rows, columns)))
        }
    }

    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Rounded(values) => values.len() * size_of::<S>(),
            Self::Unrounded(values) => values.len() * size_of::<A>(),
        }
    }

    pub(super) fn columns(&self) -> usize {
        match self {
            Self::Rounded(values) => values.ncols(),
            Self::Unrounded(values) => values.ncols(),
        }
    }

    /// Some rows, as an operand of a product.
    pub(super) fn operand(&self, rows: Range<usize>) -> Operand<'_, S, A> {
        match self {
            Self::Rounded(values) => Operand::Stored(values.slice(s![rows, ..])),
            Self::Unrounded(values) => Operand::Unrounded(values.slice(s![rows, ..])),
        }
    }

    /// `into` = columns `first..first + into.len()` of one row, widened.
    pub(super) fn read(&self, row: usize, first: usize, into: &mut [A]) {
        let columns = first..first + into.len();
        match self {
            Self::Rounded(values) => widen(values.row(row).slice(s![columns]).as_slice(), into),
            Self::Unrounded(values) => widen(values.row(row).slice(s![columns]).as_slice(), into),
        }
    }

    /// One writer for each block, all of them at once.
    pub(super) fn writers(&mut self, blocks: &[RowBlock]) -> Vec<Writer<'_, S, A>> {
        let lengths = blocks.iter().map(|block| block.rows.len());
        self.writers_of(lengths)
    }

    /// One writer for each run of consecutive rows.
    pub(super) fn writers_of(&mut self, rows: impl IntoIterator<Item = usize>) -> Vec<Writer<'_, S, A>> {
        let columns = self.columns();
        let lengths = rows.into_iter().map(|rows| rows * columns);
        match self {
            Self::Rounded(values) => split(contiguous(values), lengths)
                .into_iter()
                .map(|values| Writer { columns, values: Values::Rounded(values) })
                .collect(),
            Self::Unrounded(values) => split(contiguous(values), lengths)
                .into_iter()
                .map(|values| Writer { columns, values: Values::Unrounded(values) })
                .collect(),
        }
    }

    /// The tensor in the storage type.
    pub(super) fn into_stored(self) -> Array2<S> {
        match self {
            Self::Rounded(values) => values,
            Self::Unrounded(values) => values.mapv(A::store),
        }
    }
}

fn widen<S: Element, A: Real>(values: Option<&[S]>, into: &mut [A]) {
    A::widen_slice(values.expect("rows of a tensor that we allocated are contiguous"), into);
}

/// All values of a tensor that we allocated, row after row.
pub(super) fn contiguous<V, D: ndarray::Dimension>(tensor: &mut ndarray::Array<V, D>) -> &mut [V] {
    debug_assert!(tensor.ndim() == 0 || tensor.len_of(Axis(0)) == 0 || tensor.is_standard_layout());
    tensor.as_slice_mut().expect("a tensor that we allocated is contiguous")
}

/// Consecutive rows of an [`Intermediate`], to be written by one task.
pub(super) struct Writer<'t, S, A> {
    columns: usize,
    values: Values<'t, S, A>,
}

enum Values<'t, S, A> {
    Rounded(&'t mut [S]),
    Unrounded(&'t mut [A]),
}

impl<S: Element, A: Real> Writer<'_, S, A> {
    /// Writes `values` at `row` (counted from the first of this writer), from column `first` on.
    pub(super) fn write(&mut self, row: usize, first: usize, values: &[A]) {
        let start = row * self.columns + first;
        let place = start..start + values.len();
        match &mut self.values {
            Values::Rounded(into) => A::store_slice(values, &mut into[place]),
            Values::Unrounded(into) => into[place].copy_from_slice(values),
        }
    }
}
