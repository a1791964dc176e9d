//! Tensors that one kernel writes and another reads, a row per routed pair.

use std::ops::Range;

use ndarray::{Array, Array2, Axis, Dimension, ShapeBuilder, s};

use super::blocks::{RowBlock, split};
use super::matmul::{Operand, Scratch, Tile, reserve};
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
        if rounded { Self::Rounded(zeros((rows, columns))) } else { Self::Unrounded(zeros((rows, columns))) }
    }

    /// Makes it rows × columns, to be written anew; memory stays where the size does.
    pub(super) fn reshape(&mut self, rows: usize, columns: usize) {
        let (dim, rounded) = match self {
            Self::Rounded(values) => (values.dim(), true),
            Self::Unrounded(values) => (values.dim(), false),
        };
        if dim != (rows, columns) {
            *self = Self::zeros(rows, columns, rounded);
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

    /// Columns of one row, widened into `buffer` if they are not in the accumulator's type.
    pub(super) fn read<'r>(&'r self, row: usize, columns: Range<usize>, buffer: &'r mut Vec<A>) -> &'r [A] {
        match self {
            Self::Rounded(values) => widened(values, row, columns, buffer),
            Self::Unrounded(values) => widened(values, row, columns, buffer),
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

fn widened<'r, S: Element, A: Real>(
    values: &'r Array2<S>,
    row: usize,
    columns: Range<usize>,
    buffer: &'r mut Vec<A>,
) -> &'r [A] {
    let width = values.ncols();
    let values = values.as_slice().expect("a tensor that we allocated is contiguous");
    let values = &values[row * width + columns.start..row * width + columns.end];
    match A::of_stored(values) {
        Some(values) => values,
        None => {
            let buffer = reserve(buffer, values.len());
            A::widen_slice(values, buffer);
            buffer
        }
    }
}

/// A tensor of +0 that is to be written.
pub(super) fn zeros<V: Element, D: Dimension, I: ShapeBuilder<Dim = D>>(shape: I) -> Array<V, D> {
    let shape = shape.into_shape_with_order();
    let values = V::zeros(shape.size());
    Array::from_shape_vec(shape, values).expect("there is a value for every place of the shape")
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

    /// Writes a tile from column `first` on: [`Tile::store`].
    pub(super) fn store<L: Element, R: Element>(
        &mut self,
        tile: &Tile<'_, '_, '_, L, R, A>,
        first: usize,
        scratch: &mut Scratch<A>,
        finish: impl FnMut(usize, &mut [A]),
        read: impl FnMut(usize, &[A]),
    ) {
        let width = self.columns;
        match &mut self.values {
            Values::Rounded(into) => tile.store(scratch, into, width, first, finish, read),
            Values::Unrounded(into) => tile.store(scratch, into, width, first, finish, read),
        }
    }
}
