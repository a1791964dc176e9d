//! Kernel 1, up forward (A): x[token], w1 → h, a.

use ndarray::{ArrayView2, ArrayView3, Axis};
use rayon::prelude::*;

use super::activate::activate;
use super::blocks::{COLUMNS, blocks, row_blocks};
use super::fault::Fault;
use super::intermediate::Intermediate;
use super::matmul::{Operand, Product, Scratch, Tile, add_bias, reserve};
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
    fault: Fault,
) -> (Intermediate<S, A>, Intermediate<S, A>) {
    let rows = routing.routed();
    let width = w1.len_of(Axis(1));
    let per_unit = activation.h_width(1);
    let mut h = Intermediate::zeros(rows, width, roundings.rounds(RoundingPoint::H));
    let mut a = Intermediate::zeros(rows, width / per_unit, roundings.rounds(RoundingPoint::A));
    let tasks = row_blocks(routing);
    let writers = h.writers(&tasks).into_iter().zip(a.writers(&tasks)).collect::<Vec<_>>();
    tasks.into_par_iter().zip(writers).with_max_len(1).for_each_init(
        || (Scratch::new(), Vec::new(), Vec::new()),
        |(scratch, activated, rounded), (block, (mut h, mut a))| {
            let left = Operand::Gathered(x, &routing.row_token()[block.rows.clone()]);
            let right = Operand::<S, A>::Stored(w1.index_axis(Axis(0), block.expert));
            let bias = b1.as_ref().map(|b1| b1.row(block.expert));
            for columns in blocks(width, COLUMNS) {
                let first = columns.start;
                let activated = reserve(activated, columns.len() / per_unit);
                let tile = Tile {
                    product: Product::RightTransposed,
                    left: &left,
                    right: &right,
                    rows: 0..block.rows.len(),
                    columns,
                };
                let bias = |_, sums: &mut [A]| add_bias(sums, bias, first);
                h.store(&tile, first, scratch, bias, |row, sums| {
                    let sums = if roundings.rounds(RoundingPoint::PreActivation) {
                        let rounded = reserve(rounded, sums.len());
                        rounded.copy_from_slice(sums);
                        roundings.apply::<S, A>(RoundingPoint::PreActivation, rounded);
                        rounded
                    } else {
                        sums
                    };
                    activate(activation, sums, activated);
                    fault.clamped(activation, sums, activated, None);
                    a.write(row, first / per_unit, activated);
                });
            }
        },
    );
    (h, a)
}
