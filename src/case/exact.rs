//! Problems of the exact regime: every sum of the layer is exact in f32, in any order.
//!
//! All numbers are small integers (times a power of two), σ is exactly 1 or 0, and what a kernel
//! stores is one rounding of an exact number. So every engine with the same rounding points has the
//! same values, bit for bit, whatever it does first; [`oracle::exact`](crate::oracle::exact) says
//! which, and checks that it is so.
//!
//! | tensor | drawn as |
//! | --- | --- |
//! | dout | ±1 everywhere |
//! | w2 | three ±1 a column: every G = ⟨dout, w2⟩ is odd |
//! | w1 | three ±1 in a gate row, two ±2 in an up row, over the free features; unit 0 has none |
//! | x | max(2, d/16) of ±1 a row, over the free features; 1 in the constant ones |
//! | gates | 45 + {−3 … 3}: σ = 1 and f′ = 1 in f32 and in f64 |
//! | up | ±6 + {−4 … 4}, never 0; ±1 in unit 0, so that its a is odd and all others are even |
//! | switch | 1 for some tokens, at weight −208 in some gates: σ = 0 and f′ = 0 |
//! | b1 | the offsets; without biases the constant features carry them |
//! | b2 | ±2: ds is odd with biases as without |
//! | scores | 1/2 or 1, and 1/4 for one token of each expert, its witness; or fractions of 9 to 12 bits |
//!
//! **No row of any gradient of a weight is 0**, which is what makes an unwritten one visible. The
//! free features of a witness are 0 and it is never switched off, so with a score of 1/4 its term has
//! fewer trailing zeros than every other term of the sum. (With fine scores a row of zeros is only
//! improbable; the oracle checks every row of both.)
//!
//! Without a gate, h takes the place of the gate with weights ±2 and offset 50; for relu², whose
//! square has to be representable in eight bits, with offset 10.

use ndarray::{Array2, Array3};

use super::draw::{Stream, Tensor};
use super::{Case, Pairing};
use crate::activation::Activation;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::problem::{Biases, Gating, Problem};
use crate::routing::Routing;
use crate::shape::{ExpertId, Shape, TokenId};

/// What a pre-activation is made of.
#[derive(Clone, Copy, Debug)]
struct Offsets {
    /// Of the gate (of h without a gate), and of unit 0's.
    gate: f64,
    first_gate: f64,
    /// The size of the weights into the gate.
    gate_weight: f64,
    /// Of up, and of unit 0's; none without a gate.
    up: Option<[f64; 2]>,
}

/// The weight of the switch.
const OFF: f64 = -208.0;

fn offsets(activation: Activation) -> Option<Offsets> {
    match activation {
        Activation::SwiGlu | Activation::GeGlu(_) | Activation::ReGlu => {
            Some(Offsets { gate: 45.0, first_gate: 45.0, gate_weight: 1.0, up: Some([6.0, 1.0]) })
        }
        Activation::Silu | Activation::Gelu(_) | Activation::Relu => {
            Some(Offsets { gate: 50.0, first_gate: 45.0, gate_weight: 2.0, up: None })
        }
        Activation::ReluSquared => Some(Offsets { gate: 10.0, first_gate: 9.0, gate_weight: 2.0, up: None }),
        // σ(1.702·7) is the most that its clamp leaves, and not 1.
        Activation::GptOss => None,
    }
}

/// How finely scores are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scores {
    /// 1/2 and 1, and 1/4 for witnesses.
    Coarse,
    /// Odd multiples of 2^−9 to 2^−12 in (1/2, 1): 9 to 12 bits, which bf16 does not keep.
    Fine,
}

/// The problem of a case at exact scale.
///
/// # Errors
/// A router (its scores are no fractions of a few bits), an activation without a flat part, d or n
/// below 8, n beyond 4096 or T beyond 4096, or sizes that leave fine scores no exact sums.
pub(super) fn problem<S: Element>(case: &Case, scores: Scores) -> Result<Problem<'static, S>> {
    let offsets = held_offsets(case)?;
    let Shape { t, d, e, .. } = case.shape;
    let features = Features::draw(case, scores)?;
    let routing = case.given_pairs()?;
    let roles = Roles::draw(case, &routing);
    let scores = draw_scores(case, scores, &roles, &routing)?;
    let (w1, b1) = draw_w1_and_b1(case, &offsets, &features);
    let (w2, x) = (draw_w2(case), draw_x(case, &features, &roles));
    let mut stream = case.stream(Tensor::B2);
    let b2 = Array2::from_shape_simple_fn((e, d), || 2.0 * stream.sign());
    let mut stream = case.stream(Tensor::Dout);
    let dout = Array2::from_shape_simple_fn((t, d), || S::from_f64(stream.sign()));
    let biases = case.biases.then(|| Biases { b1: b1.mapv(S::from_f64).into(), b2: b2.mapv(S::from_f64).into() });
    Problem::new(
        x.mapv(S::from_f64),
        w1.mapv(S::from_f64),
        w2.mapv(S::from_f64),
        biases,
        Gating::Given { routing, scores },
        case.activation,
        dout,
    )
}

