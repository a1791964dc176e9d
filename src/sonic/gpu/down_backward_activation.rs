//! Kernel 4: from G = dO W2 and the kept H come dH, A′ and dS.

use half::bf16;

use super::compile::KernelName;
use super::device::{Argument, Buffer, Grid};
use super::grouped_gemm::{Epilogue, GroupedGemm, Rows, expect_len, to_i32, to_u32};
use super::layer::Layer;
use super::routing::DeviceRouting;

/// What kernel 4 writes.
pub(super) struct DownBackward<'a> {
    /// (R, 2n).
    pub dh: &'a mut Buffer<bf16>,
    /// (R, n).
    pub a_prime: &'a mut Buffer<bf16>,
    /// (R, [`score_tiles`]).
    pub ds_partial: &'a mut Buffer<f32>,
}

/// Column tiles of n: into as many parts ⟨G, A⟩ is summed. With one, kernel 4 writes ds itself,
/// unless there are biases.
pub(super) fn score_tiles(layer: &Layer) -> crate::Result<usize> {
    let geometry = layer.device().kernel(&layer.variant(KernelName::DownBackwardActivation))?.geometry()?;
    Ok(layer.n().div_ceil(geometry.tile_n as usize))
}

/// dh, a′ and the parts of ds from dout (T, d) and h (R, 2n).
pub(super) fn down_backward_activation(
    layer: &Layer,
    routing: &DeviceRouting,
    dout: &Buffer<bf16>,
    h: &Buffer<bf16>,
    results: DownBackward<'_>,
) -> crate::Result<()> {
    expect_len(h, routing.routed() * layer.h_width())?;
    let DownBackward { dh, a_prime, ds_partial } = results;
    let gemm = GroupedGemm {
        routing,
        rows: Rows::Gathered(dout),
        weight: layer.w2(),
        bias: None,
        n: layer.n(),
        k: layer.d(),
        epilogue: Epilogue::Backward { h, dh, a_prime, ds_partial },
    };
    gemm.launch(layer.device(), &layer.variant(KernelName::DownBackwardActivation))
}

/// ds (R) by row: the parts in their order, plus ⟨dout, b2⟩ with biases.
pub(super) fn score_gradient(
    layer: &Layer,
    routing: &DeviceRouting,
    dout: &Buffer<bf16>,
    ds_partial: &Buffer<f32>,
    ds: &mut Buffer<f32>,
) -> crate::Result<()> {
    let (device, routed, tiles) = (layer.device(), routing.routed(), score_tiles(layer)?);
    expect_len(dout, routing.tokens() * layer.d())?;
    expect_len(ds_partial, routed * tiles)?;
    expect_len(ds, routed)?;
    let (partial, out) = (ds_partial.address(), ds.address());
    let Some(b2) = layer.b2() else {
        let kernel = device.kernel(&layer.variant(KernelName::ScoreGradient))?;
        // R where the device has it: the last of the offsets.
        let rows = routing.expert_offsets().address() + (size_of::<u32>() * routing.experts()) as u64;
        let (tiles, addend) = (to_i32("tiles of n", tiles)?, 0u64);
        let arguments = [
            Argument::of(&partial),
            Argument::of(&addend),
            Argument::of(&out),
            Argument::of(&rows),
            Argument::of(&tiles),
        ];
        let grid = Grid { blocks: to_u32("R/256", routed.div_ceil(256))?, threads: 256, shared_bytes: 0, cluster: 1 };
        // SAFETY: live buffers of the sizes checked above, for at least as many rows as the offsets
        // end at; `ds` is exclusively borrowed.
        return unsafe { kernel.launch(device, grid, &arguments) };
    };
    expect_len(b2, layer.e() * layer.d())?;
    let kernel = device.kernel(&layer.variant(KernelName::BiasScoreGradient))?;
    let (dout, b2) = (dout.address(), b2.address());
    let experts_at = routing.expert_offsets().address();
    let (tokens_at, rows_at) = (routing.token_offsets().address(), routing.token_rows().address());
    let (tokens, experts) = (to_u32("T", routing.tokens())?, to_u32("E", layer.e())?);
    let (tiles, d) = (to_u32("tiles of n", tiles)?, to_u32("d", layer.d())?);
    let arguments = [
        Argument::of(&dout),
        Argument::of(&b2),
        Argument::of(&partial),
        Argument::of(&experts_at),
        Argument::of(&tokens_at),
        Argument::of(&rows_at),
        Argument::of(&out),
        Argument::of(&tokens),
        Argument::of(&experts),
        Argument::of(&tiles),
        Argument::of(&d),
    ];
    let grid = Grid { blocks: tokens.div_ceil(8), threads: 256, shared_bytes: 0, cluster: 1 };
    // SAFETY: live buffers of the sizes checked above; a checked routing's indices; `ds` is
    // exclusively borrowed.
    unsafe { kernel.launch(device, grid, &arguments) }
}
