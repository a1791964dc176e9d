//! Kernel 3, combine (O): y, scores → o.

use ndarray::Array2;
use rayon::prelude::*;

use super::blocks::{TOKENS, split, token_blocks};
use super::intermediate::{Intermediate, contiguous};
use super::roundings::{RoundingPoint, Roundings};
use crate::element::{Element, Real};
use crate::routing::Routing;
use crate::shape::TokenId;

/// o_t = store(Σ s·y over the token's rows, in pair order); +0 for a token without pairs.
/// `scores` are by row.
pub(super) fn combine_output<S: Element, A: Real>(
    y: &Intermediate<S, A>,
    scores: &[A],
    routing: &Routing,
    roundings: Roundings,
) -> Array2<S> {
    let d = y.columns();
    let mut o = Array2::from_elem((routing.tokens(), d), S::default());
    let tasks = token_blocks(routing.tokens(), TOKENS);
    let pieces = split(contiguous(&mut o), tasks.iter().map(|tokens| tokens.len() * d));
    tasks.into_par_iter().zip(pieces).for_each_init(
        || (vec![A::zero(); d], vec![A::zero(); d]),
        |(sums, term), (tokens, into)| {
            for (token, into) in tokens.zip(into.chunks_exact_mut(d)) {
                sums.fill(A::zero());
                for &row in routing.rows_of_token(TokenId(token as u32)) {
                    y.read(row as usize, 0, term);
                    let score = scores[row as usize];
                    term.iter_mut().for_each(|y| *y = score * *y);
                    roundings.apply::<S, A>(RoundingPoint::ScoredY, term);
                    sums.iter_mut().zip(&*term).for_each(|(sum, &term)| *sum += term);
                }
                A::store_slice(sums, into);
            }
        },
    );
    o
}
