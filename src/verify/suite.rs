//! Everything at once, for an engine of one's own.

use std::collections::BTreeMap;
use std::fmt;

use super::claim::{Claim, Finding, Tally};
use super::exact::exact_regime;
use super::museum::{Skipped, museum};
use super::{examine, laws};
use crate::case::table::edge_cases;
use crate::case::{Case, Pairing, Scale};
use crate::element::{DType, Element};
use crate::engine::Engine;
use crate::error::Result;
use crate::oracle::Verdict;
use crate::problem::Problem;
use crate::shape::Shape;

/// What the suite came to.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Every claim with what its problems came to.
    pub claims: BTreeMap<Claim, Tally>,
    /// What was wrong, with the problem.
    pub failures: Vec<(String, Finding)>,
    /// Problems that were not fed to the engine, and why.
    pub skipped: Vec<(String, String)>,
}

impl Report {
    /// The worst of all claims; incomplete if the engine accepted nothing.
    pub fn verdict(&self) -> Verdict {
        self.claims.values().filter(|tally| tally.met()).map(Tally::verdict).max().unwrap_or(Verdict::Incomplete)
    }

    fn add(&mut self, problem: &str, findings: Vec<Finding>) {
        for finding in findings {
            if finding.failing > 0 {
                self.failures.push((problem.to_owned(), finding.clone()));
            }
            self.claims.entry(finding.claim.clone()).or_default().add(finding);
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut section = None;
        for (claim, tally) in self.claims.iter().filter(|(_, tally)| tally.met()) {
            if section.replace(claim.section) != Some(claim.section) {
                writeln!(f, "{}", claim.section.title())?;
            }
            let outcome = tally.verdict().name().to_lowercase();
            writeln!(f, "  {outcome}  {}: {} judged in {} problems", claim.subject, tally.judged, tally.cases)?;
        }
        for (problem, finding) in &self.failures {
            writeln!(f, "{}, on {problem}: {}", finding.claim.subject, finding.explanation)?;
        }
        for (problem, reason) in &self.skipped {
            writeln!(f, "skipped: {problem}: {reason}")?;
        }
        write!(f, "{}", self.verdict())
    }
}

/// Feeds an engine to every oracle: the table of edge cases, the exact regime at tile edges, the
/// laws, and the museum. A problem that it does not accept is skipped, by name.
///
/// # Errors
/// What the engine returns for a problem that it has accepted.
pub fn suite<S: Element>(engine: &dyn Engine<S>) -> Result<Report> {
    let mut report = Report::default();
    for row in edge_cases() {
        judge(engine, &row.case, &mut report, |problem| Ok(examine(engine, problem)?.findings))?;
    }
    for case in exact_cases(S::DTYPE) {
        judge(engine, &case, &mut report, |problem| exact_regime(engine, problem))?;
    }
    for case in exact_cases(S::DTYPE).into_iter().filter(|case| case.scale == Scale::Exact && case.shape.t <= 64) {
        judge(engine, &case, &mut report, |problem| laws(engine, problem))?;
    }
    let (findings, skipped) = museum(engine)?;
    report.add("museum", findings);
    report.skipped.extend(skipped.into_iter().map(|Skipped { exhibit, reason }| (exhibit.to_owned(), reason)));
    Ok(report)
}

/// Given routing at tile edges, with and without biases, with both kinds of scores where the type
/// holds their sums.
fn exact_cases(storage: DType) -> Vec<Case> {
    if storage == DType::F64 {
        return Vec::new();
    }
    let scales = if storage == DType::BF16 { vec![Scale::Exact, Scale::ExactFineScores] } else { vec![Scale::Exact] };
    let mut cases = Vec::new();
    for scale in scales {
        for shape in [[1, 8, 8, 1, 1], [33, 16, 24, 5, 2], [64, 72, 64, 4, 4], [129, 136, 128, 3, 2]] {
            let [t, d, n, e, k] = shape;
            let case = Case::new(Shape { t, d, n, e, k }).with_pairing(Pairing::TopK).with_scale(scale);
            cases.extend([case.clone().with_seed(1), case.with_biases().with_seed(2)]);
        }
    }
    cases
}

fn judge<S: Element>(
    engine: &dyn Engine<S>,
    case: &Case,
    report: &mut Report,
    examine: impl FnOnce(&Problem<'_, S>) -> Result<Vec<Finding>>,
) -> Result<()> {
    let problem = case.problem::<S>()?;
    match engine.accepts(&problem) {
        Ok(()) => report.add(&case.to_string(), examine(&problem)?),
        Err(reason) => report.skipped.push((case.to_string(), reason.to_string())),
    }
    Ok(())
}
