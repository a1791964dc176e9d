//! The report for people.

use std::fmt::Write;
use std::path::Path;

use super::Checked;
use super::given_scores::needs_scores;
use super::trial::{Judged, Trial};
use crate::dump::{Dump, Source};
use crate::engine::{Output, RoundingModel};
use crate::error::Error;
use crate::oracle::statistic::LIMIT;
use crate::oracle::{Judgement, Verdict, Worst};
use crate::problem::Gating;
use crate::report::{Align, Table, count, number};

/// All that is said of one file; the last line is its verdict.
pub(super) fn file(path: &Path, checked: &Result<Checked, Error>) -> String {
    let path = path.display();
    match checked {
        Ok(checked) => of_checked(checked),
        Err(error) => {
            let verdict = Verdict::from(error);
            let message = error.to_string();
            let message = message.strip_prefix(&format!("{path}: ")).unwrap_or(&message);
            format!("{path}: {message}: {verdict}\n")
        }
    }
}

/// The line below several files.
pub(super) fn summary(tally: &[Verdict], worst: Verdict) -> String {
    let mut kinds: Vec<Verdict> = tally.to_vec();
    kinds.sort_unstable();
    kinds.dedup();
    let counted = kinds.iter().map(|kind| {
        let files = tally.iter().filter(|verdict| *verdict == kind).count();
        format!("{files} {kind}")
    });
    format!("{} files: {}; together: {worst}\n", tally.len(), counted.collect::<Vec<_>>().join(", "))
}

pub(super) fn of_checked(checked: &Checked) -> String {
    let Checked { dump, trial, verdict, .. } = checked;
    let mut text = format!("{}\n", dump.path.display());
    for line in heading(dump) {
        let _ = writeln!(text, "  {line}");
    }
    for line in routing(dump, trial) {
        let _ = writeln!(text, "  {line}");
    }
    text.push('\n');
    for line in results(trial).to_string().lines() {
        let _ = writeln!(text, "  {line}");
    }
    text.push('\n');
    let (remarks, repeat) = remarks_on(checked);
    for line in remarks {
        let _ = writeln!(text, "  {line}");
    }
    if let Some(repeat) = repeat {
        let _ = writeln!(text, "  repeat: {repeat}");
        if *verdict == Verdict::NumericFailure {
            let _ = writeln!(text, "  why: sonicmoe explain {}", dump.path.display());
        }
    }
    let _ = writeln!(text, "{}: {}: {verdict}\n", dump.path.display(), summary_of(checked));
    text
}

/// Why results do not pass, what else there is to say, and the command that repeats a failure.
pub(super) fn remarks_on(checked: &Checked) -> (Vec<String>, Option<String>) {
    let Checked { dump, refused, trial, .. } = checked;
    let failing: Vec<&Judged> = trial.judged.iter().filter(|judged| judged.verdict() != Verdict::Pass).collect();
    let causes = failing.iter().map(|judged| cause(judged));
    let refused = refused.iter().map(|(model, reason)| format!("not {}: {reason}", model.words()));
    let lines = causes.chain(refused).chain(remarks(dump, trial)).collect();
    let repeat = (!failing.is_empty()).then(|| {
        let mut names: Vec<Output> = failing.iter().map(|judged| judged.judgement.output).collect();
        names.sort_unstable();
        names.dedup();
        // Where most of a file fails, the command repeats all of it.
        names.truncate(if names.len() > 4 { 0 } else { 4 });
        let only: String = names.iter().map(|output| format!(" --only {output}")).collect();
        format!("sonicmoe check --rounding-model {}{only} {}", trial.model, dump.path.display())
    });
    (lines, repeat)
}

/// A result's name, with the kernel that it was judged for.
pub(super) fn name_of(judged: &Judged) -> String {
    let output = judged.judgement.output;
    judged.kernel.map_or_else(|| output.to_string(), |kernel| format!("{output} of {kernel}"))
}

