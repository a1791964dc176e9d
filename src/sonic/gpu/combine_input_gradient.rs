//! Kernel 8: dX = Σ over a token's rows of dX̃.

use half::bf16;

use super::combine::combine_grid;
use super::compile::KernelName;
use super::device::{Argument, Buffer};
use super::grouped_gemm::{expect_len, to_u32};
use super::layer::Layer;
use super::routing::DeviceRouting;

/// dx (T, d), the experts' part, from dx̃ (R, d).
pub(super) fn combine_input_gradient(
    layer: &Layer,
    routing: &DeviceRouting,
    dx_expanded: &Buffer<bf16>,
    dx: &mut Buffer<bf16>,
) -> crate::Result<()> {
    let (device, d) = (layer.device(), layer.d());
    expect_len(dx_expanded, routing.routed() * d)?;
    expect_len(dx, routing.tokens() * d)?;
    let kernel = device.kernel(&layer.variant(KernelName::CombineInputGradient))?;
    let (source, out) = (dx_expanded.address(), dx.address());
    let (offsets, rows) = (routing.token_offsets().address(), routing.token_rows().address());
    let (tokens, width) = (to_u32("T", routing.tokens())?, to_u32("d", d)?);
    let arguments = [
        Argument::of(&source),
        Argument::of(&offsets),
        Argument::of(&rows),
        Argument::of(&out),
        Argument::of(&tokens),
        Argument::of(&width),
    ];
    // SAFETY: live buffers of this device of the sizes checked above; a checked routing's indices;
    // `dx` is exclusively borrowed.
    unsafe { kernel.launch(device, combine_grid(routing.tokens(), d)?, &arguments) }
}
