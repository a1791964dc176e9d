//! The report for continuous integration: a case per result.

use std::path::Path;

use super::{Checked, text};
use crate::error::Error;
use crate::oracle::Verdict;
use crate::report::junit::{Fate, Suite};

/// One file's suite.
pub(super) fn suite(path: &Path, checked: &Result<Checked, Error>) -> Suite {
    let name = path.display().to_string();
    let checked = match checked {
        Ok(checked) => checked,
        Err(error) => {
            let fate = Fate::Broken { verdict: Verdict::from(error).name(), reason: error.to_string() };
            return Suite { name, cases: vec![("the file".into(), fate)] };
        }
    };
    let Checked { dump, trial, .. } = checked;
    let mut cases = Vec::new();
    for judged in &trial.judged {
        let fate = match judged.verdict() {
            Verdict::Pass => Fate::Passed,
            verdict => Fate::Failed { verdict: verdict.name(), reason: text::cause(judged) },
        };
        cases.push((text::name_of(judged), fate));
    }
    for output in &checked.missing {
        let reason = format!("{output} is required and not in the file");
        cases.push((output.name().into(), Fate::Broken { verdict: Verdict::Incomplete.name(), reason }));
    }
    for output in &trial.unjudged {
        let reason = format!("there is no bound of it under the model {}", trial.model);
        cases.push((output.name().into(), Fate::Skipped { reason }));
    }
    for name in &dump.unused {
        cases.push((name.clone(), Fate::Skipped { reason: "no tensor of ours has this name".into() }));
    }
    Suite { name, cases }
}
