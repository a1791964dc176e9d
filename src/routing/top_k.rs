//! The choice of K experts per token, exact on the logits.

use ndarray::{Array2, ArrayView1, ArrayView2, s};
use rayon::prelude::*;

use crate::element::Real;
use crate::error::{Error, Result};
use crate::mutant::Mutant;
use crate::routing::Routing;
use crate::shape::{ExpertId, TokenId};

/// K distinct experts for each of T tokens, by rank: a token's best expert first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    experts: usize,
    ids: Array2<ExpertId>,
}

impl Choice {
    /// Checks a choice that came from elsewhere; `ids` is (T, K).
    ///
    /// Whether the choice is a best one is not asked here: see
    /// [`certify_choice`](crate::routing::certificate::certify_choice).
    ///
    /// # Errors
    /// K outside `1..=E`, an id that is not below E, an expert twice in one row, or more than
    /// `i32::MAX` tokens, experts or pairs.
    pub fn new(experts: usize, ids: Array2<ExpertId>) -> Result<Self> {
        let (tokens, k) = ids.dim();
        check_sizes(tokens, experts, k)?;
        let mut seen_at = vec![usize::MAX; experts];
        for (pair, &expert) in ids.iter().enumerate() {
            if expert.index() >= experts {
                return Err(Error::pair_out_of_range(pair, "expert", expert.0.into(), experts));
            }
            let first = std::mem::replace(&mut seen_at[expert.index()], pair);
            if first != usize::MAX && first / k == pair / k {
                return Err(Error::duplicate_pair(pair / k, expert.index(), first, pair));
            }
        }
        Ok(Self { experts, ids })
    }

    /// T.
    pub fn tokens(&self) -> usize {
        self.ids.nrows()
    }

    /// E.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// K.
    pub fn k(&self) -> usize {
        self.ids.ncols()
    }

    /// (T, K) the experts by rank.
    pub fn ids(&self) -> ArrayView2<'_, ExpertId> {
        self.ids.view()
    }

    /// The pairs, t·K + rank, with their metadata.
    pub fn routing(&self) -> Routing {
        let pairs = self.ids.indexed_iter().map(|((token, _), &expert)| (TokenId(token as u32), expert));
        Routing::new(self.tokens(), self.experts, pairs)
            .expect("a Choice holds distinct ids in range and at most 2³¹ − 1 pairs: both constructors check")
    }
}

/// The K largest logits of each row of `logits` (T, E): larger first, then the smaller expert id.
///
/// The logits themselves are compared, exactly: probabilities may tie or underflow where logits
/// differ. −0 equals +0; −∞ masks an expert. The result does not depend on the number of threads.
///
/// ```
/// use ndarray::array;
/// use sonicmoe::{ExpertId, routing::top_k};
/// let choice = top_k(array![[0.5f32, 2.0, 0.5, -1.0], [-0.0, 0.0, 0.0, 0.0]].view(), 2)?;
/// assert_eq!(choice.ids(), array![[ExpertId(1), ExpertId(0)], [ExpertId(0), ExpertId(1)]]);
/// # Ok::<(), sonicmoe::Error>(())
/// ```
///
/// # Errors
/// K outside `1..=E`; of the first row that allows no choice: a logit that is NaN or +∞, or fewer
/// than K logits above −∞; more than `i32::MAX` tokens, experts or pairs.
pub fn top_k<A: Real>(logits: ArrayView2<A>, k: usize) -> Result<Choice> {
    let (tokens, experts) = logits.dim();
    check_sizes(tokens, experts, k)?;
    let mut ids = vec![ExpertId::default(); tokens * k];
    let first_failure = ids
        .par_chunks_exact_mut(k)
        .enumerate()
        .map_init(Vec::new, |candidates, (token, chosen)| {
            choose(token, logits.row(token), candidates, chosen).err().map(|error| (token, error))
        })
        .flatten()
        .min_by_key(|&(token, _)| token);
    match first_failure {
        Some((_, error)) => Err(error),
        None => {
            let ids = Array2::from_shape_vec((tokens, k), ids)
                .map_err(|error| Error::internal(format!("T·K ids do not form (T, K): {error}")))?;
            Ok(Choice { experts, ids })
        }
    }
}

