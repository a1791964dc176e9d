//! The command line.

pub mod memory;
pub mod verify;
