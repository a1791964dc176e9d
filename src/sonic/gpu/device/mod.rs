//! The border to CUDA: what the machine has, device memory, loaded kernels, launches and waits.

mod blas;
mod buffer;
mod context;
mod graph;
mod kernel;
mod pool;
pub mod probe;
mod side_by_side;
mod status;
mod tensor_map;
mod tile_queue;

pub use blas::{Blas, Entry, Factor, Product};
pub use buffer::{Buffer, Guards, Scalar};
pub use context::Device;
pub use graph::{Graph, Stopwatch};
pub use kernel::{Argument, Grid, Kernel};
pub use probe::Properties;
pub use status::Stall;
pub use tensor_map::TensorMap;
