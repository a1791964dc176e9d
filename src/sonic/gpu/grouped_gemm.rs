//! The grouped GEMM over token counts, which kernels 1, 2, 4 and 6 are: for every expert e, the rows
//! of e times e's weight. What the host and kernels/sm90/launch.cuh agree on.

use cudarc::driver::DeviceRepr;
use half::bf16;

use crate::error::Error;

use super::compile::Variant;
use super::device::{Argument, Buffer, Device, Grid, Scalar, TensorMap};
use super::routing::DeviceRouting;

/// `GroupedGemmMaps` of kernels/sm90/launch.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
struct Maps {
    a: TensorMap,
    b: TensorMap,
    h: TensorMap,
    out: TensorMap,
    activation: TensorMap,
}

// SAFETY: five tensor maps in C layout, taken by value; the same in the same order as in CUDA.
unsafe impl DeviceRepr for Maps {}

/// `GroupedGemmParams` of kernels/sm90/launch.cuh; addresses are 0 where the kernel reads nothing.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Params {
    expert_offsets: u64,
    row_token: u64,
    gathered: u64,
    bias: u64,
    h: u64,
    scores: u64,
    out: u64,
    activation: u64,
    ds_partial: u64,
    status: u64,
    tile_queue: u64,
    experts: i32,
    n: i32,
    k: i32,
    reserved: i32,
}

// SAFETY: plain numbers in C layout, taken by value; the same fields in the same order as in CUDA.
unsafe impl DeviceRepr for Params {}

/// Rows of an accumulator that one warpgroup holds, `kBoxRows` of kernels/sm90/row_box.cuh.
const BOX_ROWS: u32 = 64;

/// The rows that are multiplied.
pub(super) enum Rows<'a> {
    /// Row r is the row of a (T, k) tensor that `row_token[r]` names.
    Gathered(&'a Buffer<bf16>),
    /// A tensor (R, k) as it lies.
    Contiguous(&'a Buffer<bf16>),
}

/// One grouped GEMM: (R, k) × per expert (k, n) → (R, n).
pub(super) struct GroupedGemm<'a> {
    pub routing: &'a DeviceRouting,
    pub rows: Rows<'a>,
    /// (E, n, k), or (E, k, n) for a kernel whose B is MN-major.
    pub weight: &'a Buffer<bf16>,
    /// (E, n), added to the product.
    pub bias: Option<&'a Buffer<bf16>>,
    pub n: usize,
    pub k: usize,
    /// What the epilogue reads and writes.
    pub epilogue: Epilogue<'a>,
}

/// What an epilogue reads and writes beside the product.
pub(super) enum Epilogue<'a> {
    /// Stores the product (R, n).
    Store(&'a mut Buffer<bf16>),
    /// Stores h (R, n) and its activation.
    Activate { h: &'a mut Buffer<bf16>, a: &'a mut Buffer<bf16> },
    /// From the product G: dh, a′ and ds of each column tile (R, tiles).
    Backward {
        h: &'a Buffer<bf16>,
        dh: &'a mut Buffer<bf16>,
        a_prime: &'a mut Buffer<bf16>,
        ds_partial: &'a mut Buffer<f32>,
    },
}

