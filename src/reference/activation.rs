//! The activations as expressions over tape primitives; their derivatives are the tape's.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_PI};

use ndarray::Array2;

use super::tape::{Tape, Var};
use crate::activation::{Activation, Gelu};
use crate::element::Real;

/// a (R, n) of h (R, 2n), or of h (R, n) without a gate.
pub(super) fn activate<A: Real>(tape: &mut Tape<'_, A>, activation: Activation, h: Var) -> Var {
    let gated = |tape: &mut Tape<'_, A>, function: fn(&mut Tape<'_, A>, Var) -> Var| {
        let (gate, up) = (tape.columns(h, 0, 2), tape.columns(h, 1, 2));
        let opened = function(tape, gate);
        tape.mul(opened, up)
    };
    match activation {
        Activation::SwiGlu => gated(tape, silu),
        Activation::GeGlu(Gelu::Exact) => gated(tape, gelu_exact),
        Activation::GeGlu(Gelu::Tanh) => gated(tape, gelu_tanh),
        Activation::ReGlu => gated(tape, |tape, gate| tape.relu(gate)),
        Activation::GptOss => gpt_oss(tape, h),
        Activation::Silu => silu(tape, h),
        Activation::Gelu(Gelu::Exact) => gelu_exact(tape, h),
        Activation::Gelu(Gelu::Tanh) => gelu_tanh(tape, h),
        Activation::Relu => tape.relu(h),
        Activation::ReluSquared => {
            let relu = tape.relu(h);
            tape.mul(relu, relu)
        }
    }
}

/// x·σ(x)
fn silu<A: Real>(tape: &mut Tape<'_, A>, x: Var) -> Var {
    let sigmoid = tape.sigmoid(x);
    tape.mul(x, sigmoid)
}

/// (u + 1)·g·σ(1.702·g) with g = min(gate, 7) and u = up within ±7.
fn gpt_oss<A: Real>(tape: &mut Tape<'_, A>, h: Var) -> Var {
    let limit = A::from_f64(7.0);
    let (gate, up) = (tape.columns(h, 0, 2), tape.columns(h, 1, 2));
    let (gate, up) = (tape.clamp(gate, A::neg_infinity(), limit), tape.clamp(up, -limit, limit));
    let steep = tape.scale(gate, A::from_f64(1.702));
    let sigmoid = tape.sigmoid(steep);
    let opened = tape.mul(gate, sigmoid);
    let minus_one = Array2::from_elem((tape.shape(up).0, 1), -A::one());
    let lifted = tape.shift_rows(up, &minus_one);
    tape.mul(lifted, opened)
}

/// x·Φ(x), Φ(x) = erfc(−x/√2)/2: 1 + erf(x/√2) would cancel for negative x.
fn gelu_exact<A: Real>(tape: &mut Tape<'_, A>, x: Var) -> Var {
    let argument = tape.scale(x, A::from_f64(-FRAC_1_SQRT_2));
    let erfc = tape.erfc(argument);
    let phi = tape.scale(erfc, A::from_f64(0.5));
    tape.mul(x, phi)
}

/// x·(1 + tanh z)/2 with z = √(2/π)(x + 0.044715 x³), written x·σ(2z): the same function, without
/// the cancellation of 1 + tanh z for negative z.
fn gelu_tanh<A: Real>(tape: &mut Tape<'_, A>, x: Var) -> Var {
    let square = tape.mul(x, x);
    let cube = tape.mul(square, x);
    let cubic = tape.scale(cube, A::from_f64(0.044715));
    let polynomial = tape.add(x, cubic);
    let twice_z = tape.scale(polynomial, A::from_f64(2.0 * FRAC_2_PI.sqrt()));
    let sigmoid = tape.sigmoid(twice_z);
    tape.mul(x, sigmoid)
}
