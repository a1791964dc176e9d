//! Dense products by the vendor's library: what the router needs is no work that this crate exists for.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard};

use cudarc::cublas::result::{self as cublas, CublasError};
use cudarc::cublas::sys;
use cudarc::driver::CudaContext;

use super::buffer::{Buffer, Guards};
use super::context::Device;
use super::probe;
use crate::error::Error;

/// Bytes of workspace: what the library asks for on Hopper. Given once, so that no call allocates and
/// a product may be part of a CUDA graph.
const WORKSPACE: usize = 32 << 20;

/// cuBLAS on a device's stream, with a workspace of its own.
pub struct Blas {
    device: Arc<Device>,
    /// One call at a time: calls only queue work.
    handle: Mutex<Handle>,
    _workspace: Buffer<u32>,
}

/// The library's handle, and the context that it belongs to.
struct Handle {
    raw: sys::cublasHandle_t,
    context: Arc<CudaContext>,
}

// SAFETY: a handle may be used from any thread, by one at a time.
unsafe impl Send for Handle {}

/// Handles that no device uses now.
///
/// To destroy one is to wait for the whole GPU, which ends what other threads record on devices of their own. So
/// none is destroyed: the next device of that context takes it over.
static IDLE: Mutex<Vec<Handle>> = Mutex::new(Vec::new());

fn idle_handles() -> MutexGuard<'static, Vec<Handle>> {
    IDLE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Handle {
    /// An idle handle of the context, which is current, or a new one.
    fn of(context: &Arc<CudaContext>) -> Result<Self, CublasError> {
        let mut idle = idle_handles();
        if let Some(at) = idle.iter().position(|handle| handle.context == *context) {
            return Ok(idle.swap_remove(at));
        }
        drop(idle);
        Ok(Self { raw: cublas::create_handle()?, context: Arc::clone(context) })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        idle_handles().push(Self { raw: self.raw, context: Arc::clone(&self.context) });
    }
}

/// The type of a matrix in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// bf16.
    Bf16,
    /// f32.
    F32,
}

impl Entry {
    fn of_library(self) -> sys::cudaDataType {
        match self {
            Self::Bf16 => sys::cudaDataType::CUDA_R_16BF,
            Self::F32 => sys::cudaDataType::CUDA_R_32F,
        }
    }
}

/// A row-major bf16 matrix that is multiplied.
#[derive(Clone, Copy, Debug)]
pub struct Factor {
    /// Its device address.
    pub address: u64,
    /// Entries from one row to the next, as it lies.
    pub stride: usize,
    /// Whether its transpose is meant.
    pub transposed: bool,
}

/// product (rows, columns) = left (rows, inner) · right (inner, columns), or += it.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// left.
    pub left: Factor,
    /// right.
    pub right: Factor,
    /// The device address of the product, row-major without gaps.
    pub product: u64,
    /// Its type.
    pub entry: Entry,
    /// Whether it is added to what lies there, before the one rounding.
    pub accumulate: bool,
    /// Rows of the product.
    pub rows: usize,
    /// Columns of the product.
    pub columns: usize,
    /// What is summed over.
    pub inner: usize,
    /// How many such products, the matrices of each operand one after the other.
    pub batch: usize,
}

impl Blas {
    /// The library on the stream of `device`.
    ///
    /// # Errors
    /// No cuBLAS on this machine, one that does not start, or no memory for its workspace.
    pub fn on(device: &Arc<Device>) -> crate::Result<Arc<Self>> {
        probe::blas()?;
        let fails = |error| failed("starting", error);
        let handle = {
            let _turn = device.idle()?;
            Handle::of(device.context()).map_err(fails)?
        };
        let workspace = Buffer::<u32>::output(device, "blas_workspace", WORKSPACE / 4, Guards::NONE)?;
        let turn = device.idle()?;
        // SAFETY: no one else has the handle, and the stream and the workspace live as long as it is used;
        // a mode without sums in a narrower type than asked for.
        unsafe {
            cublas::set_stream(handle.raw, device.stream().cu_stream().cast()).map_err(fails)?;
            sys::cublasSetWorkspace_v2(handle.raw, workspace.address() as *mut c_void, WORKSPACE)
                .result()
                .map_err(fails)?;
            let mode = sys::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
            sys::cublasSetMathMode(handle.raw, mode).result().map_err(fails)?;
        }
        drop(turn);
        Ok(Arc::new(Self { device: Arc::clone(device), handle: Mutex::new(handle), _workspace: workspace }))
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Queues a product with sums in f32. Without rows or columns there is nothing to do; without
    /// anything to sum over, the caller writes the zeros.
    ///
    /// # Errors
    /// Sizes beyond 31 bits, or a library that refuses.
    ///
    /// # Safety
    /// The addresses are of live buffers of this device, of the sizes and types that the fields state;
    /// the product overlaps neither factor and is not borrowed by the host until [`Device::wait`].
    pub unsafe fn multiply(&self, product: Product) -> crate::Result<()> {
        let Product { left, right, product, entry, accumulate, rows, columns, inner, batch } = product;
        if [rows, columns, inner, batch].contains(&0) {
            return Ok(());
        }
        let _turn = self.device.turn()?;
        let size = |what: &str, size: usize| {
            i32::try_from(size).map_err(|_| Error::size(what, size, "cuBLAS counts it with 31 bits"))
        };
        let (m, n, k) =
            (size("columns of a product", columns)?, size("rows of a product", rows)?, size("inner size", inner)?);
        let operation = |factor: Factor| {
            if factor.transposed { sys::cublasOperation_t::CUBLAS_OP_T } else { sys::cublasOperation_t::CUBLAS_OP_N }
        };
        let (alpha, beta) = (1.0f32, if accumulate { 1.0f32 } else { 0.0 });
        let handle = self.handle.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let bf16 = Entry::Bf16.of_library();
        // SAFETY: the library is column-major: it sees the transpose of every row-major matrix, so it
        // gets the factors in the other order. Addresses and sizes are the caller's promise; both
        // scalars are read before the call returns (host pointer mode).
        unsafe {
            cublas::gemm_strided_batched_ex(
                handle.raw,
                operation(right),
                operation(left),
                m,
                n,
                k,
                (&raw const alpha).cast(),
                right.address as *const c_void,
                bf16,
                size("stride", right.stride)?,
                (inner * columns) as i64,
                left.address as *const c_void,
                bf16,
                size("stride", left.stride)?,
                (rows * inner) as i64,
                (&raw const beta).cast(),
                product as *mut c_void,
                entry.of_library(),
                m,
                (rows * columns) as i64,
                size("products", batch)?,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        }
        .map_err(|error| failed("a product", error))
    }
}

fn failed(what: &str, CublasError(status): CublasError) -> Error {
    Error::device(format!("cuBLAS, {what}: {status:?}"))
}
