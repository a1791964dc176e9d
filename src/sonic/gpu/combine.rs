//! What the two combines share: a thread for 8 columns of a token.

use super::compile::COMBINE_THREADS;
use super::device::Grid;
use super::grouped_gemm::to_u32;

/// No token, no blocks.
pub(super) fn combine_grid(tokens: usize, d: usize) -> crate::Result<Grid> {
    let blocks = to_u32("T·d/2048", (tokens * (d / 8)).div_ceil(COMBINE_THREADS as usize))?;
    Ok(Grid { blocks, threads: COMBINE_THREADS, shared_bytes: 0, cluster: 1 })
}
