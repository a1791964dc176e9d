//! What judges an engine. No oracle imports one.

pub mod memory;
pub mod verdict;

pub use verdict::Verdict;
