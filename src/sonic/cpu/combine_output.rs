//! Kernel 3, combine (O): y, scores → o.

use std::ops::Range;

use ndarray::Array2;
use pulp::Arch;
use rayon::prelude::*;

use super::blocks::{TOKENS, split, token_blocks};
use super::intermediate::{Intermediate, contiguous};
use super::roundings::{RoundingPoint, Roundings};
use crate::element::{Element, Real};
use crate::routing::Routing;
use crate::shape::TokenId;

/// o_t = store(Σ s·y over the token's rows, in pair order); +0 for a token without pairs. `y` has
/// the `columns` of o; `scores` are by row.
pub(super) fn combine_output<S: Element, A: Real>(
    y: &Intermediate<S, A>,
    scores: &[A],
    routing: &Routing,
    roundings: Roundings,
    columns: Range<usize>,
    o: &mut Array2<S>,
) {
    let (d, width) = (o.ncols(), columns.len());
    let tasks = token_blocks(routing.tokens(), TOKENS);
    let pieces = split(contiguous(o), tasks.iter().map(|tokens| tokens.len() * d));
    tasks.into_par_iter().zip(pieces).for_each_init(
        || (vec![A::zero(); width], vec![A::zero(); width], Vec::new()),
        |(sums, term, buffer), (tokens, into)| {
            for (token, into) in tokens.zip(into.chunks_exact_mut(d)) {
                sums.fill(A::zero());
                for &row in routing.rows_of_token(TokenId(token as u32)) {
                    let score = scores[row as usize];
                    let y = y.read(row as usize, 0..width, buffer);
                    if roundings.rounds(RoundingPoint::ScoredY) {
                        term.iter_mut().zip(y).for_each(|(term, &y)| *term = score * y);
                        roundings.apply::<S, A>(RoundingPoint::ScoredY, term);
                        add(sums, term);
                    } else {
                        Arch::new().dispatch(|| sums.iter_mut().zip(y).for_each(|(sum, &y)| *sum += score * y));
                    }
                    roundings.apply::<S, A>(RoundingPoint::PartialO, sums);
                }
                A::store_slice(sums, &mut into[columns.clone()]);
            }
        },
    );
}

/// sums += terms.
pub(super) fn add<A: Real>(sums: &mut [A], terms: &[A]) {
    Arch::new().dispatch(|| sums.iter_mut().zip(terms).for_each(|(sum, &term)| *sum += term));
}
