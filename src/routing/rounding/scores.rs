//! Scores of the pairs that a rounded routing keeps, and the way back to the logits.
//!
//! With p = softmax(l) over all E, C the token's top-K choice (the dropped ones included), R the
//! experts that it ends with, g = ds, and ĝ holding g where it says and 0 elsewhere:
//!
//! | semantics | s | dlogits |
//! | --- | --- | --- |
//! | raw | p | p(ĝ − Σ ĝp) on all E, ĝ on R |
//! | renormalised over top-K | q = softmax of l over C on R ∩ C, p on R \ C | q(ĝ − Σ_C ĝq) on all of C, ĝ on R ∩ C; plus p(ĝ − Σ ĝp) on all E, ĝ on R \ C |
//! | renormalised over kept | softmax of l over R | s(g − Σ_R gs) on R, 0 elsewhere |
//!
//! The routing itself is held fixed: rounding has no derivative. A quotient p / Σp is computed as
//! the softmax over the experts of the sum: the same function, which does not divide 0 by 0 where p
//! underflows. A token that ends with no expert, or only with masked ones, has scores 0 and
//! gradients 0.

use std::fmt;
use std::str::FromStr;

use ndarray::{Array2, ArrayView2, Axis};
use rayon::prelude::*;

use crate::element::Real;
use crate::error::{Error, Result};
use crate::mutant::Mutant;
use crate::routing::scores::{add_softmax_gradient, forward as choice_scores, softmax, softmax_into};
use crate::routing::{Choice, Convention, Routing};
use crate::shape::{ExpertId, TokenId};

/// Which score a kept pair gets; a choice apart from the ranking.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KeptScores {
    /// p as it is (upstream since April 2026).
    #[default]
    Raw,
    /// p over the sum of the token's top-K for pairs of its choice, p for added ones (upstream in
    /// December 2025).
    RenormalizedOverTopK,
    /// p over the sum of the pairs that the token ends with.
    RenormalizedOverKept,
}

impl KeptScores {
    /// Every semantics.
    pub const ALL: [Self; 3] = [Self::Raw, Self::RenormalizedOverTopK, Self::RenormalizedOverKept];

    /// The name used on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::RenormalizedOverTopK => "renormalized_over_topk",
            Self::RenormalizedOverKept => "renormalized_over_kept",
        }
    }
}

impl fmt::Display for KeptScores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for KeptScores {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|semantics| semantics.name() == text)
            .ok_or_else(|| Error::unknown("scores of kept pairs", text, Self::ALL.map(Self::name)))
    }
}

/// The scores of `routing`'s pairs, in pair order, from `logits` (T, E) and the choice that was
/// rounded.
///
/// # Errors
/// Logits or a routing of another T or E than the choice, a logit that is NaN or +∞, or a token
/// whose chosen experts are all masked by −∞.
pub fn forward<A: Real>(
    logits: ArrayView2<A>,
    choice: &Choice,
    routing: &Routing,
    semantics: KeptScores,
) -> Result<Vec<A>> {
    mutated(logits, choice, routing, semantics, None)
}

/// [`forward`] with a planted bug.
///
/// # Errors
/// As [`forward`].
pub fn mutated<A: Real>(
    logits: ArrayView2<A>,
    choice: &Choice,
    routing: &Routing,
    semantics: KeptScores,
    mutant: Option<Mutant>,
) -> Result<Vec<A>> {
    let semantics = match mutant {
        Some(Mutant::RankingScores) => KeptScores::RenormalizedOverTopK,
        _ => semantics,
    };
    let over_top_k = check(logits, choice, routing)?;
    let p = softmax(logits)?;
    let mut scores = vec![A::zero(); routing.routed()];
    let mut over_kept = Vec::new();
    for token in 0..choice.tokens() {
        let pairs = kept(routing, token);
        if semantics == KeptScores::RenormalizedOverKept {
            over_kept.resize(pairs.clone().count(), A::zero());
            softmax_into(pairs.clone().map(|(_, expert)| logits[(token, expert.index())]), &mut over_kept);
        }
        for (place, (pair, expert)) in pairs.enumerate() {
            let raw = p[(token, expert.index())];
            scores[pair] = match semantics {
                KeptScores::Raw => raw,
                KeptScores::RenormalizedOverTopK => match rank(choice, token, expert) {
                    Some(rank) => over_top_k[token * choice.k() + rank],
                    None => raw,
                },
                KeptScores::RenormalizedOverKept => over_kept[place],
            };
        }
    }
    Ok(scores)
}

