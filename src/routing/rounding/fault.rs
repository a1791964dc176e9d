//! Where a [`Mutant`] takes hold of token rounding: between what the rule decided and the pairs.

use super::ranking::Candidates;
use super::rules::Decision;
use crate::mutant::Mutant;

/// Plants a bug in the first expert that allows it.
pub(super) fn plant(mutant: Mutant, candidates: &mut [Candidates], decisions: &mut [Decision]) {
    for (Candidates { multiples, ranked, .. }, decision) in candidates.iter_mut().zip(decisions) {
        let other = multiples.lower + multiples.upper - decision.count;
        let planted = match mutant {
            Mutant::OneTileOff if other != decision.count && other <= ranked.len() => {
                decision.count = other;
                true
            }
            // The front of the ranking is lost, and the first of those that should have gone stays.
            Mutant::WrongTokenDropped if (1..ranked.len()).contains(&decision.count) => {
                ranked[..=decision.count].rotate_left(1);
                true
            }
            Mutant::NotMultiple if decision.count > 0 => {
                decision.count -= 1;
                true
            }
            _ => false,
        };
        if planted {
            return;
        }
    }
}
