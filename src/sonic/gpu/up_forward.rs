//! Kernel 1: H = X_e W1ᵀ (+ b1), A = act(H).

use half::bf16;

use super::compile::KernelName;
use super::device::Buffer;
use super::grouped_gemm::{Epilogue, GroupedGemm, Rows, expect_len};
use super::layer::Layer;
use super::routing::DeviceRouting;

/// h (R, 2n) and a (R, n) from x (T, d).
pub(super) fn up_forward(
    layer: &Layer,
    routing: &DeviceRouting,
    x: &Buffer<bf16>,
    h: &mut Buffer<bf16>,
    a: &mut Buffer<bf16>,
) -> crate::Result<()> {
    expect_len(a, routing.routed() * layer.n())?;
    let gemm = GroupedGemm {
        routing,
        rows: Rows::Gathered(x),
        weight: layer.w1(),
        bias: layer.b1(),
        n: layer.h_width(),
        k: layer.d(),
        epilogue: Epilogue::Activate { h, a },
    };
    gemm.launch(layer.device(), &layer.variant(KernelName::UpForward))
}
