//! The router on the device: x W_rᵀ (+ b_r), the choice, and after the experts' backward the way from
//! ds to dx, dW_r and db_r. Nothing of it returns to the host, and nothing is allocated after
//! [`DeviceRouter::new`]: `route` and `backward` may be captured in a CUDA graph.
//!
//! dlogits are f32, and the tensor cores multiply bf16: three parts of 8 bits hold all 24. For dx the
//! parts stand side by side along the contraction, so that W_r lies three times one below the other;
//! for dW_r they are three products, added before the one rounding.

use std::sync::Arc;

use half::bf16;
use ndarray::{ArrayView1, ArrayView2};

use super::choice::{ChoicePlan, DeviceChoice};
use super::compile::{KernelName, Variant};
use super::device::{Argument, Blas, Buffer, Entry, Factor, Grid, Guards, Product};
use super::grouped_gemm::{expect_len, to_u32};
use super::routing::DeviceRouting;
use super::top_k::token_grid;
use crate::error::Error;
use crate::routing::Convention;
use crate::routing::rounding::scores::KeptScores;

/// Parts of bf16 that hold an f32.
const PARTS: usize = 3;

/// A linear router on a device.
pub struct DeviceRouter {
    blas: Arc<Blas>,
    d: usize,
    /// E rounded up to a multiple of 8: rows of dlogits' parts start at 16 bytes.
    padded: usize,
    /// (3, padded, d): W_r three times, zeros below each.
    w: Buffer<bf16>,
    /// (E).
    b: Option<Buffer<bf16>>,
    choice: DeviceChoice,
    gradients: RouterBuffers,
}

/// What the router's backward writes.
pub struct RouterBuffers {
    /// dlogits (T, E).
    pub dlogits: Buffer<f32>,
    /// dlogits in bf16 parts (T, 3, padded).
    pub parts: Buffer<bf16>,
    /// dlogits W_r (T, d), before it is added to dx.
    pub dx_part: Buffer<f32>,
    /// Each part's product with x (3, padded, d).
    pub part_products: Buffer<f32>,
    /// dW_r (E, d).
    pub drouter_w: Buffer<bf16>,
    /// db_r (E), with a bias.
    pub drouter_b: Option<Buffer<bf16>>,
}

impl DeviceRouter {
    /// The weights W_r (E, d) and b_r (E), and memory for all that follows.
    ///
    /// # Errors
    /// What [`DeviceChoice::new`] refuses; weights of another E; d that is no multiple of 8; not enough
    /// device memory.
    pub fn new(
        blas: &Arc<Blas>,
        plan: ChoicePlan,
        w: ArrayView2<'_, bf16>,
        b: Option<ArrayView1<'_, bf16>>,
        guards: Guards,
    ) -> crate::Result<Self> {
        let device = blas.device();
        let ChoicePlan { tokens, experts, .. } = plan;
        let (rows, d) = w.dim();
        if rows != experts {
            return Err(Error::shape("router_w", &[experts, d], &[rows, d], "one row for each expert"));
        }
        if let Some(b) = b
            && b.len() != experts
        {
            return Err(Error::shape("router_b", &[experts], &[b.len()], "one entry for each expert"));
        }
        if !d.is_multiple_of(8) {
            return Err(Error::size("d", d, "the CUDA kernels copy rows 16 bytes at a time: use a multiple of 8"));
        }
        let choice = DeviceChoice::new(device, plan, guards)?;
        let padded = experts.next_multiple_of(8);
        let gradients = RouterBuffers {
            dlogits: Buffer::output(device, "dlogits", tokens * experts, guards)?,
            parts: Buffer::output(device, "dlogits_parts", tokens * PARTS * padded, guards)?,
            dx_part: Buffer::output(device, "router_dx", tokens * d, guards)?,
            part_products: Buffer::output(device, "router_part_products", PARTS * padded * d, guards)?,
            drouter_w: Buffer::output(device, "drouter_w", experts * d, guards)?,
            drouter_b: b.map(|_| Buffer::output(device, "drouter_b", experts, guards)).transpose()?,
        };
        let b = b.map(|b| Buffer::input(device, "router_b", &b.to_vec(), guards)).transpose()?;
        let w = Buffer::input(device, "router_w", &repeated(w, padded), guards)?;
        Ok(Self { blas: Arc::clone(blas), d, padded, w, b, choice, gradients })
    }

    /// Other weights of the same shapes.
    ///
    /// # Errors
    /// Weights of other shapes, or a device that fails.
    pub fn set_weights(&mut self, w: ArrayView2<'_, bf16>, b: Option<ArrayView1<'_, bf16>>) -> crate::Result<()> {
        let experts = self.choice.plan().experts;
        if w.dim() != (experts, self.d) {
            return Err(Error::shape("router_w", &[experts, self.d], w.shape(), "the shape that this router has"));
        }
        self.w.upload(&repeated(w, self.padded))?;
        match (&mut self.b, b) {
            (None, None) => Ok(()),
            (Some(own), Some(b)) => own.upload(&b.to_vec()),
            (own, _) => Err(Error::missing(
                "router_b",
                if own.is_some() { "this router has a bias" } else { "this router has none: leave it out" },
            )),
        }
    }

