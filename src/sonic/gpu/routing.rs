//! A checked routing on the device.

use std::sync::Arc;

use crate::routing::Routing;

use super::device::{Buffer, Device, Guards};
use super::grouped_gemm::expect_len;
use super::pair_sort::SortedRouting;

/// The index tensors of a [`Routing`], and the scores by row. Made from a checked routing, or written
/// by kernels whose ids are in range whatever the logits, so that no kernel meets an index out of range.
///
/// Where tokens are rounded on the device, only the device knows R: there is room for
/// [`DeviceRouting::routed`] rows, kernels read R from `expert_offsets`, and what lies beyond is neither
/// read nor written.
pub struct DeviceRouting {
    tokens: usize,
    expert_offsets: Buffer<u32>,
    expert_order: Buffer<u32>,
    row_token: Buffer<u32>,
    token_offsets: Buffer<u32>,
    token_rows: Buffer<u32>,
    scores: Buffer<f32>,
}

impl DeviceRouting {
    /// Uploads `routing`, with `scores` given by pair.
    ///
    /// # Errors
    /// Not enough device memory.
    ///
    /// # Panics
    /// If there are not R scores.
    #[track_caller]
    pub fn upload(device: &Arc<Device>, routing: &Routing, scores: &[f32], guards: Guards) -> crate::Result<Self> {
        let by_row = routing.to_rows(scores);
        let row_token: Vec<u32> = routing.row_token().iter().map(|token| token.0).collect();
        Ok(Self {
            tokens: routing.tokens(),
            expert_offsets: Buffer::input(device, "expert_offsets", routing.expert_offsets(), guards)?,
            expert_order: Buffer::input(device, "expert_order", &longest_first(routing), guards)?,
            row_token: Buffer::input(device, "row_token", &row_token, guards)?,
            token_offsets: Buffer::input(device, "token_offsets", routing.token_offsets(), guards)?,
            token_rows: Buffer::input(device, "token_rows", routing.token_rows(), guards)?,
            scores: Buffer::input(device, "scores", &by_row, guards)?,
        })
    }

    /// Room for a top-K routing, which kernels write: K rows for each token.
    ///
    /// # Errors
    /// Not enough device memory.
    pub(super) fn of_top_k(
        device: &Arc<Device>,
        tokens: usize,
        experts: usize,
        k: usize,
        guards: Guards,
    ) -> crate::Result<Self> {
        let offsets: Vec<u32> = (0..=tokens).map(|token| (token * k) as u32).collect();
        let token_offsets = Buffer::input(device, "token_offsets", &offsets, guards)?;
        Ok(Self { token_offsets, ..Self::reserve(device, tokens, experts, tokens * k, guards)? })
    }

    /// Room for a routing of at most `rows` rows, which kernels write.
    ///
    /// # Errors
    /// Not enough device memory.
    pub(super) fn reserve(
        device: &Arc<Device>,
        tokens: usize,
        experts: usize,
        rows: usize,
        guards: Guards,
    ) -> crate::Result<Self> {
        let output = |name, len| Buffer::output(device, name, len, guards);
        Ok(Self {
            tokens,
            expert_offsets: output("expert_offsets", experts + 1)?,
            expert_order: output("expert_order", experts)?,
            row_token: output("row_token", rows)?,
            token_offsets: output("token_offsets", tokens + 1)?,
            token_rows: output("token_rows", rows)?,
            scores: Buffer::output(device, "scores", rows, guards)?,
        })
    }

    /// What a counting sort writes.
    pub(super) fn sorted(&mut self) -> SortedRouting<'_> {
        let Self { tokens: _, expert_offsets, expert_order, row_token, token_offsets: _, token_rows, scores } = self;
        SortedRouting {
            expert_offsets,
            expert_order: Some(expert_order),
            row_token,
            token_rows: Some(token_rows),
            scores,
        }
    }

    /// Checks the sizes that a kernel relies on.
    ///
    /// # Errors
    /// A routing of other sizes, a fault of this crate.
    pub(super) fn expect_reserved(&self, tokens: usize, experts: usize, rows: usize) -> crate::Result<()> {
        let Self { tokens: _, expert_offsets, expert_order, row_token, token_offsets, token_rows, scores } = self;
        expect_len(expert_offsets, experts + 1)?;
        expect_len(expert_order, experts)?;
        expect_len(token_offsets, tokens + 1)?;
        expect_len(row_token, rows)?;
        expect_len(token_rows, rows)?;
        expect_len(scores, rows)
    }

    /// R as the device has it, once all work is done.
    ///
    /// # Errors
    /// A device that fails.
    pub fn used(&self) -> crate::Result<usize> {
        Ok(self.expert_offsets.download()?.last().map_or(0, |&rows| rows as usize))
    }

    /// Of [`DeviceRouting::bytes`] those that the rows of the last routing took.
    ///
    /// # Errors
    /// A device that fails.
    pub fn used_bytes(&self) -> crate::Result<usize> {
        Ok(self.bytes() - 3 * size_of::<u32>() * (self.routed() - self.used()?))
    }

    /// T.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// E.
    pub fn experts(&self) -> usize {
        self.expert_order.len()
    }

    /// R; where only the device knows it, the rows that it is reserved for.
    pub fn routed(&self) -> usize {
        self.row_token.len()
    }

    /// (E + 1) where each expert's rows begin.
    pub fn expert_offsets(&self) -> &Buffer<u32> {
        &self.expert_offsets
    }

    /// (E) the experts, those with most rows first: the order in which the weight gradients are
    /// computed, whose cost goes with the rows.
    pub fn expert_order(&self) -> &Buffer<u32> {
        &self.expert_order
    }

    /// (R) the token of each row.
    pub fn row_token(&self) -> &Buffer<u32> {
        &self.row_token
    }

    /// (T + 1) where each token's entries in `token_rows` begin.
    pub fn token_offsets(&self) -> &Buffer<u32> {
        &self.token_offsets
    }

    /// (R) the rows of each token, in the order of summation.
    pub fn token_rows(&self) -> &Buffer<u32> {
        &self.token_rows
    }

    /// (R) the scores by row.
    pub fn scores(&self) -> &Buffer<f32> {
        &self.scores
    }

    /// Bytes reserved for all of it: what stays on the device from forward to backward as metadata.
    pub fn bytes(&self) -> usize {
        let Self { tokens: _, expert_offsets, expert_order, row_token, token_offsets, token_rows, scores } = self;
        [expert_offsets, expert_order, row_token, token_offsets, token_rows]
            .map(Buffer::payload_bytes)
            .iter()
            .sum::<usize>()
            + scores.payload_bytes()
    }

    /// Red zones and contents, as [`Buffer::check_red_zones`] and [`Buffer::check_unchanged`].
    ///
    /// # Errors
    /// A kernel wrote into or around one of them.
    pub fn check_untouched(&self) -> crate::Result<()> {
        let Self { tokens: _, expert_offsets, expert_order, row_token, token_offsets, token_rows, scores } = self;
        for indices in [expert_offsets, expert_order, row_token, token_offsets, token_rows] {
            indices.check_untouched()?;
        }
        scores.check_untouched()
    }
}

fn longest_first(routing: &Routing) -> Vec<u32> {
    let offsets = routing.expert_offsets();
    let mut order: Vec<u32> = (0..routing.experts() as u32).collect();
    order.sort_by_key(|&expert| std::cmp::Reverse(offsets[expert as usize + 1] - offsets[expert as usize]));
    order
}
