//! Down or up: the rules that choose between the two multiples of M beside a count.

use std::fmt;
use std::str::FromStr;

use super::ranking::Candidates;
use super::{Multiples, TokenRounding, draw};
use crate::error::{Error, Result};
use crate::shape::ExpertId;

/// Which of lo and hi, f rounded down and up to a multiple of M, an expert keeps. If f is a
/// multiple itself every rule keeps f.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Rule {
    /// hi if hi − f < f − lo, else lo: a tie goes down.
    #[default]
    Nearest,
    /// The nearer one; a tie goes to the even multiple, as in upstream's code.
    NearestHalfToEven,
    /// hi with probability (f − lo) / M, so that the mean count is f.
    StochasticByFrequency,
    /// hi with probability (Σs − Σs_lo) / (Σs_hi − Σs_lo), the sums being over the first f, lo and
    /// hi scores of the ranking, so that the mean score sum is Σs; lo if Σs_hi ≤ Σs_lo. Where the
    /// ranking ends before hi, Σs_hi is over all of it (hi itself would be capped).
    StochasticByScores,
    /// Experts in id order, z the sum of the changes so far: hi if |hi − f + z| < |lo − f + z|,
    /// else lo. The sum of all changes stays within M/2; that of one expert may come near M.
    Balance,
    /// hi.
    Up,
    /// lo.
    Down,
}

impl Rule {
    /// Every rule.
    pub const ALL: [Self; 7] = [
        Self::Nearest,
        Self::NearestHalfToEven,
        Self::StochasticByFrequency,
        Self::StochasticByScores,
        Self::Balance,
        Self::Up,
        Self::Down,
    ];

    /// Whether the rule draws: whether its result depends on the seed.
    pub fn draws(self) -> bool {
        matches!(self, Self::StochasticByFrequency | Self::StochasticByScores)
    }

    /// The name used on the command line and in dumps.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nearest => "nearest_frequency_ties_down",
            Self::NearestHalfToEven => "nearest_frequency_half_to_even",
            Self::StochasticByFrequency => "stochastic_frequency",
            Self::StochasticByScores => "stochastic_scores",
            Self::Balance => "balance",
            Self::Up => "up",
            Self::Down => "down",
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Rule {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|rule| rule.name() == text)
            .ok_or_else(|| Error::unknown("token rounding", text, Self::ALL.map(Self::name)))
    }
}

/// How many tokens an expert keeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decision {
    pub count: usize,
    pub capped: bool,
}

/// Decides for every expert, in id order.
pub(super) fn decide(rounding: &TokenRounding, tokens: usize, experts: &[Candidates]) -> Vec<Decision> {
    let mut moved = 0; // z
    (0..)
        .map(ExpertId)
        .zip(experts)
        .map(|(expert, candidates)| {
            let Multiples { lower, frequency, upper } = candidates.multiples;
            let up = upper > lower && goes_up(rounding, expert, candidates, moved);
            let capped = up && upper > tokens;
            let count = if up && !capped { upper } else { lower };
            moved += count as i128 - frequency as i128;
            Decision { count, capped }
        })
        .collect()
}

/// Whether the rule chooses hi, for an f that is no multiple.
fn goes_up(rounding: &TokenRounding, expert: ExpertId, candidates: &Candidates, moved: i128) -> bool {
    let Multiples { lower, frequency, upper } = candidates.multiples;
    let [down_by, up_by] = [frequency - lower, upper - frequency];
    let draw = || draw(rounding.seed, expert);
    match rounding.rule {
        Rule::Nearest => up_by < down_by,
        Rule::NearestHalfToEven => up_by < down_by || (up_by == down_by && (upper / rounding.tile).is_multiple_of(2)),
        Rule::StochasticByFrequency => draw() < down_by as f64 / rounding.tile as f64,
        Rule::StochasticByScores => {
            let [sum_lower, sum, sum_upper] = candidates.sums;
            sum_upper > sum_lower && draw() < (sum - sum_lower) / (sum_upper - sum_lower)
        }
        Rule::Balance => (up_by as i128 + moved).abs() < (moved - down_by as i128).abs(),
        Rule::Up => true,
        Rule::Down => false,
    }
}
