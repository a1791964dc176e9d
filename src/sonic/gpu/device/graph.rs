//! Queued work as a CUDA graph, to be replayed with one call.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaGraph, sys};

use crate::error::Error;

use super::context::Device;

/// Kernels of one device, recorded with their arguments.
pub struct Graph {
    graph: CudaGraph,
    device: Arc<Device>,
}

// SAFETY: the driver asks that calls on one graph follow each other. `launch` takes `&self`, but its
// callers are behind `&mut` (`Step`) or hold the only reference; a graph may move between threads.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `queue` queues on the device's stream; nothing of it runs. Kernels must have been
    /// loaded before: loading is no work of a stream.
    ///
    /// # Errors
    /// What `queue` returns, or a driver that refuses to record it (an allocation or a wait, say).
    pub(in crate::sonic::gpu) fn record(
        device: &Arc<Device>,
        queue: impl FnOnce() -> crate::Result<()>,
    ) -> crate::Result<Self> {
        let fails = |error| device.failed("recording a graph", error);
        {
            let mut turn = device.idle()?;
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            device.stream().begin_capture(mode).map_err(fails)?;
            *turn = Some(std::thread::current().id());
        }
        let queued = queue();
        // Ends the recording in any case: a stream left in it would refuse everything else.
        let graph = {
            let mut turn = device.turn()?;
            *turn = None;
            device.stream().end_capture(sys::CUgraphInstantiate_flags(0))
        };
        queued?;
        let graph = graph.map_err(fails)?;
        let graph = graph.ok_or_else(|| Error::internal("the driver recorded a graph of nothing"))?;
        graph.upload().map_err(fails)?;
        Ok(Self { graph, device: Arc::clone(device) })
    }

    /// Queues all of it.
    ///
    /// # Errors
    /// A device that fails or is lost.
    ///
    /// # Safety
    /// As for the launches that were recorded: every buffer that they name is still allocated, and the
    /// host borrows nothing that they write.
    pub(in crate::sonic::gpu) unsafe fn launch(&self) -> crate::Result<()> {
        let _turn = self.device.idle()?;
        self.graph.launch().map_err(|error| self.device.failed("replaying a graph", error))
    }
}

/// Two points in a stream and the time between them.
pub struct Stopwatch {
    device: Arc<Device>,
    start: CudaEvent,
}

impl Stopwatch {
    /// Starts where the stream is now.
    ///
    /// # Errors
    /// A device that fails.
    pub fn start(device: &Arc<Device>) -> crate::Result<Self> {
        let start = Self::event(device)?;
        Ok(Self { device: Arc::clone(device), start })
    }

    /// Waits for all that was queued since, and returns what the device took for it, in ms.
    ///
    /// # Errors
    /// As [`Device::wait`].
    pub fn stop(self) -> crate::Result<f64> {
        let end = Self::event(&self.device)?;
        self.device.wait()?;
        let elapsed = self.start.elapsed_ms(&end).map_err(|error| self.device.failed("an event", error))?;
        Ok(f64::from(elapsed))
    }

    fn event(device: &Arc<Device>) -> crate::Result<CudaEvent> {
        let _turn = device.idle()?;
        let timed = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        device.stream().record_event(timed).map_err(|error| device.failed("an event", error))
    }
}
