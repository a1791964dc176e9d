//! A layer with all of its buffers on the device, allocated once: nothing is allocated when it runs.

use std::collections::BTreeMap;

use half::bf16;

use crate::engine::{Keeping, Ledger};
use crate::error::Error;

use super::backward::BackwardResults;
use super::combine_input_gradient::combine_input_gradient;
use super::combine_output::combine_output;
use super::compile::KernelName;
use super::device::Buffer;
use super::down_backward_activation::{DownBackward, down_backward_activation, score_tiles};
use super::down_backward_weight::down_backward_weight;
use super::down_forward::down_forward;
use super::forward::ForwardResults;
use super::layer::Layer;
use super::routing::DeviceRouting;
use super::up_backward_activation::up_backward_activation;
use super::up_backward_weight::up_backward_weight;
use super::up_forward::up_forward;

/// A layer and the buffers of its forward and backward for T tokens and R pairs.
///
/// From forward to backward stay x, which the caller owns, and h. a and a′ take turns in one buffer,
/// as do y and dx̃, the only one of R × d.
pub struct Plan {
    layer: Layer,
    tokens: usize,
    routed: usize,
    h: Buffer<bf16>,
    o: Buffer<bf16>,
    /// (R, n): a, then a′.
    narrow: Buffer<bf16>,
    /// (R, d): y, then dx̃.
    wide: Buffer<bf16>,
    dh: Buffer<bf16>,
    ds_partial: Option<Buffer<f32>>,
    ds: Buffer<f32>,
    dx: Buffer<bf16>,
    dw1: Buffer<bf16>,
    dw2: Buffer<bf16>,
    biases: Option<(Buffer<bf16>, Buffer<bf16>)>,
}

impl Plan {
    /// Loads the kernels of `layer` and allocates for a routing's T and R.
    ///
    /// # Errors
    /// Not enough device memory, a kernel that cannot be loaded, or sizes beyond the kernels' indices.
    pub fn allocate(layer: Layer, routing: &DeviceRouting) -> crate::Result<Self> {
        let (device, guards) = (std::sync::Arc::clone(layer.device()), layer.guards());
        device.prepare(&[layer.forward_variants(), layer.backward_variants()].concat())?;
        let (tokens, routed) = (routing.tokens(), routing.routed());
        layer.accepts_tokens(tokens, routed)?;
        let (d, n, e, width) = (layer.d(), layer.n(), layer.e(), layer.h_width());
        let parts = score_tiles(&layer)?;
        let output = |name, len| Buffer::output(&device, name, len, guards);
        let scores = |name, len| Buffer::output(&device, name, len, guards);
        let biases = match layer.b1() {
            Some(_) => Some((output("db1", e * width)?, output("db2", e * d)?)),
            None => None,
        };
        let ds_partial = if parts > 1 || biases.is_some() { Some(scores("ds_partial", routed * parts)?) } else { None };
        Ok(Self {
            tokens,
            routed,
            h: output("h", routed * width)?,
            o: output("o", tokens * d)?,
            narrow: output("a or a_prime", routed * n)?,
            wide: output("y or dx_expanded", routed * d)?,
            dh: output("dh", routed * width)?,
            ds_partial,
            ds: scores("ds", routed)?,
            dx: output("dx", tokens * d)?,
            dw1: output("dw1", e * width * d)?,
            dw2: output("dw2", e * d * n)?,
            biases,
            layer,
        })
    }

    /// Queues kernels 1 to 3 on x (T, d).
    ///
    /// # Errors
    /// A routing or an x of other sizes than the plan's, or a device that fails.
    pub fn forward(&mut self, routing: &DeviceRouting, x: &Buffer<bf16>) -> crate::Result<()> {
        self.fits(routing)?;
        let Self { layer, h, narrow: a, wide: y, o, .. } = self;
        ForwardResults { h, a, y, o }.queue(layer, routing, x)
    }

    /// Queues kernels 4 to 8 and the bias gradients, after a forward on the same routing and x.
    ///
    /// # Errors
    /// As [`Plan::forward`].
    pub fn backward(&mut self, routing: &DeviceRouting, x: &Buffer<bf16>, dout: &Buffer<bf16>) -> crate::Result<()> {
        self.fits(routing)?;
        let Self { layer, h, narrow, wide, dh, ds_partial, ds, dx, dw1, dw2, biases, .. } = self;
        let results = BackwardResults {
            dh,
            a_prime: narrow,
            dx_expanded: wide,
            ds,
            ds_partial: ds_partial.as_mut(),
            dx,
            dw1,
            dw2,
            biases: biases.as_mut().map(|(db1, db2)| (db1, db2)),
        };
        results.queue(layer, routing, x, h, dout)
    }

