//! Kernel 6: dX̃ = dH W1.

use half::bf16;

use super::compile::KernelName;
use super::device::Buffer;
use super::grouped_gemm::{Epilogue, GroupedGemm, Rows};
use super::layer::Layer;
use super::routing::DeviceRouting;

/// dx̃ (R, d) from dh (R, 2n).
pub(super) fn up_backward_activation(
    layer: &Layer,
    routing: &DeviceRouting,
    dh: &Buffer<bf16>,
    dx_expanded: &mut Buffer<bf16>,
) -> crate::Result<()> {
    let gemm = GroupedGemm {
        routing,
        rows: Rows::Contiguous(dh),
        weight: layer.w1(),
        bias: None,
        n: layer.d(),
        k: layer.h_width(),
        epilogue: Epilogue::Store(dx_expanded),
    };
    gemm.launch(layer.device(), &layer.variant(KernelName::UpBackwardActivation))
}