pub(super) fn heading(dump: &Dump) -> Vec<String> {
    let problem = &dump.problem;
    let sizes = [problem.t(), problem.d(), problem.n(), problem.e()].map(|size| size.to_string()).join(",");
    let from = match problem.gating() {
        Gating::Router(router) => format!("K={}, router {}", router.k, router.convention),
        Gating::Given { routing, .. } => format!("R={} given pairs", routing.routed()),
    };
    let biases = if problem.b1().is_some() { ", biases" } else { "" };
    let order = if problem.activation().gated() { format!(", w1 {}", dump.layout) } else { String::new() };
    let mut lines = vec![format!("T,d,n,E={sizes}, {from}, {}{biases}{order}, {}", problem.activation(), dump.storage)];
    let producer = dump.metadata.producer.iter().map(|producer| format!("producer: {}", producer.escape_debug()));
    let declared = dump.metadata.rounding_model.map(|model| match model {
        RoundingModel::Fused => "declares: fused".to_string(),
        RoundingModel::Eager => "declares: eager".to_string(),
    });
    let about: Vec<String> = producer.chain(declared).collect();
    if !about.is_empty() {
        lines.push(about.join("; "));
    }
    lines
}

pub(super) fn routing(dump: &Dump, trial: &Trial) -> Vec<String> {
    let chosen = &trial.chosen;
    let mut lines = Vec::new();
    match chosen.source {
        Source::Given => {}
        Source::Ids => lines.push("choice: the file's ids, each optimal within the error of its logits".to_string()),
        Source::Logits => lines.push("choice: from the file's logits".to_string()),
        Source::Computed => {
            lines.push("choice: inferred from x and router_w, the file has no ids or logits".to_string())
        }
    }
    if chosen.ambiguous > 0 {
        lines.push(format!(
            "{} tokens have more than one choice that is optimal within the error of their logits; {} of {} follow \
             the rows of o and dx in the file",
            chosen.ambiguous,
            chosen.ambiguous - chosen.untried,
            chosen.ambiguous
        ));
    }
    if chosen.departing > 0 {
        lines.push(format!("{} tokens are not sent to the exact top-K of these logits", chosen.departing));
    }
    lines.extend(trial.counts.iter().map(|held| format!("counts: {held}")));
    lines.extend(dump.notes.iter().map(|note| format!("note: {note}")));
    if dump.mixed {
        lines.push(format!("the tensors have several types; bounds are those of the coarsest, {}", dump.storage));
    }
    lines
}

/// The judgement of every result.
pub(super) fn results(trial: &Trial) -> Table {
    let mut table = Table::new([
        ("result", Align::Left),
        ("type", Align::Left),
        ("elements", Align::Right),
        ("worst error", Align::Right),
        ("bound", Align::Right),
        ("ratio", Align::Right),
        ("floor", Align::Right),
        ("bound/rms", Align::Right),
        ("verdict", Align::Left),
    ]);
    for judged in &trial.judged {
        let Judgement { elements, worst, floor, median_bound_over_rms, .. } = &judged.judgement;
        let (error, bound, ratio) = match worst {
            Some(Worst { value, reference, bound, ratio, .. }) => {
                (number((value - reference).abs()), number(*bound), number(*ratio))
            }
            None => ("–".into(), "–".into(), "–".into()),
        };
        table.row([
            name_of(judged),
            judged.dtype.to_string(),
            count(*elements as u64),
            error,
            bound,
            ratio,
            number(*floor),
            if median_bound_over_rms.is_nan() { "–".into() } else { number(*median_bound_over_rms) },
            judged.verdict().to_string(),
        ]);
    }
    table
}

