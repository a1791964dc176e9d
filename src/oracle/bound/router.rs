//! The router: logits, scores by convention, their gradients.

#[cfg(test)]
mod tests;

use super::Model;
use super::accumulation::Sum;
use super::ball::{Arithmetic, Ball, Measure, known};
use super::grouped;
use super::matrix::{Balls1, Balls2, Operand};
use crate::problem::Router;
use crate::routing::Convention;
use crate::shape::TokenId;

/// l = x W_rᵀ (+ b_r), stored in the router's type.
pub(crate) fn logits(model: &Model<'_, '_>, router: &Router<'_, f64>) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let (x, w) = (Operand::exact(model.problem.x()), Operand::exact(router.w.view()));
    let bias = router.b.as_ref().map(|b| b.view());
    arithmetic.matrix_product(x, w.t(), bias).rounded(arithmetic, &arithmetic.router).map(|logit| {
        // A mask is exact, whatever is added to it.
        if logit.mid == f64::NEG_INFINITY { Ball::exact(logit.mid) } else { logit }
    })
}

/// The scores by pair, stored in the router's type.
pub(crate) fn scores(model: &Model<'_, '_>, router: &Router<'_, f64>, logits: &Balls2) -> Vec<Ball> {
    let arithmetic = &model.arithmetic.of_scores();
    let mut scores = vec![Ball::default(); model.routing.routed()];
    for token in model.tokens() {
        let pairs = model.pairs_of_token(token);
        let of_token = match router.convention {
            Convention::SoftmaxOverTopK => softmax(arithmetic, &chosen(model, logits, &pairs)),
            Convention::TopKOverSoftmax => {
                let p = softmax(arithmetic, &all(logits, token));
                pairs.iter().map(|&pair| p[model.expert_of_pair(pair)]).collect()
            }
            Convention::TopKOverSoftmaxRenormalized => {
                renormalized(arithmetic, softmax(arithmetic, &chosen(model, logits, &pairs)), model.problem.e())
            }
            Convention::GroupedSigmoid(constants) => {
                grouped::scores(arithmetic, &constants, &chosen(model, logits, &pairs))
            }
        };
        for (pair, score) in pairs.into_iter().zip(of_token) {
            scores[pair] = arithmetic.round(&arithmetic.router, score);
        }
    }
    scores
}

/// p / Σp is the softmax of the chosen, with more roundings: each p is stored (its own and, in the
/// sum, everybody's), the sum is stored, the quotient is rounded. A p below the normal range errs by
/// η, and Σp ≥ 1/E.
fn renormalized(arithmetic: &Arithmetic, scores: Vec<Ball>, experts: usize) -> Vec<Ball> {
    let count = scores.len() as f64;
    let relative = 1.02 * (3.0 * arithmetic.router.unit + (count + 2.0) * arithmetic.accumulate.unit);
    let absolute = 2.0 * experts as f64 * (arithmetic.router.underflow + arithmetic.function_underflow);
    scores
        .into_iter()
        .map(|score| {
            let own = relative * score.magnitude() + absolute;
            Ball { rad: arithmetic.join(score.rad, arithmetic.spread(own)), ..score }
        })
        .collect()
}

/// dlogits (T, E), stored in the router's type. `scores` and `ds` by pair.
pub(crate) fn dlogits(
    model: &Model<'_, '_>,
    router: &Router<'_, f64>,
    logits: &Balls2,
    scores: &[Ball],
    ds: &[Ball],
) -> Balls2 {
    let arithmetic = &model.arithmetic.of_scores();
    let mut dlogits = Balls2::zeros(model.problem.t(), model.problem.e());
    for token in model.tokens() {
        let pairs = model.pairs_of_token(token);
        let s: Vec<Ball> = pairs.iter().map(|&pair| scores[pair]).collect();
        let g: Vec<Ball> = pairs.iter().map(|&pair| ds[pair]).collect();
        let mut set = |expert: usize, ball: Ball| {
            dlogits.set(token.index(), expert, arithmetic.round(&arithmetic.router, ball));
        };
        match router.convention {
            // One chosen expert has the score 1 whatever its logit: s(g − g·s) is exactly 0, unless the
            // logit or g may have overflowed: ∞ − ∞ is NaN in every engine.
            Convention::SoftmaxOverTopK if pairs.len() == 1 => {
                if !(g[0].magnitude().is_finite() && s[0].magnitude().is_finite()) {
                    set(model.expert_of_pair(pairs[0]), Ball { mid: 0.0, rad: f64::INFINITY });
                }
            }
            Convention::SoftmaxOverTopK => {
                for (&pair, ball) in pairs.iter().zip(softmax_backward(arithmetic, &s, &g)) {
                    set(model.expert_of_pair(pair), ball);
                }
            }
            Convention::TopKOverSoftmax => {
                let p = stored_softmax(arithmetic, &all(logits, token));
                let mut gradient = vec![Ball::default(); p.len()];
                let experts: Vec<usize> = pairs.iter().map(|&pair| model.expert_of_pair(pair)).collect();
                for (&expert, &g) in experts.iter().zip(&g) {
                    gradient[expert] = g;
                }
                let gradients = scattered_backward(arithmetic, &p, &gradient, &experts);
                for (expert, ball) in gradients.into_iter().enumerate() {
                    set(expert, ball);
                }
            }
            Convention::GroupedSigmoid(constants) => {
                let gradients = grouped::backward(arithmetic, &constants, &chosen(model, logits, &pairs), &g);
                for (&pair, ball) in pairs.iter().zip(gradients) {
                    set(model.expert_of_pair(pair), ball);
                }
            }
            Convention::TopKOverSoftmaxRenormalized => {
                let p = stored_softmax(arithmetic, &all(logits, token));
                let experts: Vec<usize> = pairs.iter().map(|&pair| model.expert_of_pair(pair)).collect();
                for (expert, ball) in renormalized_backward(arithmetic, &p, &experts, &s, &g).into_iter().enumerate() {
                    set(expert, ball);
                }
            }
        }
    }
    dlogits
}

