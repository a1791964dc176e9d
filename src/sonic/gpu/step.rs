//! A training step recorded as two CUDA graphs: the host only says "again".

use half::bf16;

use super::device::{Buffer, Graph};
use super::plan::Plan;
use super::routing::DeviceRouting;

/// A plan with the inputs that its graphs read, forward and backward recorded.
///
/// It owns every buffer that a graph names, and gives none of them away: that is what makes a replay
/// safe. New inputs are written into the same memory.
pub struct Step {
    forward: Graph,
    backward: Graph,
    plan: Plan,
    routing: DeviceRouting,
    x: Buffer<bf16>,
    dout: Buffer<bf16>,
}

impl Step {
    /// Records both passes; nothing of them runs.
    ///
    /// # Errors
    /// Inputs of other sizes than the plan's, another thread that records on the same device, or a
    /// driver that refuses.
    pub fn record(mut plan: Plan, routing: DeviceRouting, x: Buffer<bf16>, dout: Buffer<bf16>) -> crate::Result<Self> {
        let device = std::sync::Arc::clone(plan.layer().device());
        let forward = Graph::record(&device, || plan.forward(&routing, &x))?;
        let backward = Graph::record(&device, || plan.backward(&routing, &x, &dout))?;
        Ok(Self { forward, backward, plan, routing, x, dout })
    }

    /// Queues the forward.
    ///
    /// # Errors
    /// A device that fails.
    pub fn forward(&mut self) -> crate::Result<()> {
        // SAFETY: every buffer that was recorded belongs to `self`, which lends none of them mutably.
        unsafe { self.forward.launch() }
    }

    /// Queues the backward.
    ///
    /// # Errors
    /// A device that fails.
    pub fn backward(&mut self) -> crate::Result<()> {
        // SAFETY: as in `forward`.
        unsafe { self.backward.launch() }
    }

    /// Overwrites x (T, d).
    ///
    /// # Errors
    /// Another number of elements, or a device that fails.
    pub fn set_x(&mut self, x: &[bf16]) -> crate::Result<()> {
        self.x.upload(x)
    }

    /// Overwrites dout (T, d).
    ///
    /// # Errors
    /// As [`Step::set_x`].
    pub fn set_dout(&mut self, dout: &[bf16]) -> crate::Result<()> {
        self.dout.upload(dout)
    }

    /// The plan, whose buffers hold the results.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The routing.
    pub fn routing(&self) -> &DeviceRouting {
        &self.routing
    }

    /// Red zones, and inputs that no kernel may write.
    ///
    /// # Errors
    /// A kernel strayed.
    pub fn check_untouched(&self) -> crate::Result<()> {
        self.x.check_untouched()?;
        self.dout.check_untouched()?;
        self.routing.check_untouched()?;
        self.plan.check_untouched()
    }
}
