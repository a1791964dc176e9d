//! `sonicmoe replay` and `sonicmoe shrink`: a failing case again, and smaller.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;

use crate::cli::{Console, Progress, written};
use crate::error::Result;
use crate::oracle::Verdict;
use crate::verify::{self, CaseId, Section};

/// Repeats one case bit by bit, by the line that a failure prints.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  sonicmoe replay 1/33,16,24,5,2/swiglu+biases/topk_over_softmax,zipf/unit/7/cpu-bf16/layer:dx
  sonicmoe replay 1/museum:column-tail/cpu-bf16
  sonicmoe replay 1/17,8,8,3,1/silu/counts.16.0.1/unit/0/cpu-f32/kernel:1-up-forward-h

A case is form/T,d,n,E,K/activation[+biases]/routing/scale/seed/engine/section:subject. Routing is a
router with its load (uniform, biased, zipf, without.0.5), given (K random experts per token) or
counts (tokens of every expert). Engines: cpu-bf16, cpu-f16, cpu-f32, cpu-f64, cuda-bf16, or one of
the CPU with a planted bug, such as cpu-bf16+SignInO. Sections:
agreement, kernel, layer, exact_regime, laws, exact; or the exhibit of a museum.

Exit codes: 0 it passes, 1 it fails, 2 no such case, 4 the oracle has nothing to judge in it, or the
device is missing.")]
pub struct ReplayArgs {
    /// The case
    #[arg(value_name = "CASE")]
    pub case: CaseId,
}

/// Makes a failing case small: fewer tokens, then experts, then narrower, then simpler numbers.
///
/// The result and the oracle that it fails before stay the same.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Example, with a planted bug:
  sonicmoe shrink --write small.safetensors 1/65,33,24,7,3/swiglu/given/unit/5/cpu-bf16+SignInO/layer:o

Exit codes: 1 a smaller failing case was found, or this is the smallest; 2 no such case, or one that
does not fail; 4 the device is missing.")]
pub struct ShrinkArgs {
    /// The case
    #[arg(value_name = "CASE")]
    pub case: CaseId,
    /// Write the small case as a dump, with what the engine returned
    #[arg(long, value_name = "FILE")]
    pub write: Option<PathBuf>,
}

/// Runs a case again.
///
/// # Errors
/// A case that cannot be drawn, an engine that is not there, or output that cannot be written.
pub fn replay(args: &ReplayArgs, console: &Console, out: &mut dyn Write) -> Result<Verdict> {
    let replay = args.case.replay()?;
    let (said, verdict) = match &replay.finding {
        None => ("this oracle judges nothing in this case".to_owned(), Verdict::Incomplete),
        Some(finding) if finding.failing > 0 => (finding.explanation.clone(), Verdict::NumericFailure),
        Some(finding) if finding.judged == 0 => ("nothing was judged".to_owned(), Verdict::Incomplete),
        Some(finding) => (format!("{} numbers or facts are right", finding.judged), Verdict::Pass),
    };
    let exhibit = args.case.oracle.section == Section::Museum;
    let of = if exhibit { String::new() } else { format!("  {}\n", args.case.case) };
    let text =
        format!("{}\n{of}  {said}\n  all results, bit by bit: {:016x}\n{verdict}\n", args.case, replay.fingerprint);
    written(out.write_all(console.paint(&text).as_bytes()))?;
    Ok(verdict)
}

/// Makes a case small and says what is left of it.
///
/// # Errors
/// A case that does not fail, an engine that is not there, or output that cannot be written.
pub fn shrink(args: &ShrinkArgs, console: &Console, out: &mut dyn Write) -> Result<Verdict> {
    let progress = Progress::of_process("shrinking");
    let shrunk = verify::shrink(&args.case, args.write.as_deref());
    progress.finish();
    let shrunk = shrunk?;
    let [before, after] = shrunk.nonzeros;
    let mut text = format!(
        "{}\nafter {} runs of the engine:\n{}\n  {}\n  of its {before} numbers other than 0 {after} are left: {}\n",
        args.case, shrunk.trials, shrunk.id, shrunk.id.case, shrunk.explanation
    );
    if let Some(path) = &args.write {
        text += &format!("written to {0}: sonicmoe check {0}\n", path.display());
    }
    text += &format!("{}\n", Verdict::NumericFailure);
    written(out.write_all(console.paint(&text).as_bytes()))?;
    Ok(Verdict::NumericFailure)
}
