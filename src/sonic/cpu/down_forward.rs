//! Kernel 2, down forward (Y): a, w2 → y.

use ndarray::{ArrayView2, ArrayView3, Axis};
use rayon::prelude::*;

use super::blocks::{COLUMNS, blocks, row_blocks};
use super::intermediate::Intermediate;
use super::matmul::{Operand, Product, Scratch, add_bias, tile};
use super::roundings::{RoundingPoint, Roundings};
use crate::element::{Element, Real};
use crate::routing::Routing;

/// y = store(a W2_eᵀ + b2_e).
pub(super) fn down_forward<S: Element, A: Real>(
    a: &Intermediate<S, A>,
    w2: ArrayView3<'_, S>,
    b2: Option<ArrayView2<'_, S>>,
    routing: &Routing,
    roundings: Roundings,
) -> Intermediate<S, A> {
    let width = w2.len_of(Axis(1));
    let mut y = Intermediate::zeros(routing.routed(), width, roundings.rounds(RoundingPoint::Y));
    let tasks = row_blocks(routing);
    let writers = y.writers(&tasks);
    tasks.into_par_iter().zip(writers).with_max_len(1).for_each_init(Scratch::new, |scratch, (block, mut y)| {
        let left = a.operand(block.rows.clone());
        let right = Operand::<S, A>::Stored(w2.index_axis(Axis(0), block.expert));
        let bias = b2.as_ref().map(|b2| b2.row(block.expert));
        for columns in blocks(width, COLUMNS) {
            let rows = 0..block.rows.len();
            let sums = tile(Product::RightTransposed, &left, &right, rows, columns.clone(), scratch);
            for (row, sums) in sums.chunks_exact_mut(columns.len()).enumerate() {
                add_bias(sums, bias, columns.start);
                y.write(row, columns.start, sums);
            }
        }
    });
    y
}
