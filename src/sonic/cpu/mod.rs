//! The eight kernels and the two bias kernels on the CPU.
//!
//! Generic over the storage type S (f64, f32, bf16, f16) and the accumulator A (f32 or f64): every
//! kernel widens what it reads, sums in A, and rounds what it writes, once. The points are those of
//! the CUDA kernels, so that both can be held to the same bounds.
//!
//! * **Memory.** x (borrowed) and h stay from forward to backward. Tokens are gathered in blocks;
//!   the only tensors of R × d are y and dx̃, and both are gone when the pass returns.
//! * **Threads.** Work is cut by the sizes alone and runs in the current rayon pool; each tile is
//!   one thread's. Any number of threads gives the same bits.
//! * **Faults.** [`Roundings`] is a value that every kernel is given: a run with a rounding point
//!   left out or added is this code, not a copy of it.

mod activate;
mod blocks;
mod combine_input_gradient;
mod combine_output;
mod down_backward_activation;
mod down_backward_weight;
mod down_bias_gradient;
mod down_forward;
mod engine;
pub(super) mod fault;
pub(super) mod intermediate;
mod matmul;
mod roundings;
pub(super) mod router;
mod up_backward_activation;
mod up_backward_weight;
mod up_bias_gradient;
mod up_forward;

pub use engine::CpuEngine;
pub use roundings::{RoundingPoint, Roundings};
