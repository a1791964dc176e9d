//! Token rounding on the device: the decision, each expert's ranking as far as it is needed, the rows
//! and the scores.
//!
//! ```text
//! f ─▶ decision ─▶ thresholds ─▶ candidates ─▶ rows ─▶ tokens ─▶ scores
//! by scores:       thresholds ─▶ candidates ─▶ sums ─▶ decision ─▶ rows ─▶ …
//! ```
//!
//! Ids, counts, offsets and decisions have the bits of the CPU path on the same logits: probabilities
//! have (kernels/softmax.cuh), keys are compared as integers, sums that a draw is held against are
//! exact before they are rounded, and the draws come from the same generator.

use std::sync::Arc;

use cudarc::driver::DeviceRepr;

use super::choice::ChoicePlan;
use super::compile::{KernelName, Variant};
use super::device::{Argument, Buffer, Device, Grid, Guards};
use super::grouped_gemm::{expect_len, to_u32};
use super::pair_sort::SortedRouting;
use super::routing::DeviceRouting;
use super::top_k::token_grid;
use crate::routing::rounding::scores::KeptScores;
use crate::routing::rounding::{Rule, TokenRounding};

/// Threads of a block that ranks; kernels/ranking.cuh.
const RANK_THREADS: u32 = 256;
/// Tokens of which a bound is estimated, a thread each; kernels/rounding_thresholds.cu.
const SAMPLE_THREADS: u32 = 512;
/// Tokens and experts of a block of kernels/rounding_candidates.cu.
const CANDIDATE_TILE: (usize, usize) = (TOKEN_TILE, 128);
/// Tokens of a block of kernels/rounding_tokens.cu.
const TOKEN_TILE: usize = 256;
/// Threads of it.
const TOKEN_THREADS: u32 = 1024;
/// Shared memory that the ranking kernels use themselves, at most.
const OWN_SHARED: usize = 24 << 10;

/// What rounding needs beside the choice.
pub(super) struct Rounding {
    rounding: TokenRounding,
    scores: KeptScores,
    plan: ChoicePlan,
    /// (E + 1), (T·K) and (T·K): the tokens that chose each expert, and what they rank by.
    chosen_offsets: Buffer<u32>,
    chosen_token: Buffer<u32>,
    chosen_key: Buffer<f32>,
    /// (E) ln p that candidates reach, and (E, ⌈T/256⌉·8) a bit for each of them.
    bounds: Buffer<f32>,
    candidates: Buffer<u32>,
    /// (E, 3) f64, for the rule by scores.
    sums: Option<Buffer<u32>>,
    /// (E).
    capped: Buffer<u32>,
    /// (E, ⌈T/256⌉·8) a bit for each pair that is kept, and (E, ⌈T/256⌉) how many stand in earlier tiles.
    kept: Buffer<u32>,
    kept_before: Buffer<u32>,
    /// The expert of each entry of the routing's token_rows.
    pair_expert: Buffer<u32>,
}

/// The struct of the same name in kernels/ranking.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
struct RankingInput {
    logits: u64,
    token_softmax: u64,
    chosen_offsets: u64,
    chosen_token: u64,
    chosen_key: u64,
    bounds: u64,
    candidates: u64,
    tokens: u32,
    experts: u32,
    words: u32,
}

// SAFETY: addresses and numbers that a kernel takes by value; the layout is C's on both sides.
unsafe impl DeviceRepr for RankingInput {}

impl Rounding {
    pub fn new(
        device: &Arc<Device>,
        plan: &ChoicePlan,
        rounding: TokenRounding,
        scores: KeptScores,
        guards: Guards,
    ) -> crate::Result<Self> {
        let ChoicePlan { tokens, experts, k, .. } = *plan;
        let tiles = tokens.div_ceil(TOKEN_TILE);
        let output = |name, len| Buffer::<u32>::output(device, name, len, guards);
        let by_scores = rounding.rule == Rule::StochasticByScores;
        Ok(Self {
            rounding,
            scores,
            plan: *plan,
            chosen_offsets: output("chosen_offsets", experts + 1)?,
            chosen_token: output("chosen_token", tokens * k)?,
            chosen_key: Buffer::output(device, "chosen_key", tokens * k, guards)?,
            bounds: Buffer::output(device, "candidate_bounds", experts, guards)?,
            candidates: output("candidates", experts * tiles * (TOKEN_TILE / 32))?,
            sums: by_scores.then(|| output("score_sums", 6 * experts)).transpose()?,
            capped: output("capped", experts)?,
            kept: output("kept", experts * tiles * (TOKEN_TILE / 32))?,
            kept_before: output("kept_before", experts * tiles)?,
            pair_expert: output("pair_expert", plan.rows())?,
        })
    }

