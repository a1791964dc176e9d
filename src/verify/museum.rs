//! Every exhibit of the museum through an engine and every oracle.

use super::claim::{Claim, Finding, Section};
use super::examine::examine;
use crate::case::museum::{Answer, EXHIBITS, Exhibit};
use crate::element::Element;
use crate::engine::{Engine, Record};
use crate::error::{ErrorClass, Result};

/// An exhibit that was not fed to the engine, and why.
#[derive(Clone, Debug)]
pub struct Skipped {
    /// Its name.
    pub exhibit: &'static str,
    /// Why.
    pub reason: String,
}

/// One finding per exhibit that the engine accepts, and the others with the reason.
///
/// # Errors
/// What the engine returns for a problem that it has accepted.
pub fn museum<S: Element>(engine: &dyn Engine<S>) -> Result<(Vec<Finding>, Vec<Skipped>)> {
    let (mut findings, mut skipped) = (Vec::new(), Vec::new());
    for exhibit in EXHIBITS {
        match show(engine, exhibit)? {
            Ok(finding) => findings.push(finding),
            Err(reason) => skipped.push(reason),
        }
    }
    Ok((findings, skipped))
}

/// The finding on one exhibit, or why there is none.
///
/// # Errors
/// What the engine returns for a problem that it has accepted.
pub fn show<S: Element>(engine: &dyn Engine<S>, exhibit: Exhibit) -> Result<std::result::Result<Finding, Skipped>> {
    let place = EXHIBITS.iter().position(|other| other.name == exhibit.name).unwrap_or(EXHIBITS.len());
    let claim = Claim { section: Section::Museum, place, subject: exhibit.name.into() };
    let skipped = |reason: String| Ok(Err(Skipped { exhibit: exhibit.name, reason }));
    if let Answer::DeviceOnly(why) = exhibit.answer {
        return skipped(why.to_owned());
    }
    let to_refuse = exhibit.answer == Answer::Refusal;
    let problem = match exhibit.problem::<S>() {
        Ok(problem) => problem,
        Err(error) if to_refuse && error.class() == ErrorClass::Contract => {
            return Ok(Ok(Finding::exact(claim, 1, &[] as &[&str])));
        }
        Err(error) => return Err(error),
    };
    if let Err(reason) = engine.accepts(&problem) {
        return skipped(reason.to_string());
    }
    if to_refuse {
        let broken = match engine.forward(&problem, Record::Results) {
            Err(error) if error.class() == ErrorClass::Contract => Vec::new(),
            Err(error) => vec![format!("refused, but not for its input: {error}")],
            Ok(_) => vec!["accepted, though no result can be right".to_owned()],
        };
        return Ok(Ok(Finding::exact(claim, 1, &broken)));
    }
    let examined = examine(engine, &problem)?.findings;
    let broken: Vec<String> = examined
        .iter()
        .filter(|finding| finding.failing > 0)
        .map(|finding| format!("{}: {}", finding.claim.subject, finding.explanation))
        .collect();
    let judged = examined.iter().map(|finding| finding.judged).sum::<u64>().max(1);
    Ok(Ok(Finding::exact(claim, judged, &broken)))
}
