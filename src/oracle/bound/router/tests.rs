use super::*;
use crate::element::DType;
use crate::engine::{Numerics, RoundingModel, RouterRounding};

fn arithmetic(measure: Measure) -> Arithmetic {
    let numerics = Numerics {
        storage: DType::F16,
        score: DType::F32,
        accumulator: DType::F32.unit_roundoff(),
        rounding: RoundingModel::Fused,
        router: RouterRounding::TensorType,
        function_ulps: 4.0,
        flushes_denormals: true,
    };
    Arithmetic::new(&numerics, measure)
}

/// A stored logit of +∞ (an f16 that overflowed) leaves nothing known of its token, beside one of −∞ too.
#[test]
fn a_stored_logit_of_infinity_makes_every_score_of_its_token_unknown() {
    let token = [1.0, f64::NEG_INFINITY, f64::INFINITY].map(Ball::exact);
    assert!(softmax(&arithmetic(Measure::Worst), &token).iter().all(|p| p.rad == f64::INFINITY));
    let masked = [1.0, f64::NEG_INFINITY, 2.0].map(Ball::exact);
    let p = softmax(&arithmetic(Measure::Worst), &masked);
    assert_eq!(p[1], Ball::exact(0.0));
    assert!(p[0].rad > 0.0 && p[0].rad < 1e-4, "{p:?}");
}

/// Of a score that is 0 what may have underflowed is left, in the router's type and in exp.
#[test]
fn a_renormalized_score_of_nothing_errs_by_what_underflows() {
    let arithmetic = arithmetic(Measure::Worst);
    let found = renormalized(&arithmetic, vec![Ball::exact(0.0), Ball::exact(1.0)], 5);
    let underflow = arithmetic.router.underflow + arithmetic.function_underflow;
    assert_eq!(found[0], Ball { mid: 0.0, rad: 10.0 * underflow });
    let relative = 1.02 * (3.0 * arithmetic.router.unit + 4.0 * arithmetic.accumulate.unit);
    assert_eq!(found[1], Ball { mid: 1.0, rad: relative + 10.0 * underflow });
}

/// A masked expert is as if it were not there.
#[test]
fn masked_logits_cost_the_others_nothing() {
    for measure in [Measure::Worst, Measure::Deviation] {
        let arithmetic = arithmetic(measure);
        let ball = |mid: f64| Ball { mid, rad: 1e-3 };
        let masked = [ball(1.0), Ball::exact(f64::NEG_INFINITY), ball(2.5), Ball::exact(f64::NEG_INFINITY)];
        let (with, without) = (softmax(&arithmetic, &masked), softmax(&arithmetic, &[ball(1.0), ball(2.5)]));
        assert_eq!([with[0], with[2]], [without[0], without[1]]);
    }
}

/// Of logits that an engine has anywhere within their balls: near each other, far apart, and as unsure as
/// those of large numbers in bf16 are.
#[test]
fn a_softmax_of_logits_anywhere_within_their_balls_is_within_its_own() {
    let of = |logits: &[f64]| {
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = logits.iter().map(|logit| libm::exp(logit - largest)).collect();
        let total: f64 = weights.iter().sum();
        weights.into_iter().map(move |weight| weight / total).collect::<Vec<_>>()
    };
    let arithmetic = arithmetic(Measure::Worst);
    for apart in [0.0, 0.3, 4.0, 30.0, 279.0, 900.0, 1e5] {
        for rad in [1e-3, 0.1, 0.99, 1.01, 5.0, 140.0, 650.0, 2e3, 1e5] {
            let balls = [0.0, 1.0, 1.5, -3.0].map(|place| Ball { mid: place * apart, rad });
            let p = softmax(&arithmetic, &balls);
            // Every end of every ball.
            for ends in 0..1u32 << balls.len() {
                let side = |i: usize| if ends >> i & 1 == 1 { 1.0 } else { -1.0 };
                let logits: Vec<f64> = balls.iter().enumerate().map(|(i, l)| l.mid + side(i) * l.rad).collect();
                for (ball, found) in p.iter().zip(of(&logits)) {
                    let off = (found - ball.mid).abs();
                    assert!(off <= ball.rad, "{apart} ± {rad}: {found} is not in {ball:?}");
                }
            }
            assert!(p.iter().all(|p| p.rad < 1.1), "{apart} ± {rad}: {p:?}");
        }
    }
}

#[test]
fn the_largest_beside_each_is_found_wherever_the_largest_stand() {
    let none = f64::NEG_INFINITY;
    for (numbers, largest) in [
        (&[3.0, 1.0, 2.0][..], &[2.0, 3.0, 3.0][..]),
        (&[1.0, 2.0, 3.0], &[3.0, 3.0, 2.0]),
        (&[1.0, 3.0, 3.0], &[3.0, 3.0, 3.0]),
        (&[2.0, 3.0, 1.0, 2.5], &[3.0, 2.5, 3.0, 3.0]),
        (&[5.0], &[none]),
        (&[none, 1.0, none], &[1.0, none, 1.0]),
    ] {
        assert_eq!(largest_of_others(numbers), largest, "{numbers:?}");
    }
}

