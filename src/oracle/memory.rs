//! What a layer keeps from forward to backward, system by system, from the sizes alone.
//!
//! The formulas count activations only. Routing metadata (offsets, indices, scores, and the logits
//! where the router's backward needs them) are a few bytes per pair and are reported apart.

use crate::activation::Activation;
use crate::shape::Shape;

/// An implementation of the layer, by what it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum System {
    /// x and h.
    SonicMoe,
    /// x, h and the gathered x.
    MoMoe,
    /// x, h, a and y.
    ScatterMoe,
    /// x, gathered x, h, a and y.
    PlainAutograd,
    /// x, gathered x and h, without the padding of each expert to its tile.
    DeepGemmBased,
}

impl System {
    /// Every system, from little to much.
    pub const ALL: [Self; 5] =
        [Self::SonicMoe, Self::MoMoe, Self::ScatterMoe, Self::PlainAutograd, Self::DeepGemmBased];

    /// What the tables call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::SonicMoe => "SonicMoE",
            Self::MoMoe => "MoMoE",
            Self::ScatterMoe => "ScatterMoE",
            Self::PlainAutograd => "plain autograd",
            Self::DeepGemmBased => "DeepGEMM-based (without padding)",
        }
    }

    /// The formula for 2-byte elements and a gate.
    pub fn formula(self) -> &'static str {
        match self {
            Self::SonicMoe => "2Td + 4TKn",
            Self::MoMoe => "2Td + 4TKn + 2TKd",
            Self::ScatterMoe => "2Td + 6TKn + 2TKd",
            Self::PlainAutograd => "2Td + 6TKn + 4TKd",
            Self::DeepGemmBased => "2Td + 2TKd + 4TKn + padding",
        }
    }

    /// Bytes of activations kept for R = `routed` pairs, `bytes` per element.
    ///
    /// ```
    /// use sonicmoe::oracle::memory::{Layer, System};
    /// let layer = Layer::of("1024,2048,512,32,4".parse()?, sonicmoe::Activation::SwiGlu, 2);
    /// assert_eq!(System::SonicMoe.kept(layer), 12 << 20);
    /// # Ok::<(), sonicmoe::Error>(())
    /// ```
    pub fn kept(self, layer: Layer) -> u128 {
        sum(self.tensors(layer).map(|(_, bytes)| bytes))
    }

    /// The same, tensor by tensor: x, gathered x, h, a, y with their bytes, 0 for one that is not kept.
    pub fn tensors(self, layer: Layer) -> [(&'static str, u128); 5] {
        let Layer { x, x_gathered, h, a, y } = layer;
        let [x_gathered, a, y] = match self {
            Self::SonicMoe => [0, 0, 0],
            Self::MoMoe | Self::DeepGemmBased => [x_gathered, 0, 0],
            Self::ScatterMoe => [0, a, y],
            Self::PlainAutograd => [x_gathered, a, y],
        };
        [("x", x), ("gathered x", x_gathered), ("h", h), ("a", a), ("y", y)]
    }
}

/// Bytes of each activation of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// x (T, d).
    pub x: u128,
    /// The gathered x (R, d).
    pub x_gathered: u128,
    /// h (R, 2n), without a gate (R, n).
    pub h: u128,
    /// a (R, n).
    pub a: u128,
    /// y (R, d).
    pub y: u128,
}

impl Layer {
    /// With R = T·K.
    pub fn of(shape: Shape, activation: Activation, bytes: usize) -> Self {
        let Shape { t, d, n, e: _, k } = shape;
        let routed = (t as u128).saturating_mul(k as u128);
        Self::routed(t, d, n, routed, activation, bytes)
    }

    /// With any R.
    pub fn routed(t: usize, d: usize, n: usize, routed: u128, activation: Activation, bytes: usize) -> Self {
        let size = |rows: u128, width: usize| rows.saturating_mul(width as u128).saturating_mul(bytes as u128);
        let per_pair = |width: usize| size(routed, width);
        Self {
            x: size(t as u128, d),
            x_gathered: per_pair(d),
            h: per_pair(activation.h_width(n)),
            a: per_pair(n),
            y: per_pair(d),
        }
    }

