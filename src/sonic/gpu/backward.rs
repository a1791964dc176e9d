//! Backward on the device: kernels 4 to 8, and the bias gradients.

use half::bf16;

use crate::engine::{BackwardIntermediates, Gradients, Record};
use crate::routing::Routing;

use super::combine_input_gradient::combine_input_gradient;
use super::device::Buffer;
use super::down_backward_activation::{DownBackward, down_backward_activation, score_gradient, score_tiles};
use super::down_backward_weight::down_backward_weight;
use super::down_bias_gradient::down_bias_gradient;
use super::engine::host;
use super::layer::Layer;
use super::routing::DeviceRouting;
use super::up_backward_activation::up_backward_activation;
use super::up_backward_weight::up_backward_weight;
use super::up_bias_gradient::up_bias_gradient;

/// What a backward writes.
pub struct BackwardTensors {
    /// dh (R, 2n).
    pub dh: Buffer<bf16>,
    /// a′ (R, n).
    pub a_prime: Buffer<bf16>,
    /// dx̃ (R, d).
    pub dx_expanded: Buffer<bf16>,
    /// ds (R), by row.
    pub ds: Buffer<f32>,
    /// The parts of ds (R, tiles), where ds is not one of them.
    pub ds_partial: Option<Buffer<f32>>,
    /// dx (T, d), the experts' part.
    pub dx: Buffer<bf16>,
    /// dw1 (E, 2n, d).
    pub dw1: Buffer<bf16>,
    /// dw2 (E, d, n).
    pub dw2: Buffer<bf16>,
    /// db1 (E, 2n) and db2 (E, d), with biases.
    pub biases: Option<(Buffer<bf16>, Buffer<bf16>)>,
}

impl BackwardTensors {
    /// Memory for all of it, poisoned where the layer's guards say so.
    ///
    /// # Errors
    /// Not enough device memory, or kernel 4 cannot be loaded, which says how many parts ds has.
    pub fn allocate(layer: &Layer, routing: &DeviceRouting) -> crate::Result<Self> {
        let (device, guards, routed) = (layer.device(), layer.guards(), routing.routed());
        let (d, n, e, width) = (layer.d(), layer.n(), layer.e(), layer.h_width());
        let parts = score_tiles(layer)?;
        let output = |name, len| Buffer::output(device, name, len, guards);
        let (ds_partial, biases) = match layer.b1() {
            Some(_) => (true, Some((output("db1", e * width)?, output("db2", e * d)?))),
            None => (parts > 1, None),
        };
        Ok(Self {
            dh: output("dh", routed * width)?,
            a_prime: output("a_prime", routed * n)?,
            dx_expanded: output("dx_expanded", routed * d)?,
            ds: Buffer::output(device, "ds", routed, guards)?,
            ds_partial: ds_partial.then(|| Buffer::output(device, "ds_partial", routed * parts, guards)).transpose()?,
            dx: output("dx", routing.tokens() * d)?,
            dw1: output("dw1", e * width * d)?,
            dw2: output("dw2", e * d * n)?,
            biases,
        })
    }

    /// Queues the kernels, from x (T, d), the kept h (R, 2n) and dout (T, d).
    ///
    /// # Errors
    /// Buffers of another layer's or routing's sizes, or a device that fails.
    pub fn run(
        &mut self,
        layer: &Layer,
        routing: &DeviceRouting,
        x: &Buffer<bf16>,
        h: &Buffer<bf16>,
        dout: &Buffer<bf16>,
    ) -> crate::Result<()> {
        let Self { dh, a_prime, dx_expanded, ds, ds_partial, dx, dw1, dw2, biases } = self;
        let (ds_partial, biases) = (ds_partial.as_mut(), biases.as_mut().map(|(db1, db2)| (db1, db2)));
        let results = BackwardResults { dh, a_prime, dx_expanded, ds, ds_partial, dx, dw1, dw2, biases };
        results.queue(layer, routing, x, h, dout)
    }

