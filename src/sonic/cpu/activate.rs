//! The activations and their derivatives, closed form, for any finite input.
//!
//! With one exponential t = e^(−|x|) both tails of the sigmoid are exact to a few roundings:
//! σ(|x|) = 1/(1 + t) and σ(−|x|) = t/(1 + t). So 1 − σ is never a difference, silu′ keeps its
//! precision where σ rounds to 1, and σ saturates to 0 and 1 without ever dividing ∞ by ∞.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use pulp::Arch;

use crate::activation::{Activation, Gelu};
use crate::element::{DType, Real};

/// a = act(h) for one row, or for consecutive units of one: `h` interleaved with a gate.
pub(super) fn activate<A: Real>(activation: Activation, h: &[A], a: &mut [A]) {
    Arch::new().dispatch(|| match activation {
        Activation::SwiGlu => gated(h, a, |gate| silu(gate).0),
        Activation::GeGlu(Gelu::Exact) => gated(h, a, |gate| gelu(gate).0),
        Activation::GeGlu(Gelu::Tanh) => gated(h, a, |gate| gelu_tanh(gate).0),
        Activation::ReGlu => gated(h, a, |gate| relu(gate).0),
        Activation::GptOss => {
            for (a, unit) in a.iter_mut().zip(h.chunks_exact(2)) {
                *a = clamped_gate(unit[0]).0 * lifted_up(unit[1]).0;
            }
        }
        Activation::Silu => plain(h, a, |h| silu(h).0),
        Activation::Gelu(Gelu::Exact) => plain(h, a, |h| gelu(h).0),
        Activation::Gelu(Gelu::Tanh) => plain(h, a, |h| gelu_tanh(h).0),
        Activation::Relu => plain(h, a, |h| relu(h).0),
        Activation::ReluSquared => plain(h, a, |h| relu_squared(h).0),
    });
}

/// a = act(h) and `partials` = ∂a/∂h, which has one entry for each of h: v(up)·f′(gate), f(gate)·v′(up)
/// for a = f(gate)·v(up), where v(up) = up but for gpt-oss; or f′(h) for a = f(h).
pub(super) fn activate_with_partials<A: Real>(activation: Activation, h: &[A], a: &mut [A], partials: &mut [A]) {
    Arch::new().dispatch(|| match activation {
        Activation::SwiGlu => gated_with_partials(h, a, partials, silu),
        Activation::GeGlu(Gelu::Exact) => gated_with_partials(h, a, partials, gelu),
        Activation::GeGlu(Gelu::Tanh) => gated_with_partials(h, a, partials, gelu_tanh),
        Activation::ReGlu => gated_with_partials(h, a, partials, relu),
        Activation::GptOss => {
            for ((a, unit), partials) in a.iter_mut().zip(h.chunks_exact(2)).zip(partials.chunks_exact_mut(2)) {
                let (opened, slope) = clamped_gate(unit[0]);
                let (lifted, passes) = lifted_up(unit[1]);
                *a = opened * lifted;
                partials[0] = lifted * slope;
                partials[1] = opened * passes;
            }
        }
        Activation::Silu => plain_with_partials(h, a, partials, silu),
        Activation::Gelu(Gelu::Exact) => plain_with_partials(h, a, partials, gelu),
        Activation::Gelu(Gelu::Tanh) => plain_with_partials(h, a, partials, gelu_tanh),
        Activation::Relu => plain_with_partials(h, a, partials, relu),
        Activation::ReluSquared => plain_with_partials(h, a, partials, relu_squared),
    });
}

/// dh = ∂a/∂h · dA, in place of the partials.
pub(super) fn differentiate<A: Real>(activation: Activation, da: &[A], partials: &mut [A]) {
    Arch::new().dispatch(|| {
        if activation.gated() {
            for (partials, &da) in partials.chunks_exact_mut(2).zip(da) {
                partials[0] *= da;
                partials[1] *= da;
            }
        } else {
            partials.iter_mut().zip(da).for_each(|(partial, &da)| *partial *= da);
        }
    });
}

