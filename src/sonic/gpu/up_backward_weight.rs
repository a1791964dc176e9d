//! Kernel 7: dW1 = dHᵀ X_e.

use half::bf16;

use super::compile::KernelName;
use super::device::Buffer;
use super::layer::Layer;
use super::routing::DeviceRouting;
use super::weight_gemm::WeightGemm;

/// dw1 (E, 2n, d) from x (T, d) and dh (R, 2n).
pub(super) fn up_backward_weight(
    layer: &Layer,
    routing: &DeviceRouting,
    x: &Buffer<bf16>,
    dh: &Buffer<bf16>,
    dw1: &mut Buffer<bf16>,
) -> crate::Result<()> {
    let (d, columns) = (layer.d(), layer.h_width());
    WeightGemm { routing, gathered: x, contiguous: dh, out: dw1, transposed: true, d, columns }
        .launch(layer.device(), &layer.variant(KernelName::UpBackwardWeight))
}
