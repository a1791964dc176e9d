//! Kernel 2: Y = A W2ᵀ (+ b2).

use half::bf16;

use super::compile::KernelName;
use super::device::Buffer;
use super::grouped_gemm::{Epilogue, GroupedGemm, Rows};
use super::layer::Layer;
use super::routing::DeviceRouting;

/// y (R, d) from a (R, n).
pub(super) fn down_forward(
    layer: &Layer,
    routing: &DeviceRouting,
    a: &Buffer<bf16>,
    y: &mut Buffer<bf16>,
) -> crate::Result<()> {
    let gemm = GroupedGemm {
        routing,
        rows: Rows::Contiguous(a),
        weight: layer.w2(),
        bias: layer.b2(),
        n: layer.d(),
        k: layer.n(),
        epilogue: Epilogue::Store(y),
    };
    gemm.launch(layer.device(), &layer.variant(KernelName::DownForward))
}
