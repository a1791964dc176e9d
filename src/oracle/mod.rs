//! What judges an engine. No oracle imports one.
//!
//! | module | question |
//! | --- | --- |
//! | [`kernel`] | is each kernel right, given what it really read? |
//! | [`bound`] | is each result of the layer within what a correct engine cannot exceed? |
//! | [`statistic`] | is it within what a correct engine does not exceed on random data? |
//! | [`bias`] | do its errors lean to one side, or towards a known fault? |
//! | [`energy`] | is it of another kind altogether? |
//! | [`dependence`] | may statistics judge these data? |
//! | [`exact`] | is it, bit for bit, the only value that exact sums leave? |
//! | [`mod@judge`] | how far is a result from its truth, where, and would an error have been seen? |
//! | [`vacuity`] | would a wrong result have passed? |
//! | [`difference`] | how far are two results from each other? |
//! | [`memory`] | what does each system keep? |
//! | [`buffers`] | is every element written, and nothing else? |
//! | [`indices`] | does every index fit its type? |
//! | [`verdict`] | what does it all amount to? |

pub mod bias;
pub mod bound;
pub mod buffers;
pub mod cluster;
pub mod dependence;
pub mod difference;
pub mod energy;
pub mod exact;
pub mod heat;
pub(crate) mod impostors;
pub mod indices;
pub mod judge;
pub mod kernel;
mod median;
pub mod memory;
pub mod statistic;
pub mod vacuity;
pub mod verdict;

pub use cluster::Cluster;
pub use difference::Difference;
pub use heat::HeatMap;
pub use judge::{Bounded, Judgement, Worst, judge};
pub use verdict::Verdict;
