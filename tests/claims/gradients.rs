//! Central differences confirm the reference: every activation, every router convention.

mod primitives;
mod standard;

use std::collections::BTreeMap;

use approx::abs_diff_eq;
use ndarray::{Array, Array2, ArrayD, Dimension, Ix1, Ix2, Ix3, IxDyn};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sonicmoe::engine::{Outcome, Output};
use sonicmoe::reference::StandardMoe;
use sonicmoe::routing::{GroupedSigmoid, Routing};
use sonicmoe::{Activation, Biases, Convention, Engine, ExpertId, Gating, Gelu, Problem, Record, Router, TokenId, run};

/// The largest displacement of an input.
const STEP: f64 = 1.0 / 64.0;

const U: f64 = f64::EPSILON / 2.0;

/// The derivative at 0 of `loss`, whose values err by at most `error`, and how far it may be off.
///
/// With D(ε) = (f(ε) − f(−ε))/2ε = f′ + c₃ε² + c₅ε⁴ + …, R(ε) = (4D(ε/2) − D(ε))/3 is free of c₃.
/// R(ε) errs by about −c₅ε⁴/4 and R(ε/2) by 1/16 of that, so their difference is 15 times what
/// R(ε/2) is off by truncation. `error` reaches D(ε/4) at most 4/ε-fold, D(ε/2) 2/ε-fold, and so
/// R(ε/2) at most (4·4 + 2)/3ε = 6/ε-fold.
fn central_difference(mut loss: impl FnMut(f64) -> f64, error: f64) -> (f64, f64) {
    let [whole, half, quarter] = [STEP, STEP / 2.0, STEP / 4.0].map(|step| (loss(step) - loss(-step)) / (2.0 * step));
    let (coarse, fine) = ((4.0 * half - whole) / 3.0, (4.0 * quarter - half) / 3.0);
    (fine, (coarse - fine).abs() + 6.0 * error / STEP)
}

/// Uniform in [−1, 1].
fn uniform<D: Dimension>(random: &mut ChaCha8Rng, shape: impl ndarray::ShapeBuilder<Dim = D>) -> Array<f64, D> {
    Array::from_shape_simple_fn(shape, || random.random_range(-1.0..=1.0))
}

// ── The layer ──────────────────────────────────────────────────────────────────────────────────

const T: usize = 3;
const D: usize = 3;
const N: usize = 2;
const E: usize = 3;

/// A small layer whose inputs can be displaced, each under the name of its gradient.
#[derive(Clone)]
struct Layer {
    inputs: BTreeMap<Output, ArrayD<f64>>,
    activation: Activation,
    /// None: given routing.
    router: Option<(usize, Convention)>,
    dout: Array2<f64>,
}

/// Token 0 has three pairs, token 1 one, token 2 none, in no order; expert 2 gets one token.
fn given_routing() -> Routing {
    routing(T, E, &[(0, 2), (1, 0), (0, 0), (0, 1)])
}

fn routing(t: usize, e: usize, pairs: &[(u32, u32)]) -> Routing {
    Routing::new(t, e, pairs.iter().map(|&(token, expert)| (TokenId(token), ExpertId(expert)))).unwrap()
}

impl Layer {
    fn random(seed: u64, activation: Activation, router: Option<(usize, Convention)>, biases: bool) -> Self {
        let random = &mut ChaCha8Rng::seed_from_u64(seed);
        let width = activation.h_width(N);
        let mut shapes = vec![(Output::Dx, vec![T, D]), (Output::Dw1, vec![E, width, D]), (Output::Dw2, vec![E, D, N])];
        if biases {
            shapes.extend([(Output::Db1, vec![E, width]), (Output::Db2, vec![E, D])]);
        }
        match router {
            None => shapes.push((Output::Ds, vec![given_routing().routed()])),
            Some(_) => {
                shapes.push((Output::DrouterW, vec![E, D]));
                if biases {
                    shapes.push((Output::DrouterB, vec![E]));
                }
            }
        }
        let inputs = shapes.into_iter().map(|(name, shape)| (name, uniform(random, IxDyn(&shape)))).collect();
        Self { inputs, activation, router, dout: uniform(random, (T, D)) }
    }

    /// The first random layer whose relu, if it has one, is nowhere within reach of its kink: a
    /// displacement of one input by `STEP` moves h by at most `STEP`, as |x|, |w1| ≤ 1.
    fn away_from_kinks(activation: Activation, router: Option<(usize, Convention)>, biases: bool) -> Self {
        let kinked = matches!(activation, Activation::ReGlu | Activation::Relu | Activation::ReluSquared);
        let stride = if activation.gated() { 2 } else { 1 };
        (0..)
            .map(|seed| Self::random(seed, activation, router, biases))
            .find(|layer| {
                let h = run(&StandardMoe::new(), &layer.problem(), Record::Intermediates).unwrap().results[&Output::H]
                    .values
                    .clone();
                !kinked || h.rows().into_iter().all(|row| row.iter().step_by(stride).all(|h| h.abs() > 2.0 * STEP))
            })
            .unwrap()
    }

