//! Scores of the chosen experts, and the way back to the logits.
//!
//! With p = softmax(l) over all E, C the K experts that the token chose, g = ds:
//!
//! | convention | s | dlogits |
//! | --- | --- | --- |
//! | softmax over top-K | softmax of l over C | s(g − Σ_C gs) on C, 0 elsewhere |
//! | top-K over softmax | p on C | p(ĝ − Σ_C gp) on all E; ĝ is g on C, 0 elsewhere |
//! | the same, renormalised | p / Σ_C p | as for softmax over top-K, the same function |
//! | grouped sigmoid | of p = σ(l): see [`GroupedSigmoid`](crate::routing::GroupedSigmoid) | on C, 0 elsewhere |
//!
//! With K = 1 a normalised score is exactly 1, so dlogits = 1·(g − g·1) is exactly 0.

use ndarray::{Array2, ArrayView1, ArrayView2, ArrayViewMut1, Axis};
use rayon::prelude::*;

use crate::element::Real;
use crate::error::{Error, Result};
use crate::mutant::Mutant;
use crate::routing::{Choice, Convention, softmax};

/// The scores of the chosen experts by pair, t·K + rank, from `logits` (T, E).
///
/// Every operation is one of type `A`. A choice other than the best K of these logits is taken as
/// it is: a router of lower precision may have made it.
///
/// # Errors
/// Logits that are not (T, E) of the choice, a logit that is NaN or +∞, or a token whose chosen
/// experts are all masked by −∞.
pub fn forward<A: Real>(logits: ArrayView2<A>, choice: &Choice, convention: Convention) -> Result<Vec<A>> {
    check_logits(logits, choice, convention)?;
    let k = choice.k();
    let ids = choice.ids();
    let mut scores = vec![A::zero(); choice.tokens() * k];
    scores.par_chunks_exact_mut(k).enumerate().for_each_init(
        || vec![A::zero(); choice.experts()],
        |p, (token, scores)| {
            let (logits, chosen) = (logits.row(token), ids.row(token));
            let chosen_logits = chosen.iter().map(|expert| logits[expert.index()]);
            match convention {
                Convention::SoftmaxOverTopK => softmax_into(chosen_logits, scores),
                Convention::GroupedSigmoid(router) => router.scores(chosen_logits, scores),
                Convention::TopKOverSoftmax | Convention::TopKOverSoftmaxRenormalized => {
                    softmax_into(logits.iter().copied(), p);
                    for (score, &expert) in scores.iter_mut().zip(&chosen) {
                        *score = p[expert.index()];
                    }
                    if convention == Convention::TopKOverSoftmaxRenormalized {
                        let sum = softmax::sum(scores.iter().copied());
                        if sum > A::zero() {
                            scores.iter_mut().for_each(|score| *score = *score / sum);
                        } else {
                            // Only a choice far from the best K: p underflows on all of it.
                            softmax_into(chosen_logits, scores);
                        }
                    }
                }
            }
        },
    );
    Ok(scores)
}

/// The gradient of the logits (T, E), from `scores` and `ds`, both by pair.
///
/// # Errors
/// What [`forward`] refuses, and scores or ds that are not T·K.
pub fn backward<A: Real>(
    logits: ArrayView2<A>,
    scores: &[A],
    choice: &Choice,
    convention: Convention,
    ds: &[A],
) -> Result<Array2<A>> {
    mutated(logits, scores, choice, convention, ds, None)
}

/// [`backward`] with a planted bug.
pub(crate) fn mutated<A: Real>(
    logits: ArrayView2<A>,
    scores: &[A],
    choice: &Choice,
    convention: Convention,
    ds: &[A],
    mutant: Option<Mutant>,
) -> Result<Array2<A>> {
    check_logits(logits, choice, convention)?;
    let k = choice.k();
    for (tensor, length) in [("scores", scores.len()), ("ds", ds.len())] {
        if length != choice.tokens() * k {
            return Err(Error::shape(tensor, &[choice.tokens() * k], &[length], "one value per pair, t·K + rank"));
        }
    }
    let ids = choice.ids();
    let mut dlogits = Array2::zeros(logits.raw_dim());
    dlogits.axis_iter_mut(Axis(0)).into_par_iter().enumerate().for_each_init(
        || (vec![A::zero(); choice.experts()], vec![A::zero(); choice.experts()]),
        |(p, g_hat), (token, mut dlogits)| {
            let pairs = token * k..(token + 1) * k;
            let (s, g, chosen) = (&scores[pairs.clone()], &ds[pairs], ids.row(token));
            match convention {
                Convention::SoftmaxOverTopK | Convention::TopKOverSoftmaxRenormalized => {
                    let sum: A = s.iter().zip(g).map(|(&s, &g)| g * s).sum();
                    for ((&s, &g), &expert) in s.iter().zip(g).zip(&chosen) {
                        dlogits[expert.index()] = s * (g - sum);
                    }
                }
                Convention::GroupedSigmoid(router) => {
                    let chosen_logits = chosen.iter().map(|expert| logits[[token, expert.index()]]);
                    router.backward(chosen_logits, g, |rank, dlogit| dlogits[chosen[rank].index()] = dlogit);
                }
                Convention::TopKOverSoftmax => {
                    softmax_into(logits.row(token).iter().copied(), p);
                    g_hat.fill(A::zero());
                    for (&g, &expert) in g.iter().zip(&chosen) {
                        g_hat[expert.index()] = g;
                    }
                    add_softmax_gradient(p.iter().copied(), g_hat, &mut dlogits);
                }
            }
        },
    );
    match mutant {
        Some(Mutant::SoftmaxWithoutSum) => dlogits = unbalanced(scores, choice, ds),
        Some(Mutant::DlogitsDoubled) => dlogits.mapv_inplace(|dlogit| dlogit + dlogit),
        _ => {}
    }
    Ok(dlogits)
}