    /// The kernels that `route` and `backward` run.
    pub fn variants(&self) -> Vec<Variant> {
        let mut variants = self.choice.variants();
        variants.extend(
            [KernelName::LogitGradient, KernelName::RouterInputGradient, KernelName::RouterWeightGradient]
                .map(Variant::of),
        );
        if self.b.is_some() {
            variants.push(Variant::of(KernelName::RouterBiasGradient));
        }
        variants
    }

    /// Queues logits, choice, scores and routing of x (T, d).
    ///
    /// # Errors
    /// An x of another size, or a device that fails. Whether every row allows a choice says
    /// [`DeviceRouter::check`], which waits.
    pub fn route(&mut self, x: &Buffer<bf16>) -> crate::Result<()> {
        let ChoicePlan { tokens, experts, .. } = *self.choice.plan();
        expect_len(x, tokens * self.d)?;
        let product = Product {
            left: Factor { address: x.address(), stride: self.d, transposed: false },
            right: Factor { address: self.w.address(), stride: self.d, transposed: true },
            product: self.choice.logits().address(),
            entry: Entry::F32,
            accumulate: false,
            rows: tokens,
            columns: experts,
            inner: self.d,
            batch: 1,
        };
        // SAFETY: live buffers: x (T, d), the first E rows of w, and the logits (T, E), which this
        // router owns and borrows exclusively.
        unsafe { self.blas.multiply(product) }?;
        self.choice.choose(self.b.as_ref())
    }

    /// As [`DeviceChoice::check`].
    ///
    /// # Errors
    /// As [`DeviceChoice::check`].
    pub fn check(&self) -> crate::Result<()> {
        self.choice.check()
    }

    /// Queues dlogits, dW_r and db_r from ds by row, and adds the router's part to dx (T, d), which
    /// holds the experts'.
    ///
    /// # Errors
    /// Buffers of other sizes, or a device that fails.
    pub fn backward(&mut self, x: &Buffer<bf16>, ds: &Buffer<f32>, dx: &mut Buffer<bf16>) -> crate::Result<()> {
        let ChoicePlan { tokens, experts, .. } = *self.choice.plan();
        let (d, padded) = (self.d, self.padded);
        expect_len(x, tokens * d)?;
        expect_len(dx, tokens * d)?;
        self.logit_gradient(ds)?;
        let parts = Factor { address: self.gradients.parts.address(), stride: PARTS * padded, transposed: false };
        let of_input = Product {
            left: parts,
            right: Factor { address: self.w.address(), stride: d, transposed: false },
            product: self.gradients.dx_part.address(),
            entry: Entry::F32,
            accumulate: false,
            rows: tokens,
            columns: d,
            inner: PARTS * padded,
            batch: 1,
        };
        let of_weight = Product {
            left: Factor { transposed: true, ..parts },
            right: Factor { address: x.address(), stride: d, transposed: false },
            product: self.gradients.part_products.address(),
            entry: Entry::F32,
            accumulate: false,
            rows: PARTS * padded,
            columns: d,
            inner: tokens,
            batch: 1,
        };
        // SAFETY: live buffers: parts (T, 3·padded), w (3·padded, d), x and dx_part (T, d), part_products
        // (3·padded, d); this router's buffers are exclusively borrowed.
        unsafe {
            self.blas.multiply(of_input)?;
            self.blas.multiply(of_weight)?;
        }
        if tokens == 0 {
            self.gradients.part_products.fill(0)?;
        }
        self.input_gradient(dx)?;
        self.weight_gradients(tokens, experts)
    }

    fn logit_gradient(&mut self, ds: &Buffer<f32>) -> crate::Result<()> {
        let ChoicePlan { tokens, experts, k, .. } = *self.choice.plan();
        let routing = self.choice.routing();
        expect_len(ds, routing.routed())?;
        let RouterBuffers { dlogits, parts, .. } = &self.gradients;
        let addresses = [
            self.choice.logits().address(),
            self.choice.choice().address(),
            self.choice.token_softmax().map_or(0, Buffer::address),
            routing.token_offsets().address(),
            routing.token_rows().address(),
            self.choice.pair_expert().address(),
            routing.scores().address(),
            ds.address(),
            dlogits.address(),
            parts.address(),
        ];
        let form = gradient_form(self.choice.plan());
        let sizes = [to_u32("T", tokens)?, to_u32("E", experts)?, to_u32("E", self.padded)?, to_u32("K", k)?, form];
        let arguments: Vec<_> = addresses.iter().map(Argument::of).chain(sizes.iter().map(Argument::of)).collect();
        let device = self.choice.device();
        let kernel = device.kernel(&Variant::of(KernelName::LogitGradient))?;
        // SAFETY: live buffers of the sizes that the plan has, ds checked above; the routing's indices
        // are those that the choice's kernels wrote; results are exclusively borrowed.
        unsafe { kernel.launch(device, token_grid(tokens)?, &arguments) }
    }

