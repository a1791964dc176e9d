//! Named cases of the rules, and faults that the certificate names.

use ndarray::{Array2, array, s};
use sonicmoe::routing::rounding::certificate::{Key, Violation, certify};
use sonicmoe::routing::rounding::scores::KeptScores;
use sonicmoe::routing::rounding::{Ranking, Rounded, Rule, TokenRounding, draw, ranking_scores};
use sonicmoe::routing::{Choice, top_k};
use sonicmoe::{Error, ExpertId, TokenId};

use super::super::{experts, only};

/// A choice with K = 1 in which expert e is chosen by `frequency[e]` tokens.
fn chosen_by(frequency: &[usize], more_tokens: usize) -> (Array2<f64>, Choice) {
    let ids = frequency.iter().enumerate().flat_map(|(expert, &f)| vec![ExpertId(expert as u32); f]);
    let spare = ExpertId(frequency.len() as u32);
    let ids: Vec<_> = ids.chain(vec![spare; more_tokens]).collect();
    let p = Array2::from_shape_fn((ids.len(), frequency.len() + 1), |(token, expert)| {
        if ids[token].index() == expert { 0.5 } else { 0.5 / frequency.len() as f64 }
    });
    let ids = Array2::from_shape_vec((ids.len(), 1), ids).expect("K = 1");
    (p, Choice::new(frequency.len() + 1, ids).expect("distinct ids in range"))
}

/// Rounds frequencies among as many tokens as there are plus `more_tokens`, which choose one
/// further expert (left out of the result).
fn round(frequency: &[usize], more_tokens: usize, tile: usize, rule: Rule) -> (Vec<usize>, Vec<ExpertId>) {
    let (p, choice) = chosen_by(frequency, more_tokens);
    let rounding = TokenRounding { rule, ..TokenRounding::new(tile) };
    let Rounded { expert_frequency, mut capped, .. } = rounding.round(p.view(), &choice).expect("probabilities");
    capped.retain(|expert| expert.index() < frequency.len());
    (expert_frequency[..frequency.len()].to_vec(), capped)
}

#[test]
fn a_name_gives_its_rule_and_its_scores_back() {
    for rule in Rule::ALL {
        assert_eq!(rule.name().parse::<Rule>().unwrap(), rule);
    }
    for scores in KeptScores::ALL {
        assert_eq!(scores.name().parse::<KeptScores>().unwrap(), scores);
    }
    assert!("".parse::<Rule>().is_err() && "".parse::<KeptScores>().is_err());
}

const E0: ExpertId = ExpertId(0);
const E1: ExpertId = ExpertId(1);

#[test]
fn five_tokens_in_tiles_of_four() -> sonicmoe::Result<()> {
    let logits = array![[0.0f32], [1.0], [2.0], [3.0], [4.0]];
    for (rule, count, capped) in [(Rule::Up, 4, vec![E0]), (Rule::Down, 4, vec![]), (Rule::Nearest, 4, vec![])] {
        let (_, rounded) = TokenRounding { rule, ..TokenRounding::new(4) }.route(logits.view(), 1)?;
        assert_eq!((rounded.expert_frequency, rounded.capped), (vec![count], capped), "{rule}");
        // With one expert p = 1 for every token: the last id loses the tie.
        assert_eq!(rounded.routing.pair_token(), [0, 1, 2, 3].map(TokenId));
    }
    Ok(())
}

#[test]
fn an_expert_goes_up_by_frequency_where_its_own_draw_says_so() -> sonicmoe::Result<()> {
    let (p, choice) = chosen_by(&[1, 2, 3, 2], 8);
    for seed in 0..32 {
        let rounding = TokenRounding { rule: Rule::StochasticByFrequency, seed, ..TokenRounding::new(4) };
        let counts = rounding.round(p.view(), &choice)?.expert_frequency;
        for (expert, probability) in [0.25, 0.5, 0.75, 0.5].into_iter().enumerate() {
            let up = draw(seed, ExpertId(expert as u32)) < probability;
            assert_eq!(counts[expert], if up { 4 } else { 0 }, "expert {expert} of seed {seed}");
        }
    }
    Ok(())
}

#[test]
fn the_nearest_multiple_wins_and_ties_go_down_or_to_the_even_one() {
    let frequency = [1, 2, 3, 4, 5, 6, 7, 10];
    assert_eq!(round(&frequency, 0, 4, Rule::Nearest).0, [0, 0, 4, 4, 4, 4, 8, 8]);
    assert_eq!(round(&frequency, 0, 4, Rule::NearestHalfToEven).0, [0, 0, 4, 4, 4, 8, 8, 8]);
    // An odd tile has no ties.
    assert_eq!(round(&[1, 2, 3, 4, 5], 0, 3, Rule::Nearest).0, [0, 3, 3, 3, 6]);
    assert_eq!(round(&[1, 2, 3, 4, 5], 0, 3, Rule::NearestHalfToEven).0, [0, 3, 3, 3, 6]);
}

