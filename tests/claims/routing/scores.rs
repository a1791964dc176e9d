//! Scores and their gradients: three conventions, two functions.

use ndarray::{Array2, array};
use proptest::prelude::*;
use sonicmoe::routing::{Choice, GroupedSigmoid, scores, top_k};
use sonicmoe::{Convention, ErrorClass};

use super::{experts, logits_and_k, random};

/// Loss Σ g·s and a routing that stays as it is.
fn loss(logits: &Array2<f64>, choice: &Choice, convention: Convention, g: &[f64]) -> sonicmoe::Result<f64> {
    Ok(scores::forward(logits.view(), choice, convention)?.iter().zip(g).map(|(s, g)| s * g).sum())
}

proptest! {
    #![proptest_config(random(128))]

    #[test]
    fn dlogits_are_what_central_differences_say(
        (logits, k) in logits_and_k(4, 12), g in prop::collection::vec(-2.0f64..2.0, 48)
    ) {
        let logits = logits.mapv(f64::from);
        let choice = top_k(logits.view(), k)?;
        let g = &g[..choice.tokens() * k];
        for convention in Convention::ALL {
            let s = scores::forward(logits.view(), &choice, convention)?;
            let dlogits = scores::backward(logits.view(), &s, &choice, convention, g)?;
            let h = 1.0 / 4096.0;
            for ((token, expert), &dlogit) in dlogits.indexed_iter() {
                let mut moved = logits.clone();
                let mut at = |step| {
                    moved[(token, expert)] = logits[(token, expert)] + step;
                    loss(&moved, &choice, convention, g)
                };
                let difference = (at(h)? - at(-h)?) / (2.0 * h);
                // In one logit every score is c·σ(l + …) or c·(1 − σ), c ≤ 1, and |σ‴| ≤ 1/8. The
                // loss of all tokens is rounded in E + 24 operations on exponents of at most 16.
                let magnitude: f64 = g.iter().map(|g| g.abs()).sum();
                let operations = (logits.ncols() + g.len() + 24) as f64;
                let allowed = magnitude * (h * h / 6.0 / 8.0 + operations * f64::EPSILON / h);
                prop_assert!((dlogit - difference).abs() <= allowed,
                    "{convention}, token {token}, expert {expert}: {dlogit} against {difference} ± {allowed:e}");
            }
        }
    }

    #[test]
    fn in_f32_scores_err_by_a_few_roundoffs((logits, k) in logits_and_k(4, 40)) {
        let choice = top_k(logits.view(), k)?;
        let (tokens, e) = logits.dim();
        for convention in Convention::ALL {
            let found = scores::forward(logits.view(), &choice, convention)?;
            let truth = scores::forward(logits.mapv(f64::from).view(), &choice, convention)?;
            prop_assert_eq!(found.len(), tokens * k);
            for (found, truth) in found.into_iter().zip(truth) {
                // The exponent, at most 16, is rounded once, in numerator and denominator; exp errs by
                // an ulp in each, a sum of E terms by E roundoffs, and there are up to three divisions.
                let operations = (2 * 16 + 4 + 2 * e + 3) as f64;
                prop_assert!((f64::from(found) - truth).abs() <= 1.01 * operations * f64::from(f32::EPSILON) / 2.0 * truth);
            }
        }
    }

    #[test]
    fn a_normalised_score_alone_is_one_and_its_gradient_exactly_zero(
        (logits, _) in logits_and_k(6, 12), g in prop::collection::vec(-1e6f32..1e6, 6)
    ) {
        let choice = top_k(logits.view(), 1)?;
        let g = &g[..choice.tokens()];
        for convention in [Convention::SoftmaxOverTopK, Convention::TopKOverSoftmaxRenormalized] {
            let s = scores::forward(logits.view(), &choice, convention)?;
            prop_assert!(s.iter().all(|&s| s == 1.0));
            let dlogits = scores::backward(logits.view(), &s, &choice, convention, g)?;
            prop_assert!(dlogits.iter().all(|&dlogit| dlogit == 0.0));
        }
    }
}