    /// dx += dlogits W_r, rounded once.
    fn input_gradient(&mut self, dx: &mut Buffer<bf16>) -> crate::Result<()> {
        let device = self.choice.device();
        let (source, out, chunks) = (self.gradients.dx_part.address(), dx.address(), dx.len() as u64 / 8);
        let arguments = [Argument::of(&source), Argument::of(&out), Argument::of(&chunks)];
        let blocks = to_u32("T·d/2048", dx.len().div_ceil(2048))?;
        let kernel = device.kernel(&Variant::of(KernelName::RouterInputGradient))?;
        // SAFETY: two live buffers of T·d elements (dx was checked by the caller), dx borrowed exclusively.
        unsafe { kernel.launch(device, Grid { blocks, threads: 256, shared_bytes: 0, cluster: 1 }, &arguments) }
    }

    fn weight_gradients(&mut self, tokens: usize, experts: usize) -> crate::Result<()> {
        let device = self.choice.device();
        let RouterBuffers { dlogits, part_products, drouter_w, drouter_b, .. } = &self.gradients;
        let (source, out) = (part_products.address(), drouter_w.address());
        let (e, padded, d) = (to_u32("E", experts)?, to_u32("E", self.padded)?, to_u32("d", self.d)?);
        let arguments =
            [Argument::of(&source), Argument::of(&out), Argument::of(&e), Argument::of(&padded), Argument::of(&d)];
        let blocks = to_u32("E·d/2048", (experts * (self.d / 8)).div_ceil(256))?;
        let kernel = device.kernel(&Variant::of(KernelName::RouterWeightGradient))?;
        // SAFETY: live buffers of this router, of the sizes that the kernel states; exclusively borrowed.
        unsafe { kernel.launch(device, Grid { blocks, threads: 256, shared_bytes: 0, cluster: 1 }, &arguments) }?;
        let Some(drouter_b) = drouter_b else { return Ok(()) };
        let (source, out, t) = (dlogits.address(), drouter_b.address(), to_u32("T", tokens)?);
        let arguments = [Argument::of(&source), Argument::of(&out), Argument::of(&t), Argument::of(&e)];
        let kernel = device.kernel(&Variant::of(KernelName::RouterBiasGradient))?;
        let grid = Grid { blocks: e.div_ceil(32), threads: 1024, shared_bytes: 0, cluster: 1 };
        // SAFETY: as above.
        unsafe { kernel.launch(device, grid, &arguments) }
    }

    /// Logits, choice and metadata.
    pub fn choice(&self) -> &DeviceChoice {
        &self.choice
    }

    /// The same, to run it on logits of another origin.
    pub fn choice_mut(&mut self) -> &mut DeviceChoice {
        &mut self.choice
    }

    /// The routing of the last [`DeviceRouter::route`].
    pub fn routing(&self) -> &DeviceRouting {
        self.choice.routing()
    }

    /// What the last [`DeviceRouter::backward`] wrote.
    pub fn gradients(&self) -> &RouterBuffers {
        &self.gradients
    }

    /// Red zones of everything, and the contents of the weights.
    ///
    /// # Errors
    /// A kernel wrote into a weight or outside a buffer.
    pub fn check_untouched(&self) -> crate::Result<()> {
        let Self { blas: _, d: _, padded: _, w, b, choice, gradients } = self;
        let RouterBuffers { dlogits, parts, dx_part, part_products, drouter_w, drouter_b } = gradients;
        [Some(w), b.as_ref()].into_iter().flatten().try_for_each(Buffer::check_untouched)?;
        [dlogits, dx_part, part_products].into_iter().try_for_each(Buffer::check_red_zones)?;
        [parts, drouter_w].into_iter().chain(drouter_b).try_for_each(Buffer::check_red_zones)?;
        choice.check_red_zones()
    }
}

/// W_r three times, each with rows of zeros up to `padded`.
fn repeated(w: ArrayView2<'_, bf16>, padded: usize) -> Vec<bf16> {
    let mut once: Vec<bf16> = w.iter().copied().collect();
    once.resize(padded * w.ncols(), bf16::ZERO);
    once.repeat(PARTS)
}

/// The numbers of kernels/logit_gradient.cu.
fn gradient_form(plan: &ChoicePlan) -> u32 {
    match (plan.rounding, plan.convention) {
        (Some((_, KeptScores::RenormalizedOverKept)), _) => 0,
        (Some((_, KeptScores::Raw)), _) => 1,
        (Some((_, KeptScores::RenormalizedOverTopK)), _) => 2,
        (None, Convention::TopKOverSoftmax) => 1,
        (None, _) => 0,
    }
}
