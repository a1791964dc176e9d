//! Products of stored tensors, a tile at a time, with sums in the accumulator.
//!
//! A tile's operands are read block by block along the contraction: gathered, widened into scratch
//! and multiplied; what has the accumulator's type and lies in order is multiplied in place. No
//! operand is ever gathered or widened as a whole.

use std::ops::Range;

use faer::{Accum, MatMut, MatRef};
use ndarray::{Array2, Array3, ArrayView1, ArrayView2, s};
use rayon::prelude::*;

use super::blocks::{COLUMNS, DEPTH, FAR, ROWS, blocks, split};
use super::intermediate::{contiguous, zeros};
use crate::element::{Element, Real};
use crate::shape::TokenId;

/// Which operand of a product stands transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Product {
    /// X W: contracts the columns of X with the rows of W.
    Plain,
    /// X Wᵀ: contracts columns with columns.
    RightTransposed,
    /// Xᵀ W: contracts rows with rows.
    LeftTransposed,
}

/// A matrix that a product reads.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operand<'t, S, A> {
    /// A tensor as it is.
    Stored(ArrayView2<'t, S>),
    /// Row i is row `tokens[i]` of the tensor.
    Gathered(ArrayView2<'t, S>, &'t [TokenId]),
    /// A tensor that was not rounded.
    Unrounded(ArrayView2<'t, A>),
}

impl<'t, S: Element, A: Real> Operand<'t, S, A> {
    fn dim(&self) -> (usize, usize) {
        match self {
            Self::Stored(values) => values.dim(),
            Self::Gathered(values, tokens) => (tokens.len(), values.ncols()),
            Self::Unrounded(values) => values.dim(),
        }
    }

    /// Rows × columns of the operand in the accumulator's type: in place where it has that type and
    /// its rows are less than `limit` bytes apart, else through `scratch`.
    fn block<'b>(
        &'b self,
        rows: Range<usize>,
        columns: Range<usize>,
        limit: usize,
        scratch: &'b mut Vec<A>,
    ) -> MatRef<'b, A> {
        match self {
            Self::Stored(values) => in_place(values, &rows, &columns, limit)
                .unwrap_or_else(|| widened(rows.map(|row| values.row(row)), &columns, scratch)),
            Self::Gathered(values, tokens) => {
                widened(tokens[rows].iter().map(|token| values.row(token.index())), &columns, scratch)
            }
            Self::Unrounded(values) => in_place(values, &rows, &columns, limit)
                .unwrap_or_else(|| widened(rows.map(|row| values.row(row)), &columns, scratch)),
        }
    }
}

/// A block of a contiguous tensor whose type is the accumulator's.
fn in_place<'b, S: Element, A: Real>(
    values: &ArrayView2<'b, S>,
    rows: &Range<usize>,
    columns: &Range<usize>,
    limit: usize,
) -> Option<MatRef<'b, A>> {
    let stride = values.ncols();
    let values = A::of_stored(values.to_slice()?)?;
    if stride * size_of::<A>() >= limit {
        return None;
    }
    let block = &values[rows.start * stride + columns.start..];
    Some(MatRef::from_row_major_slice_with_stride(block, rows.len(), columns.len(), stride))
}

/// The columns of each row, widened one row after the other.
fn widened<'b, S: Element, A: Real>(
    rows: impl ExactSizeIterator<Item = ArrayView1<'b, S>>,
    columns: &Range<usize>,
    scratch: &'b mut Vec<A>,
) -> MatRef<'b, A> {
    let (height, width) = (rows.len(), columns.len());
    let block = reserve(scratch, height * width);
    for (into, row) in block.chunks_exact_mut(width).zip(rows) {
        let row = row.slice_move(s![columns.clone()]);
        match row.to_slice() {
            Some(row) => A::widen_slice(row, into),
            None => into.iter_mut().zip(row).for_each(|(into, &value)| *into = A::widen(value)),
        }
    }
    MatRef::from_row_major_slice(block, height, width)
}

/// The first `length` values of a buffer that grows as needed; whatever was there stays there.
pub(super) fn reserve<A: Real>(buffer: &mut Vec<A>, length: usize) -> &mut [A] {
    if buffer.len() < length {
        buffer.resize(length, A::zero());
    }
    &mut buffer[..length]
}

/// Buffers of one task, reused by its next tile: two operand blocks and a tile.
#[derive(Debug)]
pub(super) struct Scratch<A> {
    left: Vec<A>,
    right: Vec<A>,
    tile: Vec<A>,
}

impl<A> Scratch<A> {
    pub(super) fn new() -> Self {
        Self { left: Vec::new(), right: Vec::new(), tile: Vec::new() }
    }
}

/// One tile of a product: `rows` × `columns` of the result. An empty contraction gives +0.
#[derive(Clone, Debug)]
pub(super) struct Tile<'o, 'l, 'r, L, R, A> {
    pub product: Product,
    pub left: &'o Operand<'l, L, A>,
    pub right: &'o Operand<'r, R, A>,
    pub rows: Range<usize>,
    pub columns: Range<usize>,
}

