//! `sonicmoe dumper`: a PyTorch helper that writes dumps.

use clap::Args;

/// One file of Python.
const HELPER: &str = include_str!("dumper.py");

/// Prints a PyTorch helper, one file, that writes a run of any MoE layer as a dump.
///
/// It needs torch and safetensors only. It calls the layer once forward and once backward, finds the
/// gradients of the parameters that it is told, and records the strides that the layer saw.
///
/// ```python
/// # sonicmoe dumper > sonicmoe_dump.py
/// import torch
/// from transformers import Qwen3MoeConfig
/// from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
/// from sonicmoe_dump import dump
/// config = Qwen3MoeConfig(hidden_size=128, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)
/// block = Qwen3MoeSparseMoeBlock(config)
/// for weight in block.parameters(): torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
/// experts, x = block.experts, torch.randn(1, 65, 128)
/// dump("run.safetensors", block, x, k=2, router="topk_over_softmax_renormalized", activation="swiglu", router_w=block.gate.weight,
///      w1=experts.gate_up_proj, w1_layout="concatenated_gate_first", w2=experts.down_proj)
/// ```
#[derive(Args, Clone, Copy, Debug)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Example:
  sonicmoe dumper > sonicmoe_dump.py"
)]
pub struct DumperArgs {}

/// The helper.
pub fn dumper(_: &DumperArgs) -> &'static str {
    HELPER
}
