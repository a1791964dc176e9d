//! Work that shares no result, queued side by side: a kernel's last blocks and the next kernel's first ones
//! run at the same time.

use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use cudarc::driver::result::DriverError;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream};

use super::context::Device;

/// Streams beside the device's own.
const LANES: usize = 2;

/// Streams beside the device's own, with what they wait for and what waits for them.
pub(super) struct Lanes {
    streams: [Arc<CudaStream>; LANES],
    forked: CudaEvent,
    joined: [CudaEvent; LANES],
    /// The thread whose launches go to a lane, and that lane.
    current: Mutex<Option<(ThreadId, usize)>>,
}

impl Lanes {
    /// # Errors
    /// A driver that gives no stream or event.
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, DriverError> {
        Ok(Self {
            streams: [context.new_stream()?, context.new_stream()?],
            forked: context.new_event(None)?,
            joined: [context.new_event(None)?, context.new_event(None)?],
            current: Mutex::new(None),
        })
    }

    /// The lane that this thread's launches go to, if it is one.
    pub(super) fn current(&self) -> Option<&Arc<CudaStream>> {
        let current = *self.current.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let (thread, lane) = current?;
        (thread == thread::current().id()).then(|| &self.streams[lane])
    }

    fn choose(&self, lane: Option<usize>) {
        let current = lane.map(|lane| (thread::current().id(), lane));
        *self.current.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = current;
    }
}

impl Device {
    /// Queues `first` on the stream and the others beside it. Each begins when all that was queued before has
    /// ended, and what is queued afterwards waits for all of them. They may queue kernels alone, and none may
    /// write what another reads or writes.
    ///
    /// # Errors
    /// What they return, or a driver that refuses an event.
    pub(in crate::sonic::gpu) fn side_by_side(
        &self,
        first: impl FnOnce() -> crate::Result<()>,
        others: [&mut dyn FnMut() -> crate::Result<()>; LANES],
    ) -> crate::Result<()> {
        let fails = |error| self.failed("an event between kernels", error);
        let lanes = self.lanes();
        {
            let _turn = self.turn()?;
            lanes.forked.record(self.stream()).map_err(fails)?;
            lanes.streams.iter().try_for_each(|stream| stream.wait(&lanes.forked)).map_err(fails)?;
        }
        let mut queued = first();
        for (lane, other) in others.into_iter().enumerate() {
            lanes.choose(Some(lane));
            queued = queued.and_then(|()| other());
            lanes.choose(None);
        }
        // Joined in any case: a graph that is being recorded may not end with a lane open.
        let _turn = self.turn()?;
        for (stream, joined) in lanes.streams.iter().zip(&lanes.joined) {
            joined.record(stream).map_err(fails)?;
            self.stream().wait(joined).map_err(fails)?;
        }
        queued
    }
}