/// Why a result does not pass.
pub(super) fn cause(judged: &Judged) -> String {
    let Judgement { elements, skipped, failing, worst, clusters, .. } = &judged.judgement;
    let mut text = format!("{}: ", name_of(judged));
    if *failing > 0 {
        let _ =
            write!(text, "{} of {} elements are beyond their bound", count(*failing as u64), count(*elements as u64));
        if let Some(Worst { at, value, reference, bound, ratio }) = worst {
            let _ = write!(
                text,
                "; worst at {at:?}: {value:e}, truth {reference:e}, bound {}, ratio {}",
                number(*bound),
                number(*ratio)
            );
        }
        for cluster in clusters {
            let _ = write!(text, "; {cluster}");
        }
    } else if !judged.biased.is_empty() {
        let _ = write!(text, "within its bound, but biased: {}", judged.biased.join(", "));
    } else if skipped == elements {
        text += "no element could be judged: all may lie beyond the range of the type";
    } else {
        let _ = write!(text, "this check could not have failed: {} would pass too", judged.impostors.join(", "));
    }
    text
}

fn remarks(dump: &Dump, trial: &Trial) -> Vec<String> {
    let mut lines = Vec::new();
    for judged in &trial.judged {
        let Judgement { output, elements, skipped, .. } = &judged.judgement;
        if *skipped > 0 {
            let (skipped, elements) = (count(*skipped as u64), count(*elements as u64));
            lines.push(format!("{output}: {skipped} of {elements} elements not judged, beyond the range of the type"));
        }
        if let Some(ratio) = judged.twin {
            let deviations = number(ratio * LIMIT);
            lines.push(format!(
                "{output}: its bound alone could not have failed; the largest error is {deviations} standard \
                 deviations of a correct run on random data, of {LIMIT} allowed"
            ));
        }
    }
    if let Some(reason) = &trial.dependent {
        lines.push(format!("bias was not judged: {reason}"));
    } else if trial.judged.iter().any(|judged| judged.verdict() == Verdict::Vacuous && needs_scores(dump, judged)) {
        lines.push("with `scores`, `token_idx` and `expert_idx` in the file the experts are judged by them".into());
    }
    let of_dlogits = |judged: &Judged| matches!(judged.judgement.output, Output::DrouterW | Output::DrouterB);
    if !dump.results.contains_key(&Output::Dlogits)
        && trial.judged.iter().any(|judged| judged.verdict() == Verdict::Vacuous && of_dlogits(judged))
    {
        lines.push("with `dlogits` in the file drouter_w and drouter_b are judged from them".into());
    }
    if !dump.missing.is_empty() {
        let names: Vec<&str> = dump.missing.iter().map(|output| output.name()).collect();
        lines.push(format!("required and not in the file: {}", names.join(", ")));
    }
    if !trial.unjudged.is_empty() {
        let names: Vec<&str> = trial.unjudged.iter().map(|output| output.name()).collect();
        lines.push(format!("not judged under this model: {}", names.join(", ")));
    }
    if !dump.unused.is_empty() {
        let names: Vec<String> = dump.unused.iter().map(|name| format!("`{}`", name.escape_debug())).collect();
        lines.push(format!("not read: {}", names.join(", ")));
    }
    lines
}

/// What the verdict says in words, with the model.
pub(super) fn summary_of(checked: &Checked) -> String {
    let Checked { dump, refused, trial, .. } = checked;
    let words = trial.model.words();
    let results = trial.judged.iter().filter(|judged| judged.kernel.is_none()).count();
    if trial.judged.is_empty() && !dump.missing.is_empty() {
        let names: Vec<&str> = dump.missing.iter().map(|output| output.name()).collect();
        return format!("inputs without results; run the layer and add {}", names.join(", "));
    }
    if !trial.passes() {
        return format!("wrong even under the rounding model {words}");
    }
    let largest = trial.judged.iter().map(|judged| judged.judgement.ratio()).fold(0.0, f64::max);
    let needed = if refused.is_empty() { "as" } else { "only as" };
    let missing = match dump.missing.len() {
        0 => String::new(),
        1 => ", 1 required result is missing".into(),
        missing => format!(", {missing} required results are missing"),
    };
    format!("{results} results right {needed} {words}, largest ratio {}{missing}", number(largest))
}
