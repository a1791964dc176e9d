//! Kernel 2, down forward (Y): a, w2 → y.

use ndarray::{ArrayView2, ArrayView3, Axis};
use rayon::prelude::*;

use super::blocks::{Slab, row_blocks};
use super::intermediate::Intermediate;
use super::matmul::{Operand, Product, Scratch, Tile, add_bias};
use crate::element::{Element, Real};
use crate::routing::Routing;

/// y = store(a W2_eᵀ + b2_e), of which `y` gets the columns of `slab`.
pub(super) fn down_forward<S: Element, A: Real>(
    a: &Intermediate<S, A>,
    w2: ArrayView3<'_, S>,
    b2: Option<ArrayView2<'_, S>>,
    routing: &Routing,
    slab: &Slab,
    y: &mut Intermediate<S, A>,
) {
    let tasks = row_blocks(routing);
    let writers = y.writers(&tasks);
    tasks.into_par_iter().zip(writers).with_max_len(1).for_each_init(Scratch::new, |scratch, (block, mut y)| {
        let left = a.operand(block.rows.clone());
        let right = Operand::<S, A>::Stored(w2.index_axis(Axis(0), block.expert));
        let bias = b2.as_ref().map(|b2| b2.row(block.expert));
        for columns in &slab.tiles {
            let (rows, first) = (0..block.rows.len(), columns.start);
            let product = Product::RightTransposed;
            let tile = Tile { product, left: &left, right: &right, rows, columns: columns.clone() };
            y.store(&tile, first - slab.columns.start, scratch, |_, sums| add_bias(sums, bias, first), |_, _| ());
        }
    });
}
