//! Who computes what: the choice of experts, the scores, and the metadata that the kernels read.
//!
//! A [`Routing`] is a checked list of (token, expert) pairs together with the orders that the
//! kernels need. It carries no scores: those have the type of the engine, and come from a
//! [`Convention`] or from the caller.

pub mod certificate;
pub(crate) mod grouped;
mod metadata;
pub mod rounding;
pub mod scores;
pub(crate) mod softmax;
pub(crate) mod top_k;

pub(crate) use grouped::check_bias;
pub use grouped::{GroupedSigmoid, grouped_top_k};
pub use metadata::Routing;
pub use top_k::{Choice, top_k};

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// How the scores of the K chosen experts follow from the logits. The choice itself compares logits,
/// larger first, then the smaller expert id, but for [`Convention::GroupedSigmoid`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Convention {
    /// Softmax of the K chosen logits.
    SoftmaxOverTopK,
    /// Softmax over all E logits, then the chosen probabilities as they are.
    TopKOverSoftmax,
    /// Softmax over all E logits, the chosen probabilities divided by their sum. The same function
    /// as [`Convention::SoftmaxOverTopK`]; only the rounding differs.
    TopKOverSoftmaxRenormalized,
    /// DeepSeek-V3: sigmoids, chosen with a bias and inside groups.
    GroupedSigmoid(GroupedSigmoid),
}

impl Convention {
    /// Every convention without constants.
    pub const ALL: [Self; 3] = [Self::SoftmaxOverTopK, Self::TopKOverSoftmax, Self::TopKOverSoftmaxRenormalized];

    /// The name used on the command line and in dumps.
    pub fn name(self) -> &'static str {
        match self {
            Self::SoftmaxOverTopK => "softmax_over_topk",
            Self::TopKOverSoftmax => "topk_over_softmax",
            Self::TopKOverSoftmaxRenormalized => "topk_over_softmax_renormalized",
            Self::GroupedSigmoid(_) => GroupedSigmoid::NAME,
        }
    }

    /// Whether the scores alone do not tell the gradient of the logits.
    pub fn backward_reads_logits(self) -> bool {
        matches!(self, Self::TopKOverSoftmax | Self::GroupedSigmoid(_))
    }
}

impl fmt::Display for Convention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::GroupedSigmoid(router) => router.fmt(f),
            _ => f.pad(self.name()),
        }
    }
}

impl FromStr for Convention {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.starts_with(GroupedSigmoid::NAME) {
            return text.parse().map(Self::GroupedSigmoid);
        }
        Self::ALL.into_iter().find(|convention| convention.name() == text).ok_or_else(|| {
            Error::unknown("router", text, Self::ALL.map(Self::name).into_iter().chain([GroupedSigmoid::NAME]))
        })
    }
}
