//! Which experts a foreign router chose.
//!
//! A router of low precision may choose another expert than an exact one wherever two logits are
//! within their error. So a choice is accepted if it is optimal for *some* logits within the error
//! of the model on trial: no unchosen logit certainly above a chosen one. Where several are
//! acceptable and the file has no ids, the one that best explains the
//! token's rows of o and dx is taken.

use ndarray::{Array2, ArrayD, ArrayView1, Axis};

use super::Dump;
use super::container::quoted;
use super::grouped::{Rule, with_selection_bias};
use super::shared::of_tokens;
use crate::element::DType;
use crate::engine::{Numerics, Output, RouterRounding};
use crate::error::{Error, Result};
use crate::oracle::{Bounded, bound};
use crate::problem::{Biases, Gating, Problem, Router};
use crate::routing::{Convention, Routing};
use crate::shape::{ExpertId, TokenId};

/// Acceptable choices looked at for one token, and extra rows computed for all of them.
pub(super) const CHOICES_OF_A_TOKEN: usize = 64;
const CHOICES: usize = 4096;

/// What the choice was read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The routing was given; there was nothing to choose.
    Given,
    /// The file has the ids.
    Ids,
    /// The file has the logits.
    Logits,
    /// Logits computed from x and W_r.
    Computed,
}

/// The routing of a dump, and how sure it is.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// The pairs; behind a router t·K + rank.
    pub routing: Routing,
    /// Where they come from.
    pub source: Source,
    /// Tokens for which more than one choice is optimal within the logits' error.
    pub ambiguous: usize,
    /// Tokens whose choice is not the exact top-K of the logits it was read from.
    pub departing: usize,
    /// Ambiguous tokens with too many acceptable choices to try; they got the exact top-K.
    pub untried: usize,
}

/// Logits, or σ(l) + bias where that is compared, and how far the engine's own may lie from them.
pub(super) struct Logits {
    pub values: Array2<f64>,
    pub error: Array2<f64>,
    pub source: Source,
}

impl Dump {
    /// The experts that the file's ids send a token to.
    pub(super) fn experts_of(&self, token: usize) -> Option<Vec<usize>> {
        self.ids.as_ref().map(|ids| experts_of(ids, token))
    }

    /// The routing that the file's producer used, as far as the file shows it, if its arithmetic
    /// is `numerics`.
    ///
    /// # Errors
    /// A logit that is NaN or +∞, fewer than K above −∞, or ids of the file that are not optimal
    /// within the logits' error.
    pub fn choose(&self, numerics: &Numerics) -> Result<Chosen> {
        let router = match self.problem.gating() {
            Gating::Given { routing, .. } => {
                let routing = routing.clone();
                return Ok(Chosen { routing, source: Source::Given, ambiguous: 0, departing: 0, untried: 0 });
            }
            Gating::Router(router) => router,
        };
        let logits = self.logits_of(router, numerics)?;
        let k = router.k;
        let mut choice = Chosen {
            routing: Routing::new(0, self.problem.e(), [])?,
            source: logits.source,
            ambiguous: 0,
            departing: 0,
            untried: 0,
        };
        let mut chosen = Vec::with_capacity(self.problem.t());
        let mut alternatives = Vec::new();
        for (token, (values, error)) in logits.values.outer_iter().zip(logits.error.outer_iter()).enumerate() {
            let usable = values.iter().filter(|logit| **logit > f64::NEG_INFINITY).count();
            if usable < k {
                return Err(Error::too_few_logits(token, usable, k));
            }
            let rule = Rule { k, groups: router.convention.into() };
            let exact = rule.exact(values);
            if let Some(ids) = &self.ids {
                let ids = experts_of(ids, token);
                rule.refuse_worse(token, &ids, values, error)?;
                choice.departing += usize::from(!same_set(&ids, &exact));
                continue;
            }
            match rule.optimal(values, error) {
                Some(sets) if sets.len() > 1 => {
                    choice.ambiguous += 1;
                    // Their layer takes memory as the file's own does, by the number of its tokens.
                    let most = CHOICES.min(4 * self.problem.t() + CHOICES_OF_A_TOKEN);
                    if alternatives.len() + sets.len() <= most {
                        alternatives.extend(sets.into_iter().map(|set| (token, set)));
                    } else {
                        choice.untried += 1;
                    }
                }
                Some(_) => {}
                None => {
                    choice.ambiguous += 1;
                    choice.untried += 1;
                }
            }
            chosen.push(exact);
        }
        if let Some(ids) = &self.ids {
            choice.routing = ids.clone();
            choice.source = Source::Ids;
            return Ok(choice);
        }
        for (token, set) in self.nearest(router, alternatives, numerics)? {
            if !same_set(&set, &chosen[token]) {
                choice.departing += 1;
                chosen[token] = set;
            }
        }
        let pairs = chosen.iter().enumerate().flat_map(|(token, experts)| {
            experts.iter().map(move |&expert| (TokenId(token as u32), ExpertId(expert as u32)))
        });
        choice.routing = Routing::new(self.problem.t(), self.problem.e(), pairs)?;
        Ok(choice)
    }

