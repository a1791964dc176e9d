//! SonicMoE in Rust, and the proof that it is right.
#![warn(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]

pub mod activation;
pub mod case;
pub mod cli;
pub mod dump;
pub mod element;
pub mod engine;
pub mod error;
pub mod layout;
pub mod oracle;
pub mod problem;
pub mod reference;
pub mod report;
pub mod routing;
pub mod shape;
pub mod sonic;
pub mod verify;

pub use activation::{Activation, Gelu};
pub use element::{DType, Element, Real};
pub use engine::{Engine, Pass, Record, run};
pub use error::{Error, ErrorClass, Result};
pub use layout::GateLayout;
pub use problem::{Biases, Gating, Problem, Router};
pub use routing::Convention;
pub use shape::{ExpertId, Shape, TokenId};
