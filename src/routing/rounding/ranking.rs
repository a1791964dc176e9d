//! In which order an expert keeps tokens.

use std::cmp::Ordering;

use ndarray::{Array2, ArrayView1, ArrayView2, Axis};
use rayon::prelude::*;

use super::Multiples;
use super::exact_sum::ExactSum;
use crate::element::{Element, Real};
use crate::error::{Error, Result};
use crate::routing::{Choice, softmax};
use crate::shape::TokenId;

/// What tokens that chose an expert rank by. Those that did not always rank by p, behind them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Ranking {
    /// p over the sum of p of the token's own K experts, as upstream.
    #[default]
    Renormalized,
    /// p.
    Probability,
}

/// (T, E) what each token ranks by at each expert: `p`, or where it chose the expert and `ranking`
/// says so, p / Σ_topK p, the sum taken by rank, in the order of a warp.
///
/// Whether it chose the expert is not in the number: keys (chose it, score, −token) are compared
/// part by part.
///
/// # Errors
/// A p of another shape than (T, E) of the choice, or an entry that is not finite and ≥ 0.
pub fn ranking_scores<A: Real>(p: ArrayView2<A>, choice: &Choice, ranking: Ranking) -> Result<Array2<A>> {
    let expected = [choice.tokens(), choice.experts()];
    if p.shape() != expected {
        return Err(Error::shape("p", &expected, p.shape(), "T and E of the choice"));
    }
    if let Some(((token, expert), p)) = p.indexed_iter().find(|(_, p)| !(p.is_finite() && **p >= A::zero())) {
        return Err(Error::ranking_score(token, expert, Element::to_f64(*p)));
    }
    let mut scores = p.to_owned();
    if ranking == Ranking::Renormalized {
        let ids = choice.ids();
        scores.axis_iter_mut(Axis(0)).into_par_iter().zip(ids.axis_iter(Axis(0))).for_each(|(mut scores, chosen)| {
            let sum = softmax::sum(chosen.iter().map(|expert| scores[expert.index()]));
            // A sum of 0 has no quotients; its terms are 0 as they stand.
            if sum > A::zero() {
                for expert in chosen {
                    scores[expert.index()] = scores[expert.index()] / sum;
                }
            }
        });
    }
    Ok(scores)
}

/// What one expert has to choose from.
pub(super) struct Candidates {
    pub multiples: Multiples,
    /// The first min(hi, T) tokens of the ranking.
    pub ranked: Vec<TokenId>,
    /// Sums of the first lo, f and min(hi, T) scores, exact and rounded once to f64: no order of
    /// summation shows, and a device may have another.
    pub sums: [f64; 3],
}

/// `scores` is the expert's column of the ranking scores.
pub(super) fn candidates<A: Real>(scores: ArrayView1<A>, choosers: &[TokenId], tile: usize) -> Candidates {
    let by_score = |a: &TokenId, b: &TokenId| {
        let [score_a, score_b] = [a, b].map(|token| scores[token.index()]);
        // No NaN gets here.
        score_b.partial_cmp(&score_a).unwrap_or(Ordering::Equal).then(a.cmp(b))
    };
    let multiples = Multiples::around(choosers.len(), tile);
    let mut ranked = choosers.to_vec();
    ranked.sort_unstable_by(by_score);

    let missing = multiples.upper.min(scores.len()) - choosers.len();
    if missing > 0 {
        let mut chose = vec![false; scores.len()];
        choosers.iter().for_each(|token| chose[token.index()] = true);
        let mut others: Vec<_> =
            (0..).map(TokenId).zip(&chose).filter(|(_, chose)| !**chose).map(|(id, _)| id).collect();
        if missing < others.len() {
            others.select_nth_unstable_by(missing - 1, by_score);
            others.truncate(missing);
        }
        others.sort_unstable_by(by_score);
        ranked.append(&mut others);
    }

    let mut sum = ExactSum::default();
    let mut sums = [0.0; 3];
    let mut added = 0;
    for (end, total) in [multiples.lower, multiples.frequency, ranked.len()].into_iter().zip(&mut sums) {
        ranked[added..end].iter().for_each(|token| sum.add(scores[token.index()].to_f64()));
        added = end;
        *total = sum.rounded();
    }
    Candidates { multiples, ranked, sums }
}
