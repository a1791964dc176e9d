//! The command line.

pub mod doctor;
pub mod memory;
pub mod verify;
