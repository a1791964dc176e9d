//! Kernel 1, up forward (A): x[token], w1 → h, a.

use ndarray::{ArrayView2, ArrayView3, Axis};
use rayon::prelude::*;

use super::activate::activate;
use super::blocks::{COLUMNS, blocks, row_blocks};
use super::intermediate::Intermediate;
use super::matmul::{Operand, Product, Scratch, add_bias, reserve, tile};
use super::roundings::{RoundingPoint, Roundings};
use crate::activation::Activation;
use crate::element::{Element, Real};
use crate::routing::Routing;

/// h = store(x_e W1_eᵀ + b1_e) and a = store(act(x_e W1_eᵀ + b1_e)): the activation reads the sums
/// themselves, not their rounded copy. Gathers x on the fly.
pub(super) fn up_forward<S: Element, A: Real>(
    x: ArrayView2<'_, S>,
    w1: ArrayView3<'_, S>,
    b1: Option<ArrayView2<'_, S>>,
    activation: Activation,
    routing: &Routing,
    roundings: Roundings,
) -> (Intermediate<S, A>, Intermediate<S, A>) {
    let rows = routing.routed();
    let width = w1.len_of(Axis(1));
    let per_unit = activation.h_width(1);
    let mut h = Intermediate::zeros(rows, width, roundings.rounds(RoundingPoint::H));
    let mut a = Intermediate::zeros(rows, width / per_unit, roundings.rounds(RoundingPoint::A));
    let tasks = row_blocks(routing);
    let writers = h.writers(&tasks).into_iter().zip(a.writers(&tasks)).collect::<Vec<_>>();
    tasks.into_par_iter().zip(writers).with_max_len(1).for_each_init(
        || (Scratch::new(), Vec::new()),
        |(scratch, activated), (block, (mut h, mut a))| {
            let left = Operand::Gathered(x, &routing.row_token()[block.rows.clone()]);
            let right = Operand::<S, A>::Stored(w1.index_axis(Axis(0), block.expert));
            let bias = b1.as_ref().map(|b1| b1.row(block.expert));
            for columns in blocks(width, COLUMNS) {
                let rows = 0..block.rows.len();
                let sums = tile(Product::RightTransposed, &left, &right, rows, columns.clone(), scratch);
                let activated = reserve(activated, columns.len() / per_unit);
                for (row, sums) in sums.chunks_exact_mut(columns.len()).enumerate() {
                    add_bias(sums, bias, columns.start);
                    h.write(row, columns.start, sums);
                    roundings.apply::<S, A>(RoundingPoint::PreActivation, sums);
                    activate(activation, sums, activated);
                    a.write(row, columns.start / per_unit, activated);
                }
            }
        },
    );
    (h, a)
}
