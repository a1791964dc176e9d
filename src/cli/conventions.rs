//! What a file may leave unsaid of its conventions: flags that every command on a run takes.

use clap::Args;

use crate::activation::Activation;
use crate::dump::{GatingKind, Overrides};
use crate::layout::GateLayout;

/// Conventions said on the command line; they win over the file's own.
#[derive(Args, Clone, Debug, Default)]
pub struct Conventions {
    /// How scores follow from the logits: softmax_over_topk, topk_over_softmax,
    /// topk_over_softmax_renormalized, given, or grouped_sigmoid:groups=4,kept=2,renormalized=true,factor=2.5
    #[arg(long, value_name = "CONVENTION")]
    pub router: Option<GatingKind>,
    /// Where gate and up stand in w1: interleaved_gate_first, concatenated_gate_first or
    /// concatenated_up_first
    #[arg(long, value_name = "ORDER")]
    pub layout: Option<GateLayout>,
    /// swiglu, geglu, geglu_tanh, reglu, gpt_oss, silu, gelu, gelu_tanh, relu or relu_squared
    #[arg(long, value_name = "NAME")]
    pub activation: Option<Activation>,
    /// Experts per token
    #[arg(long, value_name = "K")]
    pub k: Option<usize>,
    /// The file's name for one of our tensors, for example x=hidden_states; may be repeated
    #[arg(long, value_name = "OURS=THEIRS", value_parser = name_pair)]
    pub map: Vec<(String, String)>,
}

impl Conventions {
    /// The same for the reader of files.
    pub fn overrides(&self) -> Overrides {
        let Self { router, layout, activation, k, map } = self;
        Overrides {
            router: *router,
            layout: *layout,
            activation: *activation,
            k: *k,
            names: map.iter().cloned().collect(),
        }
    }
}

fn name_pair(text: &str) -> std::result::Result<(String, String), String> {
    match text.split_once('=') {
        Some((ours, theirs)) if !ours.is_empty() && !theirs.is_empty() => Ok((ours.into(), theirs.into())),
        _ => Err("write OURS=THEIRS, for example x=hidden_states".into()),
    }
}
