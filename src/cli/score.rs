//! `sonicmoe score`: which oracle catches which planted bug.

use std::io::Write;

use clap::Args;

use crate::cli::written;
use crate::error::Result;
use crate::oracle::Verdict;
use crate::score::score;
use crate::shape::Shape;

/// Plants every known bug in the layer and prints which checks notice, beside published test suites.
///
/// A check is worth what it catches. Each mutant is run at unit scale, at scale 0.02 with and without
/// biases, and where it concerns the routing on logits that tie; every oracle of this crate and the
/// comparisons of nine published suites judge the same results, and the correct engine's too.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  sonicmoe score
  sonicmoe score --shape 509,256,136,9,2 --markdown
  sonicmoe score --json | jq '.survivors'

Exit codes: 0 every planted bug is caught and the correct engine passes, 1 an oracle rejects the
correct engine, 3 a planted bug survives.")]
pub struct ScoreArgs {
    /// T,d,n,E,K of the layer
    #[arg(long, default_value = "67,40,24,5,2")]
    pub shape: Shape,
    /// What the data are drawn from
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Print Markdown
    #[arg(long, conflicts_with = "json")]
    pub markdown: bool,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// Runs the score and prints it.
///
/// # Errors
/// A shape without tokens, or output that cannot be written.
pub fn run(args: &ScoreArgs, out: &mut dyn Write) -> Result<Verdict> {
    let score = score(args.shape, args.seed)?;
    let text = match (args.json, args.markdown) {
        (true, _) => format!("{}\n", score.json()),
        (_, true) => score.markdown(),
        _ => score.text(),
    };
    written(out.write_all(text.as_bytes()))?;
    Ok(match (score.wrongly_rejected().is_empty(), score.survivors().is_empty()) {
        (false, _) => Verdict::NumericFailure,
        (_, false) => Verdict::Vacuous,
        _ => Verdict::Pass,
    })
}
