//! Verdicts, and how several become one.

use std::fmt;
use std::process::ExitCode;

use crate::error::{Error, ErrorClass};

/// What a check, a file or a whole run came to.
///
/// ```
/// use sonicmoe::oracle::Verdict;
/// let several = [Verdict::Pass, Verdict::Incomplete, Verdict::NumericFailure];
/// assert_eq!(several.into_iter().max(), Some(Verdict::NumericFailure));
/// assert_eq!(Verdict::NumericFailure.code(), 1);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Verdict {
    // From mild to severe: the worst of several is their maximum.
    /// Everything that was required was judged, and is right.
    Pass,
    /// A required tensor or device is missing.
    Incomplete,
    /// A check could not have failed.
    Vacuous,
    /// A number is wrong.
    NumericFailure,
    /// The input breaks the contract: a wrong shape, a bad routing, a malformed file.
    ContractViolated,
    /// A fault of this program.
    InternalError,
}

impl Verdict {
    /// The process exit code: 0 pass, 1 numeric, 2 contract, 3 vacuous, 4 incomplete, 5 internal.
    pub fn code(self) -> u8 {
        match self {
            Self::Pass => 0,
            Self::NumericFailure => 1,
            Self::ContractViolated => 2,
            Self::Vacuous => 3,
            Self::Incomplete => 4,
            Self::InternalError => 5,
        }
    }

    /// A word for reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pass => "PASS",
            Self::NumericFailure => "FAIL",
            Self::ContractViolated => "CONTRACT VIOLATED",
            Self::Vacuous => "VACUOUS",
            Self::Incomplete => "INCOMPLETE",
            Self::InternalError => "INTERNAL ERROR",
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl From<Verdict> for ExitCode {
    fn from(verdict: Verdict) -> Self {
        Self::from(verdict.code())
    }
}

impl From<&Error> for Verdict {
    fn from(error: &Error) -> Self {
        match error.class() {
            ErrorClass::Contract => Self::ContractViolated,
            ErrorClass::Incomplete => Self::Incomplete,
            ErrorClass::Internal => Self::InternalError,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 0 pass · 4 incomplete · 3 vacuous · 1 numeric · 2 contract · 5 internal, the mildest first.
    #[test]
    fn the_worst_verdict_wins_and_each_has_its_exit_code() {
        use Verdict::{ContractViolated, Incomplete, InternalError, NumericFailure, Pass, Vacuous};
        let from_mild = [Pass, Incomplete, Vacuous, NumericFailure, ContractViolated, InternalError];
        assert_eq!(from_mild.map(Verdict::code), [0, 4, 3, 1, 2, 5]);
        assert!(from_mild.is_sorted());
        let names = from_mild.map(Verdict::name);
        assert_eq!(names, ["PASS", "INCOMPLETE", "VACUOUS", "FAIL", "CONTRACT VIOLATED", "INTERNAL ERROR"]);
    }
}