    /// The file's logits as they are, or x W_rᵀ + b_r with the error bound of the model.
    fn logits_of(&self, router: &Router<'_, f64>, numerics: &Numerics) -> Result<Logits> {
        let (values, mut error, source) = match &self.logits {
            Some(values) => (values.clone(), Array2::zeros(values.dim()), Source::Logits),
            None => {
                let x = self.problem.x();
                let mut values = x.dot(&router.w.t());
                let mut magnitude = x.mapv(f64::abs).dot(&router.w.t().mapv(f64::abs));
                let mut terms = x.ncols();
                if let Some(b) = &router.b {
                    values += b;
                    magnitude += &b.mapv(f64::abs);
                    terms += 1;
                }
                let store = match numerics.router {
                    RouterRounding::Score => numerics.score,
                    RouterRounding::TensorType => numerics.storage,
                };
                let sums = gamma(terms, numerics.accumulator) + gamma(terms, DType::F64.unit_roundoff());
                let mut error = magnitude * sums;
                error.zip_mut_with(&values, |error, value| {
                    *error += (store.unit_roundoff() * (value.abs() + *error)).max(store.underflow());
                });
                (values, error, Source::Computed)
            }
        };
        for ((row, expert), value) in values.indexed_iter() {
            if value.is_nan() || *value == f64::INFINITY {
                return Err(Error::logit(row, expert, *value));
            }
        }
        if let Convention::GroupedSigmoid(_) = router.convention {
            return Ok(Logits { source, ..with_selection_bias(router, numerics, &values, &error) });
        }
        if router.convention != Convention::SoftmaxOverTopK {
            // The choice compares p: exp of l − max l, each within its ulps and that of its argument.
            for (values, mut error) in values.outer_iter().zip(error.outer_iter_mut()) {
                let top = values.fold(f64::NEG_INFINITY, |top, value| top.max(*value));
                error.zip_mut_with(&values, |error, value| {
                    if value.is_finite() {
                        *error += (numerics.function_ulps + 1.0 + (value - top).abs()) * numerics.accumulator;
                    }
                });
            }
        }
        Ok(Logits { values, error, source })
    }