/// The router's part of dx: dlogits W_r, stored in the router's type.
pub(crate) fn dx(model: &Model<'_, '_>, router: &Router<'_, f64>, dlogits: &Balls2) -> Balls2 {
    let arithmetic = &model.arithmetic;
    arithmetic
        .matrix_product(dlogits.operand(), Operand::exact(router.w.view()), None)
        .rounded(arithmetic, &arithmetic.router)
}

/// dW_r = dlogitsᵀ x.
pub(crate) fn w_gradient(model: &Model<'_, '_>, dlogits: &Balls2) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let x = Operand::exact(model.problem.x());
    arithmetic.matrix_product(dlogits.operand().t(), x, None).rounded(arithmetic, &arithmetic.storage)
}

/// db_r = Σ_t dlogits.
pub(crate) fn b_gradient(model: &Model<'_, '_>, dlogits: &Balls2) -> Balls1 {
    let arithmetic = &model.arithmetic;
    let (tokens, experts) = dlogits.mid.dim();
    Balls1::from_balls((0..experts).map(|expert| {
        let terms = (0..tokens).map(|token| dlogits.at(token, expert));
        let sum = arithmetic.sum(&arithmetic.accumulate, terms, tokens.saturating_sub(1));
        arithmetic.round(&arithmetic.storage, sum)
    }))
}

fn all(logits: &Balls2, token: TokenId) -> Vec<Ball> {
    (0..logits.mid.ncols()).map(|expert| logits.at(token.index(), expert)).collect()
}

fn chosen(model: &Model<'_, '_>, logits: &Balls2, pairs: &[usize]) -> Vec<Ball> {
    pairs.iter().map(|&pair| logits.at(model.routing.pair_token()[pair].index(), model.expert_of_pair(pair))).collect()
}

fn stored_softmax(arithmetic: &Arithmetic, logits: &[Ball]) -> Vec<Ball> {
    softmax(arithmetic, logits).into_iter().map(|p| arithmetic.round(&arithmetic.router, p)).collect()
}