/// Of 2, 6, 10 and 14 in tiles of 4 two ties lie above an even multiple and two above an odd one.
#[test]
fn the_certificate_tells_ties_that_go_down_from_ties_that_go_to_the_even_multiple() {
    let (p, choice) = chosen_by(&[2, 6, 10, 14], 0);
    let ranking = ranking_scores(p.view(), &choice, Ranking::default()).unwrap();
    for (rule, other) in
        [(Rule::Nearest, Rule::NearestHalfToEven), (Rule::NearestHalfToEven, Rule::Nearest), (Rule::Nearest, Rule::Up)]
    {
        let rounded = TokenRounding { rule, ..TokenRounding::new(4) }.round(p.view(), &choice).unwrap();
        let judged = |by| certify(ranking.view(), choice.ids(), 4, by, &rounded.pairs(), &rounded.capped);
        assert_eq!(judged(rule), Ok(()), "{rule}");
        assert!(judged(other).is_err(), "{rule} passes for {other}");
    }
}

#[test]
fn a_multiple_is_kept_by_every_rule() {
    for rule in Rule::ALL {
        assert_eq!(round(&[0, 4, 8, 12], 0, 4, rule), (vec![0, 4, 8, 12], vec![]), "{rule}");
        assert_eq!(round(&[3, 1, 2], 5, 1, rule), (vec![3, 1, 2], vec![]), "{rule}");
    }
}

#[test]
fn fewer_tokens_than_a_tile_leave_nothing() {
    for (rule, capped) in
        [(Rule::Up, vec![E0]), (Rule::Nearest, vec![E0]), (Rule::Balance, vec![E0]), (Rule::Down, vec![])]
    {
        assert_eq!(round(&[100], 27, 128, rule), (vec![0], capped), "{rule}");
    }
    assert_eq!(round(&[100], 28, 128, Rule::Up), (vec![128], vec![]));
    for rule in Rule::ALL {
        assert_eq!(round(&[3], 0, usize::MAX, rule).0, [0], "{rule}");
    }
}

/// |Σ(count − f)| ≤ M/2 holds for all experts together; the same bound for each of them, as the
/// paper prints it, does not.
#[test]
fn balance_moves_one_expert_by_almost_a_tile() {
    let (counts, capped) = round(&[63, 1, 1], 300, 128, Rule::Balance);
    // z: −63, then −64 (down wins the tie with +64), then up by 127 to +63.
    assert_eq!((counts, capped), (vec![0, 0, 128], vec![]));
}

#[test]
fn who_chose_an_expert_ranks_first_whatever_the_scores() -> sonicmoe::Result<()> {
    // Tokens 0 and 1 have the larger p at expert 1, tokens 2 and 3 chose it (a given choice).
    let p = array![[0.6f32, 0.4], [0.6, 0.4], [0.9999, 0.0001], [0.9999, 0.0001]];
    let choice = Choice::new(2, experts(&[[0], [0], [1], [1]]))?;
    let round = |tile, ranking| {
        let rounding = TokenRounding { rule: Rule::Down, ranking, ..TokenRounding::new(tile) };
        rounding.round(p.view(), &choice).map(|rounded| rounded.pairs())
    };
    let expected = [(0, 0), (1, 0), (2, 1), (3, 1)].map(|(t, e)| (TokenId(t), ExpertId(e)));
    assert_eq!(round(2, Ranking::Probability)?, expected);
    // Up to three: the better of the others joins.
    let up = TokenRounding { rule: Rule::Up, ..TokenRounding::new(3) }.round(p.view(), &choice)?;
    let to = |expert| up.pairs().into_iter().filter(|pair| pair.1 == expert).map(|pair| pair.0.0).collect::<Vec<_>>();
    assert_eq!(to(E0), [0, 1, 2], "of 2 and 3, which tie, the smaller id");
    assert_eq!(to(ExpertId(1)), [0, 2, 3]);
    Ok(())
}

