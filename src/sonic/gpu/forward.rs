//! Forward on the device: kernels 1, 2 and 3.

use half::bf16;
use ndarray::Array2;

use crate::engine::{ForwardIntermediates, Record};
use crate::routing::Routing;

use super::combine_output::combine_output;
use super::device::Buffer;
use super::down_forward::down_forward;
use super::engine::host;
use super::layer::Layer;
use super::routing::DeviceRouting;
use super::up_forward::up_forward;

/// What a forward writes. h stays for backward; a and y are transient.
pub struct ForwardTensors {
    /// h (R, 2n).
    pub h: Buffer<bf16>,
    /// a (R, n).
    pub a: Buffer<bf16>,
    /// y (R, d).
    pub y: Buffer<bf16>,
    /// o (T, d).
    pub o: Buffer<bf16>,
}

impl ForwardTensors {
    /// Memory for all of it, poisoned where the layer's guards say so.
    ///
    /// # Errors
    /// Not enough device memory.
    pub fn allocate(layer: &Layer, routing: &DeviceRouting) -> crate::Result<Self> {
        let (device, guards, routed) = (layer.device(), layer.guards(), routing.routed());
        Ok(Self {
            h: Buffer::output(device, "h", routed * layer.h_width(), guards)?,
            a: Buffer::output(device, "a", routed * layer.n(), guards)?,
            y: Buffer::output(device, "y", routed * layer.d(), guards)?,
            o: Buffer::output(device, "o", routing.tokens() * layer.d(), guards)?,
        })
    }

    /// Queues the three kernels on x (T, d).
    ///
    /// # Errors
    /// Buffers of another layer's or routing's sizes, or a device that fails.
    pub fn run(&mut self, layer: &Layer, routing: &DeviceRouting, x: &Buffer<bf16>) -> crate::Result<()> {
        let Self { h, a, y, o } = self;
        ForwardResults { h, a, y, o }.queue(layer, routing, x)
    }

    /// The red zones of all of it.
    ///
    /// # Errors
    /// A kernel wrote outside one of them.
    pub fn check_red_zones(&self) -> crate::Result<()> {
        let Self { h, a, y, o } = self;
        [h, a, y, o].into_iter().try_for_each(Buffer::check_red_zones)
    }
}

impl ForwardTensors {
    /// o on the host, and with them asked for h, a and y.
    ///
    /// # Errors
    /// A device that fails.
    pub(super) fn results(
        &self,
        layer: &Layer,
        routing: &Routing,
        record: Record,
    ) -> crate::Result<(Array2<bf16>, Option<ForwardIntermediates<bf16>>)> {
        let Self { h, a, y, o } = self;
        let (t, r, d) = (routing.tokens(), routing.routed(), layer.d());
        let intermediates = match record {
            Record::Results => None,
            Record::Intermediates => Some(ForwardIntermediates {
                h: host(h, (r, layer.h_width()))?,
                a: host(a, (r, layer.n()))?,
                y: host(y, (r, d))?,
            }),
        };
        Ok((host(o, (t, d))?, intermediates))
    }
}

/// Where the kernels of a forward write.
pub(super) struct ForwardResults<'a> {
    pub h: &'a mut Buffer<bf16>,
    pub a: &'a mut Buffer<bf16>,
    pub y: &'a mut Buffer<bf16>,
    pub o: &'a mut Buffer<bf16>,
}

impl ForwardResults<'_> {
    /// Kernels 1, 2 and 3.
    pub(super) fn queue(self, layer: &Layer, routing: &DeviceRouting, x: &Buffer<bf16>) -> crate::Result<()> {
        let Self { h, a, y, o } = self;
        up_forward(layer, routing, x, h, a)?;
        down_forward(layer, routing, a, y)?;
        combine_output(layer, routing, y, o)
    }
}
