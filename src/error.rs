//! The one error type of the crate.
//!
//! [`Error`] is opaque: what went wrong is in its message (the tensor, what was expected, what was
//! found, what to do), and [`Error::class`] says who has to act. The command line turns the class
//! into an exit code.

use std::path::{Path, PathBuf};

/// What every fallible function of the crate returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Who has to act on an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// The input breaks the contract: a wrong shape, a bad routing, a malformed file. Exit code 2.
    Contract,
    /// Something required is missing: a tensor, a file, a device. Exit code 4.
    Incomplete,
    /// The crate broke a promise of its own. Exit code 5.
    Internal,
}

/// An error of the crate; see [`Error::class`] for who has to act.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct Error(Box<Kind>);

#[derive(Debug, thiserror::Error)]
enum Kind {
    #[error("tensor `{tensor}` has shape {found:?}, expected {expected:?} ({reason})")]
    Shape { tensor: String, expected: Vec<usize>, found: Vec<usize>, reason: String },
    #[error("{what} is {value}, but {limit}")]
    Size { what: String, value: usize, limit: String },
    #[error("K = {k} experts per token were asked for, but there are only E = {experts}; choose 1 ≤ K ≤ E")]
    TopK { k: usize, experts: usize },
    #[error(
        "logit of token {row}, expert {expert} is {value}; every logit must be a number below +∞ (−∞ masks an expert)"
    )]
    Logit { row: usize, expert: usize, value: f64 },
    #[error("token {row} has only {usable} logits above −∞, but K = {k} experts have to be chosen; mask fewer experts")]
    TooFewLogits { row: usize, usable: usize, k: usize },
    #[error(
        "ranking score of token {row}, expert {expert} is {value}; token rounding ranks by probabilities, finite and ≥ 0"
    )]
    RankingScore { row: usize, expert: usize, value: f64 },
    #[error("pair {pair} names {what} {id}, but ids end at {limit} (exclusive)")]
    PairOutOfRange { pair: usize, what: &'static str, id: u64, limit: usize },
    #[error("token {token} is sent to expert {expert} twice (pairs {first} and {second}); a pair may appear once")]
    DuplicatePair { token: usize, expert: usize, first: usize, second: usize },
    #[error("tensor `{tensor}` holds {value} at {at:?}; it must be finite")]
    NotFinite { tensor: String, at: Vec<usize>, value: f64 },
    #[error("tensor `{tensor}` at {at:?} is outside the exact regime: {reason}; draw the problem at an exact scale")]
    NotExact { tensor: String, at: Vec<usize>, reason: String },
    #[error("unknown {what} `{text}`; known are: {known}")]
    Unknown { what: &'static str, text: String, known: String },
    #[error("{what} `{text}` cannot be read: {reason}")]
    Parse { what: &'static str, text: String, reason: String },
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{}: {reason}", path.display())]
    Malformed { path: PathBuf, reason: String },
    #[error("{what} is missing: {remedy}")]
    Missing { what: String, remedy: String },
    #[error("this device cannot run it: {reason}")]
    Device { reason: String },
    #[error("internal error, please report it: {reason}")]
    Internal { reason: String },
}

impl Error {
    /// Who has to act.
    pub fn class(&self) -> ErrorClass {
        match *self.0 {
            Kind::Shape { .. }
            | Kind::Size { .. }
            | Kind::TopK { .. }
            | Kind::Logit { .. }
            | Kind::TooFewLogits { .. }
            | Kind::RankingScore { .. }
            | Kind::PairOutOfRange { .. }
            | Kind::DuplicatePair { .. }
            | Kind::NotFinite { .. }
            | Kind::NotExact { .. }
            | Kind::Unknown { .. }
            | Kind::Parse { .. }
            | Kind::Io { .. }
            | Kind::Malformed { .. } => ErrorClass::Contract,
            Kind::Missing { .. } | Kind::Device { .. } => ErrorClass::Incomplete,
            Kind::Internal { .. } => ErrorClass::Internal,
        }
    }

    fn new(kind: Kind) -> Self {
        Self(Box::new(kind))
    }

    /// A tensor of a shape that does not fit the others.
    pub fn shape(tensor: impl Into<String>, expected: &[usize], found: &[usize], reason: impl Into<String>) -> Self {
        Self::new(Kind::Shape {
            tensor: tensor.into(),
            expected: expected.to_vec(),
            found: found.to_vec(),
            reason: reason.into(),
        })
    }

    /// A size outside what an engine or a format takes; `limit` completes "… is 9, but ".
    pub fn size(what: impl Into<String>, value: usize, limit: impl Into<String>) -> Self {
        Self::new(Kind::Size { what: what.into(), value, limit: limit.into() })
    }

    /// K outside `1..=E`.
    pub fn top_k(k: usize, experts: usize) -> Self {
        Self::new(Kind::TopK { k, experts })
    }

    /// A logit that is NaN or +∞.
    pub fn logit(row: usize, expert: usize, value: f64) -> Self {
        Self::new(Kind::Logit { row, expert, value })
    }

    /// Fewer than K logits above −∞.
    pub fn too_few_logits(row: usize, usable: usize, k: usize) -> Self {
        Self::new(Kind::TooFewLogits { row, usable, k })
    }

    /// A score that tokens cannot be ranked by.
    pub fn ranking_score(row: usize, expert: usize, value: f64) -> Self {
        Self::new(Kind::RankingScore { row, expert, value })
    }

    /// A routed pair whose token or expert does not exist.
    pub fn pair_out_of_range(pair: usize, what: &'static str, id: u64, limit: usize) -> Self {
        Self::new(Kind::PairOutOfRange { pair, what, id, limit })
    }

    /// The same (token, expert) twice.
    pub fn duplicate_pair(token: usize, expert: usize, first: usize, second: usize) -> Self {
        Self::new(Kind::DuplicatePair { token, expert, first, second })
    }

    /// A value that must be finite and is not.
    pub fn not_finite(tensor: impl Into<String>, at: &[usize], value: f64) -> Self {
        Self::new(Kind::NotFinite { tensor: tensor.into(), at: at.to_vec(), value })
    }

    /// A number for which the exact regime does not hold: a sum that may round, a value that the
    /// storage type does not have, a row of zeros.
    pub fn not_exact(tensor: impl Into<String>, at: &[usize], reason: impl Into<String>) -> Self {
        Self::new(Kind::NotExact { tensor: tensor.into(), at: at.to_vec(), reason: reason.into() })
    }

    /// A name that is none of the known ones.
    pub fn unknown<'a>(what: &'static str, text: impl Into<String>, known: impl IntoIterator<Item = &'a str>) -> Self {
        let known = known.into_iter().collect::<Vec<_>>().join(", ");
        Self::new(Kind::Unknown { what, text: text.into(), known })
    }

    /// Text that does not follow its form.
    pub fn parse(what: &'static str, text: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::new(Kind::Parse { what, text: text.into(), reason: reason.into() })
    }

    /// A file that cannot be opened, read or written.
    pub fn io(path: impl AsRef<Path>, source: std::io::Error) -> Self {
        Self::new(Kind::Io { path: path.as_ref().to_path_buf(), source })
    }

    /// A file whose content breaks its format.
    pub fn malformed(path: impl AsRef<Path>, reason: impl Into<String>) -> Self {
        Self::new(Kind::Malformed { path: path.as_ref().to_path_buf(), reason: reason.into() })
    }

    /// Something required that is not there; `remedy` says how to supply it.
    pub fn missing(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(Kind::Missing { what: what.into(), remedy: remedy.into() })
    }

    /// No device, no driver, no compiler, or the wrong architecture.
    pub fn device(reason: impl Into<String>) -> Self {
        Self::new(Kind::Device { reason: reason.into() })
    }

    /// A promise of the crate's own that was broken.
    pub fn internal(reason: impl Into<String>) -> Self {
        Self::new(Kind::Internal { reason: reason.into() })
    }
}
