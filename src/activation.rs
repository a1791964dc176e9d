//! The activations that a layer may use. Names and shapes only: every side computes its own.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// Which function is meant by GELU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gelu {
    /// x·Φ(x) with the error function.
    Exact,
    /// x/2·(1 + tanh(√(2/π)(x + 0.044715 x³))).
    Tanh,
}

/// The activation between the two projections.
///
/// With a gate, a = f(gate)·v(up), v(up) = up but for gpt-oss, and h has 2n columns, gate and up interleaved, gate first; without
/// one, a = f(h) and h has n columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// silu(gate)·up, silu(x) = x·σ(x).
    SwiGlu,
    /// gelu(gate)·up.
    GeGlu(Gelu),
    /// max(gate, 0)·up.
    ReGlu,
    /// gpt-oss: (u + 1)·g·σ(1.702·g), g the gate clamped above at 7, u the up projection clamped to
    /// ±7. The gradient passes at a clamp and not beyond it.
    GptOss,
    /// silu(h).
    Silu,
    /// gelu(h).
    Gelu(Gelu),
    /// max(h, 0).
    Relu,
    /// max(h, 0)².
    ReluSquared,
}

impl Activation {
    /// Every activation.
    pub const ALL: [Self; 10] = [
        Self::SwiGlu,
        Self::GeGlu(Gelu::Exact),
        Self::GeGlu(Gelu::Tanh),
        Self::ReGlu,
        Self::GptOss,
        Self::Silu,
        Self::Gelu(Gelu::Exact),
        Self::Gelu(Gelu::Tanh),
        Self::Relu,
        Self::ReluSquared,
    ];

    /// Those that the CUDA kernels have.
    pub const WITH_KERNELS: [Self; 9] = [
        Self::SwiGlu,
        Self::GeGlu(Gelu::Exact),
        Self::GeGlu(Gelu::Tanh),
        Self::ReGlu,
        Self::Silu,
        Self::Gelu(Gelu::Exact),
        Self::Gelu(Gelu::Tanh),
        Self::Relu,
        Self::ReluSquared,
    ];

    /// Whether h holds a gate beside the up projection.
    pub fn gated(self) -> bool {
        matches!(self, Self::SwiGlu | Self::GeGlu(_) | Self::ReGlu | Self::GptOss)
    }

    /// Columns of h, rows of one expert's w1: 2n with a gate, n without.
    pub fn h_width(self, n: usize) -> usize {
        if self.gated() { 2 * n } else { n }
    }

    /// The name used on the command line and in dumps.
    pub fn name(self) -> &'static str {
        match self {
            Self::SwiGlu => "swiglu",
            Self::GeGlu(Gelu::Exact) => "geglu",
            Self::GeGlu(Gelu::Tanh) => "geglu_tanh",
            Self::ReGlu => "reglu",
            Self::GptOss => "gpt_oss",
            Self::Silu => "silu",
            Self::Gelu(Gelu::Exact) => "gelu",
            Self::Gelu(Gelu::Tanh) => "gelu_tanh",
            Self::Relu => "relu",
            Self::ReluSquared => "relu_squared",
        }
    }
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Activation {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|activation| activation.name() == text)
            .ok_or_else(|| Error::unknown("activation", text, Self::ALL.map(Self::name)))
    }
}