#[test]
fn the_rankings_differ_where_a_token_is_undecided_between_many() -> sonicmoe::Result<()> {
    // At expert 0, token 0 has the larger p; token 1 has the larger share of its own top 2.
    let p = array![[0.5f32, 0.4, 0.1], [0.45, 0.1, 0.45]];
    let choice = Choice::new(3, experts(&[[0, 1], [0, 1]]))?;
    let kept = |ranking| -> sonicmoe::Result<_> {
        let ranked = sonicmoe::routing::rounding::ranking_scores(p.view(), &choice, ranking)?;
        Ok(ranked[(0, 0)] > ranked[(1, 0)])
    };
    assert!(kept(Ranking::Probability)?);
    assert!(!kept(Ranking::Renormalized)?);
    Ok(())
}

#[test]
fn scores_of_zero_are_never_rounded_up_for_nor_kept_from_adding() -> sonicmoe::Result<()> {
    // K = 1, tile 2, three choosers: the third is at stake. Added tokens score 0: always up.
    let choice = Choice::new(2, experts(&[[0], [0], [0], [1]]))?;
    let count = |p: &Array2<f64>, seed| -> sonicmoe::Result<_> {
        let rounding = TokenRounding { rule: Rule::StochasticByScores, seed, ..TokenRounding::new(2) };
        Ok(rounding.round(p.view(), &choice)?.expert_frequency[0])
    };
    let free = array![[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]];
    let worthless = array![[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.5, 0.5]];
    let nothing = array![[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]];
    for seed in 0..200 {
        assert_eq!(count(&free, seed)?, 4);
        assert_eq!(count(&worthless, seed)?, 2);
        assert_eq!(count(&nothing, seed)?, 2);
    }
    Ok(())
}

#[test]
fn what_cannot_be_rounded_is_refused_by_name() -> sonicmoe::Result<()> {
    let p = array![[0.6f32, 0.4], [0.3, 0.7]];
    let choice = top_k(p.view(), 1)?;
    let message = |result: Result<Rounded, Error>| result.expect_err("refused").to_string();
    assert_eq!(
        message(TokenRounding::new(0).round(p.view(), &choice)),
        "M is 0, but tokens are rounded to multiples of at least 1"
    );
    assert!(message(TokenRounding::new(2).round(p.slice(s![..1, ..]), &choice)).starts_with("tensor `p`"));
    let ranked = ranking_scores(p.slice(s![..1, ..]), &choice, Ranking::Probability);
    assert!(ranked.unwrap_err().to_string().starts_with("tensor `p` has shape [1, 2], expected [2, 2]"));
    for wrong in [f32::NAN, -0.25, f32::INFINITY] {
        let mut p = p.clone();
        p[(1, 0)] = wrong;
        let message = message(TokenRounding::new(2).round(p.view(), &choice));
        assert!(message.starts_with(&format!("ranking score of token 1, expert 0 is {wrong}")), "{message}");
    }
    Ok(())
}

fn pairs(tokens: &[u32], expert: ExpertId) -> Vec<(TokenId, ExpertId)> {
    tokens.iter().map(|&token| (TokenId(token), expert)).collect()
}

