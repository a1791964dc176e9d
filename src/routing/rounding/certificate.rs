//! Judges a rounded routing from the numbers alone: nothing here calls the code that rounds.
//!
//! What [`certify`] proves, for every expert with f choosers, lo and hi around f, and `count` pairs:
//!
//! - pairs exist and none appears twice;
//! - `count` is a multiple of M, so no row of padding is left to compute, and |count − f| < M, so at
//!   most the last tile changes (and for M = 1 nothing does);
//! - the kept tokens are the front of the ranking (chose it, score, smaller id): a token that chose
//!   the expert is dropped only if every kept token chose it too and ranks above; one is added only
//!   if all that chose it are kept, and then the best one;
//! - `down` never exceeds f; `up` never stays below f unless capped; the nearest rules are nearest,
//!   with ties as they say; `balance` leaves the running sum of changes the smaller of the two
//!   possible ones (a tie goes down), and |Σ(count − f)| ≤ M/2 where no expert was capped;
//! - a stochastic rule takes no multiple that its probabilities exclude (what else it promises is
//!   about many seeds, and one result cannot show it);
//! - an expert is listed as capped if, and as far as one result can tell only if, the rule chose hi
//!   and hi > T; then it has lo.

mod frequency;

use std::fmt;

use ndarray::ArrayView2;
use thiserror::Error;

use super::Rule;
use crate::element::Element;
use crate::shape::{ExpertId, TokenId};

/// Something that no correct rounding does, with the numbers that show it.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum Violation {
    /// Arrays that do not belong together, or M = 0.
    #[error("{what} is {found}, expected {expected}")]
    Size {
        /// Which size.
        what: &'static str,
        /// What the other arguments imply.
        expected: usize,
        /// What it is.
        found: usize,
    },
    /// A ranking score that is not finite and ≥ 0.
    #[error("the ranking score of token {token}, expert {expert} is {value}")]
    Score {
        /// The token.
        token: usize,
        /// The expert.
        expert: usize,
        /// The value.
        value: f64,
    },
    /// An id that does not exist.
    #[error("{what} {id} stands at {at}, but ids end at {limit} (exclusive)")]
    OutOfRange {
        /// Token or expert, and of which array.
        what: &'static str,
        /// The index of the entry.
        at: usize,
        /// The id.
        id: u32,
        /// How many ids there are.
        limit: usize,
    },
    /// A token that goes to an expert twice.
    #[error("token {token} goes to expert {expert} twice")]
    Duplicate {
        /// The token.
        token: TokenId,
        /// The expert.
        expert: ExpertId,
    },
    /// A count that would leave padding.
    #[error("expert {expert} has {count} tokens, which is no multiple of {tile}")]
    NotMultiple {
        /// The expert.
        expert: ExpertId,
        /// Its tokens.
        count: usize,
        /// M.
        tile: usize,
    },
    /// A change of a whole tile or more.
    #[error("expert {expert} went from {frequency} tokens to {count}, by at least a tile of {tile}")]
    TooFar {
        /// The expert.
        expert: ExpertId,
        /// Tokens that chose it.
        frequency: usize,
        /// Tokens that it has.
        count: usize,
        /// M.
        tile: usize,
    },
    /// The other multiple than the one that the rule prescribes.
    #[error("expert {expert} went from {frequency} tokens to {count}, but {rule} keeps {expected} ({reason})")]
    Rule {
        /// The expert.
        expert: ExpertId,
        /// The rule.
        rule: Rule,
        /// Tokens that chose it.
        frequency: usize,
        /// Tokens that it has.
        count: usize,
        /// Tokens that it should have.
        expected: usize,
        /// Why.
        reason: &'static str,
    },
    /// Changes that `balance` should have kept within M/2 all together.
    #[error("the changes sum to {sum}, more than half a tile of {tile}")]
    Unbalanced {
        /// Σ(count − f).
        sum: i128,
        /// M.
        tile: usize,
    },
    /// An expert that is listed as capped wrongly, or twice, or out of order.
    #[error("expert {expert} is listed as capped, but {reason}")]
    NotCapped {
        /// The expert.
        expert: ExpertId,
        /// What contradicts it.
        reason: &'static str,
    },
    /// A token that was left out although it ranks above a kept one.
    #[error("expert {expert} keeps {kept}, but leaves out {left_out}, which ranks above")]
    Order {
        /// The expert.
        expert: ExpertId,
        /// The last of the kept tokens.
        kept: Key,
        /// The first of those left out.
        left_out: Key,
    },
}

/// What a token ranks by at an expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Key {
    /// Whether it chose the expert.
    pub chose: bool,
    /// Its ranking score.
    pub score: f64,
    /// The token.
    pub token: TokenId,
}

