//! Token rounding on the device: each expert's ranking, the decision, the rows and the scores.
//!
//! Ids, counts, offsets and decisions have the bits of the CPU path on the same logits: probabilities
//! have (kernels/softmax.cuh), keys are compared as integers, sums that a draw is held against are
//! exact before they are rounded, and the draws come from the same generator.

use std::sync::Arc;

use super::choice::ChoicePlan;
use super::compile::{KernelName, Variant};
use super::device::{Argument, Buffer, Device, Grid, Guards};
use super::grouped_gemm::{expect_len, to_u32};
use super::routing::DeviceRouting;
use super::top_k::token_grid;
use crate::routing::rounding::scores::KeptScores;
use crate::routing::rounding::{Ranking, Rule, TokenRounding};

/// Threads of a block that ranks; kernels/ranking.cuh.
const RANK_THREADS: u32 = 1024;
/// Tokens and experts of a tile of kernels/rounding_keys.cu.
const KEY_TILE: (usize, usize) = (32, 128);
/// Shared memory that the ranking kernels use themselves, at most.
const OWN_SHARED: usize = 12 << 10;

/// What rounding needs beside the choice.
pub(super) struct Rounding {
    rounding: TokenRounding,
    scores: KeptScores,
    plan: ChoicePlan,
    /// (E, T).
    keys: Buffer<u32>,
    /// (E, 3) f64, for the rule by scores.
    sums: Option<Buffer<u32>>,
    /// (E).
    capped: Buffer<u32>,
    /// (T).
    token_count: Buffer<u32>,
    /// (T, ⌈E/32⌉) a bit for each pair.
    token_experts: Buffer<u32>,
    /// The expert of each entry of the routing's token_rows.
    pair_expert: Buffer<u32>,
}

impl Rounding {
    pub fn new(
        device: &Arc<Device>,
        plan: &ChoicePlan,
        rounding: TokenRounding,
        scores: KeptScores,
        guards: Guards,
    ) -> crate::Result<Self> {
        let (t, e) = (plan.tokens, plan.experts);
        let output = |name, len| Buffer::<u32>::output(device, name, len, guards);
        let by_scores = rounding.rule == Rule::StochasticByScores;
        Ok(Self {
            rounding,
            scores,
            plan: *plan,
            keys: output("ranking_keys", e * t)?,
            sums: by_scores.then(|| output("score_sums", 6 * e)).transpose()?,
            capped: output("capped", e)?,
            token_count: output("token_count", t)?,
            token_experts: output("token_experts", t * e.div_ceil(32))?,
            pair_expert: output("pair_expert", plan.rows())?,
        })
    }

    pub fn kernels(&self) -> Vec<KernelName> {
        let sums = self.sums.is_some().then_some(KernelName::RoundingSums);
        let others = [
            KernelName::RoundingKeys,
            KernelName::RoundingDecision,
            KernelName::ExpertOrder,
            KernelName::RoundingRows,
            KernelName::RoundingTokens,
            KernelName::RoundingPairs,
            KernelName::RoundingScores,
        ];
        others.into_iter().chain(sums).collect()
    }

    pub fn pair_expert(&self) -> &Buffer<u32> {
        &self.pair_expert
    }

    pub fn capped(&self) -> &Buffer<u32> {
        &self.capped
    }

    pub fn bytes(&self) -> usize {
        self.buffers().map(Buffer::payload_bytes).sum()
    }

    pub fn check_red_zones(&self) -> crate::Result<()> {
        self.buffers().try_for_each(Buffer::check_red_zones)
    }

