//! The CUDA path as an engine: host tensors in, host tensors out.

use std::borrow::Cow;
use std::sync::Arc;

use half::bf16;
use ndarray::{Array, Array2, ArrayView2, Dimension, IntoDimension};

use crate::element::DType;
use crate::engine::{
    Backward, Engine, Forward, Gradients, Keeping, Ledger, Numerics, Pass, Record, RoundingModel, RouterRounding,
};
use crate::error::Error;
use crate::problem::{Gating, Problem};
use crate::routing::Routing;
use crate::sonic::cpu::fault::Fault;
use crate::sonic::cpu::intermediate::Intermediate;
use crate::sonic::cpu::{Roundings, router};

use super::absence::Absence;
use super::backward::BackwardTensors;
use super::device::{Buffer, Device, Guards, Scalar};
use super::forward::ForwardTensors;
use super::layer::{Layer, upload};
use super::routing::DeviceRouting;
use super::tuning::Tuning;

/// SonicMoE on a Hopper GPU: bf16 tensors, f32 sums on tensor cores. The router and its backward run
/// on the host, by the code of the CPU path.
///
/// ```
/// use sonicmoe::sonic::gpu::GpuEngine;
/// match GpuEngine::open() {
///     Ok(engine) => println!("runs on {}", engine.device().properties().name),
///     Err(absence) => println!("skipped: {absence}"),
/// }
/// ```
#[derive(Clone, Debug)]
pub struct GpuEngine {
    pub(super) device: Arc<Device>,
    pub(super) guards: Guards,
    pub(super) tuning: Tuning,
}

impl GpuEngine {
    /// On the first Hopper device.
    ///
    /// # Errors
    /// Why there is none.
    pub fn open() -> Result<Self, Absence> {
        Device::open().map(Self::on)
    }

    /// On a device that is already open.
    pub fn on(device: Arc<Device>) -> Self {
        Self { device, guards: Guards::NONE, tuning: Tuning::new() }
    }

    /// The same with red zones and poison: after every pass the red zones of all buffers and the
    /// contents of all inputs are compared, and a kernel that strays is an error.
    pub fn guarded(&self, guards: Guards) -> Self {
        Self { guards, ..self.clone() }
    }

    /// The same with kernels of other constants.
    pub fn tuned(&self, tuning: Tuning) -> Self {
        Self { tuning, ..self.clone() }
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

impl Engine<bf16> for GpuEngine {
    fn name(&self) -> Cow<'static, str> {
        format!("cuda ({})", self.device.properties().name).into()
    }

    fn numerics(&self) -> Numerics {
        Numerics {
            storage: DType::BF16,
            score: DType::F32,
            accumulator: DType::F32.unit_roundoff(),
            rounding: RoundingModel::Fused,
            router: RouterRounding::Score,
            function_ulps: FUNCTION_ULPS,
            flushes_denormals: true,
        }
    }

    fn accepts(&self, problem: &Problem<'_, bf16>) -> crate::Result<()> {
        Layer::accepts(problem)
    }

    fn forward<'p>(&'p self, problem: &'p Problem<'_, bf16>, record: Record) -> crate::Result<Forward<'p, bf16>> {
        let (routing, scores, logits): (_, Cow<'p, [f32]>, _) = match problem.gating() {
            Gating::Given { routing, scores } => (Cow::Borrowed(routing), Cow::Borrowed(&scores[..]), None),
            Gating::Router(layer) => {
                let routed =
                    router::forward::<bf16, f32>(problem.x(), layer, None, record, Roundings::FUSED, Fault::NONE)?;
                (Cow::Owned(routed.routing), Cow::Owned(routed.scores), routed.logits)
            }
        };
        let (device, guards) = (&self.device, self.guards);
        let layer = Layer::upload(device, problem, guards)?.tuned(self.tuning.clone());
        device.prepare(&layer.forward_variants())?;
        let x = upload(device, "x", problem.x(), guards)?;
        let on_device = DeviceRouting::upload(device, &routing, &scores, guards)?;
        let mut tensors = ForwardTensors::allocate(&layer, &on_device)?;
        tensors.run(&layer, &on_device, &x)?;
        tensors.check_red_zones()?;
        let (o, intermediates) = tensors.results(&layer, &routing, record)?;
        let pass = GpuPass { problem, layer, x, h: tensors.h, on_device, routing, scores, logits };
        pass.check_untouched()?;
        Ok(Forward { o, intermediates, pass: Box::new(pass) })
    }
}

