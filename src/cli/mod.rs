//! The command line.

pub mod memory;
