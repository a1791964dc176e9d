//! The grouped GEMM that contracts over an expert's tokens, which kernels 5 and 7 are.

use half::bf16;

use super::compile::Variant;
use super::device::{Argument, Buffer, Device, Grid, TensorMap};
use super::grouped_gemm::{expect_len, to_u32};
use super::routing::DeviceRouting;

/// For every expert, Σ over its rows of gathered ⊗ contiguous.
pub(super) struct WeightGemm<'a> {
    pub routing: &'a DeviceRouting,
    /// (T, d), of which row r is `row_token[r]`.
    pub gathered: &'a Buffer<bf16>,
    /// (R, columns).
    pub contiguous: &'a Buffer<bf16>,
    /// (E, d, columns), or (E, columns, d) where `transposed`.
    pub out: &'a mut Buffer<bf16>,
    pub transposed: bool,
    pub d: usize,
    pub columns: usize,
}

impl WeightGemm<'_> {
    /// Queues the kernel. Without pairs it still writes zeros.
    ///
    /// # Errors
    /// A buffer of another size than the kernel expects (a fault of this crate), or a device that
    /// fails.
    pub(super) fn launch(self, device: &Device, variant: &Variant) -> crate::Result<()> {
        let Self { routing, gathered, contiguous, out, transposed, d, columns } = self;
        let (routed, e) = (routing.routed(), routing.experts());
        expect_len(gathered, routing.tokens() * d)?;
        expect_len(contiguous, routed * columns)?;
        expect_len(out, e * d * columns)?;
        let kernel = device.kernel(variant)?;
        let geometry = kernel.geometry()?;
        let contiguous_map = TensorMap::encode(contiguous, [columns, routed], [64, geometry.b_box_rows])?;
        let out_map = if transposed {
            TensorMap::encode(out, [d, columns, e], [64, 64, 1])?
        } else {
            TensorMap::encode(out, [columns, d, e], [64, 64, 1])?
        };
        let (gathered, contiguous) = (gathered.address(), contiguous.address());
        let (row_token, offsets) = (routing.row_token().address(), routing.expert_offsets().address());
        let order = routing.expert_order().address();
        let (experts, d, columns) = (to_u32("E", e)?, to_u32("d", d)?, to_u32("columns", columns)?);
        let status = device.board().slot(variant.kernel());
        let arguments = [
            Argument::of(&contiguous_map),
            Argument::of(&out_map),
            Argument::of(&gathered),
            Argument::of(&contiguous),
            Argument::of(&row_token),
            Argument::of(&offsets),
            Argument::of(&order),
            Argument::of(&experts),
            Argument::of(&d),
            Argument::of(&columns),
            Argument::of(&status),
        ];
        let blocks = device.properties().multiprocessors;
        let grid = Grid {
            blocks: blocks - blocks % geometry.cluster.max(1),
            threads: geometry.threads,
            shared_bytes: geometry.shared_bytes,
            cluster: geometry.cluster,
        };
        // SAFETY: live buffers of this device of the sizes checked above; a checked routing's
        // indices; `out` is exclusively borrowed, and its map ends where it ends.
        unsafe { kernel.launch(device, grid, &arguments) }
    }
}
