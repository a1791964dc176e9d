//! Kernel 8, combine (dX): dx_expanded → dx, as kernel 3 without scores.

use rayon::prelude::*;

use super::blocks::{TOKENS, token_blocks};
use super::intermediate::Intermediate;
use super::roundings::{RoundingPoint, Roundings};
use crate::element::{Element, Real};
use crate::routing::Routing;
use crate::shape::TokenId;

/// dx_t = store(Σ dx̃ over the token's rows, in pair order); +0 for a token without pairs.
pub(super) fn combine_input_gradient<S: Element, A: Real>(
    dx_expanded: &Intermediate<S, A>,
    routing: &Routing,
    roundings: Roundings,
) -> Intermediate<S, A> {
    let d = dx_expanded.columns();
    let mut dx = Intermediate::zeros(routing.tokens(), d, roundings.rounds(RoundingPoint::ExpertDx));
    let tasks = token_blocks(routing.tokens(), TOKENS);
    let writers = dx.writers_of(tasks.iter().map(|tokens| tokens.len()));
    tasks.into_par_iter().zip(writers).for_each_init(
        || (vec![A::zero(); d], vec![A::zero(); d]),
        |(sums, term), (tokens, mut into)| {
            for (at, token) in tokens.enumerate() {
                sums.fill(A::zero());
                for &row in routing.rows_of_token(TokenId(token as u32)) {
                    dx_expanded.read(row as usize, 0, term);
                    sums.iter_mut().zip(&*term).for_each(|(sum, &term)| *sum += term);
                }
                into.write(at, 0, sums);
            }
        },
    );
    dx
}
