//! Scores of kept pairs: three semantics, with gradients at a fixed routing.

use ndarray::{Array2, array};
use proptest::prelude::*;
use sonicmoe::routing::rounding::scores::{self, KeptScores};
use sonicmoe::routing::rounding::{Ranking, TokenRounding};
use sonicmoe::routing::{Choice, Routing, top_k};
use sonicmoe::{ErrorClass, ExpertId, TokenId};

use super::super::{experts, random};
use super::{Start, rule, start};

proptest! {
    #![proptest_config(random(64))]

    #[test]
    fn dlogits_are_what_central_differences_say(
        start in start().prop_filter("few logits", |start| start.logits.len() <= 120), rule in rule(), seed in any::<u32>()
    ) {
        let Start { logits, choice, .. } = &start;
        let routing = start.round(rule, Ranking::Renormalized).routing;
        let logits = logits.mapv(f64::from);
        let g: Vec<_> = (0..routing.routed() as u32)
            .map(|pair| f64::from(seed.wrapping_mul(2 * pair + 1) >> 8) / f64::from(1 << 23) - 1.0)
            .collect();
        for semantics in KeptScores::ALL {
            let dlogits = scores::backward(logits.view(), choice, &routing, semantics, &g)?;
            let loss = |logits: &Array2<f64>| -> sonicmoe::Result<f64> {
                let s = scores::forward(logits.view(), choice, &routing, semantics)?;
                Ok(s.iter().zip(&g).map(|(s, g)| s * g).sum())
            };
            let h = 1.0 / 4096.0;
            for ((token, expert), &dlogit) in dlogits.indexed_iter() {
                let mut moved = logits.clone();
                let mut at = |step| {
                    moved[(token, expert)] = logits[(token, expert)] + step;
                    loss(&moved)
                };
                let difference = (at(h)? - at(-h)?) / (2.0 * h);
                // In one logit every score is c·σ(l + …) or c·(1 − σ), c ≤ 1, and |σ‴| ≤ 1/8. An
                // exponent −x, rounded once, moves its exponential by x·e^−x < 1 roundoffs.
                let magnitude: f64 = g.iter().map(|g| g.abs()).sum();
                let operations = (logits.ncols() + g.len() + 24) as f64;
                let allowed = magnitude * (h * h / 6.0 / 8.0 + operations * f64::EPSILON / h);
                prop_assert!((dlogit - difference).abs() <= allowed,
                    "{semantics}, token {token}, expert {expert}: {dlogit} against {difference} ± {allowed:e}");
            }
        }
    }

    #[test]
    fn scores_are_their_definitions(start in start().prop_filter("few logits", |start| start.logits.len() <= 400), rule in rule()) {
        let Start { logits, choice, .. } = &start;
        let routing = start.round(rule, Ranking::Renormalized).routing;
        let logits = logits.mapv(f64::from);
        let pairs = start.round(rule, Ranking::Renormalized).pairs();
        for semantics in KeptScores::ALL {
            let s = scores::forward(logits.view(), choice, &routing, semantics)?;
            prop_assert_eq!(s.len(), pairs.len());
            for (&found, &(token, expert)) in s.iter().zip(&pairs) {
                let t = token.index();
                let e_to = |expert: ExpertId| (logits[(t, expert.index())] - logits[(t, 0)]).exp();
                let chosen: Vec<_> = choice.ids().row(t).to_vec();
                let among: Vec<_> = match semantics {
                    KeptScores::RenormalizedOverTopK if chosen.contains(&expert) => chosen,
                    KeptScores::RenormalizedOverKept => pairs.iter().filter(|pair| pair.0 == token).map(|pair| pair.1).collect(),
                    _ => (0..logits.ncols() as u32).map(ExpertId).collect(),
                };
                let (numerator, sum) = (e_to(expert), among.iter().map(|&expert| e_to(expert)).sum::<f64>());
                // Logits far apart over- or underflow here, not in the crate.
                prop_assume!(sum.is_normal() && (numerator == 0.0 || numerator.is_normal()));
                let operations = (2 * 1000 + among.len() + 8) as f64;
                prop_assert!((found - numerator / sum).abs() <= operations * f64::EPSILON * found, "{semantics}");
            }
        }
    }
}

/// Token 0 chose experts 2 and 1, keeps 2 and gets 0 besides; token 1 keeps nothing.
fn by_hand() -> sonicmoe::Result<(Array2<f64>, Choice, Routing)> {
    let logits = array![[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]];
    let choice = Choice::new(3, experts(&[[2, 1], [2, 1]]))?;
    let pairs = [(0, 0), (0, 2)].map(|(t, e)| (TokenId(t), ExpertId(e)));
    Ok((logits, choice, Routing::new(2, 3, pairs)?))
}