    fn input<I: Dimension>(&self, name: Output) -> Option<Array<f64, I>> {
        self.inputs.get(&name).map(|input| input.clone().into_dimensionality().unwrap())
    }

    fn problem(&self) -> Problem<'static, f64> {
        let gating = match self.router {
            None => Gating::Given { routing: given_routing(), scores: self.input::<Ix1>(Output::Ds).unwrap().to_vec() },
            Some((k, convention)) => Gating::Router(Router {
                w: self.input::<Ix2>(Output::DrouterW).unwrap().into(),
                b: self.input::<Ix1>(Output::DrouterB).map(Into::into),
                selection_bias: None,
                k,
                convention,
            }),
        };
        let biases = self
            .input::<Ix2>(Output::Db1)
            .zip(self.input::<Ix2>(Output::Db2))
            .map(|(b1, b2)| Biases { b1: b1.into(), b2: b2.into() });
        Problem::new(
            self.input::<Ix2>(Output::Dx).unwrap(),
            self.input::<Ix3>(Output::Dw1).unwrap(),
            self.input::<Ix3>(Output::Dw2).unwrap(),
            biases,
            gating,
            self.activation,
            self.dout.clone(),
        )
        .unwrap()
    }

    /// ⟨dout, o⟩ with the choice of experts held fixed.
    fn loss(&self, routing: &Routing) -> f64 {
        let (engine, problem) = (StandardMoe::with_routing(routing.clone()), self.problem());
        let o = engine.forward(&problem, Record::Results).unwrap().o;
        (&o * &self.dout).sum()
    }

    /// How far `loss` may be off, from |x|, |w|, |b|, |s|, |dout| ≤ 1: then |h| ≤ d + 1,
    /// |a| ≤ (d + 1)², |y| ≤ n(d + 1)² + 1, and the loss is a sum of T·d·(pairs per token) such terms.
    /// Relative to that magnitude, roundings contribute in units of u at most: logits (d + 1)² = 16,
    /// doubled by softmax as the shift and quotient nearly double it again, 55 in all; h twice
    /// 1.13·(d + 1) through gate and up; the activation 12; y, s·y, combine and the final sum
    /// n + 1 + 1 + 3 + T·d + 1. That is 95; 128 leaves room for the displacement and for terms of u².
    fn loss_error() -> f64 {
        let y = N * (D + 1) * (D + 1) + 1;
        128.0 * U * (T * D * E * y) as f64
    }
}

/// Compares every element of every gradient of `layer` with a central difference of its loss, and
/// says where they differ by more than they may.
fn compare(gradients: &Outcome, layer: &Layer) -> Result<(), String> {
    for (name, input) in &layer.inputs {
        let gradient = &gradients.results[name].values;
        let mut displaced = layer.clone();
        let (mut largest, mut widest) = (0.0_f64, 0.0_f64);
        for (at, &value) in input.indexed_iter() {
            let (difference, tolerance) = central_difference(
                |displacement| {
                    displaced.inputs.get_mut(name).unwrap()[&at] = value + displacement;
                    displaced.loss(&gradients.routing)
                },
                Layer::loss_error(),
            );
            displaced.inputs.get_mut(name).unwrap()[&at] = value;
            if !abs_diff_eq!(gradient[&at], difference, epsilon = tolerance) {
                let found = gradient[&at];
                return Err(format!("{name}{at:?} is {found}, central difference {difference} ± {tolerance:.1e}"));
            }
            (largest, widest) = (largest.max(difference.abs()), widest.max(tolerance));
        }
        // The comparison means something: it would have noticed a change of one part in a thousand.
        assert!(largest > 1e3 * widest, "{name} reaches {largest:.1e} only, tolerance {widest:.1e}");
    }
    Ok(())
}

fn gradients(layer: &Layer) -> Outcome {
    run(&StandardMoe::new(), &layer.problem(), Record::Results).unwrap()
}

fn gatings() -> impl Iterator<Item = Option<(usize, Convention)>> {
    // A factor of 3/4 leaves |s| ≤ 1.
    let grouped = [true, false].map(|renormalized| {
        Convention::GroupedSigmoid(GroupedSigmoid { groups: 1, kept: 1, renormalized, factor: 0.75 })
    });
    let conventions = Convention::ALL.into_iter().chain(grouped);
    std::iter::once(None).chain(conventions.map(|convention| Some((2, convention))))
}

#[test]
fn every_gradient_of_every_layer_is_a_central_difference() {
    for activation in Activation::ALL {
        for router in gatings() {
            for biases in [false, true] {
                let layer = Layer::away_from_kinks(activation, router, biases);
                if let Err(difference) = compare(&gradients(&layer), &layer) {
                    panic!("{activation}, {router:?}, biases {biases}: {difference}");
                }
            }
        }
    }
}

#[test]
fn central_differences_tell_the_two_gelus_apart() {
    let exact = Layer::random(0, Activation::GeGlu(Gelu::Exact), None, false);
    let tanh = Layer { activation: Activation::GeGlu(Gelu::Tanh), ..exact.clone() };
    assert_eq!(compare(&gradients(&exact), &exact), Ok(()));
    assert_ne!(compare(&gradients(&tanh), &exact), Ok(()));
}