/// s·g on the chosen, 0 elsewhere.
fn unbalanced<A: Real>(scores: &[A], choice: &Choice, ds: &[A]) -> Array2<A> {
    let mut dlogits = Array2::zeros((choice.tokens(), choice.experts()));
    for (((token, _), expert), (&s, &g)) in choice.ids().indexed_iter().zip(scores.iter().zip(ds)) {
        dlogits[(token, expert.index())] = s * g;
    }
    dlogits
}

/// p (T, E), the softmax of every row of `logits`.
///
/// # Errors
/// A logit that is NaN or +∞, or a row without a logit above −∞.
pub fn softmax<A: Real>(logits: ArrayView2<A>) -> Result<Array2<A>> {
    first_error(logits, |token, row| {
        check_row(token, row)?;
        if row.iter().all(|&logit| logit == A::neg_infinity()) {
            return Err(Error::too_few_logits(token, 0, 1));
        }
        Ok(())
    })?;
    let mut p = Array2::zeros(logits.raw_dim());
    p.axis_iter_mut(Axis(0)).into_par_iter().zip(logits.axis_iter(Axis(0))).for_each(|(mut p, logits)| {
        // A freshly allocated row is contiguous.
        if let Some(p) = p.as_slice_mut() {
            softmax_into(logits.iter().copied(), p);
        }
    });
    Ok(p)
}

/// e^(l − max l) / Σ e^(l − max l), summed as [`softmax::sum`] does. If every l is −∞, zeros.
pub(in crate::routing) fn softmax_into<A: Real>(logits: impl Iterator<Item = A> + Clone, p: &mut [A]) {
    let largest = logits.clone().fold(A::neg_infinity(), A::max);
    if largest == A::neg_infinity() {
        p.fill(A::zero());
        return;
    }
    p.iter_mut().zip(logits).for_each(|(p, logit)| *p = (logit - largest).exponential());
    let sum = softmax::sum(p.iter().copied());
    p.iter_mut().for_each(|p| *p = *p / sum);
}

/// dlogits += p(ĝ − Σ ĝp) over all E.
pub(in crate::routing) fn add_softmax_gradient<A: Real>(
    p: impl Iterator<Item = A> + Clone,
    g_hat: &[A],
    dlogits: &mut ArrayViewMut1<A>,
) {
    let sum: A = p.clone().zip(g_hat).map(|(p, &g)| g * p).sum();
    for ((dlogit, p), &g) in dlogits.iter_mut().zip(p).zip(g_hat) {
        *dlogit += p * (g - sum);
    }
}

fn check_logits<A: Real>(logits: ArrayView2<A>, choice: &Choice, convention: Convention) -> Result<()> {
    let expected = [choice.tokens(), choice.experts()];
    if logits.shape() != expected {
        return Err(Error::shape("router_logits", &expected, logits.shape(), "T and E of the choice"));
    }
    first_error(logits, |token, row| {
        check_row(token, row)?;
        // A sigmoid of −∞ is a probability as any other; a softmax of nothing else is none.
        let sums_to_zero = !matches!(convention, Convention::GroupedSigmoid(_));
        let chosen = choice.ids();
        if sums_to_zero && chosen.row(token).iter().all(|expert| row[expert.index()] == A::neg_infinity()) {
            return Err(Error::too_few_logits(token, 0, choice.k()));
        }
        Ok(())
    })
}

pub(in crate::routing) fn check_row<A: Real>(token: usize, row: ArrayView1<A>) -> Result<()> {
    match row.iter().position(|&logit| logit.is_nan() || logit == A::infinity()) {
        Some(expert) => Err(Error::logit(token, expert, row[expert].to_f64())),
        None => Ok(()),
    }
}

/// The error of the first row that has one, whatever the number of threads.
fn first_error<A: Real>(
    logits: ArrayView2<A>,
    check: impl Fn(usize, ArrayView1<A>) -> Result<()> + Sync,
) -> Result<()> {
    let failure = (0..logits.nrows())
        .into_par_iter()
        .filter_map(|token| check(token, logits.row(token)).err().map(|error| (token, error)))
        .min_by_key(|&(token, _)| token);
    failure.map_or(Ok(()), |(_, error)| Err(error))
}