#[inline(always)]
fn gated<A: Real>(h: &[A], a: &mut [A], f: impl Fn(A) -> A) {
    for (a, unit) in a.iter_mut().zip(h.chunks_exact(2)) {
        *a = f(unit[0]) * unit[1];
    }
}

#[inline(always)]
fn plain<A: Real>(h: &[A], a: &mut [A], f: impl Fn(A) -> A) {
    for (a, &h) in a.iter_mut().zip(h) {
        *a = f(h);
    }
}

#[inline(always)]
fn gated_with_partials<A: Real>(h: &[A], a: &mut [A], partials: &mut [A], f: impl Fn(A) -> (A, A)) {
    for ((a, unit), partials) in a.iter_mut().zip(h.chunks_exact(2)).zip(partials.chunks_exact_mut(2)) {
        let (gate, up) = (unit[0], unit[1]);
        let (value, slope) = f(gate);
        *a = value * up;
        partials[0] = up * slope;
        partials[1] = value;
    }
}

#[inline(always)]
fn plain_with_partials<A: Real>(h: &[A], a: &mut [A], partials: &mut [A], f: impl Fn(A) -> (A, A)) {
    for ((a, &h), partial) in a.iter_mut().zip(h).zip(partials) {
        (*a, *partial) = f(h);
    }
}

/// σ(x) and 1 − σ(x) = σ(−x).
#[inline(always)]
fn sigmoid<A: Real>(x: A) -> (A, A) {
    let tail = exp_of_negative(-x.abs());
    let large = (A::one() + tail).recip();
    let small = tail * large;
    if x < A::zero() { (small, large) } else { (large, small) }
}

