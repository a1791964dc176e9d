//! The mutants of the choice and of token rounding, on logits made to tie.

use std::collections::BTreeSet;

use ndarray::Array2;

use super::groups_of;
use super::oracle::Oracle;
use crate::case::Case;
use crate::element::DType;
use crate::error::Result;
use crate::mutant::Mutant;
use crate::routing::rounding::certificate::certify;
use crate::routing::rounding::scores::{KeptScores, mutated as kept_scores};
use crate::routing::rounding::{Ranking, Rounded, TokenRounding, ranking_scores};
use crate::routing::scores::softmax;
use crate::routing::{
    certificate::{certify_choice, certify_grouped_choice},
    grouped, top_k,
};
use crate::shape::Shape;

/// M of the token rounding.
const TILE: usize = 8;

/// Logits in steps of a quarter, so that most tokens have two that are equal.
fn logits(shape: Shape, seed: u64) -> Result<Array2<f32>> {
    let Shape { t, e, .. } = shape;
    let case = Case::new(Shape { d: e, ..shape }).with_seed(seed);
    let drawn = case.problem::<f32>()?;
    Ok(Array2::from_shape_fn((t, e), |at| (4.0 * drawn.x()[at]).round() / 4.0))
}

/// The oracles that reject a routing with this mutant.
pub(super) fn rejections(shape: Shape, seed: u64, mutant: Option<Mutant>) -> Result<BTreeSet<Oracle>> {
    let logits = logits(shape, seed)?;
    let choice = top_k::mutated(logits.view(), shape.k, mutant)?;
    let mut rejections = BTreeSet::new();
    let certified = certify_choice(logits.view(), shape.k, choice.ids());
    let right = top_k::mutated(logits.view(), shape.k, None)?;

    // Of the same sign the two best of a group tie only where both do. In f64 equal logits are all that ties.
    let (grouped_shape, groups) = groups_of(shape);
    let ties = self::logits(grouped_shape, seed)?.mapv(|logit| f64::from(logit.abs()));
    let chosen = grouped::mutated(ties.view(), None, shape.k, &groups, mutant)?;
    if certify_grouped_choice(ties.view(), None, &groups, 0.0, shape.k, chosen.ids()).is_err() {
        rejections.insert(Oracle::Certificate);
    }

    let p = softmax(logits.view())?;
    let rounding = TokenRounding::new(TILE);
    let rounded = rounding.mutated(p.view(), &right, mutant)?;
    let Rounded { routing, capped, .. } = &rounded;
    let ranking = ranking_scores(p.view(), &right, Ranking::default())?;
    let rounded = certify(ranking.view(), right.ids(), TILE, rounding.rule, &rounded.pairs(), capped);
    if certified.is_err() || rounded.is_err() {
        rejections.insert(Oracle::Certificate);
    }

    let scores = kept_scores(logits.view(), &right, routing, KeptScores::Raw, mutant)?;
    let truth = softmax(logits.mapv(f64::from).view())?;
    for ((&score, token), expert) in scores.iter().zip(routing.pair_token()).zip(routing.pair_expert()) {
        let row = logits.row(token.index());
        let spread =
            f64::from(row.fold(f32::NEG_INFINITY, |a, &b| a.max(b)) - row.fold(f32::INFINITY, |a, &b| a.min(b)));
        // e^x takes the rounding of x, up to `spread`, and its own two; then E − 1 sums and a quotient.
        let roundings = spread + shape.e as f64 + 2.0;
        let p = truth[(token.index(), expert.index())];
        if (f64::from(score) - p).abs() > 2.0 * roundings * DType::F32.unit_roundoff() * p {
            rejections.insert(Oracle::Bound);
        }
    }
    Ok(rejections)
}