/// [`top_k`] with a planted bug: ties to the larger id are those to the smaller one, counted from the end.
pub(crate) fn mutated<A: Real>(logits: ArrayView2<A>, k: usize, mutant: Option<Mutant>) -> Result<Choice> {
    if mutant != Some(Mutant::TieToLargerId) {
        return top_k(logits, k);
    }
    let Choice { experts, ids } = top_k(logits.slice(s![.., ..;-1]), k)?;
    Ok(Choice { experts, ids: ids.mapv(|id| ExpertId(experts as u32 - 1 - id.0)) })
}

/// 1 ≤ K ≤ E, and sizes that routing metadata can index.
pub(super) fn check_sizes(tokens: usize, experts: usize, k: usize) -> Result<()> {
    if k == 0 || k > experts {
        return Err(Error::top_k(k, experts));
    }
    for (what, value) in [("T", tokens), ("E", experts), ("T·K", tokens.saturating_mul(k))] {
        if value > i32::MAX as usize {
            return Err(Error::size(what, value, "routing metadata hold 32-bit indices, up to 2³¹ − 1"));
        }
    }
    Ok(())
}

/// One row, in time O(E) whatever K: whoever cannot be among the best K of the experts before it
/// is passed over; the others gather until there are 2K of them, of which the best K stay.
fn choose<A: Real>(
    token: usize,
    logits: ArrayView1<A>,
    candidates: &mut Vec<(A, ExpertId)>,
    chosen: &mut [ExpertId],
) -> Result<()> {
    let k = chosen.len();
    candidates.clear();
    // Experts come in the order of their ids, so one that only equals the threshold loses the tie.
    let mut threshold = A::neg_infinity();
    for (expert, &logit) in logits.iter().enumerate() {
        if logit > threshold {
            if logit == A::infinity() {
                return Err(Error::logit(token, expert, logit.to_f64()));
            }
            candidates.push((logit, ExpertId(expert as u32)));
            if candidates.len() == 2 * k {
                candidates.select_nth_unstable_by(k - 1, by_rank);
                candidates.truncate(k);
                threshold = candidates[k - 1].0;
            }
        } else if logit.is_nan() {
            return Err(Error::logit(token, expert, logit.to_f64()));
        }
    }
    if candidates.len() < k {
        return Err(Error::too_few_logits(token, candidates.len(), k));
    }
    if candidates.len() > k {
        candidates.select_nth_unstable_by(k - 1, by_rank);
        candidates.truncate(k);
    }
    candidates.sort_unstable_by(by_rank);
    for (rank, &(_, expert)) in candidates.iter().enumerate() {
        chosen[rank] = expert;
    }
    Ok(())
}

/// Larger logit first, then smaller id. No NaN gets here, so the order is total.
fn by_rank<A: Real>(a: &(A, ExpertId), b: &(A, ExpertId)) -> std::cmp::Ordering {
    b.0.partial_cmp(&a.0).unwrap_or(std::cmp::Ordering::Equal).then(a.1.cmp(&b.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_tokens_experts_and_pairs_are_taken_as_32_bits_index() {
        let most = i32::MAX as usize;
        for (tokens, experts, k) in [(most, 1, 1), (1, most, 1), (most / 2, 2, 2), (1, most, most)] {
            assert!(check_sizes(tokens, experts, k).is_ok(), "{tokens}, {experts}, {k}");
        }
        for (tokens, experts, k) in [(most + 1, 1, 1), (1, most + 1, 1), (most / 2 + 1, 2, 2), (usize::MAX, 2, 2)] {
            assert!(check_sizes(tokens, experts, k).is_err(), "{tokens}, {experts}, {k}");
        }
    }
}