impl GroupedGemm<'_> {
    /// Queues the kernel; a routing without pairs is nothing to do.
    ///
    /// # Errors
    /// A buffer of another size than the kernel expects (a fault of this crate), or a device that
    /// fails.
    pub(super) fn launch(self, device: &Device, variant: &Variant) -> crate::Result<()> {
        let Self { routing, rows, weight, bias, n, k, epilogue } = self;
        let routed = routing.routed();
        if routed == 0 {
            return Ok(());
        }
        let kernel = device.kernel(variant)?;
        let geometry = kernel.geometry()?;
        expect_len(weight, routing.experts() * n * k)?;
        let e = routing.experts();
        let b = if geometry.b_is_mn_major { [n, k, e] } else { [k, n, e] };
        let mut maps = Maps {
            a: TensorMap::unused(),
            b: TensorMap::encode(weight, b, [64, geometry.b_box_rows, 1])?,
            h: TensorMap::unused(),
            out: TensorMap::unused(),
            activation: TensorMap::unused(),
        };
        if let Some(bias) = bias {
            expect_len(bias, e * n)?;
        }
        let mut params = Params {
            expert_offsets: routing.expert_offsets().address(),
            row_token: routing.row_token().address(),
            bias: bias.map_or(0, Buffer::address),
            status: device.board().slot(variant.kernel()),
            tile_queue: device.tile_queues().take(),
            experts: to_i32("E", e)?,
            n: to_i32("n", n)?,
            k: to_i32("k", k)?,
            ..Params::default()
        };
        match rows {
            Rows::Gathered(tokens) => {
                expect_len(tokens, routing.tokens() * k)?;
                params.gathered = tokens.address();
            }
            Rows::Contiguous(rows) => {
                expect_len(rows, routed * k)?;
                maps.a = TensorMap::encode(rows, [k, routed], [64, geometry.a_box_rows])?;
            }
        }
        // The epilogue's tensors (R, width) move in boxes of one warpgroup's rows.
        let boxes = |tensor: &Buffer<bf16>, columns| match columns {
            0 => Ok(TensorMap::unused()),
            _ => TensorMap::encode(tensor, [tensor.len() / routed, routed], [columns, BOX_ROWS]),
        };
        match epilogue {
            Epilogue::Store(out) => {
                expect_len(out, routed * n)?;
                params.out = out.address();
                maps.out = boxes(out, geometry.out_box_columns)?;
            }
            Epilogue::Activate { h, a } => {
                expect_len(h, routed * n)?;
                params.out = h.address();
                params.activation = a.address();
                maps.out = boxes(h, geometry.out_box_columns)?;
                maps.activation = boxes(a, geometry.activation_box_columns)?;
            }
            Epilogue::Backward { h, dh, a_prime, ds_partial } => {
                expect_len(dh, h.len())?;
                expect_len(a_prime, routed * n)?;
                expect_len(ds_partial, routed * n.div_ceil(geometry.tile_n as usize))?;
                params.h = h.address();
                params.scores = routing.scores().address();
                params.out = dh.address();
                params.activation = a_prime.address();
                params.ds_partial = ds_partial.address();
                maps.h = boxes(h, geometry.h_box_columns)?;
                maps.out = boxes(dh, geometry.out_box_columns)?;
                maps.activation = boxes(a_prime, geometry.activation_box_columns)?;
            }
        }
        let blocks = device.properties().multiprocessors;
        let grid = Grid {
            blocks: blocks - blocks % geometry.cluster.max(1),
            threads: geometry.threads,
            shared_bytes: geometry.shared_bytes,
            cluster: geometry.cluster,
        };
        // SAFETY: every address is of a live buffer of this device, of the size that the kernel's
        // source states (checked here, and for `a` and `h` by the callers, who know the activation);
        // offsets and tokens come from a checked routing; results are exclusively borrowed.
        unsafe { kernel.launch(device, grid, &[Argument::of(&maps), Argument::of(&params)]) }
    }
}

/// Checks a buffer's size before a kernel relies on it.
pub(super) fn expect_len<T: Scalar>(buffer: &Buffer<T>, expected: usize) -> crate::Result<()> {
    if buffer.len() == expected {
        return Ok(());
    }
    Err(Error::internal(format!("`{}` has {} elements on the device, not {expected}", buffer.name(), buffer.len())))
}

pub(super) fn to_i32(what: &str, size: usize) -> crate::Result<i32> {
    i32::try_from(size).map_err(|_| Error::size(what, size, "the kernels count it with 31 bits"))
}

pub(super) fn to_u32(what: &str, size: usize) -> crate::Result<u32> {
    u32::try_from(size).map_err(|_| Error::size(what, size, "the kernels count it with 32 bits"))
}
