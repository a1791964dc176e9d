//! Words in host memory that a kernel writes when one of its waits exceeds its bound.
//!
//! Device memory cannot be read once a kernel has trapped, host memory can. Launches take slots of
//! words in turn, so that the message names the kernel. Words are zero until a kernel stalls, and then
//! the device is lost: no slot is ever given back.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::{CudaContext, sys};

use crate::sonic::gpu::compile::KernelName;

/// Words that a kernel writes, as in kernels/sm90/barrier.cuh; a slot has two more to spare.
const WORDS: usize = 8;
const SLOTS: usize = 1024;
const STALLED: u32 = 0x571_7a11;

/// Status words of the last launches.
pub struct StatusBoard {
    words: *mut AtomicU32,
    /// The last kernel of each slot, and the slot that is next.
    kernels: Mutex<(Vec<KernelName>, usize)>,
    /// Frees nothing by itself: the memory goes with the process if the context is lost.
    _context: Arc<CudaContext>,
}

// SAFETY: `words` points to page-locked host memory that lives as long as the board; every access
// goes through atomics.
unsafe impl Send for StatusBoard {}
// SAFETY: as above.
unsafe impl Sync for StatusBoard {}

/// A wait that exceeded its bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// The kernel.
    pub kernel: KernelName,
    /// Who waited.
    pub role: u32,
    /// For which slot of a ring.
    pub stage: u32,
    /// For which parity.
    pub parity: u32,
    /// In which block.
    pub block: u32,
    /// In which thread.
    pub thread: u32,
}

impl std::fmt::Display for Stall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { kernel, role, stage, parity, block, thread } = self;
        // The roles of kernels/sm90/barrier.cuh.
        let role = match role {
            1 => "the producer, for an empty stage",
            2 => "a consumer, for a full stage",
            3 => "the scheduler, for an empty slot of the tile ring",
            4 => "a reader of the tile ring, for a full slot",
            5 => "the epilogue, for its operand",
            6 => "the writer, for a filled slot of the epilogue",
            _ => "an unknown role",
        };
        write!(
            f,
            "kernel {} stalled: {role}, waited beyond its bound (slot {stage}, parity {parity}, block {block}, thread \
             {thread})",
            kernel.name()
        )
    }
}

impl StatusBoard {
    /// Zeroed words in page-locked memory that the device can write.
    ///
    /// # Errors
    /// The driver gives no such memory.
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, DriverError> {
        context.bind_to_thread()?;
        // SAFETY: a context is current. Not write-combined, so that the host reads it and the device
        // may use the host's address, which unified addressing maps.
        let memory = unsafe { result::malloc_host(SLOTS * WORDS * 4, sys::CU_MEMHOSTALLOC_DEVICEMAP) }?;
        let board = Self { words: memory.cast(), kernels: Mutex::default(), _context: Arc::clone(context) };
        (0..SLOTS * WORDS).for_each(|word| board.word(word / WORDS, word % WORDS).store(0, Ordering::Release));
        Ok(board)
    }

    /// Words for one launch: the device address to pass.
    pub fn slot(&self, kernel: KernelName) -> sys::CUdeviceptr {
        let mut guard = self.kernels.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let (kernels, next) = &mut *guard;
        let slot = *next;
        *next = (slot + 1) % SLOTS;
        match kernels.get_mut(slot) {
            Some(last) => *last = kernel,
            None => kernels.push(kernel),
        }
        self.word(slot, 0) as *const AtomicU32 as sys::CUdeviceptr
    }

    /// A launch that says it stalled, if one does.
    pub fn stall(&self) -> Option<Stall> {
        let guard = self.kernels.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        guard.0.iter().enumerate().find_map(|(slot, &kernel)| {
            let word = |index| self.word(slot, index).load(Ordering::Acquire);
            (word(0) == STALLED).then(|| Stall {
                kernel,
                role: word(1),
                stage: word(2),
                parity: word(3),
                block: word(4),
                thread: word(5),
            })
        })
    }

    fn word(&self, slot: usize, index: usize) -> &AtomicU32 {
        debug_assert!(slot < SLOTS && index < WORDS);
        // SAFETY: SLOTS · WORDS words were allocated, page-aligned, and are never freed before the
        // board; AtomicU32 has the layout of u32.
        unsafe { &*self.words.add(slot * WORDS + index) }
    }
}

impl Drop for StatusBoard {
    fn drop(&mut self) {
        // SAFETY: allocated by malloc_host, freed once. With a lost context the driver refuses, and
        // the memory goes with the process.
        let _ = unsafe { result::free_host(self.words.cast()) };
    }
}
