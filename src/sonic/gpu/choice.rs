//! Who computes what, decided on the device: from logits to a routing, and nothing in between returns
//! to the host.
//!
//! ```text
//! logits ─ top_k ─▶ choice, scores ─ counting sort ─▶ routing
//!                   choice, p ─ token rounding ─▶ routing of a number of rows that only the device knows
//! ```

use std::sync::Arc;

use super::compile::{KernelName, Variant};
use super::device::{Buffer, Device, Guards};
use super::pair_sort::{PairSort, SortedRouting};
use super::routing::DeviceRouting;
use super::token_rounding::Rounding;
use super::top_k::{TopK, refusals, top_k};
use crate::error::Error;
use crate::routing::rounding::TokenRounding;
use crate::routing::rounding::scores::KeptScores;
use crate::routing::{Choice, Convention};
use crate::shape::ExpertId;

/// How tokens choose experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChoicePlan {
    /// T.
    pub tokens: usize,
    /// E, at most 4096.
    pub experts: usize,
    /// K, at most 64.
    pub k: usize,
    /// How scores follow from the logits, where tokens are not rounded.
    pub convention: Convention,
    /// Whether every expert gets a multiple of a tile's tokens, and which scores the pairs then have.
    pub rounding: Option<(TokenRounding, KeptScores)>,
}

/// Logits, the choice and its routing on a device, with all memory that the way from one to the other
/// takes.
pub struct DeviceChoice {
    device: Arc<Device>,
    plan: ChoicePlan,
    logits: Buffer<f32>,
    choice: Buffer<u32>,
    pair_scores: Buffer<f32>,
    /// Largest logit, Σ e^(l − largest), the same over the top-K, and the smallest logit of these, where a
    /// probability is needed.
    token_softmax: Option<Buffer<f32>>,
    /// Tokens that allow no choice, a warp's first; all ones: none.
    first_refused: Buffer<u32>,
    sort: PairSort,
    rounding: Option<Rounding>,
    routing: DeviceRouting,
}

impl ChoicePlan {
    /// The largest E and K that the kernels take.
    pub const LARGEST: (usize, usize) = (4096, 64);

    /// Rows that the routing may have: T·K, or with rounding at most T·K + E·M, and never more than T·E.
    pub fn rows(&self) -> usize {
        let Self { tokens, experts, k, .. } = *self;
        match self.rounding {
            None => tokens * k,
            Some((TokenRounding { tile, .. }, _)) => tokens
                .saturating_mul(k)
                .saturating_add(experts.saturating_mul(tile))
                .min(tokens.saturating_mul(experts)),
        }
    }

    fn check(&self) -> crate::Result<()> {
        let Self { tokens, experts, k, convention, rounding } = *self;
        let (most_experts, most_chosen) = Self::LARGEST;
        if !(1..=most_experts).contains(&experts) {
            return Err(Error::size("E", experts, format!("the device chooses among 1 to {most_experts} experts")));
        }
        if k == 0 || k > experts {
            return Err(Error::top_k(k, experts));
        }
        if k > most_chosen {
            return Err(Error::size("K", k, format!("the device chooses at most {most_chosen} experts a token")));
        }
        if !Convention::ALL.contains(&convention) {
            let known = Convention::ALL.map(Convention::name);
            return Err(Error::unknown("router on the device", convention.name(), known));
        }
        if let Some((TokenRounding { tile, .. }, _)) = rounding
            && !(1..=i32::MAX as usize).contains(&tile)
        {
            return Err(Error::size("M", tile, "tokens are rounded to multiples of 1 to 2³¹ − 1"));
        }
        for (what, size) in [("T", tokens), ("T·K", tokens.saturating_mul(k)), ("rows of a routing", self.rows())] {
            if size > i32::MAX as usize {
                return Err(Error::size(what, size, "routing metadata hold 32-bit indices, up to 2³¹ − 1"));
            }
        }
        Ok(())
    }
}