/// e^x for x ≤ 0, within 3 roundings; 0 from −104 on, where f32 ends.
///
/// The library's function takes one number at a time. In f32 this one, with x = n·ln 2 + r and a
/// polynomial for e^r, takes a vector.
#[inline(always)]
fn exp_of_negative<A: Real>(x: A) -> A {
    if A::DTYPE != DType::F32 {
        return x.exp();
    }
    // Adding 1.5·2²³ leaves the nearest whole number in the last bits of the sum.
    const WHOLE: f32 = 12_582_912.0;
    // ln 2 in two parts: n times the first is exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    // e^r = 1 + r + r²·P(r) for |r| ≤ ln 2 / 2 (Cephes).
    const P: [f32; 6] = [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
    let x = x.to_f32();
    let x = if x < -104.0 { -104.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + WHOLE;
    let whole = shifted - WHOLE;
    let r = x - whole * LN_2[0] - whole * LN_2[1];
    let p = P.into_iter().reduce(|p, next| p * r + next).unwrap_or_default();
    let e = p * r * r + r + 1.0;
    // 2^n in two factors: n = −150 is below the exponents that one normal number can have.
    let n = shifted.to_bits().wrapping_sub(WHOLE.to_bits()) as i32;
    let half = n >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    A::from_f32(e * power(half) * power(n.wrapping_sub(half)))
}

/// x·σ and σ(1 + x(1 − σ)).
#[inline(always)]
fn silu<A: Real>(x: A) -> (A, A) {
    let (sigma, rest) = sigmoid(x);
    (x * sigma, sigma * (A::one() + x * rest))
}

/// Where gpt-oss clamps gate and up.
const CLAMP: f64 = 7.0;

/// v = g·σ(αg) and σ(αg) + αv(1 − σ(αg)) with α = 1.702 and g = min(x, 7); above the clamp the slope is 0,
/// at it not. Where αg overflows v is 0. A NaN stays one.
#[inline(always)]
fn clamped_gate<A: Real>(x: A) -> (A, A) {
    let limit = A::from_f64(CLAMP);
    let beyond = x > limit;
    let gate = if beyond { limit } else { x };
    let steepness = A::from_f64(1.702);
    let (sigma, rest) = sigmoid(steepness * gate);
    let value = gate * sigma;
    (value, if beyond { A::zero() } else { sigma + steepness * value * rest })
}

/// u + 1 and its slope, with u = x within ±7: 1 up to the clamps, 0 beyond them. A NaN stays one.
#[inline(always)]
fn lifted_up<A: Real>(x: A) -> (A, A) {
    let limit = A::from_f64(CLAMP);
    let (up, slope) = if x > limit {
        (limit, A::zero())
    } else if x < -limit {
        (-limit, A::zero())
    } else {
        (x, A::one())
    };
    (up + A::one(), slope)
}

/// x·Φ(x) and Φ(x) + x·φ(x), with Φ(x) = erfc(−x/√2)/2 and φ(x) = e^(−x²/2)/√(2π).
///
/// In f64 whatever the accumulator: the error of a rounded argument grows with x² in both tails.
#[inline(always)]
fn gelu<A: Real>(x: A) -> (A, A) {
    let x = x.to_f64();
    let cumulative = libm::erfc(-x * FRAC_1_SQRT_2) / 2.0;
    let density = (-x * x / 2.0).exp() / (2.0 * PI).sqrt();
    (A::from_f64(x * cumulative), A::from_f64(cumulative + x * density))
}

/// x·σ(z) and σ(z) + x·z′·σ(z)(1 − σ(z)), with z = 2√(2/π)(x + 0.044715 x³): the same as
/// x/2·(1 + tanh(z/2)) without its cancellation. In f64, as [`gelu`] is.
#[inline(always)]
fn gelu_tanh<A: Real>(x: A) -> (A, A) {
    const CUBIC: f64 = 0.044715;
    let x = x.to_f64();
    let scale = 2.0 * (2.0 / PI).sqrt();
    let (sigma, rest) = sigmoid(scale * x * (1.0 + CUBIC * x * x));
    let bend = sigma * rest;
    // z′ overflows only where the sigmoid has long been flat.
    let slope = if bend == 0.0 { sigma } else { sigma + x * scale * (1.0 + 3.0 * CUBIC * x * x) * bend };
    (A::from_f64(x * sigma), A::from_f64(slope))
}

/// max(x, 0) and its slope, 0 at 0; a NaN stays one.
#[inline(always)]
fn relu<A: Real>(x: A) -> (A, A) {
    if x <= A::zero() { (A::zero(), A::zero()) } else { (x, A::one()) }
}

/// max(x, 0)² and 2·max(x, 0).
#[inline(always)]
fn relu_squared<A: Real>(x: A) -> (A, A) {
    let (positive, _) = relu(x);
    (positive * positive, positive + positive)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every 97th float from 0 to 103.9, and the ends.
    fn arguments() -> impl Iterator<Item = f32> {
        (0..=103.9f32.to_bits()).step_by(97).map(f32::from_bits)
    }

    #[test]
    fn both_tails_of_the_sigmoid_are_within_eight_roundings() {
        let smallest = f64::from(f32::from_bits(1));
        for x in arguments() {
            let t = (-f64::from(x)).exp();
            let exact = (1.0 / (1.0 + t), t / (1.0 + t));
            let (large, small) = sigmoid(x);
            for (value, exact) in [(large, exact.0), (small, exact.1)] {
                let allowed = 8.0 * DType::F32.unit_roundoff() * exact + smallest;
                assert!((f64::from(value) - exact).abs() <= allowed, "σ({x}): {value:e} for {exact:e}");
            }
            assert_eq!(sigmoid(-x), (small, large));
        }
    }

    #[test]
    fn the_sigmoid_saturates_exactly_and_keeps_nan() {
        for x in [104.0, 160.0, 1e10, f32::MAX, f32::INFINITY] {
            assert_eq!(sigmoid(x), (1.0, 0.0), "σ({x})");
            assert_eq!(sigmoid(-x), (0.0, 1.0), "σ(−{x})");
        }
        assert_eq!(sigmoid(17.5f32).0, 1.0);
        assert_eq!(sigmoid(800.0f64), (1.0, 0.0));
        assert!(sigmoid(f32::NAN).0.is_nan() && sigmoid(f64::NAN).1.is_nan());
    }

    #[test]
    fn any_finite_input_gives_a_number() {
        let ends = [0.0, -0.0, 1e-30, 6.0, 88.0, 1e5, 1e19, f32::MAX].into_iter().flat_map(|x| [x, -x]);
        for h in ends.chain(arguments().step_by(1009).flat_map(|x| [x, -x])) {
            for activation in Activation::ALL {
                let unit = [h, 1.0];
                let h = &unit[..activation.h_width(1)];
                let (mut a, mut again, mut partials) = ([0.0], [0.0], [0.0; 2]);
                activate(activation, h, &mut a);
                activate_with_partials(activation, h, &mut again, &mut partials[..h.len()]);
                assert_eq!(a, again, "{activation} at {h:?}");
                let overflows = activation == Activation::ReluSquared && h[0] > 1e19;
                let number = |x: &f32| if overflows { !x.is_nan() } else { x.is_finite() };
                assert!(a.iter().chain(&partials).all(number), "{activation} at {h:?}: {a:?}, {partials:?}");
            }
        }
    }

    #[test]
    fn a_gradient_passes_at_the_clamps_of_gpt_oss_and_not_beyond() {
        let partials = |gate: f64, up: f64| {
            let (mut a, mut partials) = ([0.0], [0.0; 2]);
            activate_with_partials(Activation::GptOss, &[gate, up], &mut a, &mut partials);
            (a[0], partials)
        };
        let next = |x: f64| x.next_up();
        let (at, [dgate, dup]) = partials(7.0, 7.0);
        assert!(dgate > 8.0 && dup > 6.9, "{dgate}, {dup}");
        assert_eq!(partials(next(7.0), next(7.0)), (at, [0.0, 0.0]));
        assert_eq!(partials(1e300, f64::INFINITY), (at, [0.0, 0.0]));
        let (below, [dgate, dup]) = partials(-7.0, -7.0);
        assert!(dgate != 0.0 && dup != 0.0);
        assert_eq!(partials(-7.0, -next(7.0)), (below, [dgate, 0.0]));
        // The gate has no lower clamp.
        assert!(partials(-8.0, 0.0).0 != partials(-7.0, 0.0).0);
    }

    #[test]
    fn each_slope_is_the_difference_quotient_of_its_function() {
        for activation in Activation::ALL {
            for step in -80..80 {
                let (h, up) = (f64::from(step) / 10.0 + 0.013, 1.7);
                let act = |h: f64| {
                    let mut a = [0.0];
                    activate(activation, &[h, up][..activation.h_width(1)], &mut a);
                    a[0]
                };
                let (mut a, mut partials) = ([0.0], [0.0; 2]);
                let width = activation.h_width(1);
                activate_with_partials(activation, &[h, up][..width], &mut a, &mut partials[..width]);
                // Central difference: its own error is δ²/6·|act‴| ≤ 2e-10 with |act‴| ≤ 10, and 1e-11 of roundoff.
                let delta = 1e-5;
                let quotient = (act(h + delta) - act(h - delta)) / (2.0 * delta);
                assert!((partials[0] - quotient).abs() < 1e-9, "{activation} at {h}: {} for {quotient}", partials[0]);
                if activation.gated() {
                    let lifted = if activation == Activation::GptOss { up + 1.0 } else { up };
                    assert!((partials[1] * lifted - act(h)).abs() < 1e-12, "{activation} at {h}");
                }
            }
        }
    }
}