#[test]
fn three_semantics_by_hand() -> sonicmoe::Result<()> {
    let (logits, choice, routing) = by_hand()?;
    let e = 1.0f64.exp();
    let z = 1.0 + e + e * e;
    let p = [1.0 / z, e / z, e * e / z];
    let q = [e / (1.0 + e), 1.0 / (1.0 + e)]; // of experts 2 and 1
    let r = [1.0 / (1.0 + e * e), e * e / (1.0 + e * e)]; // of experts 0 and 2
    let [g0, g2] = [3.0, -1.0]; // of the pairs (0, 0) and (0, 2)
    for (semantics, expected, gradient) in [
        (KeptScores::Raw, [p[0], p[2]], {
            let sum = g0 * p[0] + g2 * p[2];
            [p[0] * (g0 - sum), -p[1] * sum, p[2] * (g2 - sum)]
        }),
        (KeptScores::RenormalizedOverTopK, [p[0], q[0]], {
            // Expert 1 was dropped: it has no ĝ and is in the sum over the top-K all the same.
            let (added, chosen) = (g0 * p[0], g2 * q[0]);
            [p[0] * (g0 - added), -p[1] * added - q[1] * chosen, -p[2] * added + q[0] * (g2 - chosen)]
        }),
        (KeptScores::RenormalizedOverKept, r, {
            let sum = g0 * r[0] + g2 * r[1];
            [r[0] * (g0 - sum), 0.0, r[1] * (g2 - sum)]
        }),
    ] {
        let s = scores::forward(logits.view(), &choice, &routing, semantics)?;
        let dlogits = scores::backward(logits.view(), &choice, &routing, semantics, &[g0, g2])?;
        let found = s.iter().chain(dlogits.row(0));
        for (found, expected) in found.zip(expected.iter().chain(&gradient)) {
            assert!((found - expected).abs() <= 16.0 * f64::EPSILON, "{semantics}: {found} is not {expected}");
        }
        assert!(
            dlogits.row(1).iter().all(|dlogit| dlogit.to_bits() == 0),
            "{semantics}: a token without pairs gets +0"
        );
    }
    Ok(())
}

#[test]
fn without_rounding_the_semantics_are_the_conventions() -> sonicmoe::Result<()> {
    use sonicmoe::Convention;
    let logits = Array2::from_shape_fn((9, 7), |(t, e)| ((t * 5 + e * e * 3) % 17) as f32 / 4.0);
    let (choice, rounded) = TokenRounding::new(1).route(logits.view(), 3)?;
    let of_choice = |convention| -> sonicmoe::Result<Vec<f32>> {
        let by_pair = sonicmoe::routing::scores::forward(logits.view(), &choice, convention)?;
        let mut sorted: Vec<_> = choice.ids().indexed_iter().map(|((t, _), &e)| (t, e)).zip(by_pair).collect();
        sorted.sort_by_key(|&(pair, _)| pair);
        Ok(sorted.into_iter().map(|(_, score)| score).collect())
    };
    let kept = |semantics| scores::forward(logits.view(), &choice, &rounded.routing, semantics);
    assert_eq!(kept(KeptScores::Raw)?, of_choice(Convention::TopKOverSoftmax)?);
    assert_eq!(kept(KeptScores::RenormalizedOverTopK)?, of_choice(Convention::SoftmaxOverTopK)?);
    // Here the sum runs in pair order, not in rank order.
    for (kept, chosen) in kept(KeptScores::RenormalizedOverKept)?.iter().zip(of_choice(Convention::SoftmaxOverTopK)?) {
        assert!((kept - chosen).abs() <= 4.0 * f32::EPSILON * chosen);
    }
    Ok(())
}

#[test]
fn underflow_and_masks_divide_nothing_by_zero() -> sonicmoe::Result<()> {
    let logits = array![[0.0f32, 500.0, f32::NEG_INFINITY, 0.0]];
    let choice = top_k(logits.view(), 1)?;
    let score = |kept: &[u32]| -> sonicmoe::Result<_> {
        let routing = Routing::new(1, 4, kept.iter().map(|&e| (TokenId(0), ExpertId(e))))?;
        let g = vec![1.0; kept.len()];
        let dlogits = scores::backward(logits.view(), &choice, &routing, KeptScores::RenormalizedOverKept, &g)?;
        assert!(dlogits.iter().all(|&dlogit| dlogit == 0.0), "normalised scores under equal ds have no gradient");
        scores::forward(logits.view(), &choice, &routing, KeptScores::RenormalizedOverKept)
    };
    assert_eq!(score(&[0, 3])?, [0.5, 0.5], "p is 0 for both, their quotient is not");
    assert_eq!(score(&[2])?, [0.0], "a masked expert alone scores 0");
    assert_eq!(score(&[2, 1])?, [0.0, 1.0]);
    assert_eq!(score(&[])?, [0.0f32; 0]);
    // Nothing of the token before it.
    let two = array![[0.0f32, f32::NEG_INFINITY], [0.0, f32::NEG_INFINITY]];
    let routing = Routing::new(2, 2, [(TokenId(0), ExpertId(0)), (TokenId(1), ExpertId(1))])?;
    let choice = top_k(two.view(), 1)?;
    let alone = scores::forward(two.view(), &choice, &routing, KeptScores::RenormalizedOverKept)?;
    assert_eq!(alone, [1.0, 0.0]);
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused_by_name() -> sonicmoe::Result<()> {
    let (logits, choice, routing) = by_hand()?;
    let semantics = KeptScores::Raw;
    let wide = Routing::new(2, 4, [])?;
    for error in [
        scores::forward(logits.view(), &choice, &wide, semantics).expect_err("refused"),
        scores::backward(logits.view(), &choice, &wide, semantics, &[]).expect_err("refused"),
    ] {
        assert_eq!(error.class(), ErrorClass::Contract);
        assert!(error.to_string().starts_with("tensor `routing` has shape [2, 4], expected [2, 3]"), "{error}");
    }
    let error = scores::backward(logits.view(), &choice, &routing, semantics, &[1.0]).expect_err("refused");
    assert!(error.to_string().starts_with("tensor `ds` has shape [1], expected [2]"), "{error}");
    Ok(())
}
