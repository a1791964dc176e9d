//! A loaded kernel, and its launch: the raw layer above `cuLaunchKernelEx`.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUfunction_attribute};
use cudarc::driver::{CudaFunction, CudaModule, DeviceRepr};
use cudarc::nvrtc::Ptx;

use crate::error::Error;
use crate::sonic::gpu::compile::{Cubin, Geometry, Variant};

use super::context::Device;

/// A kernel on a device.
pub struct Kernel {
    variant: Variant,
    function: CudaFunction,
    /// Bytes of each parameter, as compiled.
    parameters: Vec<usize>,
    geometry: Option<Geometry>,
    /// Blocks of a cluster that the kernel itself prescribes; 0 if it prescribes none.
    own_cluster: u32,
    registers: u32,
    _module: Arc<CudaModule>,
}

/// How many blocks and threads a launch has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, bytes.
    pub shared_bytes: u32,
    /// Blocks of a cluster.
    pub cluster: u32,
}

/// One parameter of a launch, borrowed until the launch has been made.
#[derive(Clone, Copy)]
pub struct Argument<'a> {
    value: *const c_void,
    bytes: usize,
    borrowed: PhantomData<&'a ()>,
}

impl<'a> Argument<'a> {
    /// A value that a kernel takes as it lies in memory.
    pub fn of<T: DeviceRepr>(value: &'a T) -> Self {
        Self { value: (value as *const T).cast(), bytes: size_of::<T>(), borrowed: PhantomData }
    }
}

impl Kernel {
    /// Loads machine code and checks what can be checked before any launch.
    ///
    /// # Errors
    /// Code that the driver refuses, or that uses local memory: a spill in a main loop halves its
    /// speed, and none is expected.
    pub(super) fn load(device: &Device, variant: &Variant, cubin: &Cubin) -> crate::Result<Self> {
        let _turn = device.idle()?;
        let name = variant.kernel().name();
        let what = || format!("loading kernel {variant}");
        let fails = |error| device.failed(&what(), error);
        let module = device.context().load_module(Ptx::from_binary(cubin.bytes().to_vec())).map_err(fails)?;
        let function = module.load_function(name).map_err(fails)?;
        let local = function.local_size_bytes().map_err(fails)?;
        if local != 0 {
            return Err(Error::internal(format!("kernel {variant} uses {local} bytes of local memory a thread")));
        }
        let own_cluster =
            function.get_attribute(CUfunction_attribute::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH).map_err(fails)?;
        let registers = function.num_regs().map_err(fails)?;
        Ok(Self {
            parameters: parameters(&function).map_err(fails)?,
            geometry: cubin.geometry()?,
            own_cluster: u32::try_from(own_cluster).unwrap_or(0),
            registers: u32::try_from(registers).unwrap_or(0),
            variant: variant.clone(),
            function,
            _module: module,
        })
    }

    /// The variant.
    pub fn variant(&self) -> &Variant {
        &self.variant
    }

    /// Registers a thread has at entry.
    pub fn registers(&self) -> u32 {
        self.registers
    }

    /// What the kernel says of its launch.
    ///
    /// # Errors
    /// It says nothing.
    pub fn geometry(&self) -> crate::Result<Geometry> {
        self.geometry.ok_or_else(|| Error::internal(format!("kernel {} declares no launch geometry", self.variant)))
    }

    /// Queues the kernel on the device's stream. A grid without blocks is nothing to do.
    ///
    /// # Errors
    /// Arguments of other sizes than the kernel's parameters, a grid that its cluster does not
    /// divide, or a driver that refuses the launch.
    ///
    /// # Safety
    /// * Every address among the arguments is of device memory that was allocated on this device's
    ///   stream and not yet given back, and large enough for what the kernel's source says it reads
    ///   and writes at the sizes given.
    /// * No memory that the kernel writes is borrowed by the host until [`Device::wait`].
    /// * Index tensors hold indices in range.
    pub unsafe fn launch(&self, device: &Device, grid: Grid, arguments: &[Argument<'_>]) -> crate::Result<()> {
        if grid.blocks == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.launch_blocks(device, grid, [grid.blocks, 1, 1], arguments) }
    }

    /// [`Kernel::launch`] of blocks in three dimensions, without a cluster.
    ///
    /// # Errors
    /// As [`Kernel::launch`].
    ///
    /// # Safety
    /// As [`Kernel::launch`].
    pub unsafe fn launch_3d(
        &self,
        device: &Device,
        blocks: [u32; 3],
        threads: u32,
        arguments: &[Argument<'_>],
    ) -> crate::Result<()> {
        let grid = Grid { blocks: blocks[0], threads, shared_bytes: 0, cluster: 1 };
        // SAFETY: the caller's promise.
        unsafe { self.launch_blocks(device, grid, blocks, arguments) }
    }

    /// # Safety
    /// As [`Kernel::launch`].
    unsafe fn launch_blocks(
        &self,
        device: &Device,
        grid: Grid,
        [x, y, z]: [u32; 3],
        arguments: &[Argument<'_>],
    ) -> crate::Result<()> {
        let given: Vec<usize> = arguments.iter().map(|argument| argument.bytes).collect();
        if given != self.parameters {
            let expected = &self.parameters;
            return Err(Error::internal(format!(
                "kernel {} takes parameters of {expected:?} bytes and was given {given:?}",
                self.variant
            )));
        }
        let cluster = if self.own_cluster > 0 { self.own_cluster } else { grid.cluster.max(1) };
        if cluster != grid.cluster || !grid.blocks.is_multiple_of(cluster) {
            return Err(Error::internal(format!("kernel {} cannot run as {grid:?}", self.variant)));
        }
        let _turn = device.turn()?;
        let fails = |error| device.failed(&format!("launching kernel {} as {grid:?}", self.variant), error);
        if grid.shared_bytes > 0 {
            self.function
                .set_attribute(
                    CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    i32::try_from(grid.shared_bytes).unwrap_or(i32::MAX),
                )
                .map_err(fails)?;
        }
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster, y: 1, z: 1 },
            },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared_bytes,
            hStream: device.launch_stream().cu_stream(),
            attrs: &mut attribute,
            numAttrs: u32::from(self.own_cluster == 0 && cluster > 1),
        };
        let mut values: Vec<*mut c_void> = arguments.iter().map(|argument| argument.value.cast_mut()).collect();
        // SAFETY: the context is current, the function and the stream belong to it; `values` holds
        // one pointer for each parameter, to as many bytes as the kernel takes (checked above); the
        // driver copies them before it returns. What the addresses mean is the caller's promise.
        unsafe {
            sys::cuLaunchKernelEx(&config, self.function.cu_function(), values.as_mut_ptr(), std::ptr::null_mut())
        }
        .result()
        .map_err(fails)
    }
}

/// Bytes of each parameter.
fn parameters(function: &CudaFunction) -> Result<Vec<usize>, DriverError> {
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: both pointers are valid for a write; the function is loaded.
        let answer = unsafe { sys::cuFuncGetParamInfo(function.cu_function(), sizes.len(), &mut offset, &mut size) };
        match answer {
            sys::CUresult::CUDA_SUCCESS => sizes.push(size),
            // One past the last.
            sys::CUresult::CUDA_ERROR_INVALID_VALUE => return Ok(sizes),
            other => return Err(DriverError(other)),
        }
    }
}
