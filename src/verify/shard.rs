//! A campaign split over machines.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// The i-th of n parts of a campaign: every n-th case, from the i-th on, so that each part meets
/// every class of cases.
///
/// ```
/// use sonicmoe::verify::Shard;
/// let shard: Shard = "2/3".parse()?;
/// assert_eq!((0..8).filter(|index| shard.holds(*index)).collect::<Vec<_>>(), [1, 4, 7]);
/// # Ok::<(), sonicmoe::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// From 0.
    part: u64,
    parts: u64,
}

impl Shard {
    /// All of a campaign.
    pub const WHOLE: Self = Self { part: 0, parts: 1 };

    /// Whether the case with this index is in this part.
    pub fn holds(self, index: u64) -> bool {
        index % self.parts == self.part
    }

    /// How many of `cases` cases from `first` on are in this part.
    pub fn of(self, first: u64, cases: u64) -> u64 {
        let below = |end: u64| end / self.parts + u64::from(end % self.parts > self.part);
        below(first.saturating_add(cases)) - below(first)
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.part + 1, self.parts)
    }
}

impl FromStr for Shard {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let read = || {
            let (part, parts) = text.split_once('/')?;
            let (part, parts): (u64, u64) = (part.parse().ok()?, parts.parse().ok()?);
            (1..=parts).contains(&part).then(|| Self { part: part - 1, parts })
        };
        read().ok_or_else(|| Error::parse("shard", text, "write I/N with 1 ≤ I ≤ N, for example 3/8"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_is_in_exactly_one_part_and_the_parts_are_counted() {
        for parts in 1..=7u64 {
            let shards: Vec<Shard> = (1..=parts).map(|part| format!("{part}/{parts}").parse().unwrap()).collect();
            for index in 0..50 {
                assert_eq!(shards.iter().filter(|shard| shard.holds(index)).count(), 1);
            }
            for (first, cases) in [(0, 0), (0, 10), (3, 17), (20, 1)] {
                for shard in &shards {
                    let held = (first..first + cases).filter(|index| shard.holds(*index)).count() as u64;
                    assert_eq!(shard.of(first, cases), held, "{shard} of {first}, {cases}");
                }
            }
        }
    }

    #[test]
    fn what_is_no_part_is_refused() {
        for text in ["0/3", "4/3", "1", "1/0", "a/b", "-1/3", "1/3/5"] {
            assert!(text.parse::<Shard>().is_err(), "{text}");
        }
    }
}
