//! Routing metadata are a stable sort with its inverse; the certificate tells any other arrays.

use proptest::prelude::*;
use sonicmoe::routing::certificate::{RoutingArrays, Violation, certify_metadata};
use sonicmoe::routing::{Routing, top_k};
use sonicmoe::{ExpertId, TokenId};

use super::{all, logits_and_k, only, random};

type Pairs = Vec<(TokenId, ExpertId)>;

/// Any distinct pairs in any order: tokens and experts without pairs included.
fn pairs() -> impl Strategy<Value = (usize, usize, Pairs)> {
    (0usize..20, 1usize..12).prop_flat_map(|(tokens, experts)| {
        let every: Vec<_> =
            (0..tokens * experts).map(|at| (TokenId((at / experts) as u32), ExpertId((at % experts) as u32))).collect();
        let most = every.len();
        (Just(tokens), Just(experts), prop::sample::subsequence(every, 0..=most).prop_shuffle())
    })
}

proptest! {
    #![proptest_config(random(256))]

    #[test]
    fn the_metadata_of_any_pairs_are_certified((tokens, experts, pairs) in pairs()) {
        let routing = Routing::new(tokens, experts, pairs.iter().copied())?;
        prop_assert_eq!(certify_metadata(tokens, experts, &pairs, RoutingArrays::from(&routing)), Ok(()));
    }

    #[test]
    fn a_choice_gives_the_pairs_token_by_token_in_rank_order((logits, k) in logits_and_k(20, 12)) {
        let choice = top_k(logits.view(), k)?;
        let pairs: Pairs =
            choice.ids().indexed_iter().map(|((token, _), &expert)| (TokenId(token as u32), expert)).collect();
        let routing = choice.routing();
        prop_assert_eq!(routing.pair_expert(), pairs.iter().map(|pair| pair.1).collect::<Vec<_>>());
        prop_assert_eq!(certify_metadata(choice.tokens(), choice.experts(), &pairs, (&routing).into()), Ok(()));
    }

    #[test]
    fn one_changed_entry_of_any_array_is_found(
        (tokens, experts, pairs) in pairs(), which in 0usize..6, at in any::<prop::sample::Index>(), to in 0u32..40
    ) {
        let mut arrays = Owned::of(&Routing::new(tokens, experts, pairs.iter().copied())?);
        let array = match which {
            0 => &mut arrays.expert_offsets,
            1 => &mut arrays.row_token,
            2 => &mut arrays.row_pair,
            3 => &mut arrays.pair_row,
            4 => &mut arrays.token_offsets,
            _ => &mut arrays.token_rows,
        };
        prop_assume!(!array.is_empty());
        let at = at.index(array.len());
        prop_assume!(array[at] != to);
        array[at] = to;
        prop_assert!(arrays.judge(tokens, experts, &pairs).is_err());
    }
}

/// The arrays as a device might hand them back: free to be wrong.
#[derive(Clone)]
struct Owned {
    expert_offsets: Vec<u32>,
    row_token: Vec<u32>,
    row_pair: Vec<u32>,
    pair_row: Vec<u32>,
    token_offsets: Vec<u32>,
    token_rows: Vec<u32>,
}

impl Owned {
    fn of(routing: &Routing) -> Self {
        Self {
            expert_offsets: routing.expert_offsets().to_vec(),
            row_token: routing.row_token().iter().map(|token| token.0).collect(),
            row_pair: routing.row_pair().to_vec(),
            pair_row: routing.pair_row().to_vec(),
            token_offsets: routing.token_offsets().to_vec(),
            token_rows: routing.token_rows().to_vec(),
        }
    }

    fn judge(&self, tokens: usize, experts: usize, pairs: &Pairs) -> Result<(), Vec<Violation>> {
        let row_token: Vec<_> = self.row_token.iter().map(|&token| TokenId(token)).collect();
        let arrays = RoutingArrays {
            expert_offsets: &self.expert_offsets,
            row_token: &row_token,
            row_pair: &self.row_pair,
            pair_row: &self.pair_row,
            token_offsets: &self.token_offsets,
            token_rows: &self.token_rows,
        };
        certify_metadata(tokens, experts, pairs, arrays)
    }
}

/// Tokens 0 and 1 go to experts 2 and 0, token 2 to expert 2: rows 1, 3 | | 0, 2, 4.
fn small() -> (Pairs, Owned) {
    let pairs = [(0, 2), (0, 0), (1, 2), (1, 0), (2, 2)].map(|(t, e)| (TokenId(t), ExpertId(e))).to_vec();
    let routing = Routing::new(3, 3, pairs.iter().copied()).expect("distinct pairs in range");
    assert_eq!(routing.row_pair(), [1, 3, 0, 2, 4]);
    let arrays = Owned::of(&routing);
    (pairs, arrays)
}

#[test]
fn an_offset_off_by_one_is_found() {
    let (pairs, mut arrays) = small();
    arrays.expert_offsets[1] = 1;
    assert_eq!(
        only(arrays.judge(3, 3, &pairs)),
        Violation::Count { array: "expert_offsets", what: "expert", id: 0, begin: 0, end: 1, pairs: 2 }
    );
    let (pairs, mut arrays) = small();
    arrays.token_offsets.iter_mut().for_each(|offset| *offset += 1);
    assert_eq!(
        only(arrays.judge(3, 3, &pairs)),
        Violation::Entry { array: "token_offsets", at: 0, expected: 0, found: 1 }
    );
}