impl DeviceChoice {
    /// Memory for all of it.
    ///
    /// # Errors
    /// Sizes beyond the kernels', a convention without kernels, or not enough device memory.
    pub fn new(device: &Arc<Device>, plan: ChoicePlan, guards: Guards) -> crate::Result<Self> {
        plan.check()?;
        let ChoicePlan { tokens, experts, k, convention, rounding } = plan;
        let pairs = tokens * k;
        let needs_p = rounding.is_some() || convention != Convention::SoftmaxOverTopK;
        let routing = match rounding {
            None => DeviceRouting::of_top_k(device, tokens, experts, k, guards)?,
            Some(_) => DeviceRouting::reserve(device, tokens, experts, plan.rows(), guards)?,
        };
        Ok(Self {
            device: Arc::clone(device),
            plan,
            logits: Buffer::output(device, "router_logits", tokens * experts, guards)?,
            choice: Buffer::output(device, "choice", pairs, guards)?,
            pair_scores: Buffer::output(device, "pair_scores", pairs, guards)?,
            token_softmax: needs_p.then(|| Buffer::output(device, "token_softmax", 4 * tokens, guards)).transpose()?,
            first_refused: Buffer::output(device, "first_refused", refusals(&plan), guards)?,
            sort: PairSort::new(device, pairs, experts, guards)?,
            rounding: rounding
                .map(|(rounding, scores)| Rounding::new(device, &plan, rounding, scores, guards))
                .transpose()?,
            routing,
        })
    }

    /// The kernels that it runs.
    pub fn variants(&self) -> Vec<Variant> {
        let mut variants = vec![Variant::top_k(self.plan.experts, self.plan.k, self.token_softmax.is_some())];
        variants.extend(
            [KernelName::RoutingHistogram, KernelName::RoutingPrefix, KernelName::RoutingRows].map(Variant::of),
        );
        match &self.rounding {
            None => {}
            Some(rounding) => variants.extend(rounding.kernels().into_iter().map(Variant::of)),
        }
        variants
    }

    /// Queues everything from the logits to the routing. With a bias (E) it is added to the logits
    /// first, and they are kept so.
    ///
    /// Rows that allow no choice get safe ids and finite scores: see [`DeviceChoice::check`].
    ///
    /// # Errors
    /// A device that fails.
    pub fn choose(&mut self, bias: Option<&Buffer<half::bf16>>) -> crate::Result<()> {
        self.choose_experts(bias)?;
        let Self {
            device,
            plan,
            logits,
            choice,
            pair_scores,
            token_softmax,
            first_refused: _,
            sort,
            rounding,
            routing,
        } = self;
        sort.count(device, choice)?;
        match rounding {
            None => sort.rows(device, plan.k, choice, pair_scores, SortedRouting::of(routing)),
            Some(rounding) => {
                let softmax = token_softmax
                    .as_ref()
                    .ok_or_else(|| Error::internal("token rounding ranks by p, and its sums were not reserved"))?;
                sort.rows(device, plan.k, choice, pair_scores, rounding.choosers())?;
                rounding.run(device, logits, choice, softmax, sort.totals(), routing)
            }
        }
    }

    /// The first part of [`DeviceChoice::choose`]: ids and scores by pair.
    ///
    /// # Errors
    /// A device that fails.
    pub fn choose_experts(&mut self, bias: Option<&Buffer<half::bf16>>) -> crate::Result<()> {
        let Self { device, plan, logits, choice, pair_scores, token_softmax, first_refused, .. } = self;
        let results = TopK { choice, pair_scores, token_softmax: token_softmax.as_mut(), first_refused };
        top_k(device, plan, logits, bias, results)
    }

    /// Waits, and says whether the last choice was one.
    ///
    /// # Errors
    /// What the CPU path says of the same logits: of the first row that allows no choice, a logit that
    /// is NaN or +∞, or fewer than K above −∞. Or a device that fails.
    pub fn check(&self) -> crate::Result<()> {
        let row = match self.first_refused.download()?.into_iter().min() {
            None | Some(u32::MAX) => return Ok(()),
            Some(row) => row as usize,
        };
        let ChoicePlan { tokens, experts, k, .. } = self.plan;
        if row >= tokens {
            return Err(Error::internal(format!("the router's status names token {row} of {tokens}")));
        }
        let logits = self.logits.download()?;
        let logits = &logits[row * experts..(row + 1) * experts];
        if let Some(expert) = logits.iter().position(|logit| logit.is_nan() || *logit == f32::INFINITY) {
            return Err(Error::logit(row, expert, logits[expert].into()));
        }
        let usable = logits.iter().filter(|&&logit| logit > f32::NEG_INFINITY).count();
        if usable < k {
            return Err(Error::too_few_logits(row, usable, k));
        }
        Err(Error::internal(format!("the device took token {row} for one without a choice, which it has")))
    }

