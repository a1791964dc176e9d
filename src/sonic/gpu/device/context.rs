//! One Hopper device: its stream, its loaded kernels, and a wait that cannot hang.

use std::collections::HashMap;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use cudarc::driver::result::DriverError;
use cudarc::driver::{CudaContext, CudaStream};

use crate::error::Error;
use crate::sonic::gpu::absence::Absence;
use crate::sonic::gpu::compile::{CubinCache, Found, KernelName, Variant};

use super::kernel::{Argument, Grid, Kernel};
use super::pool::Pool;
use super::probe::{self, Properties, name_of};
use super::side_by_side::Lanes;
use super::status::StatusBoard;
use super::tile_queue::TileQueues;

/// How long [`Device::wait`] waits before it gives the device up. Waits inside a kernel are bounded
/// at 2 s and say who waited; this catches what they cannot.
const PATIENCE: Duration = Duration::from_secs(60);

/// A Hopper GPU, opened.
///
/// All work goes to one stream, in order; what a backward queues beside it, the stream waits for before
/// anything else. So a buffer may be given back while kernels that read it are still under way, because the
/// memory returns to the pool behind them.
pub struct Device {
    properties: Properties,
    context: ManuallyDrop<Arc<CudaContext>>,
    stream: ManuallyDrop<Arc<CudaStream>>,
    lanes: ManuallyDrop<Lanes>,
    board: ManuallyDrop<StatusBoard>,
    tile_queues: ManuallyDrop<TileQueues>,
    pool: ManuallyDrop<Pool>,
    cache: CubinCache,
    kernels: ManuallyDrop<Mutex<HashMap<Variant, Arc<Kernel>>>>,
    /// The thread that records a graph of the stream, if one does. Held during every call that queues:
    /// what another thread queued meanwhile would be recorded too, and replayed on buffers long gone.
    recording: Mutex<Option<ThreadId>>,
    /// Why the device cannot be used any more: a trap or a bad address ends a CUDA context.
    lost: OnceLock<String>,
}

impl Device {
    /// The first Hopper device. `CUDA_VISIBLE_DEVICES` narrows the choice.
    ///
    /// # Errors
    /// Why there is none: no driver, no device, another architecture.
    pub fn open() -> Result<Arc<Self>, Absence> {
        let devices = probe::devices()?;
        let refused = devices.iter().find_map(|device| device.require_hopper().err());
        match devices.into_iter().find(|device| device.require_hopper().is_ok()) {
            Some(hopper) => Self::start(hopper),
            None => Err(refused.unwrap_or(Absence::NoDevice)),
        }
    }

    /// The device of that number.
    ///
    /// # Errors
    /// It does not exist, or is of another architecture.
    pub fn open_ordinal(ordinal: usize) -> Result<Arc<Self>, Absence> {
        let properties = probe::device(ordinal)?;
        properties.require_hopper()?;
        Self::start(properties)
    }

    fn start(properties: Properties) -> Result<Arc<Self>, Absence> {
        let fails = |error| Absence::DriverFails { reason: name_of(error) };
        let context = CudaContext::new(properties.ordinal).map_err(fails)?;
        // With cudarc's events the first stream waits for the whole context, which ends what other threads
        // record on devices of their own.
        // SAFETY: the events order the uses of `CudaSlice`, of which this crate has none.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(fails)?;
        let lanes = Lanes::new(&context).map_err(fails)?;
        let board = StatusBoard::new(&context).map_err(fails)?;
        let tile_queues = TileQueues::new(&stream).map_err(fails)?;
        let pool = Pool::new(properties.ordinal).map_err(fails)?;
        Ok(Arc::new(Self {
            properties,
            context: ManuallyDrop::new(context),
            stream: ManuallyDrop::new(stream),
            lanes: ManuallyDrop::new(lanes),
            board: ManuallyDrop::new(board),
            tile_queues: ManuallyDrop::new(tile_queues),
            pool: ManuallyDrop::new(pool),
            cache: CubinCache::find(),
            kernels: ManuallyDrop::default(),
            recording: Mutex::new(None),
            lost: OnceLock::new(),
        }))
    }