    /// For each token with alternatives, the one that explains its row of o or of dx in the file
    /// best: where one of the two results is wrong, the other still tells.
    ///
    /// Every alternative becomes one token of a small layer with the same weights.
    fn nearest(
        &self,
        router: &Router<'_, f64>,
        alternatives: Vec<(usize, Vec<usize>)>,
        numerics: &Numerics,
    ) -> Result<Vec<(usize, Vec<usize>)>> {
        if alternatives.is_empty() {
            return Ok(Vec::new());
        }
        let tokens: Vec<usize> = alternatives.iter().map(|(token, _)| *token).collect();
        let pairs = alternatives.iter().enumerate().flat_map(|(row, (_, experts))| {
            experts.iter().map(move |&expert| (TokenId(row as u32), ExpertId(expert as u32)))
        });
        let routing = Routing::new(tokens.len(), self.problem.e(), pairs)?;
        let whole = &self.problem;
        let small = Problem::new(
            whole.x().select(Axis(0), &tokens),
            whole.w1(),
            whole.w2(),
            whole.b1().zip(whole.b2()).map(|(b1, b2)| Biases { b1: b1.into(), b2: b2.into() }),
            Gating::Router(router.view()),
            whole.activation(),
            whole.dout().select(Axis(0), &tokens),
        )?;
        let bounds = match &self.shared {
            None => bound::layer(&small, &routing, numerics)?,
            Some(shared) => bound::layer_beside(&small, &of_tokens(shared, &tokens)?, &routing, numerics)?,
        };
        let ratio = |output: Output, row: usize, token: usize| -> Option<f64> {
            let (stored, Bounded { truth, bound }) = (self.results.get(&output)?, bounds.get(&output)?);
            let row_of = |values: &ArrayD<f64>, row: usize| values.index_axis(Axis(0), row).to_owned();
            Some(worst_ratio(&row_of(&stored.values, token), &row_of(truth, row), &row_of(bound, row)))
        };
        let mut nearest: Vec<(usize, Vec<usize>)> = Vec::new();
        let mut smallest = f64::INFINITY;
        for (row, (token, set)) in alternatives.into_iter().enumerate() {
            let ratios = [Output::O, Output::Dx].into_iter().filter_map(|output| ratio(output, row, token));
            let distance = ratios.fold(f64::INFINITY, f64::min);
            match nearest.last_mut() {
                Some(last) if last.0 == token => {
                    if distance < smallest {
                        last.1 = set;
                        smallest = distance;
                    }
                }
                _ => {
                    nearest.push((token, set));
                    smallest = distance;
                }
            }
        }
        Ok(nearest)
    }
}

/// The largest error over bound; ∞ where a value is not finite.
fn worst_ratio(values: &ArrayD<f64>, truth: &ArrayD<f64>, bound: &ArrayD<f64>) -> f64 {
    let ratios = values.iter().zip(truth).zip(bound).map(|((value, truth), bound)| {
        let error = (value - truth).abs();
        if error == 0.0 {
            0.0
        } else if error.is_finite() {
            error / bound
        } else {
            f64::INFINITY
        }
    });
    ratios.fold(0.0, f64::max)
}

/// γ_m = m·u/(1 − m·u): what a sum of m products in any order may lose, relative to Σ|a||b|.
fn gamma(terms: usize, u: f64) -> f64 {
    let mu = terms as f64 * u;
    if mu < 1.0 { mu / (1.0 - mu) } else { f64::INFINITY }
}

/// Experts by logit, the larger first, then the smaller id; −0 equals +0. Logits are not NaN.
pub(super) fn ranking(logits: ArrayView1<'_, f64>) -> Vec<usize> {
    let mut ranked: Vec<usize> = (0..logits.len()).collect();
    ranked.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap_or(std::cmp::Ordering::Equal).then(a.cmp(&b)));
    ranked
}

/// Every set of K experts that is a top-K of some logits within the error, the exact one first;
/// `None` if there are too many to try.
pub(super) fn optimal(
    ranked: &[usize],
    k: usize,
    values: ArrayView1<'_, f64>,
    error: ArrayView1<'_, f64>,
) -> Option<Vec<Vec<usize>>> {
    let low = |expert: usize| values[expert] - error[expert];
    let high = |expert: usize| values[expert] + error[expert];
    let descending = |mut bounds: Vec<f64>| {
        bounds.sort_unstable_by(|a, b| b.total_cmp(a));
        bounds
    };
    let lows = descending(ranked.iter().map(|&expert| low(expert)).collect());
    let highs = descending(ranked.iter().map(|&expert| high(expert)).collect());
    // Fewer than K experts are certainly above it: it may be chosen. At most K − 1 others might be
    // level with it or above: it must be.
    let possible: Vec<usize> =
        ranked.iter().copied().filter(|&expert| values[expert].is_finite() && high(expert) >= lows[k - 1]).collect();
    let (certain, open): (Vec<usize>, Vec<usize>) =
        possible.into_iter().partition(|&expert| highs.get(k).is_none_or(|&next| next < low(expert)));
    let mut rank = vec![0; ranked.len()];
    for (place, &expert) in ranked.iter().enumerate() {
        rank[expert] = place;
    }
    let free = k - certain.len();
    let mut sets = Vec::new();
    // Combinations of `free` of the open experts in the order of the ranking: the exact top-K first.
    let mut picked: Vec<usize> = (0..free).collect();
    let mut looked_at = 0;
    while picked.iter().all(|&index| index < open.len()) {
        looked_at += 1;
        if looked_at > 16 * CHOICES_OF_A_TOKEN || sets.len() > CHOICES_OF_A_TOKEN {
            return None;
        }
        let mut set: Vec<usize> = certain.iter().copied().chain(picked.iter().map(|&index| open[index])).collect();
        set.sort_unstable_by_key(|&expert| rank[expert]);
        if worse(&set, values, error).is_none() {
            sets.push(set);
        }
        let Some(last) = (0..free).rev().find(|&slot| picked[slot] + 1 < open.len() - (free - 1 - slot)) else { break };
        picked[last] += 1;
        for slot in last + 1..free {
            picked[slot] = picked[slot - 1] + 1;
        }
    }
    Some(sets)
}

