//! Claims, what one case says of them, and what many cases add up to.

use std::borrow::Cow;

use crate::oracle::judge::Worst;
use crate::oracle::{Judgement, Verdict};

/// What kind of claim, in the order of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Section {
    /// Standard autograd and the closed form give the same f64 numbers.
    Agreement,
    /// Each kernel is right, judged from what it really read.
    Kernel,
    /// Each result of the layer is within what a correct engine cannot exceed.
    Layer,
    /// Every bit is the only one that exact sums leave.
    ExactRegime,
    /// What changes a problem changes its results in a known way.
    Laws,
    /// Problems that exposed public bugs.
    Museum,
    /// Claims without a tolerance.
    Exact,
}

impl Section {
    /// The line above its claims.
    pub fn title(self) -> &'static str {
        match self {
            Self::Agreement => "Standard autograd (keeps Y) and SonicMoE's closed form agree, both in f64",
            Self::Kernel => "Each kernel is right, from what it really read",
            Self::Layer => "Each result of the whole layer is within its a-priori bound",
            Self::ExactRegime => "Exact regime: bitwise, whatever the order of summation",
            Self::Laws => "Laws: a changed problem changes its results in the known way, bit for bit on exact sums",
            Self::Museum => "Museum: the smallest problems that exposed public bugs",
            Self::Exact => "Without any tolerance",
        }
    }
}

/// One claim about an engine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Claim {
    /// What kind.
    pub section: Section,
    /// The place in its section.
    pub place: usize,
    /// What is claimed.
    pub subject: Cow<'static, str>,
}

/// What one case says of one claim.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The claim.
    pub claim: Claim,
    /// Numbers (or facts) that were judged.
    pub judged: u64,
    /// Numbers that could not be judged.
    pub skipped: u64,
    /// Judged ones that are wrong.
    pub failing: u64,
    /// The worst number, for claims with a bound.
    pub worst: Option<Worst>,
    /// The smallest uniform relative error that would have failed; ∞ without a bound.
    pub floor: f64,
    /// What is wrong, in words.
    pub explanation: String,
}

impl Finding {
    /// From a judgement against a bound.
    pub fn bounded(claim: Claim, judgement: &Judgement) -> Self {
        Self {
            claim,
            judged: judgement.judged() as u64,
            skipped: judgement.skipped as u64,
            failing: judgement.failing as u64,
            worst: judgement.worst.clone(),
            floor: judgement.floor,
            explanation: if judgement.passes() { String::new() } else { judgement.to_string() },
        }
    }

    /// From facts that hold or do not; `broken` says which do not.
    pub fn exact<E: ToString>(claim: Claim, judged: u64, broken: &[E]) -> Self {
        Self {
            claim,
            judged,
            skipped: 0,
            failing: broken.len() as u64,
            worst: None,
            floor: f64::INFINITY,
            explanation: broken.iter().take(3).map(E::to_string).collect::<Vec<_>>().join("; "),
        }
    }
}

/// What many cases say of one claim.
#[derive(Clone, Debug)]
pub struct Tally {
    /// Cases in which something was judged.
    pub cases: u64,
    /// Numbers (or facts) that were judged.
    pub judged: u64,
    /// Numbers that could not be judged.
    pub skipped: u64,
    /// Judged ones that are wrong.
    pub failing: u64,
    /// The worst number over all cases, by its ratio of error to bound.
    pub worst: Option<Worst>,
    /// The smallest uniform relative error that some case would have failed.
    pub floor: f64,
}

impl Default for Tally {
    fn default() -> Self {
        Self { cases: 0, judged: 0, skipped: 0, failing: 0, worst: None, floor: f64::INFINITY }
    }
}

impl Tally {
    /// Adds a case.
    pub fn add(&mut self, finding: Finding) {
        let Finding { claim: _, judged, skipped, failing, worst, floor, explanation: _ } = finding;
        self.cases += u64::from(judged > 0);
        self.judged += judged;
        self.skipped += skipped;
        self.failing += failing;
        self.floor = self.floor.min(floor);
        let ratio = |worst: &Option<Worst>| worst.as_ref().map_or(-1.0, |worst| worst.ratio);
        if ratio(&worst) > ratio(&self.worst) {
            self.worst = worst;
        }
    }

    /// Whether these cases gave the claim anything to hold for.
    pub fn met(&self) -> bool {
        self.judged + self.skipped > 0
    }

    /// Failure if a number is wrong, incomplete if none of those it met could be judged.
    pub fn verdict(&self) -> Verdict {
        match (self.judged, self.skipped, self.failing) {
            (0, 1.., _) => Verdict::Incomplete,
            (_, _, 0) => Verdict::Pass,
            _ => Verdict::NumericFailure,
        }
    }
}