    /// What the driver says of it.
    pub fn properties(&self) -> &Properties {
        &self.properties
    }

    /// The stream that all work goes to, for events and graphs around it.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Waits until all work is done, by polling: the wait ends even if a kernel does not.
    ///
    /// # Errors
    /// A kernel that stalled (by name, with who waited for what), trapped, or read a bad address; or
    /// work that is not done after 60 s. The device is then lost: every later call returns the same.
    pub fn wait(&self) -> crate::Result<()> {
        let event = {
            let _turn = self.idle()?;
            self.stream.record_event(None).map_err(|error| self.failed("an event", error))?
        };
        let start = Instant::now();
        loop {
            match event.try_is_complete() {
                Ok(true) => break,
                Ok(false) => {}
                Err(error) => return Err(self.failed("work on the device", error)),
            }
            let waited = start.elapsed();
            if waited > PATIENCE {
                std::mem::forget(event);
                return Err(self.lose(format!("a kernel is still not done after {} s", waited.as_secs())));
            }
            if waited < Duration::from_millis(1) {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        Ok(())
    }

    /// Runs a kernel that waits for what never comes, to try how a stall is reported. The device is
    /// lost afterwards.
    ///
    /// # Errors
    /// The stall, by kernel, role, slot, block and thread; or what kept the kernel from running.
    pub fn stall(&self) -> crate::Result<()> {
        let kernel = self.kernel(&Variant::of(KernelName::Stall))?;
        let status = self.board.slot(KernelName::Stall);
        let grid = Grid { blocks: 1, threads: 32, shared_bytes: 0, cluster: 1 };
        // SAFETY: the kernel takes one address, of status words that live as long as the device.
        unsafe { kernel.launch(self, grid, &[Argument::of(&status)]) }?;
        self.wait()
    }

    /// Bytes of device memory that buffers on this device hold now, once all work is done.
    ///
    /// # Errors
    /// As [`Device::wait`].
    pub fn memory_in_use(&self) -> crate::Result<usize> {
        self.wait()?;
        self.pool.in_use().map_err(|error| self.failed("the memory pool", error))
    }

    /// The most bytes that buffers held at a time since the last call.
    ///
    /// # Errors
    /// As [`Device::wait`].
    pub fn take_memory_peak(&self) -> crate::Result<usize> {
        self.wait()?;
        let peak = self.pool.peak().and_then(|peak| self.pool.reset_peak().map(|()| peak));
        peak.map_err(|error| self.failed("the memory pool", error))
    }

    /// Compiles what is not yet compiled, in parallel, and loads all of it. Returns where each came
    /// from, in the order given; kernels that were loaded before are not looked for again.
    ///
    /// # Errors
    /// No compiler for a kernel that is not on disk, a source it refuses, or a kernel that spills.
    pub fn prepare(&self, variants: &[Variant]) -> crate::Result<Vec<(Variant, Found)>> {
        self.alive()?;
        let missing: Vec<Variant> = {
            let loaded = self.loaded();
            variants.iter().filter(|variant| !loaded.contains_key(variant)).cloned().collect()
        };
        let cubins = self.cache.get_all(&missing)?;
        let mut report = Vec::new();
        for (variant, (cubin, found)) in missing.into_iter().zip(cubins) {
            let kernel = Kernel::load(self, &variant, &cubin)?;
            self.loaded().insert(variant.clone(), Arc::new(kernel));
            report.push((variant, found));
        }
        Ok(report)
    }

    /// A kernel, loaded.
    pub(in crate::sonic::gpu) fn kernel(&self, variant: &Variant) -> crate::Result<Arc<Kernel>> {
        if let Some(kernel) = self.loaded().get(variant) {
            return Ok(Arc::clone(kernel));
        }
        self.prepare(std::slice::from_ref(variant))?;
        let kernel = self.loaded().get(variant).map(Arc::clone);
        kernel.ok_or_else(|| Error::internal(format!("kernel {variant} was loaded and is gone")))
    }

    pub(in crate::sonic::gpu) fn board(&self) -> &StatusBoard {
        &self.board
    }

    pub(super) fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    /// The stream that this thread's kernels go to: the device's own, or one beside it.
    pub(super) fn launch_stream(&self) -> &Arc<CudaStream> {
        self.lanes.current().unwrap_or(&self.stream)
    }

    pub(in crate::sonic::gpu) fn tile_queues(&self) -> &TileQueues {
        &self.tile_queues
    }

    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }

    pub(super) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The right to queue a kernel, held while it is queued: the device is current in this thread, is
    /// not lost, and no other thread records a graph.
    pub(in crate::sonic::gpu) fn turn(&self) -> crate::Result<MutexGuard<'_, Option<ThreadId>>> {
        self.alive()?;
        let turn = self.recording.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if turn.is_some_and(|recorder| recorder != thread::current().id()) {
            return Err(Error::device(
                "another thread records a graph of this device: give each thread its own device",
            ));
        }
        self.context.bind_to_thread().map_err(|error| self.failed("the device", error))?;
        Ok(turn)
    }