/// The gradient of the logits (T, E) from `ds` by pair, at this routing.
///
/// # Errors
/// What [`forward`] refuses, and a ds that is not one per pair.
pub fn backward<A: Real>(
    logits: ArrayView2<A>,
    choice: &Choice,
    routing: &Routing,
    semantics: KeptScores,
    ds: &[A],
) -> Result<Array2<A>> {
    let over_top_k = check(logits, choice, routing)?;
    if ds.len() != routing.routed() {
        return Err(Error::shape("ds", &[routing.routed()], &[ds.len()], "one value per pair of the routing"));
    }
    let p = softmax(logits)?;
    let ids = choice.ids();
    let k = choice.k();
    let mut dlogits = Array2::zeros(logits.raw_dim());
    let rows = dlogits.axis_iter_mut(Axis(0)).into_par_iter().zip(p.axis_iter(Axis(0))).enumerate();
    rows.for_each(|(token, (mut dlogits, p))| {
        let pairs = kept(routing, token);
        let mut g_hat = vec![A::zero(); choice.experts()];
        match semantics {
            KeptScores::Raw => {
                pairs.for_each(|(pair, expert)| g_hat[expert.index()] = ds[pair]);
                add_softmax_gradient(p.iter().copied(), &g_hat, &mut dlogits);
            }
            KeptScores::RenormalizedOverTopK => {
                let mut g_chosen = vec![A::zero(); k];
                for (pair, expert) in pairs {
                    match rank(choice, token, expert) {
                        Some(rank) => g_chosen[rank] = ds[pair],
                        None => g_hat[expert.index()] = ds[pair],
                    }
                }
                add_softmax_gradient(p.iter().copied(), &g_hat, &mut dlogits);
                let q = &over_top_k[token * k..(token + 1) * k];
                let sum: A = q.iter().zip(&g_chosen).map(|(&q, &g)| g * q).sum();
                for ((&q, g), expert) in q.iter().zip(g_chosen).zip(ids.row(token)) {
                    dlogits[expert.index()] += q * (g - sum);
                }
            }
            KeptScores::RenormalizedOverKept => {
                let mut s = vec![A::zero(); pairs.clone().count()];
                softmax_into(pairs.clone().map(|(_, expert)| logits[(token, expert.index())]), &mut s);
                let sum: A = pairs.clone().zip(&s).map(|((pair, _), &s)| ds[pair] * s).sum();
                for ((pair, expert), s) in pairs.zip(s) {
                    dlogits[expert.index()] = s * (ds[pair] - sum);
                }
            }
        }
    });
    Ok(dlogits)
}

/// Softmax over each token's top-K, by t·K + rank; its errors are those of unusable logits.
fn check<A: Real>(logits: ArrayView2<A>, choice: &Choice, routing: &Routing) -> Result<Vec<A>> {
    let expected = [choice.tokens(), choice.experts()];
    let found = [routing.tokens(), routing.experts()];
    if expected != found {
        return Err(Error::shape("routing", &expected, &found, "T and E of the choice"));
    }
    choice_scores(logits, choice, Convention::SoftmaxOverTopK)
}

/// A token's pairs and their experts, in pair order.
fn kept(routing: &Routing, token: usize) -> impl Iterator<Item = (usize, ExpertId)> + Clone {
    routing.rows_of_token(TokenId(token as u32)).iter().map(|&row| {
        let pair = routing.row_pair()[row as usize] as usize;
        (pair, routing.pair_expert()[pair])
    })
}

/// The rank at which the token chose the expert, if it did.
fn rank(choice: &Choice, token: usize, expert: ExpertId) -> Option<usize> {
    choice.ids().row(token).iter().position(|&chosen| chosen == expert)
}