/// The offsets of a case for which the regime holds.
fn held_offsets(case: &Case) -> Result<Offsets> {
    let Shape { t, d, n, .. } = case.shape;
    let Some(held) = offsets(case.activation) else {
        let known = Activation::ALL.into_iter().filter(|&activation| offsets(activation).is_some());
        return Err(Error::unknown(
            "activation of the exact regime",
            case.activation.name(),
            known.map(Activation::name),
        ));
    };
    if matches!(case.pairing, Pairing::Router { .. }) {
        return Err(Error::parse(
            "exact case",
            case.to_string(),
            "a router's scores are rounded quotients of exponentials; give the routing (top-K pairs or counts)",
        ));
    }
    for (what, size, least, most) in [("T", t, 0, 4096), ("d", d, 8, 4096), ("n", n, 8, 4096)] {
        if !(least..=most).contains(&size) {
            return Err(Error::size(what, size, format!("the exact regime holds for {least} to {most}")));
        }
    }
    Ok(held)
}

/// Scores by pair.
fn draw_scores<A: Element>(case: &Case, scores: Scores, roles: &Roles, routing: &Routing) -> Result<Vec<A>> {
    let mut stream = case.stream(Tensor::Scores);
    match scores {
        Scores::Coarse => Ok(roles.coarse_scores(&mut stream, routing)),
        Scores::Fine => {
            let bits = fine_bits(case, routing)?;
            let half = 1usize << (bits - 2);
            let odd = (0..routing.routed()).map(|_| 2 * (half + stream.below(half)) + 1);
            Ok(odd.map(|odd| Element::from_f64(libm::ldexp(odd as f64, -bits))).collect())
        }
    }
}

/// w1 (E, h width, d), and b1 (E, h width): offsets in b1, or in the constant features of w1; gates and ups
/// over the free features; the switch of some gates.
fn draw_w1_and_b1(case: &Case, offsets: &Offsets, features: &Features) -> (Array3<f64>, Array2<f64>) {
    let Shape { d, n, e, .. } = case.shape;
    let width = case.activation.h_width(n);
    let mut w1 = Array3::zeros((e, width, d));
    let mut b1 = Array2::zeros((e, width));
    let mut stream = case.stream(Tensor::W1);
    let rows_of_unit = width / n;
    for expert in 0..e {
        let switched = stream.distinct(n - 1, (n / 2).min(256));
        for unit in 0..n {
            let constant = features.constant(unit);
            let mut offset = |row: usize, value: f64| {
                if case.biases {
                    b1[[expert, row]] = value;
                } else {
                    w1[[expert, row, constant]] = value;
                }
            };
            let gate_row = rows_of_unit * unit;
            offset(gate_row, if unit == 0 { offsets.first_gate } else { offsets.gate });
            if let Some([up, first_up]) = offsets.up {
                offset(gate_row + 1, stream.sign() * if unit == 0 { first_up } else { up });
            }
            if unit == 0 {
                continue;
            }
            let mut weights = |row: usize, count: usize, size: f64| {
                for place in stream.distinct(features.free.len(), count) {
                    w1[[expert, row, features.free[place]]] = stream.sign() * size;
                }
            };
            weights(gate_row, 3, offsets.gate_weight);
            if offsets.up.is_some() {
                weights(gate_row + 1, 2, 2.0);
            }
        }
        for unit in switched {
            w1[[expert, rows_of_unit * (unit + 1), features.switch]] = OFF;
        }
    }
    (w1, b1)
}

/// w2 (E, d, n): three ±1 a column.
fn draw_w2(case: &Case) -> Array3<f64> {
    let Shape { d, n, e, .. } = case.shape;
    let mut w2 = Array3::zeros((e, d, n));
    let mut stream = case.stream(Tensor::W2);
    for expert in 0..e {
        for unit in 0..n {
            for row in stream.distinct(d, 3) {
                w2[[expert, row, unit]] = stream.sign();
            }
        }
    }
    w2
}

/// x (T, d): ±1 in some free features unless the token is a witness, 1 in the constant ones, and the switch.
fn draw_x(case: &Case, features: &Features, roles: &Roles) -> Array2<f64> {
    let Shape { t, d, .. } = case.shape;
    let mut x = Array2::zeros((t, d));
    let mut stream = case.stream(Tensor::X);
    for token in 0..t {
        features.constants.iter().for_each(|&feature| x[[token, feature]] = 1.0);
        x[[token, features.switch]] = f64::from(u8::from(roles.switched[token]));
        let some = stream.distinct(features.free.len(), (d / 16).max(2).min(features.free.len()));
        let ones: Vec<(usize, f64)> = some.into_iter().map(|place| (features.free[place], stream.sign())).collect();
        if !roles.witness[token] {
            ones.into_iter().for_each(|(feature, value)| x[[token, feature]] = value);
        }
    }
    x
}

