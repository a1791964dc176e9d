//! Kernel 4, down backward, activation (dH): dout[token], w2, h, scores → dh, a′, ds.

use ndarray::{ArrayView1, ArrayView2, ArrayView3, Axis};
use rayon::prelude::*;

use super::activate::{activate_with_partials, differentiate};
use super::blocks::{COLUMNS, blocks, row_blocks, split};
use super::fault::Fault;
use super::intermediate::Intermediate;
use super::matmul::{Operand, Product, Scratch, Tile, reserve};
use super::roundings::{RoundingPoint, Roundings};
use crate::activation::Activation;
use crate::element::{Element, Real};
use crate::routing::Routing;

/// What kernel 4 writes, all by row.
pub(super) struct DownBackward<S: Element, A> {
    /// dh (R, 2n).
    pub dh: Intermediate<S, A>,
    /// a′ (R, n).
    pub a_prime: Intermediate<S, A>,
    /// ds (R).
    pub ds: Vec<S::Score>,
}

/// With G = dout_e W2_e and A = act(h), neither of them ever stored:
///
/// | | |
/// | --- | --- |
/// | ds | store(⟨G, A⟩ + ⟨dout, b2⟩): what ⟨dout, y⟩ is, without y |
/// | a′ | store(s·A) |
/// | dh | store(∂act/∂h · s·G) |
///
/// `scores` are by row.
#[allow(clippy::too_many_arguments)] // what the method's table lists for this kernel
pub(super) fn down_backward_activation<S: Element, A: Real>(
    dout: ArrayView2<'_, S>,
    w2: ArrayView3<'_, S>,
    b2: Option<ArrayView2<'_, S>>,
    h: &Intermediate<S, A>,
    scores: &[A],
    activation: Activation,
    routing: &Routing,
    roundings: Roundings,
    fault: Fault,
) -> DownBackward<S, A> {
    let rows = routing.routed();
    let n = w2.len_of(Axis(2));
    let per_unit = activation.h_width(1);
    let mut dh = Intermediate::zeros(rows, n * per_unit, roundings.rounds(RoundingPoint::Dh));
    let mut a_prime = Intermediate::zeros(rows, n, roundings.rounds(RoundingPoint::APrime));
    let mut ds = vec![S::Score::default(); rows];
    let tasks = row_blocks(routing);
    let writers: Vec<_> = dh
        .writers(&tasks)
        .into_iter()
        .zip(a_prime.writers(&tasks))
        .zip(split(&mut ds, tasks.iter().map(|block| block.rows.len())))
        .collect();
    tasks.into_par_iter().zip(writers).with_max_len(1).for_each_init(
        || (Scratch::new(), Vec::new(), Vec::new(), Vec::new()),
        |(scratch, buffer, a, partials), (block, ((mut dh, mut a_prime), ds))| {
            let tokens = &routing.row_token()[block.rows.clone()];
            let left = Operand::Gathered(dout, tokens);
            let right = Operand::<S, A>::Stored(w2.index_axis(Axis(0), block.expert));
            let mut sums = vec![A::zero(); tokens.len()];
            for units in blocks(n, COLUMNS) {
                let first = units.start * per_unit;
                let h_units = first..first + units.len() * per_unit;
                let partials = reserve(partials, units.len() * per_unit);
                let a = reserve(a, units.len());
                let rows = 0..tokens.len();
                let tile = Tile { product: Product::Plain, left: &left, right: &right, rows, columns: units.clone() };
                let g = tile.sums(scratch);
                for (row, g) in g.chunks_exact_mut(units.len()).enumerate() {
                    let [score_of_da, score_of_a_prime] = fault.scores_of_backward(scores[block.rows.start + row]);
                    let h_row = h.read(block.rows.start + row, h_units.clone(), buffer);
                    activate_with_partials(activation, h_row, a, partials);
                    fault.partials(h_row, partials);
                    fault.clamped(activation, h_row, a, Some(&mut *partials));
                    roundings.apply::<S, A>(RoundingPoint::RecomputedA, a);
                    roundings.apply::<S, A>(RoundingPoint::G, g);
                    sums[row] = g.iter().zip(&*a).fold(sums[row], |sum, (&g, &a)| sum + g * a);

                    a.iter_mut().for_each(|a| *a = score_of_a_prime * *a);
                    a_prime.write(row, units.start, a);

                    let da = g;
                    da.iter_mut().for_each(|g| *g = score_of_da * *g);
                    roundings.apply::<S, A>(RoundingPoint::DA, da);
                    differentiate(activation, da, partials);
                    dh.write(row, first, partials);
                }
            }
            for ((ds, mut sum), token) in ds.iter_mut().zip(sums).zip(tokens) {
                if let Some(b2) = &b2 {
                    sum += dot(dout.row(token.index()), b2.row(block.expert));
                }
                roundings.apply::<S, A>(RoundingPoint::Ds, std::slice::from_mut(&mut sum));
                *ds = sum.store();
            }
        },
    );
    DownBackward { dh, a_prime, ds }
}

/// ⟨u, v⟩ in the accumulator, term after term.
fn dot<S: Element, A: Real>(u: ArrayView1<'_, S>, v: ArrayView1<'_, S>) -> A {
    u.iter().zip(v).fold(A::zero(), |sum, (&u, &v)| sum + A::widen(u) * A::widen(v))
}