/// p_i = e^{l_i} / Σ e^{l_j}, as the accumulator has it.
///
/// The worst case is attained with l_i off by E_i and every other l_j by E_j the other way:
/// p⁺ = p_i e^{E_i} / (p_i e^{E_i} + Σ_{j≠i} p_j e^{−E_j}), and p⁻ with the signs turned; both differences
/// to p_i are written without cancellation, but for the sums over j ≠ i, which lose what is far below p_i:
/// where some E > 1 may make that large, [`softmax_out_of`] stands for them. The evaluation adds F units for
/// each exp, the distance to the maximum (the rounded difference is exponentiated), the sum and the quotient.
fn softmax(arithmetic: &Arithmetic, logits: &[Ball]) -> Vec<Ball> {
    let largest = logits.iter().map(|logit| logit.mid).fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|logit| libm::exp(logit.mid - largest)).collect();
    let total: f64 = weights.iter().sum();
    let p: Vec<f64> = weights.iter().map(|weight| weight / total).collect();
    // One logit of ∞ makes every quotient of its token NaN: e^(∞ − ∞) stands in each, and in the sum. A
    // stored logit may be one, exactly; −∞ is a number like any other.
    if logits.iter().any(|logit| !logit.rad.is_finite() || logit.mid.is_nan() || logit.mid == f64::INFINITY) {
        return p.into_iter().map(|mid| Ball { mid, rad: f64::INFINITY }).collect();
    }
    let alive = logits.iter().filter(|logit| logit.mid > f64::NEG_INFINITY).count();
    if alive <= 1 {
        // x/x = 1 in every arithmetic.
        return p.into_iter().map(Ball::exact).collect();
    }

    let over = |f: &dyn Fn(f64, Ball) -> f64| -> f64 { p.iter().zip(logits).map(|(&p, &l)| f(p, l)).sum() };
    let above = over(&|p, l| p * libm::expm1(l.rad));
    let below = over(&|p, l| p * libm::expm1(-l.rad));
    let squares = over(&|p, l| (p * l.rad) * (p * l.rad));
    let away = |l: Ball| if l.mid > f64::NEG_INFINITY { largest - l.mid } else { 0.0 };
    let mean_distance = over(&|p, l| p * away(l));
    let widest = logits.iter().map(|logit| logit.rad).fold(0.0, f64::max);
    let out_of = (arithmetic.reach(widest) > 1.0).then(|| softmax_out_of(arithmetic, logits));

    p.iter()
        .zip(logits)
        .enumerate()
        .map(|(i, (&p, &l))| {
            if l.mid == f64::NEG_INFINITY {
                return Ball::exact(0.0);
            }
            let (up, down) = (libm::expm1(l.rad), libm::expm1(-l.rad));
            let rad = match (arithmetic.measure, &out_of) {
                (Measure::Midpoint, _) => return Ball::exact(p),
                (_, Some(most)) => {
                    let [of_it, of_others] = most[i];
                    let (rise, fall) = (of_it.min(1.0 - p), of_others.min(p));
                    rise.max(fall) / arithmetic.reach(1.0)
                }
                (Measure::Worst, None) => {
                    let rise = p * ((1.0 - p) * up - (below - p * down)) / (1.0 + p * up + (below - p * down));
                    let fall = p * ((above - p * up) - (1.0 - p) * down) / (1.0 + p * down + (above - p * up));
                    rise.max(fall).max(0.0)
                }
                (Measure::Deviation, None) => {
                    let own = p * p * l.rad * l.rad;
                    p * ((squares - own).max(0.0) + (1.0 - p) * (1.0 - p) * l.rad * l.rad).sqrt()
                }
            };
            let roundings =
                2.0 * arithmetic.function_ulps + alive as f64 + 3.0 + (away(l) + mean_distance + 4.0 * widest);
            let own = 1.01 * arithmetic.accumulate.unit * roundings * (p + rad) + 4.0 * arithmetic.function_underflow;
            let rad = arithmetic.join(rad, arithmetic.spread(own));
            Ball { mid: p, rad }
        })
        .collect()
}

/// The most that each p_i may be, and the most that all the others may be together, of logits anywhere within
/// reach:
///
/// ```text
/// p_i       ≤  σ(l_i + E_i − max_{j≠i} (l_j − E_j))
/// 1 − p_i   ≤  σ(max_{j≠i} (l_j + E_j) + ln(E − 1) − l_i + E_i)
/// ```
fn softmax_out_of(arithmetic: &Arithmetic, logits: &[Ball]) -> Vec<[f64; 2]> {
    let end = |l: Ball, side: f64| l.mid + side * arithmetic.reach(l.rad);
    let [lower, upper] = [-1.0, 1.0].map(|side| logits.iter().map(|&l| end(l, side)).collect::<Vec<_>>());
    let (below, above) = (largest_of_others(&lower), largest_of_others(&upper));
    let others = libm::log(logits.len().saturating_sub(1) as f64);
    let sigma = |x: f64| 1.0 / (1.0 + libm::exp(-x));
    (0..logits.len()).map(|i| [sigma(upper[i] - below[i]), sigma(above[i] + others - lower[i])]).collect()
}

/// The largest number beside each.
fn largest_of_others(numbers: &[f64]) -> Vec<f64> {
    let (mut at, mut first, mut second) = (0, f64::NEG_INFINITY, f64::NEG_INFINITY);
    for (i, &number) in numbers.iter().enumerate() {
        if number > first {
            (at, first, second) = (i, number, first);
        } else {
            second = second.max(number);
        }
    }
    (0..numbers.len()).map(|i| if i == at { second } else { first }).collect()
}

/// s(g − Σgs) over the chosen, each operation rounded in the accumulator.
fn softmax_backward(arithmetic: &Arithmetic, s: &[Ball], g: &[Ball]) -> Vec<Ball> {
    let chosen: Vec<usize> = (0..s.len()).collect();
    scattered_backward(arithmetic, s, g, &chosen)
}

