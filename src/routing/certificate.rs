//! Judges a routing from the numbers alone: nothing here calls the code that made it.
//!
//! Every function takes plain arrays, of any origin (this crate, a device, a file), and returns
//! either `Ok`, the certificate, or all that is wrong with them.

mod choice;
mod metadata;

pub use choice::{certify_choice, certify_choice_within, certify_grouped_choice};
pub use metadata::{RoutingArrays, certify_metadata};

use thiserror::Error;

/// Something that no correct routing does, with the numbers that show it.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum Violation {
    /// An array that does not have the size that the others imply.
    #[error("`{array}` has {found} entries, expected {expected}")]
    Length {
        /// Which array.
        array: &'static str,
        /// Entries that it must have.
        expected: usize,
        /// Entries that it has.
        found: usize,
    },
    /// A choice whose K is no possible one.
    #[error("K = {k} of E = {experts} experts cannot be chosen")]
    TopK {
        /// K.
        k: usize,
        /// E.
        experts: usize,
    },
    /// A logit that allows no choice, or an error of a logit that is no number ≥ 0.
    #[error("`{array}` holds {value} for token {token}, expert {expert}")]
    Number {
        /// Which array.
        array: &'static str,
        /// The token.
        token: usize,
        /// The expert.
        expert: usize,
        /// The value.
        value: f64,
    },
    /// An id that does not exist.
    #[error("entry {at} of `{array}` is {id}, but ids end at {limit} (exclusive)")]
    OutOfRange {
        /// Which array.
        array: &'static str,
        /// The flat index of the entry.
        at: usize,
        /// The id.
        id: u64,
        /// How many ids there are.
        limit: usize,
    },
    /// A token that goes to an expert twice.
    #[error("token {token} goes to expert {expert} twice (pairs {first} and {second})")]
    Duplicate {
        /// The token.
        token: usize,
        /// The expert.
        expert: usize,
        /// The pair that had it first.
        first: usize,
        /// The pair that repeats it.
        second: usize,
    },
    /// A chosen expert whose logit is −∞.
    #[error("token {token}, rank {rank}: expert {expert} was chosen, but is masked by −∞")]
    Masked {
        /// The token.
        token: usize,
        /// The rank.
        rank: usize,
        /// The expert.
        expert: u32,
    },
    /// An expert that was left out although it comes before a chosen one.
    #[error(
        "token {token}, rank {rank}: expert {chosen} (logit {chosen_logit}) was chosen before expert {left_out} \
         (logit {left_out_logit}), which was left out"
    )]
    LeftOut {
        /// The token.
        token: usize,
        /// The rank of the chosen one.
        rank: usize,
        /// The chosen expert.
        chosen: u32,
        /// Its logit.
        chosen_logit: f64,
        /// The expert that ranks before it.
        left_out: u32,
        /// Its logit.
        left_out_logit: f64,
    },
    /// Two chosen experts in the wrong order.
    #[error(
        "token {token}, rank {rank}: expert {earlier} (logit {earlier_logit}) stands before expert {later} \
         (logit {later_logit})"
    )]
    RankOrder {
        /// The token.
        token: usize,
        /// The rank of the earlier one.
        rank: usize,
        /// The expert that stands first.
        earlier: u32,
        /// Its logit.
        earlier_logit: f64,
        /// The expert that ought to stand before it.
        later: u32,
        /// Its logit.
        later_logit: f64,
    },
    /// A segment that is not as long as its expert or token has pairs.
    #[error("`{array}` gives {what} {id} the rows {begin}..{end}, but it has {pairs} pairs")]
    Count {
        /// Which array.
        array: &'static str,
        /// Expert or token.
        what: &'static str,
        /// Its id.
        id: usize,
        /// Where its segment begins.
        begin: usize,
        /// Where its segment ends.
        end: usize,
        /// Its number of pairs.
        pairs: usize,
    },
    /// An entry that two places of a one-to-one map share.
    #[error("`{array}` is not one-to-one: {value} stands at {first} and at {second}")]
    NotOneToOne {
        /// Which array.
        array: &'static str,
        /// The value that appears twice.
        value: u32,
        /// Where it stands first.
        first: usize,
        /// Where it stands again.
        second: usize,
    },
    /// An entry that disagrees with the pairs or with another array.
    #[error("entry {at} of `{array}` is {found}, expected {expected}")]
    Entry {
        /// Which array.
        array: &'static str,
        /// The index of the entry.
        at: usize,
        /// What follows from the other arrays.
        expected: u32,
        /// What stands there.
        found: u32,
    },
    /// A pair among those of another expert or token.
    #[error("entry {at} of `{array}` belongs to {what} {id}, but its pair {pair} is one of {what} {owner}")]
    Foreign {
        /// Which array.
        array: &'static str,
        /// Expert or token.
        what: &'static str,
        /// Whose segment it stands in.
        id: usize,
        /// The index of the entry.
        at: usize,
        /// The pair.
        pair: u32,
        /// Whose pair it is.
        owner: usize,
    },
    /// Pairs of one expert, or rows of one token, that do not keep the order of the pairs.
    #[error("`{array}`, {what} {id}: pair {second} comes after pair {first}")]
    Unstable {
        /// Which array.
        array: &'static str,
        /// Expert or token.
        what: &'static str,
        /// Its id.
        id: usize,
        /// The pair that comes first.
        first: u32,
        /// The smaller pair that comes after it.
        second: u32,
    },
}
