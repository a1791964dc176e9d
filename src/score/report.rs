//! The matrix as text, Markdown and JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{Comparator, Fate, Oracle, Regime, Score, groups_of};
use crate::mutant::Mutant;
use crate::report::{Align, Table};

/// The form of the JSON document; it changes with any change of meaning.
const SCHEMA: &str = "sonicmoe.score/1";

impl Score {
    /// For people: what was run, the matrix, what it comes to.
    pub fn text(&self) -> String {
        format!("{}\n{}\n{}", self.heading(), self.table(), self.summary())
    }

    /// The same as Markdown.
    pub fn markdown(&self) -> String {
        let paragraphs = |text: String| text.lines().fold(String::new(), |text, line| text + line + "\n\n");
        format!("{}{}\n{}", paragraphs(self.heading()), self.table().markdown(), paragraphs(self.summary()))
    }

    /// The same for programs.
    pub fn json(&self) -> Value {
        let fates = |fates: &std::collections::BTreeMap<Regime, Fate>| -> Value {
            fates.iter().map(|(regime, fate)| (regime.name().to_owned(), of_fate(fate))).collect()
        };
        json!({
            "schema": SCHEMA,
            "shape": self.shape.to_string(),
            "seed": self.seed,
            "correct": fates(&self.correct),
            "mutants": self.mutants.iter().map(|(&mutant, by_regime)| json!({
                "name": mutant.name(),
                "class": format!("{:?}", mutant.class()),
                "does": mutant.does(),
                "expected": Oracle::expected(mutant).name(),
                "equivalent": self.equivalent(mutant),
                "regimes": fates(by_regime),
            })).collect::<Vec<_>>(),
            "survivors": self.survivors().iter().map(|mutant| mutant.name()).collect::<Vec<_>>(),
            "wrongly_rejected": self.wrongly_rejected().iter().map(|(regime, oracle)| {
                json!({ "regime": regime.name(), "oracle": oracle.name() })
            }).collect::<Vec<_>>(),
        })
    }

    fn heading(&self) -> String {
        let oracles: Vec<String> =
            Oracle::ALL.iter().map(|oracle| format!("{} {}", oracle.letter(), oracle.name())).collect();
        let regimes: Vec<String> =
            Regime::ALL.iter().map(|regime| format!("{} {}", regime.letter(), regime.name())).collect();
        format!(
            "{} planted bugs in a bf16 layer of T,d,n,E,K = {} (E = {} with groups), seed {}.\n\
             Under a regime: the oracles of this crate that reject the run. {}; = not a fault there; – nobody.\n\
             Under a suite: the regimes in which its comparison rejects the run. {}.\n",
            self.mutants.len(),
            self.shape,
            groups_of(self.shape).0.e,
            self.seed,
            oracles.join(", "),
            regimes.join(", "),
        )
    }

    fn table(&self) -> Table {
        let columns = [("planted bug", Align::Left)]
            .into_iter()
            .chain(Regime::ALL.iter().map(|regime| (regime.name(), Align::Left)))
            .chain(Comparator::ALL.iter().map(|comparator| (comparator.name(), Align::Left)));
        let mut table = Table::new(columns);
        let row = |name: &str, fates: &std::collections::BTreeMap<Regime, Fate>| -> Vec<String> {
            let by_regime = Regime::ALL.iter().map(|regime| match fates.get(regime) {
                None => String::new(),
                Some(Fate { equivalent: Some(_), .. }) => "=".to_owned(),
                Some(fate) if fate.oracles.is_empty() => "–".to_owned(),
                Some(fate) => fate.oracles.iter().map(|oracle| oracle.letter()).collect(),
            });
            let by_comparator = Comparator::ALL.iter().map(|comparator| {
                let refusing = fates.iter().filter(|(_, fate)| fate.comparators.contains(comparator));
                let letters: String = refusing.map(|(regime, _)| regime.letter()).collect();
                if letters.is_empty() { "–".to_owned() } else { letters }
            });
            [name.to_owned()].into_iter().chain(by_regime).chain(by_comparator).collect()
        };
        table.row(row("none: the correct engine", &self.correct));
        for (&mutant, fates) in &self.mutants {
            let cells = row(mutant.name(), fates);
            table.row(cells);
        }
        table
    }

    fn summary(&self) -> String {
        let mut text = String::new();
        for regime in Regime::ALL {
            let faults: Vec<&Fate> = self.faults(regime).map(|(_, fate)| fate).collect();
            let killed = faults.iter().filter(|fate| !fate.oracles.is_empty()).count();
            let _ = write!(text, "{}: {killed} of {} faults killed", regime.name(), faults.len());
            if regime != Regime::Routing {
                let each = Comparator::ALL.iter().map(|comparator| {
                    let killed = faults.iter().filter(|fate| fate.comparators.contains(comparator)).count();
                    let rejects_correct = self.correct[&regime].comparators.contains(comparator);
                    let mark = if rejects_correct { " (and the correct engine)" } else { "" };
                    format!("{} {killed}{mark}", comparator.name())
                });
                let _ = write!(text, "; {}", each.collect::<Vec<_>>().join(", "));
            }
            text += ".\n";
        }
        let equivalent: Vec<String> = self
            .mutants
            .keys()
            .filter_map(|&mutant| self.equivalent(mutant).map(|reason| format!("{mutant} ({reason})")))
            .collect();
        if !equivalent.is_empty() {
            let _ = writeln!(text, "No fault anywhere: {}.", equivalent.join(", "));
        }
        let names = |names: Vec<String>| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        let _ = writeln!(
            text,
            "Survive every oracle: {}.",
            names(self.survivors().iter().map(|m| m.to_string()).collect())
        );
        let wrongly = self.wrongly_rejected();
        let wrongly = wrongly.iter().map(|(regime, oracle)| format!("{} in {}", oracle.name(), regime.name()));
        let _ = writeln!(text, "Oracles that reject the correct engine: {}.", names(wrongly.collect()));
        text
    }

    fn faults(&self, regime: Regime) -> impl Iterator<Item = (Mutant, &Fate)> {
        let all = self.mutants.iter().filter_map(move |(&mutant, fates)| Some((mutant, fates.get(&regime)?)));
        all.filter(|(_, fate)| fate.equivalent.is_none())
    }
}

fn of_fate(fate: &Fate) -> Value {
    json!({
        "equivalent": fate.equivalent,
        "oracles": fate.oracles.iter().map(|oracle| oracle.name()).collect::<Vec<_>>(),
        "comparators": fate.comparators.iter().map(|comparator| comparator.name()).collect::<Vec<_>>(),
    })
}