    fn buffers(&self) -> impl Iterator<Item = &Buffer<u32>> {
        let Self { rounding: _, scores: _, plan: _, keys, sums, capped, token_count, token_experts, pair_expert } =
            self;
        [keys, capped, token_count, token_experts, pair_expert].into_iter().chain(sums)
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
        self.token_count.fill(0)?;
        self.token_experts.fill(0)?;
        routing.expect_reserved(tokens, experts, self.plan.rows())?;

        let (t, e, k) = (to_u32("T", tokens)?, to_u32("E", experts)?, to_u32("K", k)?);
        let tile = to_u32("M", self.rounding.tile)?;
        let (logits, choice, softmax) = (logits.address(), choice.address(), softmax.address());
        let (keys, frequency, capped) = (self.keys.address(), frequency.address(), self.capped.address());
        let sums = self.sums.as_ref().map_or(0, Buffer::address);
        let (token_count, token_experts) = (self.token_count.address(), self.token_experts.address());
        let pair_expert = self.pair_expert.address();
        let expert_offsets = routing.expert_offsets().address();
        let expert_order = routing.expert_order().address();
        let row_token = routing.row_token().address();
        let (token_offsets, token_rows) = (routing.token_offsets().address(), routing.token_rows().address());
        let scores = routing.scores().address();
        // Keys of an expert stay in shared memory between the passes if they fit there.
        let shared = 4 * tokens;
        let fits = shared + OWN_SHARED <= device.properties().shared_memory as usize;
        let ranks = Grid {
            blocks: e,
            threads: RANK_THREADS,
            shared_bytes: if fits { to_u32("4·T", shared)? } else { 0 },
            cluster: 1,
        };
        let fits = u32::from(fits);
        let one = Grid { blocks: 1, threads: RANK_THREADS, shared_bytes: 0, cluster: 1 };
        let launch = |kernel, grid, arguments: &[Argument<'_>]| {
            let kernel = device.kernel(&Variant::of(kernel))?;
            // SAFETY: live buffers of the sizes checked above and at their allocation; what is written is
            // exclusively borrowed by this call; ids of a choice are below E, counts follow from it,
            // and the sum of all rows stays within what was reserved.
            unsafe { kernel.launch(device, grid, arguments) }
        };

        let renormalized = u32::from(self.rounding.ranking == Ranking::Renormalized);
        let tiles = tokens.div_ceil(KEY_TILE.0) * experts.div_ceil(KEY_TILE.1);
        let grid = Grid { blocks: to_u32("tiles of T·E", tiles)?, threads: 256, shared_bytes: 0, cluster: 1 };
        let arguments = [
            Argument::of(&logits),
            Argument::of(&choice),
            Argument::of(&softmax),
            Argument::of(&keys),
            Argument::of(&t),
            Argument::of(&e),
            Argument::of(&k),
            Argument::of(&renormalized),
        ];
        launch(KernelName::RoundingKeys, grid, &arguments)?;
        if self.sums.is_some() {
            let arguments = [
                Argument::of(&keys),
                Argument::of(&frequency),
                Argument::of(&sums),
                Argument::of(&t),
                Argument::of(&tile),
                Argument::of(&fits),
            ];
            launch(KernelName::RoundingSums, ranks, &arguments)?;
        }
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
        launch(KernelName::RoundingDecision, one, &arguments)?;
        let arguments = [Argument::of(&expert_offsets), Argument::of(&expert_order), Argument::of(&e)];
        let grid = Grid { blocks: e.div_ceil(256), threads: 256, shared_bytes: 0, cluster: 1 };
        launch(KernelName::ExpertOrder, grid, &arguments)?;
        let arguments = [
            Argument::of(&keys),
            Argument::of(&frequency),
            Argument::of(&expert_offsets),
            Argument::of(&row_token),
            Argument::of(&token_count),
            Argument::of(&token_experts),
            Argument::of(&t),
            Argument::of(&fits),
        ];
        launch(KernelName::RoundingRows, ranks, &arguments)?;
        let arguments = [Argument::of(&token_count), Argument::of(&token_offsets), Argument::of(&t)];
        launch(KernelName::RoundingTokens, one, &arguments)?;
        let arguments = [
            Argument::of(&expert_offsets),
            Argument::of(&row_token),
            Argument::of(&token_offsets),
            Argument::of(&token_experts),
            Argument::of(&token_rows),
            Argument::of(&pair_expert),
            Argument::of(&e),
        ];
        let blocks = to_u32("R/256", self.plan.rows().div_ceil(256))?;
        launch(KernelName::RoundingPairs, Grid { blocks, threads: 256, shared_bytes: 0, cluster: 1 }, &arguments)?;
        let semantics = score_number(self.scores);
        let arguments = [
            Argument::of(&logits),
            Argument::of(&choice),
            Argument::of(&softmax),
            Argument::of(&token_offsets),
            Argument::of(&token_rows),
            Argument::of(&pair_expert),
            Argument::of(&scores),
            Argument::of(&t),
            Argument::of(&e),
            Argument::of(&k),
            Argument::of(&semantics),
        ];
        launch(KernelName::RoundingScores, token_grid(tokens)?, &arguments)
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

/// The numbers of kernels/rounding_scores.cu.
fn score_number(scores: KeptScores) -> u32 {
    match scores {
        KeptScores::Raw => 0,
        KeptScores::RenormalizedOverTopK => 1,
        KeptScores::RenormalizedOverKept => 2,
    }
}
