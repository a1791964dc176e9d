//! Kernel 6, up backward, activation (dX̃): dh, w1 → dx_expanded.

use ndarray::{ArrayView3, Axis};
use rayon::prelude::*;

use super::blocks::{COLUMNS, blocks, row_blocks};
use super::intermediate::Intermediate;
use super::matmul::{Operand, Product, Scratch, tile};
use super::roundings::{RoundingPoint, Roundings};
use crate::element::{Element, Real};
use crate::routing::Routing;

/// dx̃ = store(dh W1_e), a row per routed pair.
pub(super) fn up_backward_activation<S: Element, A: Real>(
    dh: &Intermediate<S, A>,
    w1: ArrayView3<'_, S>,
    routing: &Routing,
    roundings: Roundings,
) -> Intermediate<S, A> {
    let d = w1.len_of(Axis(2));
    let mut dx_expanded = Intermediate::zeros(routing.routed(), d, roundings.rounds(RoundingPoint::DxExpanded));
    let tasks = row_blocks(routing);
    let writers = dx_expanded.writers(&tasks);
    tasks.into_par_iter().zip(writers).with_max_len(1).for_each_init(Scratch::new, |scratch, (block, mut into)| {
        let left = dh.operand(block.rows.clone());
        let right = Operand::<S, A>::Stored(w1.index_axis(Axis(0), block.expert));
        for columns in blocks(d, COLUMNS) {
            let sums = tile(Product::Plain, &left, &right, 0..block.rows.len(), columns.clone(), scratch);
            for (row, sums) in sums.chunks_exact(columns.len()).enumerate() {
                into.write(row, columns.start, sums);
            }
        }
    });
    dx_expanded
}
