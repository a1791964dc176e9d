//! The method on a Hopper GPU: the eight kernels as CUDA, launched from here.
//!
//! ```text
//! probe ─▶ Device ─ prepare ─▶ kernels ─ launch ─▶ buffers ─ wait ─▶ host tensors
//! ```
//!
//! * **No CUDA at build time.** The driver is loaded when a [`device::Device`] is opened; kernels are
//!   compiled by NVRTC when they are first asked for ([`compile`]). What a machine lacks is an
//!   [`Absence`], with its reason, and never a panic.
//! * **Three layers.** `device::kernel` launches what it is given (unsafe); one file per kernel,
//!   named as in the paper, checks every size and launches; [`GpuEngine`] is the safe surface.
//! * **The router too.** [`RoutedEngine`] and [`DeviceRouter`] choose, score, sort and round tokens on
//!   the device; R may be known to nobody else. [`GpuEngine`] alone has the host do it.
//! * **No hang.** Waits inside a kernel are bounded and say who waited; the host polls, and gives a
//!   device up that does not answer.
//! * **Guards.** Red zones, poison and fingerprints of the inputs are a value,
//!   [`device::Guards`], so that the checked run is the run.

mod absence;
mod arithmetic;
mod backward;
mod choice;
mod combine;
mod combine_input_gradient;
mod combine_output;
pub mod compile;
pub mod device;
mod down_backward_activation;
mod down_backward_weight;
mod down_bias_gradient;
mod down_forward;
mod engine;
mod forward;
mod grouped_gemm;
mod layer;
mod measure;
mod pair_sort;
mod plan;
mod routed_engine;
mod router;
mod routing;
mod step;
mod token_rounding;
mod top_k;
pub mod tuning;
mod up_backward_activation;
mod up_backward_weight;
mod up_bias_gradient;
mod up_forward;
mod weight_gemm;
mod witness;
mod workload;

pub use absence::Absence;
pub use arithmetic::{Accumulation, Arithmetic, Sigmoid, Terms};
pub use backward::BackwardTensors;
pub use choice::{ChoicePlan, DeviceChoice};
pub use device::Device;
pub use engine::GpuEngine;
pub use forward::ForwardTensors;
pub use layer::{Layer, upload};
pub use measure::{GEMMS, KERNELS, Measurement, Subject, Times};
pub use plan::Plan;
pub use routed_engine::RoutedEngine;
pub use router::{DeviceRouter, RouterBuffers};
pub use routing::DeviceRouting;
pub use step::Step;
pub use tuning::Tuning;
pub use witness::{Witnessed, fill_normal, witness_backward, witness_forward};
pub use workload::{Load, Loaded, Workload};