/// A chosen expert and an unchosen one whose logit is above it beyond the error of both.
pub(super) fn worse(set: &[usize], values: ArrayView1<'_, f64>, error: ArrayView1<'_, f64>) -> Option<(usize, usize)> {
    (0..values.len())
        .filter(|expert| !set.contains(expert))
        .flat_map(|unchosen| set.iter().map(move |&chosen| (chosen, unchosen)))
        .find(|&(chosen, unchosen)| values[unchosen] - error[unchosen] > values[chosen] + error[chosen])
}

pub(super) fn refused(
    token: usize,
    ids: &[usize],
    values: ArrayView1<'_, f64>,
    error: ArrayView1<'_, f64>,
) -> Result<()> {
    let Some((chosen, unchosen)) = worse(ids, values, error) else { return Ok(()) };
    let reason = format!(
        "token {token} goes to expert {chosen} ranked by {:e} and not to expert {unchosen} ranked by {:e}, \
         farther apart than their error {:e}",
        values[chosen],
        values[unchosen],
        error[chosen] + error[unchosen]
    );
    Err(Error::parse("tensor", quoted("expert_idx").trim_matches('`'), reason))
}

fn experts_of(routing: &Routing, token: usize) -> Vec<usize> {
    let rows = routing.rows_of_token(TokenId(token as u32));
    rows.iter().map(|&row| routing.pair_expert()[routing.row_pair()[row as usize] as usize].index()).collect()
}

pub(super) fn same_set(a: &[usize], b: &[usize]) -> bool {
    a.len() == b.len() && a.iter().all(|expert| b.contains(expert))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    fn sets(values: [f64; 4], error: f64, k: usize) -> Vec<Vec<usize>> {
        let values = ndarray::Array1::from(values.to_vec());
        let error = ndarray::Array1::from_elem(4, error);
        optimal(&ranking(values.view()), k, values.view(), error.view()).unwrap()
    }

    #[test]
    fn only_experts_within_the_error_of_the_boundary_are_open() {
        assert_eq!(sets([4.0, 1.0, 3.0, 2.0], 0.0, 2), [[0, 2]]);
        assert_eq!(sets([4.0, 1.0, 2.0, 2.0], 0.0, 2), [[0, 2], [0, 3]]);
        // Eighths and sixteenths are exact, so that intervals touch where they seem to.
        assert_eq!(sets([4.0, 1.875, 2.0, 2.125], 0.0625, 2), [[0, 3], [0, 2]]);
        // 1.875 may be level with 2.125 only if 2.0 is too.
        assert_eq!(sets([4.0, 1.875, 2.0, 2.125], 0.125, 2), [[0, 3], [0, 2], [0, 1]]);
        assert_eq!(sets([1.0; 4], 0.0, 4), [[0, 1, 2, 3]]);
    }

    #[test]
    fn equal_logits_rank_by_id_and_zeros_have_no_sign() {
        assert_eq!(ranking(array![0.0, -0.0, 1.0, 0.0].view()), [2, 0, 1, 3]);
    }

    #[test]
    fn ids_beyond_the_error_are_refused_and_the_message_names_both_logits() {
        let (values, error) = (array![1.0, 2.0, 3.0], array![0.4, 0.4, 0.4]);
        assert!(refused(0, &[0, 2], values.view(), array![0.5, 0.5, 0.5].view()).is_ok());
        let message = refused(7, &[0, 2], values.view(), error.view()).unwrap_err().to_string();
        assert!(
            message.contains("token 7 goes to expert 0") && message.contains("expert 1 ranked by 2e0"),
            "{message}"
        );
    }
}
