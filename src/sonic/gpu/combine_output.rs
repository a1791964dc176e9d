//! Kernel 3: o = Σ over a token's rows of score · y.

use half::bf16;

use super::combine::combine_grid;
use super::compile::KernelName;
use super::device::{Argument, Buffer};
use super::grouped_gemm::{expect_len, to_u32};
use super::layer::Layer;
use super::routing::DeviceRouting;

/// o (T, d) from y (R, d).
pub(super) fn combine_output(
    layer: &Layer,
    routing: &DeviceRouting,
    y: &Buffer<bf16>,
    o: &mut Buffer<bf16>,
) -> crate::Result<()> {
    let (device, d) = (layer.device(), layer.d());
    expect_len(y, routing.routed() * d)?;
    expect_len(o, routing.tokens() * d)?;
    let kernel = device.kernel(&layer.variant(KernelName::CombineOutput))?;
    let addresses = [y.address(), routing.scores().address(), routing.token_offsets().address()];
    let (rows, out) = (routing.token_rows().address(), o.address());
    let (tokens, width) = (to_u32("T", routing.tokens())?, to_u32("d", d)?);
    let [y, scores, offsets] = &addresses;
    let arguments = [
        Argument::of(y),
        Argument::of(scores),
        Argument::of(offsets),
        Argument::of(&rows),
        Argument::of(&out),
        Argument::of(&tokens),
        Argument::of(&width),
    ];
    // SAFETY: live buffers of this device of the sizes checked above; a checked routing's indices;
    // `o` is exclusively borrowed.
    unsafe { kernel.launch(device, combine_grid(routing.tokens(), d)?, &arguments) }
}
