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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::rounding::Multiples;
    use crate::shape::TokenId;

    /// What is decided of experts with these multiples, ranked tokens and counts once the bug is planted: the
    /// counts and the rankings.
    fn planted(mutant: Mutant, experts: &[([usize; 3], u32, usize)]) -> (Vec<usize>, Vec<Vec<u32>>) {
        let of_expert = |&([lower, frequency, upper], tokens, count): &([usize; 3], u32, usize)| {
            let multiples = Multiples { lower, frequency, upper };
            let ranked = (0..tokens).map(TokenId).collect();
            (Candidates { multiples, ranked, sums: [0.0; 3] }, Decision { count, capped: false })
        };
        let (mut candidates, mut decisions): (Vec<_>, Vec<_>) = experts.iter().map(of_expert).unzip();
        plant(mutant, &mut candidates, &mut decisions);
        let ranked = candidates.iter().map(|of_expert| of_expert.ranked.iter().map(|token| token.0).collect());
        (decisions.iter().map(|decision| decision.count).collect(), ranked.collect())
    }

    fn in_order(tokens: &[u32]) -> Vec<Vec<u32>> {
        tokens.iter().map(|&tokens| (0..tokens).collect()).collect()
    }

    /// hi beyond T and a frequency that is a multiple allow no other multiple.
    #[test]
    fn the_first_expert_with_two_multiples_goes_to_the_other_one() {
        let no_other = [([4, 5, 8], 6, 4), ([4, 4, 4], 4, 4)];
        for (lower, upper) in [(4, 8), (0, 4)] {
            for (count, other) in [(lower, upper), (upper, lower)] {
                let open = ([lower, upper - 1, upper], upper as u32, count);
                let experts = [no_other[0], no_other[1], open, open];
                let expected = (vec![4, 4, other, count], in_order(&[6, 4, upper as u32, upper as u32]));
                assert_eq!(planted(Mutant::OneTileOff, &experts), expected, "{lower} to {upper}");
            }
        }
    }

    #[test]
    fn the_first_token_of_the_first_expert_with_some_kept_and_some_not_is_dropped_for_the_next() {
        let experts = [([0, 1, 4], 4, 0), ([4, 4, 4], 4, 4), ([2, 3, 4], 4, 2), ([2, 3, 4], 4, 2)];
        let (counts, ranked) = planted(Mutant::WrongTokenDropped, &experts);
        assert_eq!(counts, [0, 4, 2, 2]);
        assert_eq!(ranked, [vec![0, 1, 2, 3], vec![0, 1, 2, 3], vec![1, 2, 0, 3], vec![0, 1, 2, 3]]);
        let (_, ranked) = planted(Mutant::WrongTokenDropped, &[([1, 1, 1], 2, 1)]);
        assert_eq!(ranked, [[1, 0]]);
    }

    #[test]
    fn the_first_expert_with_tokens_loses_one() {
        let experts = [([0, 1, 4], 4, 0), ([4, 5, 8], 8, 4), ([4, 5, 8], 8, 8)];
        assert_eq!(planted(Mutant::NotMultiple, &experts), (vec![0, 3, 8], in_order(&[4, 8, 8])));
    }

    #[test]
    fn a_mutant_of_something_else_leaves_the_decisions() {
        let experts = [([4, 5, 8], 8, 4), ([4, 6, 8], 8, 8)];
        for mutant in Mutant::ALL
            .iter()
            .copied()
            .filter(|mutant| !matches!(mutant, Mutant::OneTileOff | Mutant::WrongTokenDropped | Mutant::NotMultiple))
        {
            assert_eq!(planted(mutant, &experts), (vec![4, 8], in_order(&[8, 8])), "{mutant:?}");
        }
    }
}
