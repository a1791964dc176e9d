//! The vendor's library as a baseline: the same products, balanced and ungathered.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cublas::result::{self, CublasError};
use cudarc::cublas::sys::{self, cublasOperation_t as Operation};
use half::bf16;

use crate::error::{Error, Result};

use super::device::{Buffer, Device, Guards, probe};
use super::grouped_gemm::{expect_len, to_i32};

/// A handle of cuBLAS on a device's stream, with a workspace of its own, so that it may be recorded.
pub(super) struct Blas {
    handle: sys::cublasHandle_t,
    device: Arc<Device>,
    _workspace: Buffer<f32>,
}

/// How an operand of (outer, k) lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Major {
    /// (outer, k): k is contiguous.
    K,
    /// (k, outer).
    Outer,
}

/// `batch` products of one size, C (m, n) = A (m, k)·B (n, k)ᵀ, all matrices one after the other.
pub(super) struct Batched<'a> {
    pub batch: usize,
    pub size: [usize; 3],
    pub a: (&'a Buffer<bf16>, Major),
    pub b: (&'a Buffer<bf16>, Major),
    pub c: &'a mut Buffer<bf16>,
}

/// What Hopper's kernels may use, by the vendor's advice.
const WORKSPACE_BYTES: usize = 32 << 20;

impl Blas {
    /// # Errors
    /// No cuBLAS on this machine, or one that does not start.
    pub(super) fn new(device: &Arc<Device>) -> Result<Self> {
        probe::blas().map_err(|absence| Error::device(absence.to_string()))?;
        let workspace = Buffer::output(device, "cuBLAS workspace", WORKSPACE_BYTES / 4, Guards::NONE)?;
        let handle = {
            let _turn = device.idle()?;
            result::create_handle().map_err(fails)?
        };
        let blas = Self { handle, device: Arc::clone(device), _workspace: workspace };
        let _turn = device.idle()?;
        // SAFETY: the handle was made just now in this context; the stream is the device's own, and the
        // workspace lives as long as the handle.
        unsafe {
            result::set_stream(handle, device.stream().cu_stream().cast()).map_err(fails)?;
            let address = blas._workspace.address() as *mut c_void;
            sys::cublasSetWorkspace_v2(handle, address, WORKSPACE_BYTES).result().map_err(fails)?;
        }
        Ok(blas)
    }

    /// Queues the products. With fewer elements than the sizes ask for nothing is queued.
    ///
    /// # Errors
    /// Buffers that are too small (a fault of this crate), or cuBLAS refuses.
    pub(super) fn multiply(&self, products: Batched<'_>) -> Result<()> {
        let Batched { batch, size: [m, n, k], a: (a, a_major), b: (b, b_major), c } = products;
        for (buffer, elements) in [(a, m * k), (b, n * k), (&*c, m * n)] {
            if buffer.len() < batch * elements {
                expect_len(buffer, batch * elements)?;
            }
        }
        // cuBLAS is column-major: it computes Cᵀ = B·Aᵀ, and reads a row-major (outer, k) as (k, outer).
        let (b_turned, b_lead) = match b_major {
            Major::K => (Operation::CUBLAS_OP_T, k),
            Major::Outer => (Operation::CUBLAS_OP_N, n),
        };
        let (a_turned, a_lead) = match a_major {
            Major::K => (Operation::CUBLAS_OP_N, k),
            Major::Outer => (Operation::CUBLAS_OP_T, m),
        };
        let (one, zero) = (1.0f32, 0.0f32);
        let number = |size| to_i32("a size of the baseline", size);
        let bf16 = sys::cudaDataType_t::CUDA_R_16BF;
        let _turn = self.device.turn()?;
        // SAFETY: live buffers of this device that hold the matrices (checked above); `c` is borrowed
        // exclusively; alpha and beta are host memory that is read before the call returns.
        unsafe {
            result::gemm_strided_batched_ex(
                self.handle,
                b_turned,
                a_turned,
                number(n)?,
                number(m)?,
                number(k)?,
                (&raw const one).cast(),
                b.address() as *const c_void,
                bf16,
                number(b_lead)?,
                (n * k) as i64,
                a.address() as *const c_void,
                bf16,
                number(a_lead)?,
                (m * k) as i64,
                (&raw const zero).cast(),
                c.address() as *mut c_void,
                bf16,
                number(n)?,
                (m * n) as i64,
                number(batch)?,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        }
        .map_err(fails)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        if let Ok(_turn) = self.device.idle() {
            // SAFETY: made once, given back once.
            let _ = unsafe { result::destroy_handle(self.handle) };
        }
    }
}

fn fails(CublasError(status): CublasError) -> Error {
    Error::device(format!("cuBLAS: {status:?}"))
}
