//! `sonicmoe explain`: which known fault fits a run that fails.

use std::fmt::Write as _;
use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use crate::cli::check::{CheckArgs, Checked, check_file};
use crate::cli::conventions::Conventions;
use crate::cli::written;
use crate::dump::Model;
use crate::error::Result;
use crate::oracle::Verdict;
use crate::report::number;
use crate::score::explain::{Cause, Fault, explain};

/// Names the known bugs that fit a file that `check` does not pass.
///
/// Every planted bug of `sonicmoe score` is computed in float64 from the file's own inputs. A bug fits
/// if the file's errors point to its result (β near 1, more than six deviations from 0) and little of
/// the error is left.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  sonicmoe explain run.safetensors
  sonicmoe explain --json run.safetensors | jq '.causes[0]'

Exit codes: those of check.")]
pub struct ExplainArgs {
    /// A safetensors file, as for check
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// What the file leaves unsaid, or says wrong.
    #[command(flatten)]
    pub conventions: Conventions,
    /// As for check
    #[arg(long, value_name = "MODEL")]
    pub rounding_model: Option<Model>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// A file and the causes that fit.
#[derive(Debug)]
pub struct Explained {
    /// What check says of it.
    pub checked: Checked,
    /// The best first; none for a file that passes.
    pub causes: Vec<Cause>,
}

/// Checks and explains one file.
///
/// # Errors
/// As [`check_file`].
pub fn explain_file(args: &ExplainArgs) -> Result<Explained> {
    let ExplainArgs { file, conventions, rounding_model, json: _ } = args.clone();
    let check = CheckArgs { conventions, rounding_model, ..CheckArgs::default() };
    let checked = check_file(&file, &check)?;
    let causes = match checked.verdict {
        Verdict::NumericFailure => {
            explain(&checked.dump.problem, checked.routing(), &checked.dump.results, &checked.numerics())?
        }
        _ => Vec::new(),
    };
    Ok(Explained { checked, causes })
}

/// Explains a file and prints what was found.
///
/// # Errors
/// As [`explain_file`], and output that cannot be written.
pub fn run(args: &ExplainArgs, out: &mut dyn Write) -> Result<Verdict> {
    let explained = explain_file(args)?;
    let text = if args.json { format!("{}\n", json_of(&explained)) } else { text_of(&explained) };
    written(out.write_all(text.as_bytes()))?;
    Ok(explained.checked.verdict)
}

impl Explained {
    /// The report for people.
    pub fn text(&self) -> String {
        text_of(self)
    }
}

fn text_of(explained: &Explained) -> String {
    let Explained { checked, causes } = explained;
    let path = checked.dump.path.display();
    if checked.verdict != Verdict::NumericFailure {
        return format!("{path}: {}: nothing needs explaining\n", checked.verdict);
    }
    let faults: Vec<String> = checked.faults().iter().map(|(output, _)| output.to_string()).collect();
    let mut text = format!("{path}: {}: {} wrong\n", checked.verdict, faults.join(", "));
    if causes.is_empty() {
        text += "  no known bug fits; `sonicmoe check` says where the errors sit\n";
    }
    for (rank, cause) in causes.iter().enumerate() {
        let _ = writeln!(
            text,
            "  {}. {}; {}% of the error is left",
            rank + 1,
            words(cause.fault),
            number(100.0 * cause.unexplained)
        );
        for fit in &cause.fits {
            let _ = writeln!(text, "     {}: β {}, z {}", fit.output, number(fit.bias.beta), number(fit.bias.z));
        }
    }
    text
}

fn words(fault: Fault) -> String {
    match fault {
        Fault::Known(mutant) => format!("{mutant}: {}", mutant.does()),
        Fault::Scaled(output, beta) => {
            let direction = if beta > 0.0 { "large" } else { "small" };
            format!("scale: all of {output} is {}% too {direction}", number(100.0 * beta.abs()))
        }
    }
}

fn json_of(explained: &Explained) -> Value {
    let Explained { checked, causes } = explained;
    let float =
        |value: f64| serde_json::Number::from_f64(value).map_or_else(|| Value::from(value.to_string()), Value::Number);
    json!({
        "schema": "sonicmoe.explain/1",
        "path": checked.dump.path.display().to_string(),
        "verdict": checked.verdict.name(),
        "wrong": checked.faults().iter().map(|(output, _)| output.name()).collect::<Vec<_>>(),
        "causes": causes.iter().map(|cause| json!({
            "cause": match cause.fault {
                Fault::Known(mutant) => mutant.name(),
                Fault::Scaled(..) => "scale",
            },
            "words": words(cause.fault),
            "unexplained": float(cause.unexplained),
            "results": cause.fits.iter().map(|fit| json!({
                "result": fit.output.name(),
                "beta": float(fit.bias.beta),
                "z": float(fit.bias.z),
            })).collect::<Vec<_>>(),
        })).collect::<Vec<_>>(),
    })
}
