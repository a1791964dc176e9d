//! The router: logits, the choice of experts, and scores as expressions over tape primitives.
//!
//! Scores are computed pair by pair with sums over each token's pairs, so any routing is served,
//! not only K pairs per token.

use ndarray::{Array2, ArrayView2, Axis};

use super::primitives::sigmoid;
use super::tape::{Indices, Tape, Var};
use crate::element::{Element, Real};
use crate::error::{Error, Result};
use crate::problem::Router;
use crate::routing::{Convention, GroupedSigmoid, Routing};
use crate::shape::{ExpertId, TokenId};

/// The K experts of each token: larger logit first, then the smaller id; −0 equals +0. Pair t·K + j
/// is token t's j-th. A grouped sigmoid router compares σ(l) + bias instead, inside the groups whose two
/// best sum to most.
///
/// # Errors
/// A logit that is NaN or +∞, or a token with fewer than K logits above −∞.
pub(super) fn choose<A: Real>(logits: ArrayView2<'_, A>, router: &Router<'_, A>) -> Result<Routing> {
    let k = router.k;
    let mut pairs = Vec::with_capacity(logits.nrows() * k);
    for (token, row) in logits.rows().into_iter().enumerate() {
        let usable = usable_logits(token, row.iter().copied())?;
        let experts = match router.convention {
            Convention::GroupedSigmoid(groups) => {
                let with_bias = |expert: usize| {
                    let bias = router.selection_bias.as_ref().map_or(A::zero(), |bias| bias[expert]);
                    sigmoid(row[expert]) + bias
                };
                inside_groups(&(0..row.len()).map(with_bias).collect::<Vec<_>>(), &groups)
            }
            _ if usable < k => return Err(Error::too_few_logits(token, usable, k)),
            _ => descending((0..row.len()).collect(), |expert| row[expert]),
        };
        pairs.extend(experts[..k].iter().map(|&expert| (TokenId(token as u32), ExpertId(expert as u32))));
    }
    Routing::new(logits.nrows(), logits.ncols(), pairs)
}

/// Experts of the groups that stay, the best first.
fn inside_groups<A: Real>(values: &[A], router: &GroupedSigmoid) -> Vec<usize> {
    let size = values.len() / router.groups;
    let members = |group: usize| (group * size..(group + 1) * size).collect::<Vec<_>>();
    let of_two_best = |group: usize| {
        let best = descending(members(group), |expert| values[expert]);
        values[best[0]] + values[best[1]]
    };
    let groups = descending((0..router.groups).collect(), of_two_best);
    let mut experts: Vec<usize> = groups[..router.kept].iter().flat_map(|&group| members(group)).collect();
    experts.sort_unstable();
    descending(experts, |expert| values[expert])
}

/// Ids in ascending order by descending value: no NaN is left, −0 and +0 compare as equal, and a stable
/// sort leaves equals in id order.
fn descending<A: Real>(mut ids: Vec<usize>, value: impl Fn(usize) -> A) -> Vec<usize> {
    ids.sort_by(|&a, &b| value(b).partial_cmp(&value(a)).unwrap_or(std::cmp::Ordering::Equal));
    ids
}

/// Checks that scores can be computed for a choice made elsewhere.
///
/// # Errors
/// A logit that is NaN or +∞, or a token without a logit above −∞, of which no softmax is left.
pub(super) fn check<A: Real>(logits: ArrayView2<'_, A>, convention: Convention) -> Result<()> {
    for (token, row) in logits.rows().into_iter().enumerate() {
        let usable = usable_logits(token, row.iter().copied())?;
        if usable == 0 && !matches!(convention, Convention::GroupedSigmoid(_)) {
            return Err(Error::too_few_logits(token, 0, 1));
        }
    }
    Ok(())
}

fn usable_logits<A: Real>(token: usize, logits: impl Iterator<Item = A>) -> Result<usize> {
    let mut usable = 0;
    for (expert, logit) in logits.enumerate() {
        if logit.is_nan() || logit == A::infinity() {
            return Err(Error::logit(token, expert, Element::to_f64(logit)));
        }
        usable += usize::from(logit > A::neg_infinity());
    }
    Ok(usable)
}

/// Scores (R, 1) by pair, from logits (T, E) with `tokens` and `experts` of each pair.
pub(super) fn scores<A: Real>(
    tape: &mut Tape<'_, A>,
    logits: Var,
    convention: Convention,
    tokens: &Indices,
    experts: &Indices,
) -> Var {
    match convention {
        Convention::SoftmaxOverTopK => {
            let chosen = tape.pick(logits, tokens, experts);
            let largest = largest_by_token(tape.value(chosen), tokens, tape.shape(logits).0);
            let shifted = tape.shift_rows(chosen, &largest);
            let exponentials = tape.exp(shifted);
            normalize_by_token(tape, exponentials, tokens, logits)
        }
        Convention::TopKOverSoftmax => {
            let probabilities = softmax(tape, logits);
            tape.pick(probabilities, tokens, experts)
        }
        Convention::TopKOverSoftmaxRenormalized => {
            let probabilities = softmax(tape, logits);
            let chosen = tape.pick(probabilities, tokens, experts);
            normalize_by_token(tape, chosen, tokens, logits)
        }
        Convention::GroupedSigmoid(router) => {
            let probabilities = tape.sigmoid(logits);
            let chosen = tape.pick(probabilities, tokens, experts);
            let scores = if router.renormalized {
                let sums = tape.scatter_add_rows((tape.shape(logits).0, 1), &[(chosen, tokens.clone())]);
                // S = Σp + 1e-20
                let away_from_zero = Array2::from_elem(tape.shape(sums), A::from_f64(-1e-20));
                let sums = tape.shift_rows(sums, &away_from_zero);
                let sum_of_pair = tape.gather_rows(sums, tokens);
                tape.div(chosen, sum_of_pair)
            } else {
                chosen
            };
            tape.scale(scores, A::from_f64(router.factor))
        }
    }
}

/// Softmax of each row. It does not change when a row is shifted by a constant, so the row's
/// maximum is subtracted against overflow, and no gradient flows through it.
fn softmax<A: Real>(tape: &mut Tape<'_, A>, logits: Var) -> Var {
    let largest = tape.value(logits).map_axis(Axis(1), |row| row.iter().copied().fold(A::neg_infinity(), A::max));
    let shifted = tape.shift_rows(logits, &largest.insert_axis(Axis(1)));
    let exponentials = tape.exp(shifted);
    let sums = tape.row_sums(exponentials);
    tape.divide_rows(exponentials, sums)
}

/// Each pair's value divided by the sum over its token's pairs.
fn normalize_by_token<A: Real>(tape: &mut Tape<'_, A>, values: Var, tokens: &Indices, logits: Var) -> Var {
    let sums = tape.scatter_add_rows((tape.shape(logits).0, 1), &[(values, tokens.clone())]);
    let sum_of_pair = tape.gather_rows(sums, tokens);
    tape.div(values, sum_of_pair)
}

/// For each pair, the largest value among its token's pairs.
fn largest_by_token<A: Real>(values: ArrayView2<'_, A>, tokens: &Indices, t: usize) -> Array2<A> {
    let mut largest = vec![A::neg_infinity(); t];
    for (&token, &value) in tokens.iter().zip(&values) {
        largest[token] = largest[token].max(value);
    }
    Array2::from_shape_fn((tokens.len(), 1), |(pair, _)| largest[tokens[pair]])
}
