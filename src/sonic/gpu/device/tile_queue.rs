//! The words from which the blocks of a grouped GEMM claim their tiles, `TileQueueWords` of
//! kernels/sm90/tile_schedule.cuh.
//!
//! A kernel finds its words zero and leaves them zero. Launches take words in turn, so that kernels which
//! run side by side have their own; recorded launches keep theirs, since launches of one stream that
//! share words follow each other.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaContext, CudaStream};

/// Bytes of one launch's words, and what sets them apart from the next launch's: a sector of memory.
const STEP: usize = 32;
const LAUNCHES: usize = 1024;

/// Words for the launches of one device.
pub struct TileQueues {
    words: CUdeviceptr,
    next: AtomicUsize,
    context: Arc<CudaContext>,
}

impl TileQueues {
    /// Words on the device, zero for all that is queued on `stream` from now on, or behind it.
    ///
    /// # Errors
    /// Not enough device memory.
    pub fn new(stream: &CudaStream) -> Result<Self, DriverError> {
        let context = Arc::clone(stream.context());
        context.bind_to_thread()?;
        // SAFETY: a context is current.
        let words = unsafe { result::malloc_sync(LAUNCHES * STEP) }?;
        let queues = Self { words, next: AtomicUsize::new(0), context };
        // SAFETY: so many bytes were allocated just now, and are freed when the device is idle.
        unsafe { result::memset_d8_async(words, 0, LAUNCHES * STEP, stream.cu_stream()) }?;
        Ok(queues)
    }

    /// Words for one launch: the device address to pass.
    pub fn take(&self) -> CUdeviceptr {
        let launch = self.next.fetch_add(1, Ordering::Relaxed) % LAUNCHES;
        self.words + (launch * STEP) as CUdeviceptr
    }
}

impl Drop for TileQueues {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated by malloc_sync, freed once, when the device is idle.
            let _ = unsafe { result::free_sync(self.words) };
        }
    }
}