#[test]
fn the_certificate_names_each_kind_of_fault() -> sonicmoe::Result<()> {
    // Expert 0 has choosers 0 to 4, best first; tokens 5 to 7 chose expert 1.
    let p = Array2::from_shape_fn((8, 2), |(token, expert)| {
        if (token < 5) == (expert == 0) { 0.9 - token as f64 / 64.0 } else { 0.1 + token as f64 / 64.0 }
    });
    let ids = experts(&[[0], [0], [0], [0], [0], [1], [1], [1]]);
    let judge = |rule, of_0: &[u32], of_1: &[u32], capped: &[u32]| {
        let capped: Vec<_> = capped.iter().map(|&expert| ExpertId(expert)).collect();
        certify(p.view(), ids.view(), 4, rule, &[pairs(of_0, E0), pairs(of_1, E1)].concat(), &capped)
    };
    let key = |token: u32, expert| Key {
        chose: (token < 5) == (expert == 0),
        score: p[(token as usize, expert)],
        token: TokenId(token),
    };
    assert_eq!(judge(Rule::Nearest, &[0, 1, 2, 3], &[4, 5, 6, 7], &[]), Ok(()));
    assert_eq!(
        only(judge(Rule::Nearest, &[0, 1, 2], &[4, 5, 6, 7], &[])),
        Violation::NotMultiple { expert: E0, count: 3, tile: 4 }
    );
    assert_eq!(
        only(judge(Rule::Nearest, &[], &[4, 5, 6, 7], &[])),
        Violation::TooFar { expert: E0, frequency: 5, count: 0, tile: 4 }
    );
    let at_a_multiple = |of_0: &[u32]| {
        let (p, ids) = (Array2::from_elem((8, 2), 0.5), experts(&[[0], [0], [0], [0], [1], [1], [1], [1]]));
        certify(p.view(), ids.view(), 4, Rule::Up, &[pairs(of_0, E0), pairs(&[4, 5, 6, 7], E1)].concat(), &[])
    };
    assert_eq!(at_a_multiple(&[0, 1, 2, 3]), Ok(()));
    for of_0 in [&[][..], &[0, 1, 2, 3, 4, 5, 6, 7]] {
        let far = Violation::TooFar { expert: E0, frequency: 4, count: of_0.len(), tile: 4 };
        assert_eq!(only(at_a_multiple(of_0)), far);
    }
    let dropped_wrongly = only(judge(Rule::Nearest, &[0, 1, 2, 4], &[4, 5, 6, 7], &[]));
    assert_eq!(dropped_wrongly, Violation::Order { expert: E0, kept: key(4, 0), left_out: key(3, 0) });
    assert_eq!(
        dropped_wrongly.to_string(),
        "expert 0 keeps token 4 (chose it, score 0.8375), but leaves out token 3 (chose it, score 0.853125), which ranks above"
    );
    let added_too_early = only(judge(Rule::Nearest, &[0, 1, 2, 7], &[4, 5, 6, 7], &[]));
    assert_eq!(added_too_early, Violation::Order { expert: E0, kept: key(7, 0), left_out: key(3, 0) });
    let added_wrongly = only(judge(Rule::Nearest, &[0, 1, 2, 3], &[3, 5, 6, 7], &[]));
    assert_eq!(added_wrongly, Violation::Order { expert: E1, kept: key(3, 1), left_out: key(4, 1) });
    assert_eq!(
        only(judge(Rule::Nearest, &[0, 1, 2, 3], &[], &[])),
        Violation::Rule {
            expert: E1,
            rule: Rule::Nearest,
            frequency: 3,
            count: 0,
            expected: 4,
            reason: "the nearer multiple"
        }
    );
    assert!(
        matches!(only(judge(Rule::Down, &[0, 1, 2, 3], &[4, 5, 6, 7], &[])), Violation::Rule { expert, .. } if expert == E1)
    );
    assert_eq!(judge(Rule::Up, &[0, 1, 2, 3, 4, 5, 6, 7], &[4, 5, 6, 7], &[]), Ok(()));
    assert!(matches!(only(judge(Rule::Up, &[0, 1, 2, 3], &[4, 5, 6, 7], &[])), Violation::Rule { expected: 8, .. }));
    let reason = "it has room for the larger multiple";
    assert_eq!(only(judge(Rule::Up, &[0, 1, 2, 3], &[4, 5, 6, 7], &[0])), Violation::NotCapped { expert: E0, reason });
    assert_eq!(
        only(judge(Rule::Nearest, &[0, 1, 2, 3, 0], &[4, 5, 6, 7], &[])),
        Violation::Duplicate { token: TokenId(0), expert: E0 }
    );
    assert_eq!(
        only(judge(Rule::Nearest, &[0, 1, 2, 8], &[4, 5, 6, 7], &[])),
        Violation::OutOfRange { what: "token of pair", at: 3, id: 8, limit: 8 }
    );
    assert_eq!(
        only(judge(Rule::Nearest, &[0, 1, 2, 3], &[4, 5, 6, 7], &[2])),
        Violation::OutOfRange { what: "capped expert", at: 0, id: 2, limit: 2 }
    );
    // Seven tokens that all chose expert 0 are not eight.
    let capped = |rule, listed: &[ExpertId]| {
        let (p, ids) = (Array2::from_elem((7, 1), 0.5), Array2::from_elem((7, 1), E0));
        certify(p.view(), ids.view(), 4, rule, &pairs(&[0, 1, 2, 3], E0), listed)
    };
    assert_eq!(capped(Rule::Up, &[E0]), Ok(()));
    let reason = "the expert is capped and must be listed";
    assert_eq!(
        only(capped(Rule::Up, &[])),
        Violation::Rule { expert: E0, rule: Rule::Up, frequency: 7, count: 4, expected: 4, reason }
    );
    let reason = "the rule chooses the smaller multiple";
    assert_eq!(only(capped(Rule::Down, &[E0])), Violation::NotCapped { expert: E0, reason });
    // −1 and +1: balanced. −1 and −3 leave −4, more than half a tile.
    assert_eq!(judge(Rule::Balance, &[0, 1, 2, 3], &[4, 5, 6, 7], &[]), Ok(()));
    let unbalanced = judge(Rule::Balance, &[0, 1, 2, 3], &[], &[]).unwrap_err();
    assert_eq!(unbalanced.len(), 2);
    assert_eq!(unbalanced[1], Violation::Unbalanced { sum: -4, tile: 4 });
    // Half a tile is balanced: of two choosers both, or none.
    let (p, ids) = (Array2::from_elem((4, 2), 0.5), experts(&[[0], [0], [1], [1]]));
    let of_two = |of_0: &[u32], of_1: &[u32]| {
        certify(p.view(), ids.view(), 4, Rule::Balance, &[pairs(of_0, E0), pairs(of_1, E1)].concat(), &[])
    };
    assert_eq!(of_two(&[], &[0, 1, 2, 3]), Ok(()));
    assert!(of_two(&[], &[]).is_err() && of_two(&[0, 1, 2, 3], &[0, 1, 2, 3]).is_err());
    let one = |tokens: &[u32]| {
        let ids = experts(&[[0], [0]]);
        certify(p.slice(s![..2, ..1]), ids.view(), 4, Rule::Balance, &pairs(tokens, E0), &[])
    };
    assert_eq!(one(&[]), Ok(()));
    assert_eq!(
        only(certify(p.slice(s![..2, ..]), experts(&[[0]; 3]).view(), 4, Rule::Balance, &[], &[])),
        Violation::Size { what: "T of the choice", expected: 2, found: 3 }
    );
    // −5 is more than half of 8, however little beyond it.
    let p = Array2::from_elem((5, 1), 0.5);
    let found = certify(p.view(), experts(&[[0]; 5]).view(), 8, Rule::Balance, &[], &[]).unwrap_err();
    assert!(found.contains(&Violation::Unbalanced { sum: -5, tile: 8 }), "{found:?}");
    Ok(())
}

