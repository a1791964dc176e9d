//! Random layers of the sizes that are in use, made on the device: for proofs and times at full size.

use std::fmt;
use std::sync::Arc;

use half::bf16;
use ndarray::Array2;
use rayon::prelude::*;

use crate::activation::Activation;
use crate::error::{Error, Result};
use crate::routing::rounding::TokenRounding;
use crate::routing::rounding::scores::{self, KeptScores};
use crate::routing::{Routing, top_k};
use crate::shape::{ExpertId, Shape, TokenId};

use super::device::{Buffer, Device, Guards};
use super::layer::Layer;
use super::routing::DeviceRouting;
use super::tuning;
use super::witness::fill_normal;

/// How tokens spread over the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// Every choice of K experts is as likely as any other.
    Uniform,
    /// Expert i is drawn with weight 1/(i + 1), without replacement: the first has nearly all tokens.
    Zipf,
}

impl Load {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Uniform, Self::Zipf];
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Uniform => "uniform",
            Self::Zipf => "zipf",
        })
    }
}

/// A SwiGLU layer at unit scale with given routing, a pure function of these values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// T, d, n, E, K.
    pub shape: Shape,
    /// The spread of tokens.
    pub load: Load,
    /// Whether tokens are rounded after their choice, and how; scores are then p as it is.
    pub rounding: Option<TokenRounding>,
    /// Of all numbers.
    pub seed: u64,
}

/// A workload on the device.
pub struct Loaded {
    /// w1 ~ d^−1/2, w2 ~ n^−1/2.
    pub layer: Layer,
    /// x (T, d), ~ 1.
    pub x: Buffer<bf16>,
    /// dout (T, d), ~ 1.
    pub dout: Buffer<bf16>,
    /// The routing and the scores.
    pub on_device: DeviceRouting,
    /// The host's view of the routing.
    pub routing: Routing,
    /// By pair, in (0, 1]; without rounding with a sum of 1 for each token.
    pub scores: Vec<f32>,
}

impl Workload {
    /// The pairs of every token in falling order of score, and their scores; rounded, by ascending expert.
    ///
    /// # Errors
    /// Sizes beyond the indices of a routing.
    pub fn routing(&self) -> Result<(Routing, Vec<f32>)> {
        let Shape { t, e, k, .. } = self.shape;
        if let Some(rounding) = self.rounding {
            let logits: Vec<f32> =
                (0..t).into_par_iter().flat_map_iter(|token| self.logits(token)).map(|logit| logit as f32).collect();
            let logits = Array2::from_shape_vec((t, e), logits)
                .map_err(|error| Error::internal(format!("T·E logits do not form (T, E): {error}")))?;
            let choice = top_k(logits.view(), k)?;
            let p = crate::routing::scores::softmax(logits.view())?;
            let routing = rounding.round(p.view(), &choice)?.routing;
            let scores = scores::forward(logits.view(), &choice, &routing, KeptScores::Raw)?;
            return Ok((routing, scores));
        }
        let chosen: Vec<(ExpertId, f32)> = (0..t).into_par_iter().flat_map_iter(|token| self.choice(token)).collect();
        let tokens = (0..t as u32).flat_map(|token| std::iter::repeat_n(TokenId(token), k));
        let routing = Routing::new(t, e, tokens.zip(chosen.iter().map(|&(expert, _)| expert)))?;
        // A routing keeps its pairs in the order given.
        Ok((routing, chosen.into_iter().map(|(_, score)| score).collect()))
    }

    /// Weights' logarithms plus Gumbel noise: the K largest are a draw without replacement.
    fn logits(&self, token: usize) -> impl Iterator<Item = f64> + use<> {
        let (Self { load, seed, .. }, e) = (*self, self.shape.e);
        (0..e).map(move |expert| {
            let bits = mixed(seed ^ mixed((token * e + expert) as u64));
            let uniform = ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
            let weight = match load {
                Load::Uniform => 0.0,
                Load::Zipf => -((expert + 1) as f64).ln(),
            };
            weight - (-uniform.ln()).ln()
        })
    }

