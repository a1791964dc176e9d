//! db2 = Σ over an expert's rows of score · dO.

use half::bf16;

use super::compile::KernelName;
use super::device::{Argument, Buffer, Grid};
use super::grouped_gemm::{expect_len, to_u32};
use super::layer::Layer;
use super::routing::DeviceRouting;

/// db2 (E, d) from dout (T, d).
pub(super) fn down_bias_gradient(
    layer: &Layer,
    routing: &DeviceRouting,
    dout: &Buffer<bf16>,
    db2: &mut Buffer<bf16>,
) -> crate::Result<()> {
    let (device, d, e) = (layer.device(), layer.d(), layer.e());
    expect_len(dout, routing.tokens() * d)?;
    expect_len(db2, e * d)?;
    let kernel = device.kernel(&layer.variant(KernelName::DownBiasGradient))?;
    let (dout, scores) = (dout.address(), routing.scores().address());
    let (row_token, offsets) = (routing.row_token().address(), routing.expert_offsets().address());
    let out = db2.address();
    let (experts, width) = (to_u32("E", e)?, to_u32("d", d)?);
    let arguments = [
        Argument::of(&dout),
        Argument::of(&scores),
        Argument::of(&row_token),
        Argument::of(&offsets),
        Argument::of(&out),
        Argument::of(&experts),
        Argument::of(&width),
    ];
    let grid = Grid { blocks: to_u32("E·d/64", e * d.div_ceil(64))?, threads: 256, shared_bytes: 0, cluster: 1 };
    // SAFETY: live buffers of the sizes checked above; a checked routing's indices; `db2` is
    // exclusively borrowed.
    unsafe { kernel.launch(device, grid, &arguments) }
}