    /// Queues one of the eight kernels alone, on what its buffers hold: for measurements.
    ///
    /// # Errors
    /// As [`Plan::forward`]; or another kernel than the eight.
    pub fn kernel(
        &mut self,
        kernel: KernelName,
        routing: &DeviceRouting,
        x: &Buffer<bf16>,
        dout: &Buffer<bf16>,
    ) -> crate::Result<()> {
        self.fits(routing)?;
        let Self { layer, h, o, narrow, wide, dh, ds_partial, ds, dx, dw1, dw2, .. } = self;
        match kernel {
            KernelName::UpForward => up_forward(layer, routing, x, h, narrow),
            KernelName::DownForward => down_forward(layer, routing, narrow, wide),
            KernelName::CombineOutput => combine_output(layer, routing, wide, o),
            KernelName::DownBackwardActivation => {
                let ds_partial = ds_partial.as_mut().unwrap_or(ds);
                down_backward_activation(layer, routing, dout, h, DownBackward { dh, a_prime: narrow, ds_partial })
            }
            KernelName::DownBackwardWeight => down_backward_weight(layer, routing, dout, narrow, dw2),
            KernelName::UpBackwardActivation => up_backward_activation(layer, routing, dh, wide),
            KernelName::UpBackwardWeight => up_backward_weight(layer, routing, x, dh, dw1),
            KernelName::CombineInputGradient => combine_input_gradient(layer, routing, wide, dx),
            other => Err(Error::internal(format!("{} is none of the eight kernels", other.name()))),
        }
    }

    /// Compiles one kernel with other constants from now on.
    ///
    /// # Errors
    /// Constants under which ds has another number of parts than was allocated.
    pub fn retune(&mut self, kernel: KernelName, constants: BTreeMap<&'static str, u32>) -> crate::Result<()> {
        if kernel != KernelName::DownBackwardActivation {
            self.layer.retune(kernel, constants);
            return Ok(());
        }
        let before = score_tiles(&self.layer)?;
        self.layer.retune(kernel, constants);
        let parts = score_tiles(&self.layer)?;
        if before == parts {
            return Ok(());
        }
        Err(Error::size("the number of parts of ds", parts, format!("the plan was allocated for {before}")))
    }

    /// The layer alone; every buffer is given back.
    pub fn into_layer(self) -> Layer {
        self.layer
    }

    /// What stays from forward to backward: the caller's x, h, and the routing.
    pub fn kept(&self, routing: &DeviceRouting, x: &Buffer<bf16>) -> Ledger {
        let mut ledger = Ledger::default();
        ledger.keep("x", x.payload_bytes(), Keeping::Activation);
        ledger.keep("h", self.h.payload_bytes(), Keeping::Activation);
        ledger.keep("routing and scores", routing.bytes(), Keeping::Metadata);
        ledger
    }

    /// Bytes of every buffer of the plan, its weights' apart.
    pub fn bytes(&self) -> usize {
        let Self { layer: _, tokens: _, routed: _, h, o, narrow, wide, dh, ds_partial, ds, dx, dw1, dw2, biases } =
            self;
        let biases = biases.iter().flat_map(|(db1, db2)| [db1, db2]);
        let tensors = [h, o, narrow, wide, dh, dx, dw1, dw2].into_iter().chain(biases).map(Buffer::payload_bytes);
        tensors.sum::<usize>() + ds.payload_bytes() + ds_partial.as_ref().map_or(0, Buffer::payload_bytes)
    }

    /// Red zones of every buffer, and the weights' contents.
    ///
    /// # Errors
    /// A kernel wrote around one of them or into a weight.
    pub fn check_untouched(&self) -> crate::Result<()> {
        let Self { layer, tokens: _, routed: _, h, o, narrow, wide, dh, ds_partial, ds, dx, dw1, dw2, biases } = self;
        let biases = biases.iter().flat_map(|(db1, db2)| [db1, db2]);
        [h, o, narrow, wide, dh, dx, dw1, dw2].into_iter().chain(biases).try_for_each(Buffer::check_red_zones)?;
        [Some(ds), ds_partial.as_ref()].into_iter().flatten().try_for_each(Buffer::check_red_zones)?;
        layer.check_untouched()
    }

    /// The layer.
    pub fn layer(&self) -> &Layer {
        &self.layer
    }

    /// h (R, 2n) of the last forward.
    pub fn h(&self) -> &Buffer<bf16> {
        &self.h
    }

    /// (R, n): a of the last forward, a′ after a backward.
    pub fn narrow(&self) -> &Buffer<bf16> {
        &self.narrow
    }

    /// (R, d): y of the last forward, dx̃ after a backward.
    pub fn wide(&self) -> &Buffer<bf16> {
        &self.wide
    }

    /// o (T, d).
    pub fn o(&self) -> &Buffer<bf16> {
        &self.o
    }

    /// dh (R, 2n).
    pub fn dh(&self) -> &Buffer<bf16> {
        &self.dh
    }

    /// ds (R), by row.
    pub fn ds(&self) -> &Buffer<f32> {
        &self.ds
    }

    /// dx (T, d), the experts' part.
    pub fn dx(&self) -> &Buffer<bf16> {
        &self.dx
    }

    /// dw1 (E, 2n, d).
    pub fn dw1(&self) -> &Buffer<bf16> {
        &self.dw1
    }

    /// dw2 (E, d, n).
    pub fn dw2(&self) -> &Buffer<bf16> {
        &self.dw2
    }

    /// db1 (E, 2n) and db2 (E, d), with biases.
    pub fn biases(&self) -> Option<(&Buffer<bf16>, &Buffer<bf16>)> {
        self.biases.as_ref().map(|(db1, db2)| (db1, db2))
    }

    fn fits(&self, routing: &DeviceRouting) -> crate::Result<()> {
        for (what, own, given) in [("T", self.tokens, routing.tokens()), ("R", self.routed, routing.routed())] {
            if own != given {
                let advice = format!("the plan was allocated for {own}: allocate one for this routing");
                return Err(Error::size(what, given, advice));
            }
        }
        Ok(())
    }
}