#[test]
fn a_wrong_inverse_is_found() {
    let (pairs, mut arrays) = small();
    arrays.pair_row.swap(0, 4);
    assert_eq!(
        all(arrays.judge(3, 3, &pairs)),
        [
            Violation::Entry { array: "pair_row", at: 0, expected: 2, found: 4 },
            Violation::Entry { array: "pair_row", at: 4, expected: 4, found: 2 },
        ]
    );
}

#[test]
fn an_unstable_sort_is_found_though_all_else_is_right() {
    let (pairs, mut arrays) = small();
    // Rows 2 and 3, both of expert 2, change places in every array alike.
    arrays.row_pair.swap(2, 3);
    arrays.row_token.swap(2, 3);
    arrays.pair_row.swap(0, 2);
    for row in &mut arrays.token_rows {
        *row = match *row {
            2 => 3,
            3 => 2,
            other => other,
        };
    }
    assert_eq!(
        only(arrays.judge(3, 3, &pairs)),
        Violation::Unstable { array: "row_pair", what: "expert", id: 2, first: 2, second: 0 }
    );

    let (pairs, mut arrays) = small();
    arrays.token_rows.swap(0, 1);
    assert_eq!(
        only(arrays.judge(3, 3, &pairs)),
        Violation::Unstable { array: "token_rows", what: "token", id: 0, first: 1, second: 0 }
    );
}

#[test]
fn a_swapped_expert_is_found() {
    let (mut pairs, arrays) = small();
    (pairs[2].1, pairs[3].1) = (pairs[3].1, pairs[2].1);
    assert_eq!(
        all(arrays.judge(3, 3, &pairs)),
        [
            Violation::Foreign { array: "row_pair", what: "expert", id: 0, at: 1, pair: 3, owner: 2 },
            Violation::Foreign { array: "row_pair", what: "expert", id: 2, at: 3, pair: 2, owner: 0 },
        ]
    );
}

#[test]
fn a_row_of_another_token_is_found() {
    let (pairs, mut arrays) = small();
    arrays.row_token[2] = 1;
    assert_eq!(only(arrays.judge(3, 3, &pairs)), Violation::Entry { array: "row_token", at: 2, expected: 0, found: 1 });
}

#[test]
fn a_pair_that_two_rows_share_is_found() {
    let (pairs, mut arrays) = small();
    arrays.row_pair[4] = 2;
    assert_eq!(
        only(arrays.judge(3, 3, &pairs)),
        Violation::NotOneToOne { array: "row_pair", value: 2, first: 3, second: 4 }
    );
    arrays.row_pair[4] = 5;
    assert_eq!(only(arrays.judge(3, 3, &pairs)), Violation::OutOfRange { array: "row_pair", at: 4, id: 5, limit: 5 });
}

#[test]
fn wild_and_repeated_pairs_are_refused_and_found() {
    let (pairs, arrays) = small();
    let mut wild = pairs.clone();
    wild[1].1 = ExpertId(3);
    let expected = Violation::OutOfRange { array: "pair_expert", at: 1, id: 3, limit: 3 };
    assert_eq!(only(arrays.judge(3, 3, &wild)), expected);
    let refused = Routing::new(3, 3, wild).expect_err("refused").to_string();
    assert_eq!(refused, "pair 1 names expert 3, but ids end at 3 (exclusive)");

    let mut beyond = pairs.clone();
    beyond[2].0 = TokenId(3);
    let expected = Violation::OutOfRange { array: "pair_token", at: 2, id: 3, limit: 3 };
    assert_eq!(only(arrays.judge(3, 3, &beyond)), expected);
    let refused = Routing::new(3, 3, beyond).expect_err("refused").to_string();
    assert_eq!(refused, "pair 2 names token 3, but ids end at 3 (exclusive)");

    let mut repeated = pairs.clone();
    repeated[4] = pairs[0];
    let expected = Violation::Duplicate { token: 0, expert: 2, first: 0, second: 4 };
    assert_eq!(only(arrays.judge(3, 3, &repeated)), expected);
    let refused = Routing::new(3, 3, repeated).expect_err("refused").to_string();
    assert_eq!(refused, "token 0 is sent to expert 2 twice (pairs 0 and 4); a pair may appear once");
    // The last token is one of them.
    let last = [(TokenId(0), ExpertId(1)), (TokenId(2), ExpertId(1)), (TokenId(2), ExpertId(1))];
    let refused = Routing::new(3, 3, last).expect_err("refused").to_string();
    assert_eq!(refused, "token 2 is sent to expert 1 twice (pairs 1 and 2); a pair may appear once");
}

#[test]
fn arrays_of_the_wrong_length_are_found() {
    let (pairs, mut arrays) = small();
    arrays.pair_row.pop();
    arrays.expert_offsets.push(5);
    assert_eq!(
        all(arrays.judge(3, 3, &pairs)),
        [
            Violation::Length { array: "expert_offsets", expected: 4, found: 5 },
            Violation::Length { array: "pair_row", expected: 5, found: 4 },
        ]
    );
}