    /// The choice of the last run, checked.
    ///
    /// # Errors
    /// As [`DeviceChoice::check`]; or ids that are no choice, a fault of the kernel.
    pub fn host_choice(&self) -> crate::Result<Choice> {
        let ids = self.choice.download()?.into_iter().map(ExpertId).collect();
        let ids = ndarray::Array2::from_shape_vec((self.plan.tokens, self.plan.k), ids)
            .map_err(|error| Error::internal(format!("T·K ids do not form (T, K): {error}")))?;
        Choice::new(self.plan.experts, ids)
    }

    /// What was asked for.
    pub fn plan(&self) -> &ChoicePlan {
        &self.plan
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// (T, E) the logits.
    pub fn logits(&self) -> &Buffer<f32> {
        &self.logits
    }

    /// (T, E) the logits, to be written.
    pub fn logits_mut(&mut self) -> &mut Buffer<f32> {
        &mut self.logits
    }

    /// (T, K) the experts by rank.
    pub fn choice(&self) -> &Buffer<u32> {
        &self.choice
    }

    /// (T·K) the scores of the choice by pair; where tokens are rounded, what they rank by.
    pub fn pair_scores(&self) -> &Buffer<f32> {
        &self.pair_scores
    }

    /// (T, 4) of each token the largest logit, Σ e^(l − largest), the same sum over its top-K, and the smallest
    /// logit of these.
    pub fn token_softmax(&self) -> Option<&Buffer<f32>> {
        self.token_softmax.as_ref()
    }

    /// The expert of each entry of [`DeviceRouting::token_rows`].
    pub fn pair_expert(&self) -> &Buffer<u32> {
        self.rounding.as_ref().map_or(&self.choice, Rounding::pair_expert)
    }

    /// (E) 1 for the experts for which the rounding chose hi, but hi > T.
    pub fn capped(&self) -> Option<&Buffer<u32>> {
        self.rounding.as_ref().map(Rounding::capped)
    }

    /// (E) f, the tokens that chose each expert.
    pub fn topk_frequency(&self) -> &Buffer<u32> {
        self.sort.totals()
    }

    /// The routing.
    pub fn routing(&self) -> &DeviceRouting {
        &self.routing
    }

    /// Bytes that are held beside the logits and the routing.
    pub fn workspace_bytes(&self) -> usize {
        let Self {
            device: _,
            plan: _,
            logits: _,
            choice,
            pair_scores,
            token_softmax,
            first_refused,
            sort,
            rounding,
            routing: _,
        } = self;
        choice.payload_bytes()
            + pair_scores.payload_bytes()
            + token_softmax.as_ref().map_or(0, Buffer::payload_bytes)
            + first_refused.payload_bytes()
            + sort.bytes()
            + rounding.as_ref().map_or(0, Rounding::bytes)
    }

    /// The red zones of all of it.
    ///
    /// # Errors
    /// A kernel wrote outside one of them.
    pub fn check_red_zones(&self) -> crate::Result<()> {
        let Self {
            device: _,
            plan: _,
            logits,
            choice,
            pair_scores,
            token_softmax,
            first_refused,
            sort,
            rounding,
            routing,
        } = self;
        [Some(logits), Some(pair_scores), token_softmax.as_ref()]
            .into_iter()
            .flatten()
            .try_for_each(Buffer::check_red_zones)?;
        [choice, first_refused].into_iter().try_for_each(Buffer::check_red_zones)?;
        sort.check_red_zones()?;
        rounding.as_ref().map_or(Ok(()), Rounding::check_red_zones)?;
        routing.check_untouched()
    }
}
