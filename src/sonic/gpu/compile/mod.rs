//! From CUDA sources to machine code: the sources inside the binary, NVRTC, and a cache on disk.
//!
//! Nothing of CUDA is needed to build the crate. A kernel is compiled when it is first asked for,
//! which takes about a second, and kept on disk; compiled kernels can also be carried to a machine
//! without a compiler. Compiling needs neither a driver nor a GPU.

mod cache;
mod compiler;
mod cubin;
mod sources;
mod variant;

pub use cache::{CubinCache, Found};
pub use compiler::{Compiled, Compiler};
pub use cubin::{Cubin, Geometry};
pub use sources::{HEADERS, KernelName, Source};
pub(super) use variant::COMBINE_THREADS;
pub use variant::Variant;
