//! Scores of sigmoids, and the way back to their logits, op by op: each result is stored in the
//! router's type. An engine with fewer roundings stays within.

use super::ball::{Arithmetic, Ball};
use super::router::{divide, subtract};
use crate::routing::GroupedSigmoid;

/// What keeps Σp from being 0.
const NO_ZERO: f64 = 1e-20;

/// factor·p/S, or factor·p, of the chosen.
pub(super) fn scores(arithmetic: &Arithmetic, router: &GroupedSigmoid, logits: &[Ball]) -> Vec<Ball> {
    let p = probabilities(arithmetic, logits);
    let shares = shares(arithmetic, router, &p);
    shares.into_iter().map(|share| arithmetic.multiply(share, constant(arithmetic, router.factor))).collect()
}

/// dlogit = dp·p(1 − p) with dp = factor·(g − Σ g·p/S)/S, as autograd has it: factor·g first, then over S
/// and through S apart.
pub(super) fn backward(arithmetic: &Arithmetic, router: &GroupedSigmoid, logits: &[Ball], g: &[Ball]) -> Vec<Ball> {
    let p = probabilities(arithmetic, logits);
    let g: Vec<Ball> =
        g.iter().map(|&g| store(arithmetic, arithmetic.multiply(g, constant(arithmetic, router.factor)))).collect();
    let dp = if router.renormalized {
        let total = total(arithmetic, &p);
        let through_total = g.iter().zip(shares(arithmetic, router, &p)).map(|(&g, share)| {
            store(arithmetic, arithmetic.multiply(g, store(arithmetic, divide(arithmetic, share, total))))
        });
        let shift = store(arithmetic, arithmetic.sum(&arithmetic.accumulate, through_total, p.len()));
        let direct = g.iter().map(|&g| store(arithmetic, divide(arithmetic, g, total)));
        direct.map(|direct| store(arithmetic, subtract(arithmetic, direct, shift))).collect()
    } else {
        g
    };
    dp.into_iter().zip(&p).map(|(dp, &p)| arithmetic.multiply(dp, arithmetic.bend(p))).collect()
}

fn store(arithmetic: &Arithmetic, ball: Ball) -> Ball {
    arithmetic.round(&arithmetic.router, ball)
}

fn constant(arithmetic: &Arithmetic, value: f64) -> Ball {
    arithmetic.operation(Ball::exact(value))
}

fn probabilities(arithmetic: &Arithmetic, logits: &[Ball]) -> Vec<Ball> {
    logits.iter().map(|&logit| store(arithmetic, arithmetic.sigmoid(logit))).collect()
}

/// S = Σp + 1e-20.
fn total(arithmetic: &Arithmetic, p: &[Ball]) -> Ball {
    let sum = store(arithmetic, arithmetic.sum(&arithmetic.accumulate, p.iter().copied(), p.len()));
    store(arithmetic, arithmetic.add(sum, Ball::exact(NO_ZERO)))
}

fn shares(arithmetic: &Arithmetic, router: &GroupedSigmoid, p: &[Ball]) -> Vec<Ball> {
    if !router.renormalized {
        return p.to_vec();
    }
    let total = total(arithmetic, p);
    p.iter().map(|&p| store(arithmetic, divide(arithmetic, p, total))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;
    use crate::engine::RoundingModel;
    use crate::oracle::bound::ball::Measure;
    use crate::oracle::bound::numerics_of;

    /// σ(−46) is 1.05e-20: beside 1e-20 it is half of what it is divided by.
    #[test]
    fn probabilities_that_nearly_vanish_are_shared_with_the_constant() {
        let numerics = numerics_of(DType::F32, RoundingModel::Fused);
        let arithmetic = Arithmetic::new(&numerics, Measure::Worst);
        let router = GroupedSigmoid { groups: 1, kept: 1, renormalized: true, factor: 2.0 };
        let logits = [Ball::exact(-46.0), Ball::exact(-200.0)];
        let scores = scores(&arithmetic, &router, &logits);
        let p = libm::exp(-46.0);
        assert!((scores[0].mid - 2.0 * p / (p + 1e-20)).abs() < 1e-12, "{scores:?}");
        assert!(scores[1].mid < 1e-60 && scores[0].rad < 1e-4, "{scores:?}");
    }
}
