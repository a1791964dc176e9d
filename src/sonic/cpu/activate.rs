//! The activations and their derivatives, closed form, for any finite input.
//!
//! With one exponential t = e^(−|x|) both tails of the sigmoid are exact to a few roundings:
//! σ(|x|) = 1/(1 + t) and σ(−|x|) = t/(1 + t). So 1 − σ is never a difference, silu′ keeps its
//! precision where σ rounds to 1, and σ saturates to 0 and 1 without ever dividing ∞ by ∞.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use crate::activation::{Activation, Gelu};
use crate::element::Real;

/// a = act(h) for one row, or for consecutive units of one: `h` interleaved with a gate.
pub(super) fn activate<A: Real>(activation: Activation, h: &[A], a: &mut [A]) {
    match activation {
        Activation::SwiGlu => gated(h, a, |gate| silu(gate).0),
        Activation::GeGlu(Gelu::Exact) => gated(h, a, |gate| gelu(gate).0),
        Activation::GeGlu(Gelu::Tanh) => gated(h, a, |gate| gelu_tanh(gate).0),
        Activation::ReGlu => gated(h, a, |gate| relu(gate).0),
        Activation::Silu => plain(h, a, |h| silu(h).0),
        Activation::Gelu(Gelu::Exact) => plain(h, a, |h| gelu(h).0),
        Activation::Gelu(Gelu::Tanh) => plain(h, a, |h| gelu_tanh(h).0),
        Activation::Relu => plain(h, a, |h| relu(h).0),
        Activation::ReluSquared => plain(h, a, |h| relu_squared(h).0),
    }
}

/// a = act(h) and `partials` = ∂a/∂h, which has one entry for each of h: up·f′(gate), f(gate) for
/// a = f(gate)·up, or f′(h) for a = f(h).
pub(super) fn activate_with_partials<A: Real>(activation: Activation, h: &[A], a: &mut [A], partials: &mut [A]) {
    match activation {
        Activation::SwiGlu => gated_with_partials(h, a, partials, silu),
        Activation::GeGlu(Gelu::Exact) => gated_with_partials(h, a, partials, gelu),
        Activation::GeGlu(Gelu::Tanh) => gated_with_partials(h, a, partials, gelu_tanh),
        Activation::ReGlu => gated_with_partials(h, a, partials, relu),
        Activation::Silu => plain_with_partials(h, a, partials, silu),
        Activation::Gelu(Gelu::Exact) => plain_with_partials(h, a, partials, gelu),
        Activation::Gelu(Gelu::Tanh) => plain_with_partials(h, a, partials, gelu_tanh),
        Activation::Relu => plain_with_partials(h, a, partials, relu),
        Activation::ReluSquared => plain_with_partials(h, a, partials, relu_squared),
    }
}

/// dh = ∂a/∂h · dA, in place of the partials.
pub(super) fn differentiate<A: Real>(activation: Activation, da: &[A], partials: &mut [A]) {
    let width = activation.h_width(1);
    for (partials, &da) in partials.chunks_exact_mut(width).zip(da) {
        partials.iter_mut().for_each(|partial| *partial = *partial * da);
    }
}

fn gated<A: Real>(h: &[A], a: &mut [A], f: impl Fn(A) -> A) {
    for (a, unit) in a.iter_mut().zip(h.chunks_exact(2)) {
        *a = f(unit[0]) * unit[1];
    }
}

fn plain<A: Real>(h: &[A], a: &mut [A], f: impl Fn(A) -> A) {
    for (a, &h) in a.iter_mut().zip(h) {
        *a = f(h);
    }
}

fn gated_with_partials<A: Real>(h: &[A], a: &mut [A], partials: &mut [A], f: impl Fn(A) -> (A, A)) {
    for ((a, unit), partials) in a.iter_mut().zip(h.chunks_exact(2)).zip(partials.chunks_exact_mut(2)) {
        let (gate, up) = (unit[0], unit[1]);
        let (value, slope) = f(gate);
        *a = value * up;
        partials[0] = up * slope;
        partials[1] = value;
    }
}

fn plain_with_partials<A: Real>(h: &[A], a: &mut [A], partials: &mut [A], f: impl Fn(A) -> (A, A)) {
    for ((a, &h), partial) in a.iter_mut().zip(h).zip(partials) {
        (*a, *partial) = f(h);
    }
}

/// σ(x) and 1 − σ(x) = σ(−x).
fn sigmoid<A: Real>(x: A) -> (A, A) {
    let tail = (-x.abs()).exp();
    let large = (A::one() + tail).recip();
    let small = tail * large;
    if x < A::zero() { (small, large) } else { (large, small) }
}

/// x·σ and σ(1 + x(1 − σ)).
fn silu<A: Real>(x: A) -> (A, A) {
    let (sigma, rest) = sigmoid(x);
    (x * sigma, sigma * (A::one() + x * rest))
}

/// x·Φ(x) and Φ(x) + x·φ(x), with Φ(x) = erfc(−x/√2)/2 and φ(x) = e^(−x²/2)/√(2π).
///
/// In f64 whatever the accumulator: the error of a rounded argument grows with x² in both tails.
fn gelu<A: Real>(x: A) -> (A, A) {
    let x = x.to_f64();
    let cumulative = libm::erfc(-x * FRAC_1_SQRT_2) / 2.0;
    let density = (-x * x / 2.0).exp() / (2.0 * PI).sqrt();
    (A::from_f64(x * cumulative), A::from_f64(cumulative + x * density))
}

/// x·σ(z) and σ(z) + x·z′·σ(z)(1 − σ(z)), with z = 2√(2/π)(x + 0.044715 x³): the same as
/// x/2·(1 + tanh(z/2)) without its cancellation. In f64, as [`gelu`] is.
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
fn relu<A: Real>(x: A) -> (A, A) {
    if x <= A::zero() { (A::zero(), A::zero()) } else { (x, A::one()) }
}

/// max(x, 0)² and 2·max(x, 0).
fn relu_squared<A: Real>(x: A) -> (A, A) {
    let (positive, _) = relu(x);
    (positive * positive, positive + positive)
}