    /// The most activations that are live at once in SonicMoE's forward: x, h, a, y and o.
    pub fn forward_peak(self) -> u128 {
        let Self { x, x_gathered: _, h, a, y } = self;
        sum([x, h, a, y, x])
    }

    /// The most in its backward: x, h, dout, dh, a′, dx̃ and dx, if a′ lives as long as dh.
    pub fn backward_peak(self) -> u128 {
        let Self { x, x_gathered: _, h, a, y } = self;
        sum([x, h, x, h, a, y, x])
    }
}

/// Sizes beyond 2¹²⁸ count as 2¹²⁸ − 1: any input has an answer.
fn sum<const N: usize>(sizes: [u128; N]) -> u128 {
    sizes.into_iter().fold(0, u128::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(shape: &str) -> Layer {
        Layer::of(shape.parse().unwrap(), Activation::SwiGlu, 2)
    }

    const MIB: u128 = 1 << 20;

    #[test]
    fn memory_is_constant_when_n_halves_and_k_doubles_but_a_gathered_x_doubles() {
        let (coarse, fine) = (layer("1024,2048,512,32,4"), layer("1024,2048,256,64,8"));
        assert_eq!((coarse.x, coarse.h), (4 * MIB, 8 * MIB));
        assert_eq!(System::SonicMoe.kept(coarse), 12 * MIB);
        assert_eq!(System::SonicMoe.kept(fine), 12 * MIB);
        assert_eq!((coarse.x_gathered, fine.x_gathered), (16 * MIB, 32 * MIB));
    }

    #[test]
    fn the_paper_s_7b_layer_keeps_192_mib_of_h() {
        let layer = layer("24576,1536,256,128,8");
        assert_eq!(layer.h, 192 * MIB);
        assert_eq!(System::SonicMoe.kept(layer), 264 * MIB);
        assert_eq!(System::ScatterMoe.kept(layer) - layer.x, (192 + 96 + 576) * MIB);
    }

    /// 6TKn as a number: a factor and the sizes that its letters name.
    fn product(term: &str, Shape { t, d, n, e: _, k }: Shape) -> u128 {
        let letters = term.trim_start_matches(|c: char| c.is_ascii_digit());
        let factor: u128 = term[..term.len() - letters.len()].parse().unwrap();
        let size = |letter| match letter {
            'T' => t,
            'K' => k,
            'd' => d,
            'n' => n,
            other => panic!("{other} in {term}"),
        };
        letters.chars().map(|letter| size(letter) as u128).product::<u128>() * factor
    }

    #[test]
    fn each_system_keeps_what_its_formula_says() {
        let shape: Shape = "7,40,24,5,3".parse().unwrap();
        let names: std::collections::BTreeSet<_> = System::ALL.map(System::name).into();
        assert!(names.len() == 5 && !names.contains(""), "{names:?}");
        for system in System::ALL {
            let terms = system.formula().split(" + ").filter(|term| *term != "padding");
            let bytes: u128 = terms.map(|term| product(term, shape)).sum();
            assert_eq!(system.kept(layer("7,40,24,5,3")), bytes, "{}", system.name());
        }
    }

    /// Forward x, h, a, y, o; backward x, h, dO, dH, A′, dX̃, dX: in 2-byte elements of an ungated and a gated layer.
    #[test]
    fn the_peaks_are_the_tensors_that_live_at_once() {
        let (t, d, n, r) = (7u128, 40, 24, 7 * 3);
        for (activation, width) in [(Activation::Relu, n), (Activation::SwiGlu, 2 * n)] {
            let layer = Layer::of("7,40,24,5,3".parse().unwrap(), activation, 2);
            assert_eq!(layer.forward_peak(), 2 * (t * d + r * width + r * n + r * d + t * d));
            assert_eq!(layer.backward_peak(), 2 * (t * d + r * width + t * d + r * width + r * n + r * d + t * d));
        }
    }

    #[test]
    fn no_size_panics() {
        let huge = layer("18446744073709551615,18446744073709551615,1,1,1");
        assert_eq!(System::PlainAutograd.kept(huge), u128::MAX);
    }
}
