//! db1 = Σ over an expert's rows of the stored dH.

use half::bf16;

use super::compile::KernelName;
use super::device::{Argument, Buffer, Grid};
use super::grouped_gemm::{expect_len, to_u32};
use super::layer::Layer;
use super::routing::DeviceRouting;

/// db1 (E, 2n) from dh (R, 2n).
pub(super) fn up_bias_gradient(
    layer: &Layer,
    routing: &DeviceRouting,
    dh: &Buffer<bf16>,
    db1: &mut Buffer<bf16>,
) -> crate::Result<()> {
    let (device, width, e) = (layer.device(), layer.h_width(), layer.e());
    expect_len(dh, routing.routed() * width)?;
    expect_len(db1, e * width)?;
    let kernel = device.kernel(&layer.variant(KernelName::UpBiasGradient))?;
    let (dh, offsets, out) = (dh.address(), routing.expert_offsets().address(), db1.address());
    let (experts, columns) = (to_u32("E", e)?, to_u32("columns of h", width)?);
    let arguments =
        [Argument::of(&dh), Argument::of(&offsets), Argument::of(&out), Argument::of(&experts), Argument::of(&columns)];
    let grid = Grid { blocks: to_u32("E·2n/64", e * width.div_ceil(64))?, threads: 256, shared_bytes: 0, cluster: 1 };
    // SAFETY: live buffers of the sizes checked above; a checked routing's offsets; `db1` is
    // exclusively borrowed.
    unsafe { kernel.launch(device, grid, &arguments) }
}
