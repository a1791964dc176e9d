//! Token rounding: every expert gets a multiple of M tokens, so that no tile of a grouped GEMM
//! computes padding.
//!
//! ```text
//! logits ─ top_k ─▶ choice ┐
//!        ─ softmax ─▶ p ───┴─ TokenRounding::round ─▶ Rounded (routing) ─ scores ─▶ scores by pair
//! ```
//!
//! An expert that f tokens chose keeps lo or hi of them, f rounded down or up to a multiple of M;
//! a [`Rule`] says which. It keeps them from the front of its ranking: first the tokens that chose
//! it, then the others, each group by [`Ranking`], ties by the smaller token id. So at most its
//! last tile changes. Tokens may end with no pair, or with more than K.
//!
//! A rule that chose hi where hi > T goes down instead, and the expert is reported as *capped*;
//! with T < M every count is 0.
//!
//! This changes the model's routing; it is no other order of the same sum. It is meant for
//! training, where the mean number of tokens per expert is at least 2M; evaluation routes by top-K.

pub mod certificate;
mod draw;
mod exact_sum;
mod fault;
mod ranking;
mod rules;
pub mod scores;

pub use draw::draw;
pub use ranking::{Ranking, ranking_scores};
pub use rules::Rule;

use ndarray::ArrayView2;
use rayon::prelude::*;

use crate::element::Real;
use crate::error::{Error, Result};
use crate::mutant::Mutant;
use crate::routing::scores::softmax;
use crate::routing::{Choice, Routing, top_k};
use crate::shape::{ExpertId, TokenId};

/// How to round: the tile, the rule, the ranking, and the seed of rules that draw.
///
/// ```
/// use ndarray::array;
/// use sonicmoe::routing::rounding::{Rule, TokenRounding};
/// // Three tokens prefer expert 0, one prefers expert 1; tiles of two tokens.
/// let logits = array![[2.0f32, 0.0], [1.5, 0.0], [1.0, 0.0], [0.0, 1.0]];
/// let down = TokenRounding { rule: Rule::Down, ..TokenRounding::new(2) };
/// let rounded = down.route(logits.view(), 1)?.1;
/// assert_eq!(rounded.topk_frequency, [3, 1]);
/// assert_eq!(rounded.expert_frequency, [2, 0]);
/// let up = TokenRounding { rule: Rule::Up, ..TokenRounding::new(2) };
/// assert_eq!(up.route(logits.view(), 1)?.1.expert_frequency, [4, 2]);
/// # Ok::<(), sonicmoe::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TokenRounding {
    /// M ≥ 1, usually M_tile: every count becomes a multiple of it.
    pub tile: usize,
    /// Whether an expert goes down or up.
    pub rule: Rule,
    /// What the tokens that chose an expert rank by.
    pub ranking: Ranking,
    /// What [`draw`] is seeded with; used by the rules that draw and by no other.
    pub seed: u64,
}

impl TokenRounding {
    /// To multiples of `tile`, by the default rule (nearest by frequency) and ranking.
    pub fn new(tile: usize) -> Self {
        Self { tile, rule: Rule::default(), ranking: Ranking::default(), seed: 0 }
    }

    /// Rounds `choice`, with the tokens ranked by `p` (T, E), the softmax over all E whatever the
    /// convention of the scores.
    ///
    /// A pure function of its arguments: the same on any number of threads.
    ///
    /// # Errors
    /// M = 0, a p of another shape than (T, E) of the choice or with an entry that is not finite
    /// and ≥ 0, or more than `i32::MAX` pairs in the result.
    pub fn round<A: Real>(&self, p: ArrayView2<A>, choice: &Choice) -> Result<Rounded> {
        self.mutated(p, choice, None)
    }

    /// [`TokenRounding::round`] with a planted bug.
    ///
    /// # Errors
    /// As [`TokenRounding::round`].
    pub fn mutated<A: Real>(&self, p: ArrayView2<A>, choice: &Choice, mutant: Option<Mutant>) -> Result<Rounded> {
        if self.tile == 0 {
            return Err(Error::size("M", 0, "tokens are rounded to multiples of at least 1"));
        }
        let scores = ranking_scores(p, choice, self.ranking)?;
        let chosen = choice.routing();
        let mut candidates: Vec<_> = (0..choice.experts())
            .into_par_iter()
            .map(|expert| {
                let choosers = &chosen.row_token()[chosen.rows_of_expert(ExpertId(expert as u32))];
                ranking::candidates(scores.column(expert), choosers, self.tile)
            })
            .collect();
        let mut decisions = rules::decide(self, choice.tokens(), &candidates);
        if let Some(mutant) = mutant {
            fault::plant(mutant, &mut candidates, &mut decisions);
        }

        let mut pairs: Vec<_> = candidates
            .par_iter()
            .zip(&decisions)
            .enumerate()
            .flat_map_iter(|(expert, (candidates, decision))| {
                candidates.ranked[..decision.count].iter().map(move |&token| (token, ExpertId(expert as u32)))
            })
            .collect();
        pairs.par_sort_unstable();
        Ok(Rounded {
            routing: Routing::new(choice.tokens(), choice.experts(), pairs)?,
            topk_frequency: candidates.iter().map(|candidates| candidates.multiples.frequency).collect(),
            expert_frequency: decisions.iter().map(|decision| decision.count).collect(),
            capped: (0..)
                .map(ExpertId)
                .zip(&decisions)
                .filter(|(_, decision)| decision.capped)
                .map(|(id, _)| id)
                .collect(),
        })
    }

    /// The choice of the `k` largest `logits` (T, E), and that choice rounded.
    ///
    /// # Errors
    /// What [`top_k`] and [`TokenRounding::round`] refuse.
    pub fn route<A: Real>(&self, logits: ArrayView2<A>, k: usize) -> Result<(Choice, Rounded)> {
        let choice = top_k(logits, k)?;
        let rounded = self.round(softmax(logits)?.view(), &choice)?;
        Ok((choice, rounded))
    }
}

/// A routing in which every expert has a multiple of M tokens, and how it came about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rounded {
    /// The pairs: token by token, a token's experts ascending. Any engine takes it as given.
    pub routing: Routing,
    /// (E) f, the tokens that chose each expert.
    pub topk_frequency: Vec<usize>,
    /// (E) the tokens that each expert keeps.
    pub expert_frequency: Vec<usize>,
    /// The experts for which the rule chose hi, but hi > T; ascending.
    pub capped: Vec<ExpertId>,
}

impl Rounded {
    /// The pairs in pair order.
    pub fn pairs(&self) -> Vec<(TokenId, ExpertId)> {
        self.routing.pair_token().iter().copied().zip(self.routing.pair_expert().iter().copied()).collect()
    }
}

/// Rows of padding that a grouped GEMM with tiles of `tile` rows computes for experts of these
/// frequencies: Σ (f rounded up − f). 0 after rounding to the same tile.
pub fn padding(frequency: &[usize], tile: usize) -> usize {
    frequency.iter().map(|&f| Multiples::around(f, tile.max(1)).upper - f).sum()
}

/// f between the multiples of M beside it; all three are equal if f is one itself.
#[derive(Clone, Copy, Debug)]
struct Multiples {
    lower: usize,
    frequency: usize,
    upper: usize,
}

impl Multiples {
    fn around(frequency: usize, tile: usize) -> Self {
        Self { lower: frequency / tile * tile, frequency, upper: frequency.div_ceil(tile).saturating_mul(tile) }
    }
}
