//! What a device's arithmetic does, measured: tensor cores are no IEEE adders, and σ is approximate.
//!
//! Both are read off kernel 4, the only one of the eight with an f32 result. With h = 1 in one column
//! and ReLU, ds is one number of G as the tensor cores left it; with G = 1 and up = 1, ds is
//! silu(gate) as the epilogue evaluates it. So what is measured is the arithmetic of the kernels
//! themselves and not of a copy.

use std::fmt;
use std::sync::Arc;

use half::bf16;
use ndarray::{Array2, Array3};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rayon::prelude::*;

use crate::activation::Activation;
use crate::engine::Numerics;
use crate::error::Result;
use crate::problem::{Gating, Problem};
use crate::routing::Routing;
use crate::shape::{ExpertId, TokenId};

use super::device::{Buffer, Device, Guards};
use super::down_backward_activation::{DownBackward, down_backward_activation};
use super::layer::{Layer, upload};
use super::routing::DeviceRouting;

/// What kind of numbers are multiplied and added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Terms {
    /// Normally distributed.
    Normal,
    /// Normally distributed times 2 to a random power: 12 binades.
    Spread,
    /// All positive, so that partial sums grow.
    Positive,
}

impl Terms {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Normal, Self::Spread, Self::Positive];

    fn name(self) -> &'static str {
        match self {
            Self::Normal => "normal",
            Self::Spread => "12 binades",
            Self::Positive => "positive",
        }
    }
}

/// The error of sums of one length.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Accumulation {
    /// What was added.
    pub terms: Terms,
    /// m, terms of a sum.
    pub length: usize,
    /// Sums measured.
    pub sums: usize,
    /// The worst |error| / Σ|a·b|, in units of 2⁻²⁴.
    pub worst: f64,
    /// The mean of error / Σ|a·b|, in the same units: below 0 where partial sums are cut off.
    pub mean: f64,
    /// What the bounds allow, γ_m / 2⁻²⁴.
    pub allowed: f64,
}

/// The error of silu over every bf16 gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sigmoid {
    /// Gates whose σ and silu are normal f32 numbers.
    pub gates: usize,
    /// The worst relative error, in units of 2⁻²⁴, and its gate.
    pub worst: (f64, f64),
    /// What the engine declares for its functions, in the same units, with the product.
    pub allowed: f64,
    /// From this gate on silu(gate) = gate: σ is exactly 1.
    pub one_from: f64,
    /// Down from this gate silu is exactly 0.
    pub zero_from: f64,
    /// Gates with a result that is not finite.
    pub not_finite: usize,
}

/// Both.
#[derive(Clone, Debug, PartialEq)]
pub struct Arithmetic {
    /// By kind and length.
    pub sums: Vec<Accumulation>,
    /// Of the epilogue.
    pub sigmoid: Sigmoid,
}

/// Lengths of the sums.
const LENGTHS: [usize; 4] = [16, 256, 1024, 16384];
/// Sums of each kind and length.
const SUMS: usize = 2048;
/// Units of kernel 4's narrowest tensors.
const UNITS: usize = 8;
/// u of f32.
const UNIT: f64 = 1.0 / (1u64 << 24) as f64;

impl Arithmetic {
    /// Measures `device`, whose engine declares `numerics`.
    ///
    /// # Errors
    /// A device that fails.
    pub fn measure(device: &Arc<Device>, numerics: &Numerics) -> Result<Self> {
        let kinds = Terms::ALL.into_iter().flat_map(|terms| LENGTHS.map(|length| (terms, length)));
        let sums = kinds.map(|(terms, length)| accumulation(device, numerics, terms, length));
        Ok(Self { sums: sums.collect::<Result<_>>()?, sigmoid: sigmoid(device, numerics)? })
    }

    /// Whether all of it is within what the bounds assume.
    pub fn as_declared(&self) -> bool {
        let Sigmoid { worst: (worst, _), allowed, not_finite, .. } = self.sigmoid;
        self.sums.iter().all(|sum| sum.worst <= sum.allowed) && worst <= allowed && not_finite == 0
    }
}

impl fmt::Display for Arithmetic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "sums on tensor cores, error in units of 2⁻²⁴·Σ|a·b| (worst / mean / allowed):")?;
        for terms in Terms::ALL {
            write!(f, "  {:<10}", terms.name())?;
            for sum in self.sums.iter().filter(|sum| sum.terms == terms) {
                write!(f, "  m = {}: {:.1} / {:+.2} / {:.0}", sum.length, sum.worst, sum.mean, sum.allowed)?;
            }
            writeln!(f)?;
        }
        let Sigmoid { gates, worst: (worst, gate), allowed, one_from, zero_from, not_finite } = self.sigmoid;
        write!(
            f,
            "σ in the epilogue, over {gates} gates: silu errs by {worst:.1} units of 2⁻²⁴ at {gate} (allowed {allowed:.0}); σ \
             is 1 from {one_from} on and 0 from {zero_from} down"
        )?;
        if not_finite > 0 {
            write!(f, "; {not_finite} results are not finite")?;
        }
        Ok(())
    }
}

