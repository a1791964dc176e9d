//! Standard autograd: a tape over `ndarray`, and the plain MoE layer on it.
//!
//! This is the side that the SonicMoE path is compared with, so it shares nothing with it: products
//! are `ndarray`'s, the choice of experts is its own, every derivative follows from the primitives
//! of [`tape`], and Y is kept because autograd needs it for the scores' gradient ⟨dO, Y⟩.
//!
//! | file | story |
//! | --- | --- |
//! | [`tape`] | the graph, the backward sweep, what is kept |
//! | `primitives` | the operations, each beside its derivative |
//! | `activation`, `router` | the composites |
//! | [`moe`] | the layer |

mod activation;
pub mod moe;
mod primitives;
mod router;
pub mod tape;

pub use moe::{StandardMoe, run_with};
