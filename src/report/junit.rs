//! JUnit XML, as continuous integration reads it: a suite per file, a case per result.

use super::markup::Markup;

/// What became of one case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It was judged and is right.
    Passed,
    /// It was judged and does not pass; the word is the verdict.
    Failed {
        /// The verdict.
        verdict: &'static str,
        /// Why.
        reason: String,
    },
    /// It could not be judged, and that is a fault.
    Broken {
        /// The verdict.
        verdict: &'static str,
        /// Why.
        reason: String,
    },
    /// It was not judged, and did not have to be.
    Skipped {
        /// Why.
        reason: String,
    },
}

/// The cases of one file.
#[derive(Clone, Debug, Default)]
pub struct Suite {
    /// The file.
    pub name: String,
    /// What was judged, and what became of it.
    pub cases: Vec<(String, Fate)>,
}

impl Suite {
    /// How many cases have the fate that `counts` names.
    fn count(&self, counts: fn(&Fate) -> bool) -> usize {
        self.cases.iter().filter(|(_, fate)| counts(fate)).count()
    }
}

/// Counted in the attributes of suites: tests, failures, errors, skipped.
const COUNTED: [fn(&Fate) -> bool; 4] = [
    |_| true,
    |fate| matches!(fate, Fate::Failed { .. }),
    |fate| matches!(fate, Fate::Broken { .. }),
    |fate| matches!(fate, Fate::Skipped { .. }),
];

/// The whole document.
pub fn document(name: &str, suites: &[Suite]) -> String {
    let mut xml = Markup::default();
    xml.literal("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let totals = COUNTED.map(|counts| suites.iter().map(|suite| suite.count(counts)).sum::<usize>());
    open(&mut xml, "testsuites", name, totals);
    for suite in suites {
        open(&mut xml, "testsuite", &suite.name, COUNTED.map(|counts| suite.count(counts)));
        for (case, fate) in &suite.cases {
            xml.open("testcase", &[("name", case), ("classname", &suite.name)]);
            match fate {
                Fate::Passed => {}
                Fate::Failed { verdict, reason } => {
                    xml.leaf("failure", &[("type", verdict), ("message", reason)], reason);
                }
                Fate::Broken { verdict, reason } => {
                    xml.leaf("error", &[("type", verdict), ("message", reason)], reason);
                }
                Fate::Skipped { reason } => xml.empty("skipped", &[("message", reason)]),
            }
            xml.close("testcase");
        }
        xml.close("testsuite");
    }
    xml.close("testsuites");
    xml.finish()
}

fn open(xml: &mut Markup, tag: &'static str, name: &str, counts: [usize; 4]) {
    let [tests, failures, errors, skipped] = &counts;
    xml.open(
        tag,
        &[("name", &name), ("tests", tests), ("failures", failures), ("errors", errors), ("skipped", skipped)],
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_counted_by_their_fate_and_names_are_escaped() {
        let failed = Fate::Failed { verdict: "FAIL", reason: "2 < 3".into() };
        let broken = Fate::Broken { verdict: "INCOMPLETE", reason: "no dx".into() };
        let cases = vec![("o".into(), Fate::Passed), ("dw1".into(), failed), ("dx".into(), broken)];
        let text = document("check", &[Suite { name: "<a>".into(), cases }]);
        assert!(text.contains("<testsuite name=\"&lt;a&gt;\" tests=\"3\" failures=\"1\" errors=\"1\" skipped=\"0\">"));
        assert!(text.contains("<failure type=\"FAIL\" message=\"2 &lt; 3\">2 &lt; 3</failure>"), "{text}");
    }
}