    pub fn kernels(&self) -> Vec<KernelName> {
        let sums = self.sums.is_some().then_some(KernelName::RoundingSums);
        let kept_scores = (self.scores == KeptScores::RenormalizedOverKept).then_some(KernelName::RoundingKeptScores);
        let others = [
            KernelName::RoundingDecision,
            KernelName::RoundingThresholds,
            KernelName::RoundingCandidates,
            KernelName::RoundingRows,
            KernelName::RoundingTokens,
        ];
        others.into_iter().chain(sums).chain(kept_scores).collect()
    }

    pub fn pair_expert(&self) -> &Buffer<u32> {
        &self.pair_expert
    }

    pub fn capped(&self) -> &Buffer<u32> {
        &self.capped
    }

    pub fn bytes(&self) -> usize {
        let of_numbers = self.chosen_key.payload_bytes() + self.bounds.payload_bytes();
        self.buffers().map(Buffer::payload_bytes).sum::<usize>() + of_numbers
    }

    pub fn check_red_zones(&self) -> crate::Result<()> {
        self.buffers().try_for_each(Buffer::check_red_zones)?;
        self.chosen_key.check_red_zones()?;
        self.bounds.check_red_zones()
    }

    fn buffers(&self) -> impl Iterator<Item = &Buffer<u32>> {
        let Self {
            rounding: _,
            scores: _,
            plan: _,
            chosen_offsets,
            chosen_token,
            chosen_key: _,
            bounds: _,
            candidates,
            sums,
            capped,
            kept,
            kept_before,
            pair_expert,
        } = self;
        let others = [chosen_offsets, chosen_token, candidates, capped, kept, kept_before, pair_expert];
        others.into_iter().chain(sums)
    }

