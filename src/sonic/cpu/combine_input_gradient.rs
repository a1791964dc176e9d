//! Kernel 8, combine (dX): dx_expanded → dx, as kernel 3 without scores.

use std::ops::Range;

use rayon::prelude::*;

use super::blocks::{TOKENS, token_blocks};
use super::combine_output::add;
use super::intermediate::Intermediate;
use crate::element::{Element, Real};
use crate::routing::Routing;
use crate::shape::TokenId;

/// dx_t = store(Σ dx̃ over the token's rows, in pair order); +0 for a token without pairs.
/// `dx_expanded` has the `columns` of dx.
pub(super) fn combine_input_gradient<S: Element, A: Real>(
    dx_expanded: &Intermediate<S, A>,
    routing: &Routing,
    columns: Range<usize>,
    dx: &mut Intermediate<S, A>,
) {
    let width = columns.len();
    let tasks = token_blocks(routing.tokens(), TOKENS);
    let writers = dx.writers_of(tasks.iter().map(|tokens| tokens.len()));
    tasks.into_par_iter().zip(writers).for_each_init(
        || (vec![A::zero(); width], Vec::new()),
        |(sums, buffer), (tokens, mut into)| {
            for (at, token) in tokens.enumerate() {
                sums.fill(A::zero());
                for &row in routing.rows_of_token(TokenId(token as u32)) {
                    add(sums, dx_expanded.read(row as usize, 0..width, buffer));
                }
                into.write(at, columns.start, sums);
            }
        },
    );
}
