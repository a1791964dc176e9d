//! The CUDA path with its router on the device: from x to o, and from dout to every gradient, nothing
//! passes through the host.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, MutexGuard};

use half::bf16;
use ndarray::{Array1, Array2, ArrayView2};

use crate::engine::{Backward, Engine, Forward, Gradients, Keeping, Ledger, Numerics, Pass, Record, RouterGradients};
use crate::error::Error;
use crate::problem::{Gating, Problem, Router};
use crate::routing::{Convention, Routing};

use super::backward::BackwardTensors;
use super::choice::ChoicePlan;
use super::device::{Blas, Buffer};
use super::engine::{GpuEngine, host};
use super::forward::ForwardTensors;
use super::layer::{Layer, upload};
use super::router::{DeviceRouter, RouterBuffers};

/// [`GpuEngine`] with logits, choice, scores, metadata and the router's gradients on the device.
///
/// Given routings, and routers whose choice has no kernel (grouped sigmoids), run as in [`GpuEngine`].
#[derive(Clone)]
pub struct RoutedEngine {
    engine: GpuEngine,
    blas: Arc<Blas>,
}

impl GpuEngine {
    /// The same with its router on the device.
    ///
    /// # Errors
    /// No cuBLAS on this machine, which multiplies x by W_r.
    pub fn routed_on_device(&self) -> crate::Result<RoutedEngine> {
        Ok(RoutedEngine { engine: self.clone(), blas: Blas::on(&self.device)? })
    }
}

impl RoutedEngine {
    /// The engine around it.
    pub fn engine(&self) -> &GpuEngine {
        &self.engine
    }

    /// The products of its routers.
    pub fn blas(&self) -> &Arc<Blas> {
        &self.blas
    }
}

impl Engine<bf16> for RoutedEngine {
    fn name(&self) -> Cow<'static, str> {
        format!("{}, router on the device", self.engine.name()).into()
    }

    fn numerics(&self) -> Numerics {
        self.engine.numerics()
    }

    fn accepts(&self, problem: &Problem<'_, bf16>) -> crate::Result<()> {
        self.engine.accepts(problem)
    }

    fn forward<'p>(&'p self, problem: &'p Problem<'_, bf16>, record: Record) -> crate::Result<Forward<'p, bf16>> {
        let router = match problem.gating() {
            Gating::Router(router) if Convention::ALL.contains(&router.convention) => router,
            _ => return self.engine.forward(problem, record),
        };
        let GpuEngine { device, guards, tuning } = &self.engine;
        let layer = Layer::upload(device, problem, *guards)?.tuned(tuning.clone());
        let Router { w, b, k, convention, selection_bias: _ } = router;
        let (tokens, experts) = (problem.t(), problem.e());
        let plan = ChoicePlan { tokens, experts, k: *k, convention: *convention, rounding: None };
        let b = b.as_ref().map(|b| b.view());
        let mut router = DeviceRouter::new(&self.blas, plan, w.view(), b, *guards)?;
        device.prepare(&layer.forward_variants())?;
        device.prepare(&router.variants())?;
        let x = upload(device, "x", problem.x(), *guards)?;
        router.route(&x)?;
        let mut tensors = ForwardTensors::allocate(&layer, router.routing())?;
        tensors.run(&layer, router.routing(), &x)?;

        // Only now the host looks.
        router.check()?;
        tensors.check_red_zones()?;
        let choice = router.choice();
        let routing = choice.host_choice()?.routing();
        let scores = choice.pair_scores().download()?;
        let keeps_logits = convention.backward_reads_logits() || record == Record::Intermediates;
        let logits = match keeps_logits {
            true => Some(host(choice.logits(), (tokens, experts))?),
            false => None,
        };
        let (o, intermediates) = tensors.results(&layer, &routing, record)?;
        let router = Mutex::new(router);
        let pass = RoutedPass { layer, x, h: tensors.h, router, routing, scores, logits };
        pass.check_untouched()?;
        Ok(Forward { o, intermediates, pass: Box::new(pass) })
    }
}

/// What stays from forward to backward.
struct RoutedPass {
    layer: Layer,
    x: Buffer<bf16>,
    h: Buffer<bf16>,
    /// A backward writes into its buffers.
    router: Mutex<DeviceRouter>,
    /// The host's copies, for whoever asks.
    routing: Routing,
    scores: Vec<f32>,
    logits: Option<Array2<f32>>,
}

impl RoutedPass {
    fn router(&self) -> MutexGuard<'_, DeviceRouter> {
        self.router.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn check_untouched(&self) -> crate::Result<()> {
        self.layer.check_untouched()?;
        self.x.check_untouched()?;
        self.h.check_red_zones()?;
        self.router().check_untouched()
    }
}

impl Pass<bf16> for RoutedPass {
    fn routing(&self) -> &Routing {
        &self.routing
    }

    fn scores(&self) -> Vec<f32> {
        self.scores.clone()
    }

    fn logits(&self) -> Option<ArrayView2<'_, f32>> {
        self.logits.as_ref().map(|logits| logits.view())
    }

    fn kept(&self) -> Ledger {
        let Self { layer: _, x, h, router: _, routing: _, scores: _, logits: _ } = self;
        let router = self.router();
        let mut ledger = Ledger::default();
        ledger.keep("x", x.payload_bytes(), Keeping::Activation);
        ledger.keep("h", h.payload_bytes(), Keeping::Activation);
        ledger.keep("routing and scores", router.routing().bytes(), Keeping::Metadata);
        ledger.keep("router_logits", router.choice().logits().payload_bytes(), Keeping::Metadata);
        ledger.keep("the choice and its workspaces", router.choice().workspace_bytes(), Keeping::Metadata);
        ledger
    }

    fn backward(&self, dout: ArrayView2<'_, bf16>, record: Record) -> crate::Result<Backward<bf16>> {
        let Self { layer, x, h, router: _, routing, scores: _, logits: _ } = self;
        let (t, d, e) = (routing.tokens(), layer.d(), layer.e());
        if dout.dim() != (t, d) {
            return Err(Error::shape("dout", &[t, d], dout.shape(), "the shape of o is that of x"));
        }
        let device = layer.device();
        device.prepare(&layer.backward_variants())?;
        let dout = upload(device, "dout", dout, layer.guards())?;
        let mut router = self.router();
        let mut tensors = BackwardTensors::allocate(layer, router.routing())?;
        tensors.run(layer, router.routing(), x, h, &dout)?;
        router.backward(x, &tensors.ds, &mut tensors.dx)?;
        tensors.check_red_zones()?;
        let RouterBuffers { dlogits, drouter_w, drouter_b, .. } = router.gradients();
        let of_router = RouterGradients {
            dlogits: host(dlogits, (t, e))?,
            drouter_w: host(drouter_w, (e, d))?,
            drouter_b: drouter_b.as_ref().map(|b| b.download().map(Array1::from)).transpose()?,
        };
        drop(router);
        self.check_untouched()?;
        dout.check_untouched()?;

        let (gradients, intermediates) = tensors.results(layer, routing, record)?;
        let gradients = Gradients { router: Some(of_router), ..gradients };
        Ok(Backward { gradients, intermediates })
    }
}