/// Dao-AILab/sonic-moe#5.
#[test]
fn three_conventions_are_two_functions() -> sonicmoe::Result<()> {
    let logits = array![[0.0f64, 1.0, 2.0]];
    let choice = top_k(logits.view(), 2)?;
    let e = 1.0f64.exp();
    let expected = [
        [e / (1.0 + e), 1.0 / (1.0 + e)],
        [e * e / (1.0 + e + e * e), e / (1.0 + e + e * e)],
        [e / (1.0 + e), 1.0 / (1.0 + e)],
    ];
    // dlogits of the loss 3 s₀ + s₁ by hand: s₀s₁(3 − 1) on both sides; p_j(ĝ_j − 3p₂ − p₁).
    let [p2, p1] = expected[1];
    let slope = 2.0 * expected[0][0] * expected[0][1];
    let mean = 3.0 * p2 + p1;
    let gradients =
        [[0.0, -slope, slope], [(1.0 - p1 - p2) * -mean, p1 * (1.0 - mean), p2 * (3.0 - mean)], [0.0, -slope, slope]];
    for ((convention, expected), gradient) in Convention::ALL.into_iter().zip(expected).zip(gradients) {
        let s = scores::forward(logits.view(), &choice, convention)?;
        let dlogits = scores::backward(logits.view(), &s, &choice, convention, &[3.0, 1.0])?;
        for (found, expected) in s.iter().chain(&dlogits).zip(expected.iter().chain(&gradient)) {
            assert!((found - expected).abs() <= 8.0 * f64::EPSILON, "{convention}: {found} is not {expected}");
        }
    }
    Ok(())
}

#[test]
fn large_and_distant_logits_overflow_nothing() -> sonicmoe::Result<()> {
    let logits = array![[3e38f32, -3e38, 2e38, f32::NEG_INFINITY], [-3e38, -3e38, -3e38, -3e38]];
    let choice = top_k(logits.view(), 3)?;
    for convention in Convention::ALL {
        let s = scores::forward(logits.view(), &choice, convention)?;
        let equal = if convention == Convention::TopKOverSoftmax { 0.25 } else { 1.0 / 3.0 };
        assert_eq!(s, [1.0, 0.0, 0.0, equal, equal, equal], "{convention}");
    }
    Ok(())
}

/// σ(−46) is 1.05e-20: 1e-20 beside it is half of what it is divided by, and nothing is divided by 0.
#[test]
fn probabilities_that_nearly_vanish_are_shared_with_the_constant() -> sonicmoe::Result<()> {
    let router = GroupedSigmoid { groups: 1, kept: 1, renormalized: true, factor: 2.5 };
    let logits = array![[-46.0f64, -47.0], [-300.0, f64::NEG_INFINITY]];
    let choice = Choice::new(2, experts(&[[0, 1], [0, 1]]))?;
    let found = scores::forward(logits.view(), &choice, Convention::GroupedSigmoid(router))?;
    let p = logits.mapv(|logit: f64| logit.exp() / (1.0 + logit.exp()));
    for ((token, rank), p) in p.indexed_iter() {
        let expected = 2.5 * p / (logits.row(token).iter().map(|logit| logit.exp()).sum::<f64>() + 1e-20);
        assert!((found[2 * token + rank] - expected).abs() <= 1e-12 * expected, "{found:?}");
    }
    Ok(())
}

#[test]
fn a_choice_that_is_not_the_best_is_scored_as_it_is() -> sonicmoe::Result<()> {
    // e^−200 is no f32: the probabilities of the chosen are 0 and their quotient is not.
    let logits = array![[200.0f32, 0.0, 0.0]];
    let choice = Choice::new(3, experts(&[[1, 2]]))?;
    assert_eq!(scores::forward(logits.view(), &choice, Convention::TopKOverSoftmax)?, [0.0, 0.0]);
    for convention in [Convention::SoftmaxOverTopK, Convention::TopKOverSoftmaxRenormalized] {
        assert_eq!(scores::forward(logits.view(), &choice, convention)?, [0.5, 0.5]);
    }
    Ok(())
}