/// σ = 1/(1 + 2^(−x·log₂e)) from ex2.approx (2 ulps) and rcp.approx (1 ulp): the exponent, up to 126,
/// carries a rounding and log₂e's own error, so up to 2·ln 2·126 = 175 units of 2⁻²⁴. In the GELU of
/// tanh the exponent is a polynomial of five roundings: 5·ln 2·126 = 437. In the GELU of erf it is
/// x²·log₂e/2 with three, 3·ln 2·126 = 262, times a polynomial with an error of a few units. All of it
/// is a hundredth of a bf16 ulp.
const FUNCTION_ULPS: f64 = 512.0;

/// What stays from forward to backward: x and h, and who went where.
struct GpuPass<'p, 'q> {
    /// For its router.
    problem: &'p Problem<'q, bf16>,
    /// Parameters, which stay in any case.
    layer: Layer,
    x: Buffer<bf16>,
    h: Buffer<bf16>,
    on_device: DeviceRouting,
    /// The host's view of the same routing.
    routing: Cow<'p, Routing>,
    /// By pair.
    scores: Cow<'p, [f32]>,
    /// Where the router's backward needs all of them, or where they were asked for.
    logits: Option<Array2<f32>>,
}

impl GpuPass<'_, '_> {
    fn check_untouched(&self) -> crate::Result<()> {
        self.layer.check_untouched()?;
        self.x.check_untouched()?;
        self.on_device.check_untouched()
    }
}

impl Pass<bf16> for GpuPass<'_, '_> {
    fn routing(&self) -> &Routing {
        &self.routing
    }

    fn scores(&self) -> Vec<f32> {
        self.scores.to_vec()
    }

    fn logits(&self) -> Option<ArrayView2<'_, f32>> {
        self.logits.as_ref().map(|logits| logits.view())
    }

    fn kept(&self) -> Ledger {
        // The host's routing and scores are its own copy of what `on_device` counts.
        let Self { problem: _, layer: _, x, h, on_device, routing: _, scores: _, logits } = self;
        let mut ledger = Ledger::default();
        ledger.keep("x", x.payload_bytes(), Keeping::Activation);
        ledger.keep("h", h.payload_bytes(), Keeping::Activation);
        ledger.keep("routing and scores", on_device.bytes(), Keeping::Metadata);
        if let Some(logits) = logits {
            ledger.keep("router_logits", logits.len() * size_of::<f32>(), Keeping::Metadata);
        }
        ledger
    }

    fn backward(&self, dout: ArrayView2<'_, bf16>, record: Record) -> crate::Result<Backward<bf16>> {
        let Self { problem, layer, x, h, on_device, routing, scores, logits } = self;
        let (t, d) = (routing.tokens(), layer.d());
        if dout.dim() != (t, d) {
            return Err(Error::shape("dout", &[t, d], dout.shape(), "the shape of o is that of x"));
        }
        let device = layer.device();
        device.prepare(&layer.backward_variants())?;
        let dout = upload(device, "dout", dout, layer.guards())?;
        let mut tensors = BackwardTensors::allocate(layer, on_device)?;
        let h_before = if layer.guards().red_zone > 0 { Some(h.download()?) } else { None };
        tensors.run(layer, on_device, x, h, &dout)?;
        tensors.check_red_zones()?;
        self.check_untouched()?;
        dout.check_untouched()?;
        h.check_red_zones()?;
        if let Some(before) = h_before
            && h.download()?.iter().zip(&before).any(|(now, then)| now.to_bits() != then.to_bits())
        {
            return Err(Error::internal("a kernel of the backward wrote into `h`, which other backwards need"));
        }

        let (mut gradients, intermediates) = tensors.results(layer, routing, record)?;
        if let Gating::Router(router) = problem.gating() {
            let kept = router::Kept { routing, scores, logits: logits.as_ref().map(|logits| logits.view()) };
            let experts = Intermediate::<bf16, f32>::Rounded(gradients.dx);
            let (dx, of_router) =
                router::backward(problem.x(), router, kept, &gradients.ds, experts, Roundings::FUSED, Fault::NONE)?;
            gradients = Gradients { dx, router: Some(of_router), ..gradients };
        }
        Ok(Backward { gradients, intermediates })
    }
}

pub(super) fn host<T: Scalar, D: Dimension>(
    buffer: &Buffer<T>,
    shape: impl IntoDimension<Dim = D>,
) -> crate::Result<Array<T, D>> {
    Array::from_shape_vec(shape.into_dimension(), buffer.download()?)
        .map_err(|error| Error::internal(format!("`{}` on the device: {error}", buffer.name())))
}
