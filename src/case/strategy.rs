//! Proptest strategies over [`Case`]: sizes around tile edges, every activation, every source of a
//! routing. They shrink towards one token, one expert and the smallest widths.

use proptest::prelude::*;
use proptest::sample::select;

use super::{Case, Load, Pairing};
use crate::activation::Activation;
use crate::routing::{Convention, GroupedSigmoid};
use crate::shape::Shape;

/// Which cases an engine and the time at hand allow.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// d and n are multiples of this: 1 on the CPU, 8 on a GPU.
    pub width_multiple: usize,
    /// The largest T.
    pub tokens: usize,
    /// The largest d and n.
    pub width: usize,
    /// The largest E.
    pub experts: usize,
    /// Activations to draw from.
    pub activations: &'static [Activation],
}

impl Limits {
    /// Small problems of any width, for the CPU.
    pub const SMALL: Self =
        Self { width_multiple: 1, tokens: 130, width: 65, experts: 9, activations: &Activation::ALL };

    /// Problems around the edges of GPU tiles: widths in multiples of 8.
    pub const DEVICE: Self =
        Self { width_multiple: 8, tokens: 600, width: 520, experts: 33, activations: &Activation::WITH_KERNELS };
}

/// Sizes where tiles begin and end, and a few in between.
const EDGES: [usize; 28] = [
    1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 33, 63, 64, 65, 72, 96, 127, 128, 129, 136, 192, 255, 256, 257, 264, 384, 513,
];

/// Any case within `limits`, T = 0 among them.
pub fn any_case(limits: Limits) -> BoxedStrategy<Case> {
    (shape(limits), any::<bool>(), activation(limits), any::<u64>())
        .prop_flat_map(|(shape, biases, activation, seed)| {
            pairing(shape).prop_map(move |pairing| {
                let case = Case { biases, activation, seed, ..Case::new(shape) };
                match pairing {
                    Pairing::Counts(counts) => case.with_counts(&counts),
                    pairing => case.with_pairing(pairing),
                }
            })
        })
        .boxed()
}

/// Any activation within `limits`; shrinks to SwiGLU.
pub fn activation(limits: Limits) -> impl Strategy<Value = Activation> + use<> {
    select(limits.activations)
}

/// Any router convention that `shape` allows.
pub fn convention(shape: Shape) -> BoxedStrategy<Convention> {
    let softmaxes = select(&Convention::ALL[..]);
    let groups: Vec<usize> = (1..=shape.e / 2).filter(|groups| shape.e.is_multiple_of(*groups)).collect();
    if groups.is_empty() {
        return softmaxes.boxed();
    }
    let grouped = select(groups)
        .prop_flat_map(move |groups| (Just(groups), (shape.k * groups).div_ceil(shape.e)..=groups))
        .prop_flat_map(|(groups, kept)| (Just(groups), Just(kept), any::<bool>(), select(vec![1.0, 2.5])))
        .prop_map(|(groups, kept, renormalized, factor)| {
            Convention::GroupedSigmoid(GroupedSigmoid { groups, kept, renormalized, factor })
        });
    prop_oneof![3 => softmaxes, 1 => grouped].boxed()
}

/// A shape within `limits`; widths near tile edges.
pub fn shape(limits: Limits) -> impl Strategy<Value = Shape> {
    let tokens: Vec<usize> = [0].into_iter().chain(EDGES).filter(|&t| t <= limits.tokens).collect();
    let widths: Vec<usize> = EDGES
        .into_iter()
        .filter(|&width| width <= limits.width && width.is_multiple_of(limits.width_multiple))
        .collect();
    (select(tokens), select(widths.clone()), select(widths), 1..=limits.experts)
        .prop_flat_map(|(t, d, n, e)| (Just((t, d, n, e)), 1..=e.min(8)))
        .prop_map(|((t, d, n, e), k)| Shape { t, d, n, e, k })
}

/// Any source of a routing for `shape`.
pub fn pairing(shape: Shape) -> BoxedStrategy<Pairing> {
    let routers = (convention(shape), load(shape)).prop_map(|(convention, load)| Pairing::Router { convention, load });
    let counts = prop::collection::vec(count(shape.t), shape.e).prop_map(Pairing::Counts);
    prop_oneof![Just(Pairing::TopK), routers, counts].boxed()
}

/// Any load that leaves K experts to choose from.
fn load(shape: Shape) -> BoxedStrategy<Load> {
    let everywhere = select(vec![Load::Uniform, Load::Biased, Load::Zipf]);
    if shape.k == shape.e {
        return everywhere.boxed();
    }
    let experts: Vec<u32> = (0..shape.e as u32).collect();
    let without = prop::sample::subsequence(experts, 1..=shape.e - shape.k).prop_map(Load::Without);
    prop_oneof![3 => everywhere, 2 => without].boxed()
}

/// Tokens of one expert: none, all, a tile edge, or any number.
fn count(t: usize) -> BoxedStrategy<usize> {
    let edges: Vec<usize> = [0, t].into_iter().chain(EDGES.into_iter().filter(|&edge| edge < t)).collect();
    prop_oneof![2 => select(edges), 1 => 0..=t].boxed()
}