/// ds of kernel 4 for one expert that has every token: ⟨dout_t·w2, act(h_t)⟩.
fn score_gradients(
    device: &Arc<Device>,
    activation: Activation,
    w2: Array3<bf16>,
    dout: Array2<bf16>,
    h: &[bf16],
) -> Result<Vec<f32>> {
    let (t, d) = dout.dim();
    let n = w2.dim().2;
    let routing = Routing::new(t, 1, (0..t as u32).map(|token| (TokenId(token), ExpertId(0))))?;
    let scores = vec![1.0f32; t];
    let on_device = DeviceRouting::upload(device, &routing, &scores, Guards::NONE)?;
    let w1 = Array3::from_elem((1, activation.h_width(n), d), bf16::ZERO);
    let gating = Gating::Given { routing, scores };
    let problem = Problem::new(dout.view(), w1, w2, None, gating, activation, dout.view())?;
    let layer = Layer::upload(device, &problem, Guards::NONE)?;
    device.prepare(&layer.backward_variants())?;
    let dout = upload(device, "dout", problem.dout(), Guards::NONE)?;
    let h = Buffer::input(device, "h", h, Guards::NONE)?;
    let mut dh = Buffer::output(device, "dh", h.len(), Guards::NONE)?;
    let mut a_prime = Buffer::output(device, "a_prime", t * n, Guards::NONE)?;
    let mut ds = Buffer::output(device, "ds", t, Guards::NONE)?;
    let results = DownBackward { dh: &mut dh, a_prime: &mut a_prime, ds_partial: &mut ds };
    down_backward_activation(&layer, &on_device, &dout, &h, results)?;
    ds.download()
}

fn accumulation(device: &Arc<Device>, numerics: &Numerics, terms: Terms, length: usize) -> Result<Accumulation> {
    let mut random = ChaCha8Rng::seed_from_u64(length as u64);
    let mut draw = || number(&mut random, terms);
    let dout = Array2::from_shape_simple_fn((SUMS, length), &mut draw);
    let w2 = Array3::from_shape_simple_fn((1, length, UNITS), &mut draw);
    let mut h = vec![bf16::ZERO; SUMS * UNITS];
    (0..SUMS).for_each(|row| h[row * UNITS + row % UNITS] = bf16::ONE);
    let found = score_gradients(device, Activation::Relu, w2.clone(), dout.clone(), &h)?;

    let errors: Vec<f64> = found
        .par_iter()
        .enumerate()
        .map(|(row, &found)| {
            // Products of bf16 are exact in f64.
            let products = (0..length).map(|k| f64::from(dout[[row, k]]) * f64::from(w2[[0, k, row % UNITS]]));
            let (sum, magnitude) = products.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
            (f64::from(found) - sum) / magnitude / UNIT
        })
        .collect();
    let gamma = length as f64 * numerics.accumulator;
    Ok(Accumulation {
        terms,
        length,
        sums: errors.len(),
        worst: errors.iter().fold(0.0, |worst, error| worst.max(error.abs())),
        mean: errors.iter().sum::<f64>() / errors.len() as f64,
        allowed: gamma / (1.0 - gamma) / UNIT,
    })
}

fn number(random: &mut ChaCha8Rng, terms: Terms) -> bf16 {
    let mut uniform = || (f64::from(random.next_u32()) + 0.5) / (1u64 << 32) as f64;
    let normal = (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
    bf16::from_f64(match terms {
        Terms::Normal => normal,
        Terms::Spread => normal * (12.0 * uniform()).floor().exp2(),
        Terms::Positive => normal.abs(),
    })
}

fn sigmoid(device: &Arc<Device>, numerics: &Numerics) -> Result<Sigmoid> {
    let gates: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).filter(|gate| gate.is_finite()).collect();
    let t = gates.len();
    let mut dout = Array2::from_elem((t, UNITS), bf16::ZERO);
    dout.column_mut(0).fill(bf16::ONE);
    let mut w2 = Array3::from_elem((1, UNITS, UNITS), bf16::ZERO);
    w2[[0, 0, 0]] = bf16::ONE;
    let mut h = vec![bf16::ZERO; t * 2 * UNITS];
    for (row, &gate) in gates.iter().enumerate() {
        (h[row * 2 * UNITS], h[row * 2 * UNITS + 1]) = (gate, bf16::ONE);
    }
    let found = score_gradients(device, Activation::SwiGlu, w2, dout, &h)?;

    let mut sigmoid = Sigmoid {
        gates: 0,
        worst: (0.0, 0.0),
        // The function, x·σ, and the product with up and G: two roundings more than the function's.
        allowed: numerics.function_ulps + 4.0,
        one_from: f64::INFINITY,
        zero_from: f64::NEG_INFINITY,
        not_finite: 0,
    };
    let mut measured: Vec<(f64, f64)> =
        gates.iter().map(|&gate| gate.into()).zip(found.iter().map(|&s| s.into())).collect();
    measured.sort_by(|one, two| one.0.total_cmp(&two.0));
    for &(gate, found) in &measured {
        // e^x/(1 + e^x) for negative gates: no tail cancels.
        let tail = libm::exp(-gate.abs());
        let sigma = if gate < 0.0 { tail / (1.0 + tail) } else { 1.0 / (1.0 + tail) };
        let truth = gate * sigma;
        if !found.is_finite() {
            sigmoid.not_finite += 1;
        } else if truth != 0.0 && truth.abs().min(sigma) >= 2.0 * f64::from(f32::MIN_POSITIVE) {
            sigmoid.gates += 1;
            let error = ((found - truth) / truth).abs() / UNIT;
            if error > sigmoid.worst.0 {
                sigmoid.worst = (error, gate);
            }
        }
    }
    let from_above = measured.iter().rev().take_while(|(gate, found)| *gate > 0.0 && gate == found);
    sigmoid.one_from = from_above.last().map_or(f64::INFINITY, |(gate, _)| *gate);
    let from_below = measured.iter().take_while(|(gate, found)| *gate < 0.0 && *found == 0.0);
    sigmoid.zero_from = from_below.last().map_or(f64::NEG_INFINITY, |(gate, _)| *gate);
    Ok(sigmoid)
}