/// What the columns of x stand for.
struct Features {
    switch: usize,
    /// 1 for every token.
    constants: Vec<usize>,
    free: Vec<usize>,
}

impl Features {
    /// Units that share a constant feature: dx there sums over all of them, and that sum has to stay
    /// exact behind fine scores.
    const UNITS: usize = 32;

    fn draw(case: &Case, scores: Scores) -> Result<Self> {
        let Shape { d, n, .. } = case.shape;
        let wanted = if case.biases { 1 } else { n.div_ceil(Self::UNITS) };
        let constants = wanted.min(d / 4);
        if scores == Scores::Fine && constants < wanted {
            return Err(Error::size(
                "n",
                n,
                format!("without biases and with fine scores the exact regime holds up to {}", constants * Self::UNITS),
            ));
        }
        let mut columns = case.stream(Tensor::RouterW).distinct(d, d);
        let free = columns.split_off(1 + constants);
        let switch = columns.remove(0);
        Ok(Self { switch, constants: columns, free })
    }

    fn constant(&self, unit: usize) -> usize {
        self.constants[unit % self.constants.len()]
    }
}

/// What tokens are drawn for.
struct Roles {
    /// By token: whether some expert's sums are led by it.
    witness: Vec<bool>,
    /// By expert with two tokens or more.
    witness_of: Vec<Option<TokenId>>,
    /// By token: some gates are off.
    switched: Vec<bool>,
}

impl Roles {
    /// An expert with one token needs no witness, only a token that is not switched off.
    fn draw(case: &Case, routing: &Routing) -> Self {
        let mut stream = case.stream(Tensor::RouterB);
        let mut witness = vec![false; routing.tokens()];
        let mut kept_on = vec![false; routing.tokens()];
        let mut witness_of = vec![None; routing.experts()];
        for (expert, witness_of) in witness_of.iter_mut().enumerate() {
            let tokens = &routing.row_token()[routing.rows_of_expert(ExpertId(expert as u32))];
            match tokens {
                [] => {}
                [alone] => kept_on[alone.index()] = true,
                _ => {
                    let drawn = tokens[stream.below(tokens.len())];
                    let leader = tokens.iter().copied().find(|token| witness[token.index()]).unwrap_or(drawn);
                    witness[leader.index()] = true;
                    *witness_of = Some(leader);
                }
            }
        }
        let switched =
            witness.iter().zip(&kept_on).map(|(witness, kept_on)| stream.sign() > 0.0 && !witness && !kept_on);
        Self { switched: switched.collect(), witness, witness_of }
    }

    fn coarse_scores<A: Element>(&self, stream: &mut Stream, routing: &Routing) -> Vec<A> {
        let pairs = routing.pair_token().iter().zip(routing.pair_expert());
        let scores = pairs.map(|(&token, expert)| {
            let drawn = 0.75 + 0.25 * stream.sign();
            let leads = self.witness_of[expert.index()] == Some(token);
            A::from_f64(if leads { 0.25 } else { drawn })
        });
        scores.collect()
    }
}

/// The number of bits of fine scores that keeps every sum below 2²³ of its units.
///
/// db2 sums the scores of one expert. o sums s·|y| over a token's pairs: a y has 3n/d terms of about
/// 300, so it is near a normal number of deviation 300·√(3n/d); of p such numbers |y| add up to 0.6 p
/// deviations and hardly ever to 3√p more.
fn fine_bits(case: &Case, routing: &Routing) -> Result<i32> {
    let Shape { d, n, .. } = case.shape;
    let longest =
        |offsets: &[u32]| f64::from(offsets.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0).max(1));
    let (rows, pairs) = (longest(routing.expert_offsets()), longest(routing.token_offsets()));
    let deviation = 300.0 * libm::sqrt(3.0 * n as f64 / d as f64);
    let largest = rows.max(deviation * (0.6 * pairs + 3.0 * libm::sqrt(pairs)));
    let bits = (23.0 - libm::log2(largest)).floor() as i32;
    if bits < 9 {
        return Err(Error::parse(
            "exact case",
            case.to_string(),
            "fine scores have no exact sums at this size; take fewer experts per token, a smaller n/d, or scores 1/2 and 1",
        ));
    }
    Ok(bits.min(12))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_regime_does_not_hold_for_is_refused_with_the_reason() {
        let case = |shape: &str| Case::new(shape.parse().unwrap()).with_pairing(Pairing::TopK);
        let refused = |case: Case, scores| problem::<f32>(&case, scores).unwrap_err().to_string();
        let router = Case::new("8,8,8,2,1".parse().unwrap());
        assert!(refused(router, Scores::Coarse).contains("give the routing"));
        assert!(refused(case("8,7,8,2,1"), Scores::Coarse).contains("d is 7"));
        assert!(refused(case("8,8,200,2,1"), Scores::Fine).contains("up to 64"));
        assert!(refused(case("8,8,64,17,17").with_biases(), Scores::Fine).contains("fewer experts per token"));
        assert!(problem::<f32>(&case("8,8,200,2,1").with_biases(), Scores::Fine).is_ok());
    }
}