/// What is at stake, 10⁻¹⁵, is less than sums of the kept scores in another order may differ by: an engine may
/// see it as nothing or as something. 10⁻³ is something.
#[test]
fn the_certificate_rests_nothing_on_scores_that_the_roundoff_of_sums_hides() {
    let ids = experts(&[[0], [0], [0], [0], [0], [1], [1], [1]]);
    for (at_stake, may_stay) in [(1e-15, true), (1e-3, false)] {
        let p = Array2::from_shape_fn((8, 2), |at| match at {
            (4, 0) => at_stake,
            (token, 0) => f64::from(u8::from(token < 4)),
            (token, _) => 0.5 - token as f64 / 64.0,
        });
        let judge = |of_0: u32| {
            let of_1 = [5, 6, 7, 0].map(|token| (TokenId(token), ExpertId(1)));
            let pairs: Vec<_> = (0..of_0).map(|token| (TokenId(token), E0)).chain(of_1).collect();
            certify(p.view(), ids.view(), 4, Rule::StochasticByScores, &pairs, &[])
        };
        assert_eq!(judge(8), Ok(()), "{at_stake}");
        assert_eq!(judge(4).is_ok(), may_stay, "{at_stake}: {:?}", judge(4));
    }
}

/// ChaCha8 from its definition, as a device would write it.
fn chacha8_block(seed: u64, expert: u32) -> [u32; 16] {
    let mut input = [0u32; 16];
    for (word, bytes) in input.iter_mut().zip(b"expand 32-byte k".chunks_exact(4)) {
        *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    [input[4], input[5], input[14]] = [seed as u32, (seed >> 32) as u32, expert];
    let mut x = input;
    let mut quarter_round = |a: usize, b: usize, c: usize, d: usize| {
        for (add_to, other, rotated, by) in [(a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)] {
            x[add_to] = x[add_to].wrapping_add(x[other]);
            x[rotated] = (x[rotated] ^ x[add_to]).rotate_left(by);
        }
    };
    for _ in 0..4 {
        (0..4).for_each(|i| quarter_round(i, 4 + i, 8 + i, 12 + i));
        (0..4).for_each(|i| quarter_round(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4));
    }
    std::array::from_fn(|i| x[i].wrapping_add(input[i]))
}

#[test]
fn a_draw_is_the_first_53_bits_of_a_chacha8_block() {
    // The published key stream of ChaCha8 for a key and a nonce of zeros.
    assert_eq!(
        chacha8_block(0, 0)[..2].iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>(),
        [0x3e, 0x00, 0xef, 0x2f, 0x89, 0x5f, 0x40, 0xd6]
    );
    for seed in [0, 1, 0x0123_4567_89ab_cdef, u64::MAX] {
        for expert in [0, 1, 255, 256, u32::MAX] {
            let [low, high, ..] = chacha8_block(seed, expert);
            let bits = u64::from(high) << 21 | u64::from(low) >> 11;
            assert_eq!(draw(seed, ExpertId(expert)), bits as f64 * f64::EPSILON / 2.0, "seed {seed}, expert {expert}");
        }
    }
}