    /// Where the choice goes, sorted by expert, before [`Rounding::run`].
    pub fn choosers(&mut self) -> SortedRouting<'_> {
        SortedRouting {
            expert_offsets: &mut self.chosen_offsets,
            expert_order: None,
            row_token: &mut self.chosen_token,
            token_rows: None,
            scores: &mut self.chosen_key,
        }
    }

    /// Queues all of it; `frequency` (E) is how many tokens chose each expert.
    pub fn run(
        &mut self,
        device: &Device,
        logits: &Buffer<f32>,
        choice: &Buffer<u32>,
        softmax: &Buffer<f32>,
        frequency: &Buffer<u32>,
        routing: &mut DeviceRouting,
    ) -> crate::Result<()> {
        let ChoicePlan { tokens, experts, k, .. } = self.plan;
        expect_len(logits, tokens * experts)?;
        expect_len(choice, tokens * k)?;
        expect_len(softmax, 4 * tokens)?;
        expect_len(frequency, experts)?;
        routing.expect_reserved(tokens, experts, self.plan.rows())?;

        let (t, e, k) = (to_u32("T", tokens)?, to_u32("E", experts)?, to_u32("K", k)?);
        let tile = to_u32("M", self.rounding.tile)?;
        let tiles = to_u32("T/256", tokens.div_ceil(TOKEN_TILE))?;
        let words = tiles * (TOKEN_TILE as u32 / 32);
        let input = RankingInput {
            logits: logits.address(),
            token_softmax: softmax.address(),
            chosen_offsets: self.chosen_offsets.address(),
            chosen_token: self.chosen_token.address(),
            chosen_key: self.chosen_key.address(),
            bounds: self.bounds.address(),
            candidates: self.candidates.address(),
            tokens: t,
            experts: e,
            words,
        };
        let (choice, frequency, capped) = (choice.address(), frequency.address(), self.capped.address());
        let sums = self.sums.as_ref().map_or(0, Buffer::address);
        let (kept, kept_before) = (self.kept.address(), self.kept_before.address());
        let pair_expert = self.pair_expert.address();
        let expert_offsets = routing.expert_offsets().address();
        let expert_order = routing.expert_order().address();
        let row_token = routing.row_token().address();
        let (token_offsets, token_rows) = (routing.token_offsets().address(), routing.token_rows().address());
        let scores = routing.scores().address();
        let launch = |kernel, grid, arguments: &[Argument<'_>]| {
            let kernel = device.kernel(&Variant::of(kernel))?;
            // SAFETY: live buffers of the sizes checked above and at their allocation; what is written is
            // exclusively borrowed by this call; ids of a choice are below E, counts follow from it,
            // and the sum of all rows stays within what was reserved.
            unsafe { kernel.launch(device, grid, arguments) }
        };
        let plain = |blocks, threads| Grid { blocks, threads, shared_bytes: 0, cluster: 1 };

        let decide = || {
            let (seed, rule) = (self.rounding.seed, rule_number(self.rounding.rule));
            let arguments = [
                Argument::of(&frequency),
                Argument::of(&sums),
                Argument::of(&expert_offsets),
                Argument::of(&capped),
                Argument::of(&seed),
                Argument::of(&t),
                Argument::of(&e),
                Argument::of(&tile),
                Argument::of(&rule),
            ];
            launch(KernelName::RoundingDecision, plain(1, 1024), &arguments)
        };
        // The rule by scores adds up what an expert would get; every other one knows before.
        let by_scores = self.sums.is_some();
        if !by_scores {
            decide()?;
        }
        let counts = if by_scores { 0 } else { expert_offsets };
        let arguments = [
            Argument::of(&input.logits),
            Argument::of(&input.token_softmax),
            Argument::of(&frequency),
            Argument::of(&counts),
            Argument::of(&input.bounds),
            Argument::of(&t),
            Argument::of(&e),
            Argument::of(&tile),
        ];
        launch(KernelName::RoundingThresholds, plain(e, SAMPLE_THREADS), &arguments)?;
        let arguments = [
            Argument::of(&input.logits),
            Argument::of(&input.token_softmax),
            Argument::of(&input.bounds),
            Argument::of(&input.candidates),
            Argument::of(&t),
            Argument::of(&e),
            Argument::of(&words),
        ];
        let blocks = tokens.div_ceil(CANDIDATE_TILE.0) * experts.div_ceil(CANDIDATE_TILE.1);
        launch(KernelName::RoundingCandidates, plain(to_u32("tiles of T·E", blocks)?, 256), &arguments)?;

        // An expert's bits stay in shared memory if they fit there.
        let bits = 4 * words as usize;
        let fits = bits + OWN_SHARED <= device.properties().shared_memory as usize;
        let ranks = Grid {
            blocks: e,
            threads: RANK_THREADS,
            shared_bytes: if fits { to_u32("T/8", bits)? } else { 0 },
            cluster: 1,
        };
        let (fits, semantics) = (u32::from(fits), score_number(self.scores));
        if by_scores {
            let arguments = [
                Argument::of(&input),
                Argument::of(&sums),
                Argument::of(&kept),
                Argument::of(&tile),
                Argument::of(&fits),
            ];
            launch(KernelName::RoundingSums, ranks, &arguments)?;
            decide()?;
        }
        let arguments = [
            Argument::of(&input),
            Argument::of(&choice),
            Argument::of(&expert_offsets),
            Argument::of(&expert_order),
            Argument::of(&row_token),
            Argument::of(&scores),
            Argument::of(&kept),
            Argument::of(&kept_before),
            Argument::of(&fits),
            Argument::of(&k),
            Argument::of(&semantics),
        ];
        launch(KernelName::RoundingRows, ranks, &arguments)?;
        let arguments = [
            Argument::of(&expert_offsets),
            Argument::of(&kept),
            Argument::of(&kept_before),
            Argument::of(&token_offsets),
            Argument::of(&token_rows),
            Argument::of(&pair_expert),
            Argument::of(&t),
            Argument::of(&tiles),
            Argument::of(&e),
        ];
        let shared = to_u32("44·E", 4 * experts * (TOKEN_TILE / 32 + 3))?;
        let grid = Grid { shared_bytes: shared, ..plain(tiles.max(1), TOKEN_THREADS) };
        launch(KernelName::RoundingTokens, grid, &arguments)?;

        if self.scores != KeptScores::RenormalizedOverKept {
            return Ok(());
        }
        let arguments = [
            Argument::of(&input.logits),
            Argument::of(&token_offsets),
            Argument::of(&token_rows),
            Argument::of(&pair_expert),
            Argument::of(&scores),
            Argument::of(&t),
            Argument::of(&e),
        ];
        launch(KernelName::RoundingKeptScores, token_grid(tokens)?, &arguments)
    }
}

/// The numbers of kernels/rounding_decision.cu.
fn rule_number(rule: Rule) -> u32 {
    match rule {
        Rule::Nearest => 0,
        Rule::NearestHalfToEven => 1,
        Rule::StochasticByFrequency => 2,
        Rule::StochasticByScores => 3,
        Rule::Balance => 4,
        Rule::Up => 5,
        Rule::Down => 6,
    }
}

/// The numbers of kernels/rounding_rows.cu.
fn score_number(scores: KeptScores) -> u32 {
    match scores {
        KeptScores::Raw => 0,
        KeptScores::RenormalizedOverTopK => 1,
        KeptScores::RenormalizedOverKept => 2,
    }
}