/// p(ĝ − Σĝp) over all experts, where ĝ is 0 but for the `chosen`.
///
/// ĝ_i stands before the sum and in it. An engine has (p_j + δ_j)(ĝ_j + ε_j) in the sum, so that
///
/// ```text
/// error of ĝ_i − Σĝp  =  (1 − p_i − δ_i) ε_i − Σ_{j≠i} (p_j + δ_j) ε_j − Σ_j δ_j ĝ_j
/// ```
///
/// and E_ĝ counts |1 − p_i| + E_p times: with two equal scores half as often as 1 + p_i times.
fn scattered_backward(arithmetic: &Arithmetic, p: &[Ball], g: &[Ball], chosen: &[usize]) -> Vec<Ball> {
    let terms: Vec<Ball> = chosen.iter().map(|&j| arithmetic.product(g[j], p[j])).collect();
    // The terms' own radii are passed on below, each with its weight.
    let sum = Sum {
        ball: Ball::exact(terms.iter().map(|term| term.mid).sum()),
        magnitude: terms.iter().map(|term| term.magnitude()).sum(),
        square: terms.iter().map(|term| term.mid * term.mid).sum(),
    };
    let mean = arithmetic.summed(&arithmetic.accumulate, sum, chosen.len());
    let of_expert = |i: usize| {
        let others = chosen.iter().zip(&terms).filter(|&(&j, _)| j != i);
        let from_others = others.fold(mean.rad, |rad, (_, term)| arithmetic.join(rad, term.rad));
        let from_g = ((1.0 - p[i].mid).abs() + p[i].rad) * g[i].rad;
        let own = arithmetic.join(from_g, p[i].rad * g[i].mid.abs());
        let rad = known(arithmetic.join(from_others, own));
        arithmetic.multiply(p[i], arithmetic.operation(Ball { mid: g[i].mid - mean.mid, rad }))
    };
    (0..p.len()).map(of_expert).collect()
}

/// The gradient of p / Σp. An engine may use s(g − Σgs) on the chosen, or go op by op: g/S, −Σ g·(s/S),
/// their sum, and the backward of the softmax over all experts, each stored in the router's type. The
/// second leaves roundoff on the experts that were not chosen. The bound admits either.
fn renormalized_backward(arithmetic: &Arithmetic, p: &[Ball], experts: &[usize], s: &[Ball], g: &[Ball]) -> Vec<Ball> {
    let store = |ball| arithmetic.round(&arithmetic.router, ball);
    let total = store(arithmetic.sum(&arithmetic.accumulate, experts.iter().map(|&expert| p[expert]), experts.len()));
    let shares = s.iter().zip(g).map(|(&s, &g)| store(arithmetic.multiply(g, store(divide(arithmetic, s, total)))));
    let shift = store(arithmetic.sum(&arithmetic.accumulate, shares, experts.len()));
    let mut dp = vec![Ball::default(); p.len()];
    for (&expert, &g) in experts.iter().zip(g) {
        dp[expert] = store(subtract(arithmetic, store(divide(arithmetic, g, total)), shift));
    }
    let by_operation = scattered_backward(arithmetic, p, &dp, experts);
    let mut dlogits: Vec<Ball> =
        by_operation.iter().map(|ball| Ball { mid: 0.0, rad: ball.mid.abs() + ball.rad }).collect();
    for (&expert, direct) in experts.iter().zip(softmax_backward(arithmetic, s, g)) {
        // Scores as stored do not add up to 1: the two formulas differ by what is missing.
        let Ball { mid, rad } = by_operation[expert];
        dlogits[expert] = Ball { mid: direct.mid, rad: direct.rad.max((direct.mid - mid).abs() + rad) };
    }
    dlogits
}

pub(super) fn subtract(arithmetic: &Arithmetic, a: Ball, b: Ball) -> Ball {
    arithmetic.add(a, Ball { mid: -b.mid, ..b })
}

/// a/b for b > 0: (|a| + E_a)/(b − E_b) − |a|/b = (E_a + E_b|a|/b)/(b − E_b). Nothing is known of it where an
/// engine's b may be 0, which may lie several deviations away.
pub(super) fn divide(arithmetic: &Arithmetic, a: Ball, b: Ball) -> Ball {
    let mid = a.mid / b.mid;
    let least = b.mid - b.rad;
    let rad =
        if b.mid > arithmetic.reach(b.rad) { arithmetic.join(a.rad, b.rad * mid.abs()) / least } else { f64::INFINITY };
    arithmetic.operation(Ball { mid, rad })
}