    /// The red zones of all of it.
    ///
    /// # Errors
    /// A kernel wrote outside one of them.
    pub fn check_red_zones(&self) -> crate::Result<()> {
        let Self { dh, a_prime, dx_expanded, ds, ds_partial, dx, dw1, dw2, biases } = self;
        let biases = biases.iter().flat_map(|(db1, db2)| [db1, db2]);
        [dh, a_prime, dx_expanded, dx, dw1, dw2].into_iter().chain(biases).try_for_each(Buffer::check_red_zones)?;
        [Some(ds), ds_partial.as_ref()].into_iter().flatten().try_for_each(Buffer::check_red_zones)
    }
}

impl BackwardTensors {
    /// The gradients on the host, without a router's, and with them asked for dh, a′ and dx̃.
    ///
    /// # Errors
    /// A device that fails.
    pub(super) fn results(
        &self,
        layer: &Layer,
        routing: &Routing,
        record: Record,
    ) -> crate::Result<(Gradients<bf16>, Option<BackwardIntermediates<bf16>>)> {
        let Self { dh, a_prime, dx_expanded, ds, ds_partial: _, dx, dw1, dw2, biases } = self;
        let (t, r) = (routing.tokens(), routing.routed());
        let (d, n, e, width) = (layer.d(), layer.n(), layer.e(), layer.h_width());
        let (db1, db2) = match biases {
            Some((db1, db2)) => (Some(host(db1, (e, width))?), Some(host(db2, (e, d))?)),
            None => (None, None),
        };
        let gradients = Gradients {
            dx: host(dx, (t, d))?,
            dw1: host(dw1, (e, width, d))?,
            dw2: host(dw2, (e, d, n))?,
            db1,
            db2,
            ds: routing.to_pairs(&ds.download()?),
            router: None,
        };
        let intermediates = match record {
            Record::Results => None,
            Record::Intermediates => Some(BackwardIntermediates {
                dh: host(dh, (r, width))?,
                a_prime: host(a_prime, (r, n))?,
                dx_expanded: host(dx_expanded, (r, d))?,
            }),
        };
        Ok((gradients, intermediates))
    }
}

/// Where the kernels of a backward write.
pub(super) struct BackwardResults<'a> {
    pub dh: &'a mut Buffer<bf16>,
    pub a_prime: &'a mut Buffer<bf16>,
    pub dx_expanded: &'a mut Buffer<bf16>,
    pub ds: &'a mut Buffer<f32>,
    pub ds_partial: Option<&'a mut Buffer<f32>>,
    pub dx: &'a mut Buffer<bf16>,
    pub dw1: &'a mut Buffer<bf16>,
    pub dw2: &'a mut Buffer<bf16>,
    pub biases: Option<(&'a mut Buffer<bf16>, &'a mut Buffer<bf16>)>,
}

impl BackwardResults<'_> {
    /// Kernels 4 to 8, and the bias gradients.
    pub(super) fn queue(
        self,
        layer: &Layer,
        routing: &DeviceRouting,
        x: &Buffer<bf16>,
        h: &Buffer<bf16>,
        dout: &Buffer<bf16>,
    ) -> crate::Result<()> {
        let Self { dh, a_prime, dx_expanded, ds, ds_partial, dx, dw1, dw2, biases } = self;
        match ds_partial {
            Some(parts) => {
                let results = DownBackward { dh, a_prime, ds_partial: parts };
                down_backward_activation(layer, routing, dout, h, results)?;
                score_gradient(layer, routing, dout, parts, ds)?;
            }
            None => {
                down_backward_activation(layer, routing, dout, h, DownBackward { dh, a_prime, ds_partial: ds })?;
            }
        }
        // From here on dx, dw2 and dw1 share no result. dx̃ first: what combines it finds room where the others end.
        let a_prime = &*a_prime;
        let dh = &*dh;
        let (mut db1, mut db2) = biases.unzip();
        layer.device().side_by_side(
            || {
                up_backward_activation(layer, routing, dh, dx_expanded)?;
                combine_input_gradient(layer, routing, dx_expanded, dx)
            },
            [
                &mut || {
                    down_backward_weight(layer, routing, dout, a_prime, dw2)?;
                    db2.as_deref_mut().map_or(Ok(()), |db2| down_bias_gradient(layer, routing, dout, db2))
                },
                &mut || {
                    up_backward_weight(layer, routing, x, dh, dw1)?;
                    db1.as_deref_mut().map_or(Ok(()), |db1| up_bias_gradient(layer, routing, dh, db1))
                },
            ],
        )
    }
}