    /// The right to do what no graph may record: allocate, give back, copy from and to the host, wait.
    pub(in crate::sonic::gpu) fn idle(&self) -> crate::Result<MutexGuard<'_, Option<ThreadId>>> {
        let turn = self.turn()?;
        match *turn {
            None if self.lanes.current().is_some() => {
                Err(Error::internal("kernels are being queued side by side: no allocation, copy or wait among them"))
            }
            None => Ok(turn),
            Some(_) => Err(Error::internal("a graph is being recorded: it takes kernels, no allocation, copy or wait")),
        }
    }

    /// An error of the driver, or of the kernel that caused it. Out of memory and the like leave the
    /// device usable; a trap does not.
    pub(in crate::sonic::gpu) fn failed(&self, what: &str, error: DriverError) -> Error {
        use cudarc::driver::sys::CUresult as Code;
        if let Some(stall) = self.board.stall() {
            return self.lose(stall.to_string());
        }
        let message = format!("{what}: {}", name_of(error));
        match error.0 {
            Code::CUDA_ERROR_ILLEGAL_ADDRESS
            | Code::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | Code::CUDA_ERROR_MISALIGNED_ADDRESS
            | Code::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | Code::CUDA_ERROR_INVALID_PC
            | Code::CUDA_ERROR_HARDWARE_STACK_ERROR
            | Code::CUDA_ERROR_LAUNCH_FAILED
            | Code::CUDA_ERROR_LAUNCH_TIMEOUT
            | Code::CUDA_ERROR_ASSERT => self.lose(message),
            _ => Error::device(message),
        }
    }

    fn lose(&self, reason: String) -> Error {
        let reason = self.lost.get_or_init(|| reason);
        Error::internal(format!("{reason}; the device cannot be used further in this process"))
    }

    fn alive(&self) -> crate::Result<()> {
        match self.lost.get() {
            None => Ok(()),
            Some(reason) => Err(self.lose(reason.clone())),
        }
    }

    fn loaded(&self) -> MutexGuard<'_, HashMap<Variant, Arc<Kernel>>> {
        self.kernels.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("properties", &self.properties).field("lost", &self.lost).finish_non_exhaustive()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Giving back a context under a kernel that does not end would block for ever: leave all of
        // it to the end of the process.
        if self.wait().is_err() {
            return;
        }
        // SAFETY: each is dropped once, here, and not used afterwards; the context outlives the rest.
        unsafe {
            ManuallyDrop::drop(&mut self.kernels);
            ManuallyDrop::drop(&mut self.pool);
            ManuallyDrop::drop(&mut self.board);
            ManuallyDrop::drop(&mut self.tile_queues);
            ManuallyDrop::drop(&mut self.lanes);
            ManuallyDrop::drop(&mut self.stream);
            ManuallyDrop::drop(&mut self.context);
        }
    }
}