impl<L: Element, R: Element, A: Real> Tile<'_, '_, '_, L, R, A> {
    /// The sums, row after row.
    pub(super) fn sums<'s>(&self, scratch: &'s mut Scratch<A>) -> &'s mut [A] {
        let Scratch { left, right, tile } = scratch;
        let tile = reserve(tile, self.rows.len() * self.columns.len());
        self.multiply(tile, self.columns.len(), left, right);
        tile
    }

    /// Stores the sums in `into`, row i from `i·width + first` on. `finish` ends the sums of a row
    /// before they are stored, `read` sees them afterwards, as they were before rounding; both are
    /// told which row of the tile it is.
    ///
    /// Where `into` has the accumulator's type the sums are never anywhere else.
    pub(super) fn store<S: Element>(
        &self,
        scratch: &mut Scratch<A>,
        into: &mut [S],
        width: usize,
        first: usize,
        mut finish: impl FnMut(usize, &mut [A]),
        mut read: impl FnMut(usize, &[A]),
    ) {
        if self.rows.is_empty() || self.columns.is_empty() {
            return;
        }
        let columns = first..first + self.columns.len();
        if let Some(into) = A::of_stored_mut(into) {
            self.multiply(&mut into[first..], width, &mut scratch.left, &mut scratch.right);
            for (row, into) in into.chunks_mut(width).take(self.rows.len()).enumerate() {
                finish(row, &mut into[columns.clone()]);
                read(row, &into[columns.clone()]);
            }
            return;
        }
        let sums = self.sums(scratch).chunks_exact_mut(self.columns.len());
        for ((row, sums), into) in sums.enumerate().zip(into.chunks_mut(width)) {
            finish(row, sums);
            A::store_slice(sums, &mut into[columns.clone()]);
            read(row, sums);
        }
    }

    /// The sums, in `into`, row i from `i·stride` on.
    fn multiply(&self, into: &mut [A], stride: usize, left_scratch: &mut Vec<A>, right_scratch: &mut Vec<A>) {
        let Self { product, left, right, rows, columns } = self;
        let depth = match product {
            Product::Plain | Product::RightTransposed => left.dim().1,
            Product::LeftTransposed => left.dim().0,
        };
        if depth == 0 {
            into.chunks_mut(stride).take(rows.len()).for_each(|row| row[..columns.len()].fill(A::zero()));
        }
        for terms in blocks(depth, DEPTH) {
            let accumulate = if terms.start == 0 { Accum::Replace } else { Accum::Add };
            let left = match product {
                Product::Plain | Product::RightTransposed => {
                    left.block(rows.clone(), terms.clone(), usize::MAX, left_scratch)
                }
                Product::LeftTransposed => left.block(terms.clone(), rows.clone(), FAR, left_scratch).transpose(),
            };
            let right = match product {
                Product::Plain | Product::LeftTransposed => {
                    right.block(terms, columns.clone(), usize::MAX, right_scratch)
                }
                Product::RightTransposed => right.block(columns.clone(), terms, usize::MAX, right_scratch).transpose(),
            };
            // faer 0.24's constructor from rows with a stride takes them for columns.
            let into = MatMut::from_column_major_slice_with_stride_mut(into, columns.len(), rows.len(), stride);
            let into = into.transpose_mut();
            A::multiply(into, accumulate, left, right);
        }
    }
}

/// sums += bias, of which the sums begin at column `first`.
pub(super) fn add_bias<S: Element, A: Real>(sums: &mut [A], bias: Option<ArrayView1<'_, S>>, first: usize) {
    if let Some(bias) = bias {
        sums.iter_mut().zip(bias.iter().skip(first)).for_each(|(sum, &bias)| *sum += A::widen(bias));
    }
}

/// A whole product: `finish(row, first column, sums)` ends each piece of a row before it is stored.
pub(super) fn product<L: Element, R: Element, S: Element, A: Real>(
    product: Product,
    left: &Operand<'_, L, A>,
    right: &Operand<'_, R, A>,
    finish: impl Fn(usize, usize, &mut [A]) + Sync,
) -> Array2<S> {
    let height = match product {
        Product::Plain | Product::RightTransposed => left.dim().0,
        Product::LeftTransposed => left.dim().1,
    };
    let width = match product {
        Product::Plain | Product::LeftTransposed => right.dim().1,
        Product::RightTransposed => right.dim().0,
    };
    let mut result = zeros((height, width));
    let tasks: Vec<_> = blocks(height, ROWS).collect();
    let pieces = split(contiguous(&mut result), tasks.iter().map(|rows| rows.len() * width));
    tasks.into_par_iter().zip(pieces).with_max_len(1).for_each_init(Scratch::new, |scratch, (rows, into)| {
        for columns in blocks(width, COLUMNS) {
            let first = columns.start;
            let tile = Tile { product, left, right, rows: rows.clone(), columns };
            tile.store(scratch, into, width, first, |row, sums| finish(rows.start + row, first, sums), |_, _| ());
        }
    });
    result
}

/// `gradient[e]` = store(`left(e)`ᵀ `right(e)`) for every e: a product that contracts over the
/// rows of one expert. Without rows it is +0.
pub(super) fn contract_over_rows<'t, L: Element, R: Element, S: Element, A: Real>(
    gradient: &mut Array3<S>,
    left: impl Fn(usize) -> Operand<'t, L, A> + Sync,
    right: impl Fn(usize) -> Operand<'t, R, A> + Sync,
) {
    let (experts, height, width) = gradient.dim();
    let tasks: Vec<_> = (0..experts).flat_map(|expert| blocks(height, ROWS).map(move |rows| (expert, rows))).collect();
    let pieces = split(contiguous(gradient), tasks.iter().map(|(_, rows)| rows.len() * width));
    tasks.into_par_iter().zip(pieces).with_max_len(1).for_each_init(Scratch::new, |scratch, ((expert, rows), into)| {
        let (left, right) = (left(expert), right(expert));
        for columns in blocks(width, COLUMNS) {
            let first = columns.start;
            let tile =
                Tile { product: Product::LeftTransposed, left: &left, right: &right, rows: rows.clone(), columns };
            tile.store(scratch, into, width, first, |_, _| (), |_, _| ());
        }
    });
}
