//! Kernel 6, up backward, activation (dX̃): dh, w1 → dx_expanded.

use ndarray::{ArrayView3, Axis};
use rayon::prelude::*;

use super::blocks::{Slab, row_blocks};
use super::intermediate::Intermediate;
use super::matmul::{Operand, Product, Scratch, Tile};
use crate::element::{Element, Real};
use crate::routing::Routing;

/// dx̃ = store(dh W1_e), a row per routed pair, of which `dx_expanded` gets the columns of `slab`.
pub(super) fn up_backward_activation<S: Element, A: Real>(
    dh: &Intermediate<S, A>,
    w1: ArrayView3<'_, S>,
    routing: &Routing,
    slab: &Slab,
    dx_expanded: &mut Intermediate<S, A>,
) {
    let tasks = row_blocks(routing);
    let writers = dx_expanded.writers(&tasks);
    tasks.into_par_iter().zip(writers).with_max_len(1).for_each_init(Scratch::new, |scratch, (block, mut into)| {
        let left = dh.operand(block.rows.clone());
        let right = Operand::<S, A>::Stored(w1.index_axis(Axis(0), block.expert));
        for columns in &slab.tiles {
            let (rows, first) = (0..block.rows.len(), columns.start);
            let tile = Tile { product: Product::Plain, left: &left, right: &right, rows, columns: columns.clone() };
            into.store(&tile, first - slab.columns.start, scratch, |_, _| (), |_, _| ());
        }
    });
}
