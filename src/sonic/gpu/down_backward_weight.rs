//! Kernel 5: dW2 = dO_eᵀ A′.

use half::bf16;

use super::compile::KernelName;
use super::device::Buffer;
use super::layer::Layer;
use super::routing::DeviceRouting;
use super::weight_gemm::WeightGemm;

/// dw2 (E, d, n) from dout (T, d) and a′ (R, n).
pub(super) fn down_backward_weight(
    layer: &Layer,
    routing: &DeviceRouting,
    dout: &Buffer<bf16>,
    a_prime: &Buffer<bf16>,
    dw2: &mut Buffer<bf16>,
) -> crate::Result<()> {
    let (d, columns) = (layer.d(), layer.n());
    WeightGemm { routing, gathered: dout, contiguous: a_prime, out: dw2, transposed: false, d, columns }
        .launch(layer.device(), &layer.variant(KernelName::DownBackwardWeight))
}