impl Key {
    /// Whether this token ranks above `other`.
    fn above(self, other: Self) -> bool {
        if self.chose != other.chose {
            self.chose
        } else if self.score != other.score {
            self.score > other.score
        } else {
            self.token < other.token
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { chose, score, token } = self;
        write!(f, "token {token} ({}, score {score})", if *chose { "chose it" } else { "did not choose it" })
    }
}

/// The tokens of one expert, ranked.
struct Expert {
    id: ExpertId,
    /// The keys of all tokens with whether each is kept, best first.
    ranked: Vec<(Key, bool)>,
    /// f.
    frequency: usize,
    /// Tokens that it has.
    count: usize,
    /// Whether it is listed as capped.
    capped: bool,
}

/// Judges `pairs` and `capped` as the rounding of the choice `ids` (T, K, by rank) to multiples of
/// `tile` by `rule`, where tokens rank by `ranking_scores` (T, E) and only its choosers come first.
///
/// The ranking scores are taken as they are, of whatever [`Ranking`](super::Ranking).
pub fn certify<S: Element>(
    ranking_scores: ArrayView2<S>,
    ids: ArrayView2<ExpertId>,
    tile: usize,
    rule: Rule,
    pairs: &[(TokenId, ExpertId)],
    capped: &[ExpertId],
) -> Result<(), Vec<Violation>> {
    let experts = read(ranking_scores, ids, tile, pairs, capped)?;
    let tokens = ranking_scores.nrows();
    let mut violations = Vec::new();
    let mut moved = 0i128;
    for expert in &experts {
        let &Expert { id, frequency, count, .. } = expert;
        let before = violations.len();
        if count % tile != 0 {
            violations.push(Violation::NotMultiple { expert: id, count, tile });
        }
        if count.abs_diff(frequency) >= tile {
            violations.push(Violation::TooFar { expert: id, frequency, count, tile });
        }
        // Only a count that is one of the two multiples can be compared with the rule's.
        if violations.len() == before {
            violations.extend(frequency::judge(expert, tokens, tile, rule, moved));
        }
        moved += count as i128 - frequency as i128;

        let last_kept = expert.ranked.iter().rev().find(|(_, kept)| *kept);
        let first_left_out = expert.ranked.iter().find(|(_, kept)| !*kept);
        if let (Some(&(kept, _)), Some(&(left_out, _))) = (last_kept, first_left_out)
            && left_out.above(kept)
        {
            violations.push(Violation::Order { expert: id, kept, left_out });
        }
    }
    if rule == Rule::Balance && capped.is_empty() && 2 * moved.unsigned_abs() > tile as u128 {
        violations.push(Violation::Unbalanced { sum: moved, tile });
    }
    if violations.is_empty() { Ok(()) } else { Err(violations) }
}

/// Everything that must hold before experts can be judged one by one.
fn read<S: Element>(
    ranking_scores: ArrayView2<S>,
    ids: ArrayView2<ExpertId>,
    tile: usize,
    pairs: &[(TokenId, ExpertId)],
    capped: &[ExpertId],
) -> Result<Vec<Expert>, Vec<Violation>> {
    let (tokens, experts) = ranking_scores.dim();
    if tile == 0 {
        return Err(vec![Violation::Size { what: "M", expected: 1, found: 0 }]);
    }
    if ids.nrows() != tokens {
        return Err(vec![Violation::Size { what: "T of the choice", expected: tokens, found: ids.nrows() }]);
    }
    let mut violations = Vec::new();
    for ((token, expert), score) in ranking_scores.indexed_iter() {
        let value = score.to_f64();
        if !(0.0..f64::INFINITY).contains(&value) {
            violations.push(Violation::Score { token, expert, value });
        }
    }
    let chosen = ids.indexed_iter().enumerate().map(|(at, ((token, _), &expert))| (at, TokenId(token as u32), expert));
    let chose = flags(tokens, experts, ["token of choice", "expert of choice"], chosen, &mut violations);
    let given = pairs.iter().enumerate().map(|(at, &(token, expert))| (at, token, expert));
    let kept = flags(tokens, experts, ["token of pair", "expert of pair"], given, &mut violations);
    let mut is_capped = vec![false; experts];
    for (at, &expert) in capped.iter().enumerate() {
        match is_capped.get_mut(expert.index()) {
            None => violations.push(Violation::OutOfRange { what: "capped expert", at, id: expert.0, limit: experts }),
            Some(flag) => *flag = true,
        }
        if at > 0 && capped[at - 1] >= expert {
            violations.push(Violation::NotCapped { expert, reason: "the list does not ascend" });
        }
    }
    if !violations.is_empty() {
        return Err(violations);
    }

    let read_expert = |expert: usize| {
        let of = |flags: &[bool], token: usize| flags[token * experts + expert];
        let mut ranked: Vec<_> = (0..tokens)
            .map(|token| {
                let score = ranking_scores[(token, expert)].to_f64();
                (Key { chose: of(&chose, token), score, token: TokenId(token as u32) }, of(&kept, token))
            })
            .collect();
        ranked.sort_by(|(a, _), (b, _)| b.above(*a).cmp(&a.above(*b)));
        Expert {
            id: ExpertId(expert as u32),
            frequency: ranked.iter().filter(|(key, _)| key.chose).count(),
            count: ranked.iter().filter(|(_, kept)| *kept).count(),
            capped: is_capped[expert],
            ranked,
        }
    };
    Ok((0..experts).map(read_expert).collect())
}

/// (T, E) which pairs a list holds, each once.
fn flags(
    tokens: usize,
    experts: usize,
    [token_of, expert_of]: [&'static str; 2],
    list: impl Iterator<Item = (usize, TokenId, ExpertId)>,
    violations: &mut Vec<Violation>,
) -> Vec<bool> {
    let mut flags = vec![false; tokens * experts];
    for (at, token, expert) in list {
        if token.index() >= tokens {
            violations.push(Violation::OutOfRange { what: token_of, at, id: token.0, limit: tokens });
        } else if expert.index() >= experts {
            violations.push(Violation::OutOfRange { what: expert_of, at, id: expert.0, limit: experts });
        } else if std::mem::replace(&mut flags[token.index() * experts + expert.index()], true) {
            violations.push(Violation::Duplicate { token, expert });
        }
    }
    flags
}