/// The formulas, written out.
#[test]
fn unsure_logits_are_bounded_by_the_largest_of_the_others() {
    let balls = [(0.0, 2.0), (3.0, 1.5), (2.0, 4.0), (-1.0, 0.5)].map(|(mid, rad)| Ball { mid, rad });
    let sigma = |x: f64| 1.0 / (1.0 + libm::exp(-x));
    let found = softmax_out_of(&arithmetic(Measure::Worst), &balls);
    for (i, [of_it, of_others]) in found.into_iter().enumerate() {
        let others = || balls.iter().enumerate().filter(move |(j, _)| *j != i).map(|(_, ball)| *ball);
        let least = others().map(|ball| ball.mid - ball.rad).fold(f64::NEG_INFINITY, f64::max);
        let most = others().map(|ball| ball.mid + ball.rad).fold(f64::NEG_INFINITY, f64::max);
        let own = balls[i];
        assert_eq!(of_it, sigma(own.mid + own.rad - least));
        assert!((of_others - sigma(most + libm::log(3.0) - (own.mid - own.rad))).abs() < 1e-15);
    }
    let p = softmax(&arithmetic(Measure::Worst), &balls);
    let out_of = softmax_out_of(&arithmetic(Measure::Worst), &balls);
    for (p, [of_it, of_others]) in p.iter().zip(out_of) {
        // It rises to 1 at most, and falls to 0.
        let most = of_it.min(1.0 - p.mid).max(of_others.min(p.mid));
        assert!((most..most + 1e-4).contains(&p.rad), "{p:?}: {most}");
    }
}

/// A divisor that the engine may have flushed to 0 lies within several of its deviations.
#[test]
fn a_quotient_is_unknown_where_its_divisor_may_be_zero() {
    let one = Ball::exact(1.0);
    for (measure, near, far) in [(Measure::Worst, 1.0, 0.9), (Measure::Deviation, 0.2, 0.1)] {
        let by = |rad| divide(&arithmetic(measure), one, Ball { mid: 1.0, rad }).rad;
        assert_eq!(by(near), f64::INFINITY, "{measure:?}");
        assert!(by(far).is_finite(), "{measure:?}");
    }
}

/// g/Σp, −Σ g·(s/Σp), their sum, and the backward of the softmax over all experts, each stored in f16: what
/// they leave on experts that were not chosen is within the bound, as is s(g − Σgs) on those that were.
#[test]
fn both_formulas_of_a_renormalized_score_are_within_its_gradients_bound() {
    let round = |value: f64| DType::F16.round(value);
    let arithmetic = arithmetic(Measure::Worst);
    let (chosen, mut left) = ([3, 0], 0.0f64);
    for case in 0..64 {
        let logits = [0.3, -0.7, 0.11, 0.9].map(|logit| logit * (1.0 + f64::from(case) / 17.0));
        let total: f64 = logits.iter().map(|&logit| libm::exp(logit)).sum();
        let p = logits.map(|logit| round(libm::exp(logit) / total));
        let of_chosen = round(p[3] + p[0]);
        let s = chosen.map(|expert| round(p[expert] / of_chosen));
        let g = [1.3, -0.4 - f64::from(case)].map(round);
        let balls = |values: &[f64]| values.iter().map(|&value| Ball::exact(value)).collect::<Vec<_>>();
        let bound = renormalized_backward(&arithmetic, &balls(&p), &chosen, &balls(&s), &balls(&g));

        let shift = round(s.iter().zip(g).map(|(&s, g)| round(g * round(s / of_chosen))).sum());
        let mut dp = [0.0; 4];
        for (expert, g) in chosen.into_iter().zip(g) {
            dp[expert] = round(round(g / of_chosen) - shift);
        }
        let mean = round(p.iter().zip(dp).map(|(&p, dp)| round(p * dp)).sum());
        let by_operation: [f64; 4] = std::array::from_fn(|expert| round(p[expert] * round(dp[expert] - mean)));
        for (expert, (found, ball)) in by_operation.into_iter().zip(&bound).enumerate() {
            assert!((found - ball.mid).abs() <= ball.rad, "{case}, {expert}: {found} is not in {ball:?}");
            if !chosen.contains(&expert) {
                assert_eq!(ball.mid, 0.0);
                left = left.max(found.abs() / ball.rad);
            }
        }
        let mean: f64 = s.iter().zip(g).map(|(s, g)| s * g).sum();
        for ((expert, s), g) in chosen.into_iter().zip(s).zip(g) {
            let (direct, ball) = (round(s * round(g - mean)), bound[expert]);
            assert!((direct - ball.mid).abs() <= ball.rad, "{case}, {expert}: {direct} is not in {ball:?}");
        }
    }
    // And the bound is no wider than it has to be.
    assert!(left > 0.05, "{left}");
}