#[test]
fn an_infinite_ds_stays_in_its_own_row() -> sonicmoe::Result<()> {
    let logits = array![[0.0f32, 1.0, 2.0], [2.0, 1.0, 0.0]];
    let choice = top_k(logits.view(), 2)?;
    for convention in Convention::ALL {
        let s = scores::forward(logits.view(), &choice, convention)?;
        let clean = scores::backward(logits.view(), &s, &choice, convention, &[1.0, 0.0, 0.5, -1.0])?;
        let dirty = scores::backward(logits.view(), &s, &choice, convention, &[f32::INFINITY, f32::NAN, 0.5, -1.0])?;
        assert_eq!(clean.row(1), dirty.row(1), "{convention}");
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused_by_name() -> sonicmoe::Result<()> {
    let logits = array![[0.0f32, 1.0, 2.0], [0.0, 1.0, 2.0]];
    let choice = top_k(logits.view(), 2)?;
    let convention = Convention::SoftmaxOverTopK;
    let message = |result: sonicmoe::Result<_>| -> String {
        let error: sonicmoe::Error = result.map(|_: Vec<f32>| ()).expect_err("refused");
        assert_eq!(error.class(), ErrorClass::Contract);
        error.to_string()
    };
    let narrow = array![[0.0f32, 1.0], [0.0, 1.0]];
    assert!(
        message(scores::forward(narrow.view(), &choice, convention))
            .starts_with("tensor `router_logits` has shape [2, 2]")
    );
    let mut nan = logits.clone();
    nan[(1, 0)] = f32::NAN;
    assert!(message(scores::forward(nan.view(), &choice, convention)).starts_with("logit of token 1, expert 0 is NaN"));
    nan = logits.clone();
    nan[(0, 2)] = f32::INFINITY;
    assert!(message(scores::forward(nan.view(), &choice, convention)).starts_with("logit of token 0, expert 2 is inf"));
    let masked = array![[0.0f32, 1.0, 2.0], [0.0, f32::NEG_INFINITY, f32::NEG_INFINITY]];
    assert!(message(scores::forward(masked.view(), &choice, convention)).starts_with("token 1 has only 0 logits"));
    let one_masked = array![[0.0f32, 1.0, 2.0], [0.0, 1.0, f32::NEG_INFINITY]];
    assert_eq!(scores::forward(one_masked.view(), &choice, convention)?[2..], [0.0, 1.0]);
    let of_nan = scores::softmax(array![[0.0f32, 1.0], [2.0, f32::NAN]].view()).unwrap_err().to_string();
    assert!(of_nan.starts_with("logit of token 1, expert 1 is NaN"), "{of_nan}");
    let of_the_first =
        scores::softmax(array![[1.0, f32::NAN, f32::INFINITY], [f32::NAN, 2.0, 3.0]].view()).unwrap_err().to_string();
    assert!(of_the_first.starts_with("logit of token 0, expert 1 is NaN"), "{of_the_first}");
    let of_all_experts = scores::softmax(array![[0.0f32], [f32::NEG_INFINITY]].view()).unwrap_err().to_string();
    assert!(of_all_experts.starts_with("token 1 has only 0 logits above −∞, but K = 1 "), "{of_all_experts}");
    // σ(−∞) is 0, a probability as any other.
    let groups = Convention::GroupedSigmoid(GroupedSigmoid { groups: 1, kept: 1, renormalized: false, factor: 2.0 });
    assert_eq!(scores::forward(masked.view(), &choice, groups)?[2..], [0.0, 0.0]);
    let backward = |s: &[f32], g: &[f32]| {
        message(
            scores::backward(logits.view(), s, &choice, convention, g)
                .map(|dlogits| dlogits.into_raw_vec_and_offset().0),
        )
    };
    let of_nan = scores::backward(nan.view(), &[0.5; 4], &choice, convention, &[1.0; 4]).unwrap_err().to_string();
    assert!(of_nan.starts_with("logit of token 0, expert 2 is inf"), "{of_nan}");
    assert!(backward(&[0.5; 3], &[1.0; 4]).starts_with("tensor `scores` has shape [3], expected [4]"));
    assert!(backward(&[0.5; 4], &[1.0; 5]).starts_with("tensor `ds` has shape [5], expected [4]"));
    let of_one = top_k(logits.view(), 1)?;
    let of_one = scores::backward(logits.view(), &[1.0; 3], &of_one, convention, &[1.0; 2]).unwrap_err().to_string();
    assert!(of_one.starts_with("tensor `scores` has shape [3], expected [2]"), "{of_one}");
    Ok(())
}
