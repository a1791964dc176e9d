//! The counting sort of a choice's pairs by expert: three launches, stable, and the same in every run.

use std::sync::Arc;

use super::compile::{KernelName, Variant};
use super::device::{Argument, Buffer, Device, Grid, Guards};
use super::grouped_gemm::{expect_len, to_u32};
use super::routing::DeviceRouting;

/// Threads of a block, and pairs that it sorts; those of kernels/pair_sort.cuh.
const THREADS: u32 = 512;
const PAIRS_PER_BLOCK: usize = 2048;
const WARPS: usize = 16;
/// Experts of a block of kernels/routing_prefix.cu, a warp each.
const EXPERTS_PER_BLOCK: u32 = 8;
/// Experts that a block of kernels/routing_rows.cu orders.
const EXPERTS_ORDERED: u32 = 64;

/// What lies between the launches.
pub(super) struct PairSort {
    pairs: usize,
    experts: usize,
    /// (E, blocks up to a multiple of 4): of each block the pairs of each expert, then those in earlier blocks.
    counts: Buffer<u32>,
    /// (E).
    totals: Buffer<u32>,
}

/// The parts of a routing that the sort writes.
pub(super) struct SortedRouting<'a> {
    pub expert_offsets: &'a mut Buffer<u32>,
    /// The experts by falling count, if they are wanted.
    pub expert_order: Option<&'a mut Buffer<u32>>,
    pub row_token: &'a mut Buffer<u32>,
    /// The rows of each token, if they are wanted.
    pub token_rows: Option<&'a mut Buffer<u32>>,
    pub scores: &'a mut Buffer<f32>,
}

impl PairSort {
    pub fn new(device: &Arc<Device>, pairs: usize, experts: usize, guards: Guards) -> crate::Result<Self> {
        let blocks = pairs.div_ceil(PAIRS_PER_BLOCK);
        Ok(Self {
            pairs,
            experts,
            counts: Buffer::output(device, "pair_counts", experts * blocks.next_multiple_of(4), guards)?,
            totals: Buffer::output(device, "topk_frequency", experts, guards)?,
        })
    }

    /// (E) the pairs of each expert.
    pub fn totals(&self) -> &Buffer<u32> {
        &self.totals
    }

    pub fn bytes(&self) -> usize {
        let Self { pairs: _, experts: _, counts, totals } = self;
        counts.payload_bytes() + totals.payload_bytes()
    }

    pub fn check_red_zones(&self) -> crate::Result<()> {
        let Self { pairs: _, experts: _, counts, totals } = self;
        [counts, totals].into_iter().try_for_each(Buffer::check_red_zones)
    }

    /// Steps 1 and 2: how many pairs each expert has, and has in each block.
    pub fn count(&mut self, device: &Device, choice: &Buffer<u32>) -> crate::Result<()> {
        expect_len(choice, self.pairs)?;
        let (pairs, experts, blocks) = self.sizes()?;
        let (choice, counts, totals) = (choice.address(), self.counts.address(), self.totals.address());
        let arguments = [Argument::of(&choice), Argument::of(&counts), Argument::of(&pairs), Argument::of(&experts)];
        let grid = Grid { blocks, threads: THREADS, shared_bytes: 0, cluster: 1 };
        let kernel = device.kernel(&Variant::of(KernelName::RoutingHistogram))?;
        // SAFETY: live buffers of the sizes checked here and at their allocation, the results
        // exclusively borrowed; the ids of a choice are below E.
        unsafe { kernel.launch(device, grid, &arguments) }?;
        let arguments = [Argument::of(&counts), Argument::of(&totals), Argument::of(&blocks), Argument::of(&experts)];
        let grid = Grid { blocks: experts.div_ceil(EXPERTS_PER_BLOCK), threads: 32 * EXPERTS_PER_BLOCK, ..grid };
        let kernel = device.kernel(&Variant::of(KernelName::RoutingPrefix))?;
        // SAFETY: as above.
        unsafe { kernel.launch(device, grid, &arguments) }
    }

    /// Step 3: every pair's row, behind [`PairSort::count`] of the same choice.
    pub fn rows(
        &self,
        device: &Device,
        k: usize,
        choice: &Buffer<u32>,
        pair_scores: &Buffer<f32>,
        routing: SortedRouting<'_>,
    ) -> crate::Result<()> {
        let SortedRouting { expert_offsets, expert_order, row_token, token_rows, scores } = routing;
        expect_len(choice, self.pairs)?;
        expect_len(row_token, self.pairs)?;
        expect_len(pair_scores, self.pairs)?;
        expect_len(scores, self.pairs)?;
        expect_len(expert_offsets, self.experts + 1)?;
        if let Some(token_rows) = &token_rows {
            expect_len(token_rows, self.pairs)?;
        }
        if let Some(expert_order) = &expert_order {
            expect_len(expert_order, self.experts)?;
        }
        let (pairs, experts, blocks) = self.sizes()?;
        let addresses = [
            choice.address(),
            pair_scores.address(),
            self.counts.address(),
            self.totals.address(),
            expert_offsets.address(),
            expert_order.map_or(0, |order| order.address()),
            row_token.address(),
            token_rows.map_or(0, |rows| rows.address()),
            scores.address(),
        ];
        let sizes = [pairs, experts, to_u32("K", k)?, blocks];
        let arguments: Vec<_> = addresses.iter().map(Argument::of).chain(sizes.iter().map(Argument::of)).collect();
        let shared = (self.experts * (4 + 2 * WARPS)).next_multiple_of(16);
        let grid = Grid {
            blocks: blocks + experts.div_ceil(EXPERTS_ORDERED),
            threads: THREADS,
            shared_bytes: to_u32("E·36", shared)?,
            cluster: 1,
        };
        let kernel = device.kernel(&Variant::of(KernelName::RoutingRows))?;
        // SAFETY: live buffers of the sizes checked above, the results exclusively borrowed, address 0
        // where none is wanted; the ids of a choice are below E, and `counts` are of this choice.
        unsafe { kernel.launch(device, grid, &arguments) }
    }

    fn sizes(&self) -> crate::Result<(u32, u32, u32)> {
        let blocks = to_u32("R/2048", self.pairs.div_ceil(PAIRS_PER_BLOCK))?;
        Ok((to_u32("R", self.pairs)?, to_u32("E", self.experts)?, blocks))
    }
}

impl<'a> SortedRouting<'a> {
    /// All that the sort writes of `routing`.
    pub fn of(routing: &'a mut DeviceRouting) -> Self {
        routing.sorted()
    }
}