    /// The K largest of them.
    fn choice(&self, token: usize) -> Vec<(ExpertId, f32)> {
        let Shape { k, e, .. } = self.shape;
        let mut logits: Vec<(f64, usize)> = self.logits(token).zip(0..).collect();
        let largest_first = |a: &(f64, usize), b: &(f64, usize)| b.0.total_cmp(&a.0);
        if k < e {
            logits.select_nth_unstable_by(k, largest_first);
        }
        logits.truncate(k);
        logits.sort_by(largest_first);
        let largest = logits.first().map_or(0.0, |first| first.0);
        let sum: f64 = logits.iter().map(|(logit, _)| (logit - largest).exp()).sum();
        let score = |logit: f64| ((logit - largest).exp() / sum) as f32;
        logits.into_iter().map(|(logit, expert)| (ExpertId(expert as u32), score(logit))).collect()
    }

    /// All of it on `device`.
    ///
    /// # Errors
    /// Not enough device memory, or a device that fails.
    pub fn load(&self, device: &Arc<Device>, guards: Guards) -> Result<Loaded> {
        let Shape { t, d, n, e, .. } = self.shape;
        let (routing, scores) = self.routing()?;
        let normal = |name, len, stream: u64, variance: usize| -> Result<Buffer<bf16>> {
            let mut buffer = Buffer::output(device, name, len, guards)?;
            fill_normal(device, &mut buffer, mixed(self.seed ^ stream), 1.0 / (variance as f32).sqrt())?;
            Ok(buffer)
        };
        let (w1, w2) = (normal("w1", e * 2 * n * d, 1, d)?, normal("w2", e * d * n, 2, n)?);
        let layer = Layer::of(device, Activation::SwiGlu, [d, n, e], w1, w2, guards)?;
        Ok(Loaded {
            layer: layer.tuned(tuning::for_layer([d, n, e], routing.routed(), device.properties().multiprocessors)?),
            x: normal("x", t * d, 3, 1)?,
            dout: normal("dout", t * d, 4, 1)?,
            on_device: DeviceRouting::upload(device, &routing, &scores, guards)?,
            routing,
            scores,
        })
    }
}

/// splitmix64.
fn mixed(z: u64) -> u64 {
    let z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_has_k_experts_and_scores_that_add_up_to_1() {
        for load in Load::ALL {
            let workload = Workload { shape: "500,8,8,16,3".parse().unwrap(), load, rounding: None, seed: 1 };
            let (routing, scores) = workload.routing().unwrap();
            assert_eq!(routing.routed(), 1500);
            for token in scores.chunks(3) {
                assert!((token.iter().sum::<f32>() - 1.0).abs() < 1e-6 && token.is_sorted_by(|a, b| a >= b));
            }
            let counts: Vec<u32> = routing.expert_offsets().windows(2).map(|pair| pair[1] - pair[0]).collect();
            match load {
                // 93.75 a head, deviation 8.7: six of them.
                Load::Uniform => assert!(counts.iter().all(|count| (42..=146).contains(count)), "{counts:?}"),
                Load::Zipf => assert!(counts[0] > 300 && counts[15] < 80, "{counts:?}"),
            }
        }
    }
    #[test]
    fn rounded_it_is_the_same_choice_but_for_the_last_tile_of_each_expert() {
        for load in Load::ALL {
            let of_top_k = Workload { shape: "500,8,8,16,3".parse().unwrap(), load, rounding: None, seed: 1 };
            let rounded = Workload { rounding: Some(TokenRounding::new(32)), ..of_top_k };
            let [(of_top_k, _), (rounded, scores)] = [of_top_k, rounded].map(|workload| workload.routing().unwrap());
            let pairs = of_top_k.tokens_per_expert().into_iter().zip(rounded.tokens_per_expert());
            for (before, after) in pairs {
                assert!(after.is_multiple_of(32) && before.abs_diff(after) <= 16, "{before} became {after}");
            }
            assert_eq!(scores.len(), rounded.routed());
            assert!(scores.iter().all(|score| *score > 0.0 && *score <= 1.0));
        }
    }
}
