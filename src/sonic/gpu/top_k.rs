//! The K best experts of every token, and their scores.

use half::bf16;

use super::choice::ChoicePlan;
use super::compile::{KernelName, Variant};
use super::device::{Argument, Buffer, Device, Grid};
use super::grouped_gemm::{expect_len, to_u32};
use crate::error::Error;
use crate::routing::Convention;
use crate::routing::rounding::Ranking;

/// Tokens of a block, a warp each.
const TOKENS_PER_BLOCK: usize = 8;
/// Tokens of a block of kernels/top_k.cu, eight lanes each.
const TOKENS_OF_GROUPS: usize = 16;
/// Tokens of a warp of it.
const TOKENS_OF_WARP: usize = 4;

/// What the kernel writes.
pub(super) struct TopK<'a> {
    /// (T, K).
    pub choice: &'a mut Buffer<u32>,
    /// (T, K).
    pub pair_scores: &'a mut Buffer<f32>,
    /// (T, 4), where a probability is needed.
    pub token_softmax: Option<&'a mut Buffer<f32>>,
    /// As long as [`refusals`] says.
    pub first_refused: &'a mut Buffer<u32>,
}

/// Words that say which tokens have no choice, one for each warp.
pub(super) fn refusals(plan: &ChoicePlan) -> usize {
    match Variant::top_k(plan.experts, plan.k, false).kernel() {
        KernelName::TopK => plan.tokens.div_ceil(TOKENS_OF_WARP),
        _ => plan.tokens,
    }
}

/// A warp for each token.
pub(super) fn token_grid(tokens: usize) -> crate::Result<Grid> {
    let blocks = to_u32("T/8", tokens.div_ceil(TOKENS_PER_BLOCK))?;
    Ok(Grid { blocks, threads: 32 * TOKENS_PER_BLOCK as u32, shared_bytes: 0, cluster: 1 })
}

/// Choice and scores from the logits (T, E), to which `bias` (E) is added where they lie.
pub(super) fn top_k(
    device: &Device,
    plan: &ChoicePlan,
    logits: &mut Buffer<f32>,
    bias: Option<&Buffer<bf16>>,
    results: TopK<'_>,
) -> crate::Result<()> {
    let ChoicePlan { tokens, experts, k, convention, rounding } = *plan;
    let TopK { choice, pair_scores, token_softmax, first_refused } = results;
    expect_len(logits, tokens * experts)?;
    expect_len(choice, tokens * k)?;
    expect_len(pair_scores, tokens * k)?;
    expect_len(first_refused, refusals(plan))?;
    if let Some(bias) = bias {
        expect_len(bias, experts)?;
    }
    let softmax = match &token_softmax {
        Some(softmax) => {
            expect_len(softmax, 4 * tokens)?;
            softmax.address()
        }
        None => 0,
    };
    // The numbers of kernels/choice.cuh. Token rounding wants what an expert ranks its choosers by.
    let convention = match rounding.map_or(convention, |(rounding, _)| ranking_convention(rounding.ranking)) {
        Convention::SoftmaxOverTopK => 0u32,
        Convention::TopKOverSoftmax => 1,
        Convention::TopKOverSoftmaxRenormalized => 2,
        Convention::GroupedSigmoid(_) => return Err(Error::internal("a grouped router has no kernel")),
    };
    let variant = Variant::top_k(experts, k, token_softmax.is_some());
    let grid = match variant.kernel() {
        KernelName::TopK => Grid {
            blocks: to_u32("T/16", tokens.div_ceil(TOKENS_OF_GROUPS))?,
            threads: 8 * TOKENS_OF_GROUPS as u32,
            shared_bytes: 0,
            cluster: 1,
        },
        _ => token_grid(tokens)?,
    };
    let kernel = device.kernel(&variant)?;
    let addresses = [
        logits.address(),
        bias.map_or(0, Buffer::address),
        choice.address(),
        pair_scores.address(),
        softmax,
        first_refused.address(),
    ];
    let sizes = [to_u32("T", tokens)?, to_u32("E", experts)?, to_u32("K", k)?, convention];
    let arguments: Vec<_> = addresses.iter().map(Argument::of).chain(sizes.iter().map(Argument::of)).collect();
    // SAFETY: live buffers of the sizes checked above, exclusively borrowed where they are written;
    // address 0 where the kernel looks for none.
    unsafe { kernel.launch(device, grid, &arguments) }
}

/// The convention of the scores that tokens rank by at the experts that they chose.
fn ranking_convention(ranking: Ranking) -> Convention {
    match ranking {
        Ranking::Probability => Convention::TopKOverSoftmax,
        Ranking::Renormalized => Convention::TopKOverSoftmaxRenormalized,
    }
}
