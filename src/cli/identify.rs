//! `sonicmoe identify`: which conventions explain a run.

use std::fmt::Write as _;
use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use crate::activation::Activation;
use crate::cli::conventions::Conventions;
use crate::cli::{Console, Progress, written};
use crate::dump::{self, Candidate, GatingKind, Metadata, Reading};
use crate::error::Result;
use crate::layout::GateLayout;
use crate::oracle::Verdict;
use crate::report::{Align, Table, float, number};

/// Finds out which order of gate and up, convention of scores and activation explain a run.
///
/// Every combination that the shapes allow is computed in f64 on up to 256 tokens and compared with
/// the file's o and dx. What the file says of itself is shown and not believed.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  sonicmoe identify run.safetensors
  sonicmoe identify --activation swiglu --json run.safetensors

Columns: `o` and `dx` are the median over tokens of the relative error, |file - computed| over
|computed|. `fits` says whether most tokens are within what an eager engine of the file's types
cannot exceed. Combinations in one line are one function on this file.

A convention given as a flag is the only one tried. Without --k the file's metadata or ids say K, or
all up to 16 are tried.

Exit codes: 0 the first line fits, 1 none does, 2 bad input, 4 o and dx or an input are missing.")]
pub struct IdentifyArgs {
    /// A run, with inputs
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// What is said here is not tried otherwise.
    #[command(flatten)]
    pub conventions: Conventions,
    /// How many lines to print
    #[arg(long, default_value_t = 8)]
    pub top: usize,
    /// Print one JSON document instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Ranks the readings of a file and writes them.
///
/// # Errors
/// A file that cannot be read under any of them, or output that cannot be written.
pub fn identify(args: &IdentifyArgs, console: &Console, out: &mut dyn Write) -> Result<Verdict> {
    let known = args.conventions.overrides();
    let progress = Progress::of_process(&args.file.display().to_string());
    let found = dump::identify(&args.file, &known, |reading| progress.step(&words(reading)));
    progress.finish();
    let (candidates, metadata) = found?;
    let explained = candidates.first().is_some_and(|candidate| candidate.explains);
    let verdict = if explained { Verdict::Pass } else { Verdict::NumericFailure };
    if args.json {
        written(writeln!(out, "{}", as_json(args, &candidates, &metadata, verdict)))?;
    } else {
        written(out.write_all(console.paint(&as_text(args, &candidates, &metadata, verdict)).as_bytes()))?;
    }
    Ok(verdict)
}

fn words(reading: &Reading) -> String {
    let Reading { layout, router, activation, k } = reading;
    let layout = layout.map(|layout| format!(", {layout}"));
    let k = k.map(|k| format!(", K={k}"));
    format!("{activation}, {router}{}{}", layout.unwrap_or_default(), k.unwrap_or_default())
}

fn flags(reading: &Reading) -> String {
    let Reading { layout, router, activation, k } = reading;
    let layout = layout.map(|layout| format!(" --layout {layout}"));
    let k = k.map(|k| format!(" --k {k}"));
    format!("--router {router}{} --activation {activation}{}", layout.unwrap_or_default(), k.unwrap_or_default())
}

fn as_text(args: &IdentifyArgs, candidates: &[Candidate], metadata: &Metadata, verdict: Verdict) -> String {
    let mut text = format!("{}\n", args.file.display());
    let declared: Vec<&str> = [
        metadata.activation.map(|activation| activation.name()),
        metadata.router.map(|router| router.name()),
        metadata.layout.map(|layout| layout.name()),
    ]
    .into_iter()
    .flatten()
    .collect();
    if !declared.is_empty() {
        let _ = writeln!(text, "  declares: {}", declared.join(", "));
    }
    text.push('\n');
    let mut headers = vec![("reading", Align::Left)];
    let names: Vec<&str> =
        candidates.iter().take(1).flat_map(|first| &first.residuals).map(|(o, _)| o.name()).collect();
    headers.extend(names.into_iter().map(|name| (name, Align::Right)));
    headers.push(("fits", Align::Left));
    let mut table = Table::new(headers);
    for candidate in candidates.iter().take(args.top) {
        let residuals = candidate.residuals.iter().map(|(_, residual)| number(*residual));
        let fits = if candidate.explains { "yes" } else { "no" }.to_owned();
        let reading = candidate.readings.iter().map(words).collect::<Vec<_>>().join("  =  ");
        table.row([reading].into_iter().chain(residuals).chain([fits]));
    }
    text += &table.to_string();
    if candidates.len() > args.top {
        let _ = writeln!(text, "and {} more", candidates.len() - args.top);
    }
    text.push('\n');
    if let Some(first) = candidates.first() {
        if first.readings.len() > 1 {
            text += "The readings in the first line are one function here: no result tells them apart.\n";
        }
        if let [first, second, ..] = candidates {
            let times = second.residual() / first.residual();
            let _ = writeln!(text, "The second line is {} times as far away.", number(times));
        }
        if let Some(reading) = first.readings.first() {
            let _ = writeln!(text, "check it: sonicmoe check {} {}", flags(reading), args.file.display());
        }
    }
    let said = if verdict == Verdict::Pass { "explained" } else { "no combination explains it" };
    let _ = writeln!(text, "{}: {said}: {verdict}", args.file.display());
    text
}

fn as_json(args: &IdentifyArgs, candidates: &[Candidate], metadata: &Metadata, verdict: Verdict) -> Value {
    let reading = |Reading { layout, router, activation, k }: &Reading| {
        json!({
            "w1_layout": layout.map(GateLayout::name), "router": router.name(), "activation": activation.name(), "K": k,
        })
    };
    let candidate = |candidate: &Candidate| {
        let residuals =
            candidate.residuals.iter().map(|(output, residual)| (output.name().to_owned(), float(*residual)));
        json!({
            "readings": candidate.readings.iter().map(reading).collect::<Vec<_>>(),
            "residuals": residuals.collect::<serde_json::Map<_, _>>(), "fits": candidate.explains,
        })
    };
    json!({
        "schema": "sonicmoe.identify/1", "path": args.file.display().to_string(),
        "declared": {
            "w1_layout": metadata.layout.map(GateLayout::name), "router": metadata.router.map(GatingKind::name),
            "activation": metadata.activation.map(Activation::name), "K": metadata.k,
        },
        "candidates": candidates.iter().map(candidate).collect::<Vec<_>>(),
        "verdict": verdict.name(), "exit_code": verdict.code(),
    })
}
