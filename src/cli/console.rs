//! Colours and progress, where somebody can see them.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::oracle::Verdict;

const RESET: &str = "\x1b[0m";

/// How the report is shown.
#[derive(Clone, Copy, Debug)]
pub struct Console {
    /// Whether verdicts are coloured.
    pub colours: bool,
}

impl Console {
    /// Colours only on a terminal, and not where `NO_COLOR` is set to anything.
    pub fn of_process() -> Self {
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self { colours: !refused && std::io::stdout().is_terminal() }
    }

    /// Colours each verdict that ends a line.
    pub fn paint(&self, text: &str) -> String {
        if !self.colours {
            return text.to_string();
        }
        text.split_inclusive('\n').map(paint_line).collect()
    }
}

/// What long work is at, on a terminal only.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// Shows steps of the work on `subject` if standard error is a terminal.
    pub fn of_process(subject: &str) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self::hidden();
        }
        let subject: String = subject.escape_debug().collect();
        let style = ProgressStyle::with_template("{spinner} {elapsed} {prefix}: {msg}");
        let bar = ProgressBar::new_spinner().with_prefix(subject);
        let bar = bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
        bar.enable_steady_tick(Duration::from_millis(120));
        Self(bar)
    }

    /// Counts `problems` if standard error is a terminal.
    pub fn of_problems(problems: u64) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self::hidden();
        }
        let style = ProgressStyle::with_template("{bar:40} {pos}/{len} problems, {eta} left");
        Self(ProgressBar::new(problems).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())))
    }

    /// Shows nothing.
    pub fn hidden() -> Self {
        Self(ProgressBar::hidden())
    }

    /// The next step begins.
    pub fn step(&self, what: &str) {
        self.0.set_message(what.to_owned());
    }

    /// So many problems are done.
    pub fn reach(&self, done: u64) {
        self.0.set_position(done);
    }

    /// The work is done; its line goes away.
    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}

fn paint_line(line: &str) -> String {
    const ALL: [Verdict; 6] = [
        Verdict::Pass,
        Verdict::Incomplete,
        Verdict::Vacuous,
        Verdict::NumericFailure,
        Verdict::ContractViolated,
        Verdict::InternalError,
    ];
    let end = line.trim_end();
    match ALL.into_iter().find(|verdict| end.ends_with(verdict.name())) {
        None => line.to_string(),
        Some(verdict) => {
            let (before, word) = end.split_at(end.len() - verdict.name().len());
            let colour = match verdict {
                Verdict::Pass => "\x1b[32m",
                Verdict::Incomplete | Verdict::Vacuous => "\x1b[33m",
                _ => "\x1b[31m",
            };
            format!("{before}{colour}{word}{RESET}{}", &line[end.len()..])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_verdicts_at_the_end_of_a_line_are_coloured() {
        let text = "PASS is a word\nfile: PASS\n";
        assert_eq!(Console { colours: false }.paint(text), text);
        assert_eq!(Console { colours: true }.paint(text), "PASS is a word\nfile: \x1b[32mPASS\x1b[0m\n");
    }
}
