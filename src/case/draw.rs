//! Seeded draws: one ChaCha stream per tensor, so that a tensor does not depend on the sizes or
//! the presence of the others. Arithmetic is IEEE and `libm` alone: the same bits everywhere.

use std::f64::consts::TAU;

use ndarray::{Array, Dimension, ShapeBuilder};
use rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::pairs_of_token;
use crate::element::Element;
use crate::shape::{ExpertId, TokenId};

/// The tensors of a problem; the discriminant is the stream of the generator.
#[derive(Clone, Copy)]
pub(super) enum Tensor {
    X = 1,
    W1,
    W2,
    B1,
    B2,
    RouterW,
    RouterB,
    Pairs,
    Scores,
    Dout,
    SelectionBias,
}

/// The generator of one tensor.
pub(super) struct Stream(ChaCha8Rng);

impl Stream {
    pub(super) fn new(seed: u64, tensor: Tensor) -> Self {
        let mut generator = ChaCha8Rng::seed_from_u64(seed);
        generator.set_stream(tensor as u64);
        Self(generator)
    }

    /// In (0, 1), never 0: 53 random bits and a half.
    fn unit(&mut self) -> f64 {
        ((self.0.next_u64() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Two independent standard normal numbers (Box and Muller).
    fn normal_pair(&mut self) -> (f64, f64) {
        let radius = (-2.0 * libm::log(self.unit())).sqrt();
        let (sin, cos) = libm::sincos(TAU * self.unit());
        (radius * cos, radius * sin)
    }

    /// Normal numbers of standard deviation `scale`, in row-major order.
    pub(super) fn normal<S: Element, D: Dimension>(
        &mut self,
        shape: impl ShapeBuilder<Dim = D>,
        scale: f64,
    ) -> Array<S, D> {
        let mut spare = None;
        Array::from_shape_simple_fn(shape, || {
            let value = spare.take().unwrap_or_else(|| {
                let (now, later) = self.normal_pair();
                spare = Some(later);
                now
            });
            S::from_f64(scale * value)
        })
    }

    /// A number below `limit`, which must not be 0.
    pub(super) fn below(&mut self, limit: usize) -> usize {
        self.0.random_range(0..limit as u64) as usize
    }

    /// −1 or 1.
    pub(super) fn sign(&mut self) -> f64 {
        if self.0.next_u64() >> 63 == 0 { 1.0 } else { -1.0 }
    }

    /// Scores in (0, 1], in f32 steps even for f64 engines, so that every engine reads the same.
    pub(super) fn scores<A: Element>(&mut self, routed: usize) -> Vec<A> {
        (0..routed).map(|_| A::from_f32(self.unit() as f32)).collect()
    }

    /// K distinct experts for every token, token by token.
    pub(super) fn experts_of_tokens(&mut self, t: usize, e: usize, k: usize) -> Vec<(TokenId, ExpertId)> {
        (0..t).flat_map(|token| pairs_of_token(token, self.distinct(e, k))).collect()
    }

    /// `counts[e]` distinct tokens for every expert, expert by expert.
    pub(super) fn tokens_of_experts(&mut self, t: usize, counts: &[usize]) -> Vec<(TokenId, ExpertId)> {
        let mut pairs = Vec::with_capacity(counts.iter().sum());
        for (expert, &count) in counts.iter().enumerate() {
            let expert = ExpertId(expert as u32);
            pairs.extend(self.distinct(t, count).into_iter().map(|token| (TokenId(token as u32), expert)));
        }
        pairs
    }

    /// `count` distinct numbers below `limit`, in random order: the head of a Fisher–Yates shuffle.
    pub(super) fn distinct(&mut self, limit: usize, count: usize) -> Vec<usize> {
        let mut numbers: Vec<usize> = (0..limit).collect();
        for place in 0..count {
            let other = self.0.random_range(place as u64..limit as u64) as usize;
            numbers.swap(place, other);
        }
        numbers.truncate(count);
        numbers
    }
}
