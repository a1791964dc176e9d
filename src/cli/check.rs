//! `sonicmoe check`: the results in a file against the f64 truth of the file's own inputs.

mod given_scores;
mod html;
mod json;
mod junit;
mod sweep;
mod text;
mod trial;

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;

use crate::cli::conventions::Conventions;
use crate::cli::{Console, Progress, written};
use crate::dump::{Dump, Model};
use crate::engine::{Numerics, Output};
use crate::error::{Error, Result};
use crate::oracle::Verdict;
use crate::report;
use crate::routing::Routing;
use trial::Trial;

/// Checks the outputs and gradients that any MoE implementation wrote to a file.
///
/// The layer is computed in float64 from the file's inputs, and every element of every result gets
/// the largest error that a correct implementation can have by its own rounding. No tolerance is
/// chosen by anybody. A result fails beyond its bound, and is VACUOUS if a wrong result (zeros,
/// a constant, sign flipped, rows shifted, gate and up swapped) would have passed too.
#[derive(Args, Clone, Debug, Default)]
#[command(after_long_help = HELP)]
pub struct CheckArgs {
    /// safetensors or .npz files, or directories of .npy files, one run each
    #[arg(required_unless_present = "json_schema", value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// What the file leaves unsaid, or says wrong.
    #[command(flatten)]
    pub conventions: Conventions,
    /// Judge under this model only: fused, fused_tensor_router or eager. Without it they are tried
    /// in this order, up to the one that the file declares, and the report says which was needed
    #[arg(long, value_name = "MODEL")]
    pub rounding_model: Option<Model>,
    /// How far exp and the like may err, in last places of the accumulator
    #[arg(long, value_name = "ULPS")]
    pub function_ulps: Option<f64>,
    /// Judge only this result, for example dx; may be repeated
    #[arg(long, value_name = "RESULT", value_parser = output)]
    pub only: Vec<Output>,
    /// Print one JSON document for programs instead of tables; --json-schema describes it
    #[arg(long)]
    pub json: bool,
    /// Print the JSON Schema of what --json prints, and check nothing
    #[arg(long, exclusive = true)]
    pub json_schema: bool,
    /// Write a JUnit XML report too: a suite per file, a case per result
    #[arg(long, value_name = "REPORT")]
    pub junit: Option<PathBuf>,
    /// Write a page with pictures too: one HTML file that needs no other
    #[arg(long, value_name = "REPORT")]
    pub html: Option<PathBuf>,
}

const HELP: &str = "\
Examples:
  sonicmoe check run.safetensors                      the file says its conventions itself
  sonicmoe check --router given --layout concatenated_gate_first --activation swiglu run.safetensors
  sonicmoe check --map x=hidden_states --map o=output run.safetensors
  sonicmoe check --json runs/*.safetensors | jq .verdict
  sonicmoe check --html report.html --junit report.xml run.safetensors

Tensors in a file (T tokens, d model width, n expert width, E experts, R routed pairs):
  x, dout (T,d)   w1 (E,2n,d)   w2 (E,d,n)   optional b1 (E,2n), b2 (E,d)
  routing:  router_w (E,d), optional router_b (E), router_logits (T,E); or token_idx, expert_idx,
            scores (R). Behind a grouped_sigmoid router selection_bias (E)
  a shared expert, SwiGLU added to o: shared_gate, shared_up (n,d), shared_down (d,n) and dshared_gate,
            dshared_up, dshared_down
  required: o, dx (T,d)  dw1  dw2; db1, db2 with biases; drouter_w (drouter_b) with a router, ds (R)
            with given routing
  optional: dlogits, expert_frequency, topk_frequency; with a router token_idx and expert_idx (T·K,
            token by token) and then ds and scores in their order; and what passes between the
            kernels, rows in expert order: h, a, y, dh, a_prime, dx_expanded
Types: F64, F32, BF16, F16, each tensor its own. Metadata strings: router, w1_layout, activation, K;
optional rounding_model (fused or eager), token_rounding, tile, producer, seed. Flags win.

Routers: softmax_over_topk, topk_over_softmax, topk_over_softmax_renormalized, given, or DeepSeek-V3's as
grouped_sigmoid:groups=4,kept=2,renormalized=true,factor=2.5.

Files with the names of a gpt-oss or DeepSeek-V3 checkpoint (param.experts.gate_up_proj, grad.…, a JSON
config among the strings) are read as they are, beside x, dout, o and dx.

numpy: an uncompressed archive or a directory of arrays; arrays without axes are the strings. bfloat16 of
ml_dtypes, which numpy stores as V2, is read as such.
  np.savez('run.npz', x=x, w1=w1, …, router='topk_over_softmax', activation='swiglu', K=2)

From Python:
  safetensors.torch.save_file(dict(x=x, w1=w1, w2=w2, dout=dout, router_w=router_w, o=o, dx=x.grad,
    dw1=w1.grad, dw2=w2.grad, drouter_w=router_w.grad), 'run.safetensors', metadata=dict(
    router='topk_over_softmax', w1_layout='concatenated_gate_first', activation='swiglu', K='2'))

Columns: `ratio` is error over bound at the worst element; above 1 it fails. `floor` is the smallest
uniform relative error that would have failed. `bound/rms` is the median bound over the root mean
square of the truth: near 1 a bound says little.

Exit codes: 0 pass, 1 a number is wrong, 2 bad input or malformed file, 3 vacuous (the check could
not have failed), 4 something required is missing, 5 a fault of this program. The worst by the order
5, 2, 1, 3, 4, 0 wins.";

fn output(text: &str) -> Result<Output> {
    let mut all = Output::RESULTS.into_iter().chain(Output::INTERMEDIATES);
    all.find(|output| output.name() == text).ok_or_else(|| {
        Error::unknown("result", text, Output::RESULTS.into_iter().chain(Output::INTERMEDIATES).map(Output::name))
    })
}

impl CheckArgs {
    fn judges(&self, output: Output) -> bool {
        self.only.is_empty() || self.only.contains(&output)
    }
}

/// What one file came to.
#[derive(Debug)]
pub struct Checked {
    /// The file, read.
    pub dump: Dump,
    /// Models under which it is wrong, tightest first, each with the reason.
    pub refused: Vec<(Model, String)>,
    /// The trial that it passed, or the last.
    trial: Trial,
    /// Required results that were asked for and are not in the file.
    pub missing: Vec<Output>,
    /// The verdict on the file.
    pub verdict: Verdict,
}

impl Checked {
    /// The model of the trial that the file passed; of the last one if it passed none.
    pub fn model(&self) -> Model {
        self.trial.model
    }

    /// The layer's results that do not pass, with the verdict on each.
    pub fn faults(&self) -> Vec<(Output, Verdict)> {
        let faults = self.trial.judged.iter().map(|judged| (judged.judgement.output, judged.verdict()));
        faults.filter(|(_, verdict)| *verdict != Verdict::Pass).collect()
    }

    /// The routing that the last trial judged by.
    pub(crate) fn routing(&self) -> &Routing {
        &self.trial.chosen.routing
    }

    /// The arithmetic that it took for granted.
    pub(crate) fn numerics(&self) -> Numerics {
        self.trial.numerics
    }

    /// The report for people.
    pub fn report(&self) -> String {
        text::of_checked(self)
    }
}

/// Checks every file and writes the report; the verdict is the worst.
///
/// # Errors
/// Output that cannot be written.
pub fn check(args: &CheckArgs, console: &Console, out: &mut dyn Write) -> Result<Verdict> {
    if args.json_schema {
        written(out.write_all(json::SCHEMA_DOCUMENT.as_bytes()))?;
        return Ok(Verdict::Pass);
    }
    let mut worst = Verdict::Pass;
    let mut tally: Vec<Verdict> = Vec::new();
    // Reports are made file by file: the tensors of one are gone before the next is read.
    let (mut files, mut suites, mut articles) = (Vec::new(), Vec::new(), Vec::new());
    for path in &args.files {
        let progress = Progress::of_process(&path.display().to_string());
        let checked = judge_file(path, args, &progress);
        progress.finish();
        let verdict = checked.as_ref().map_or_else(|error| error.into(), |checked| checked.verdict);
        worst = worst.max(verdict);
        tally.push(verdict);
        if args.json {
            files.push(json::file(path, &checked));
        } else {
            written(out.write_all(console.paint(&text::file(path, &checked)).as_bytes()))?;
        }
        if args.junit.is_some() {
            suites.push(junit::suite(path, &checked));
        }
        if args.html.is_some() {
            articles.push(html::article(path, &checked));
        }
    }
    if args.json {
        written(writeln!(out, "{}", json::document(worst, files)))?;
    } else if args.files.len() > 1 {
        written(out.write_all(console.paint(&text::summary(&tally, worst)).as_bytes()))?;
    }
    if let Some(path) = &args.junit {
        save(path, &report::junit::document("sonicmoe check", &suites))?;
    }
    if let Some(path) = &args.html {
        save(path, &html::page(worst, &tally, &articles))?;
    }
    Ok(worst)
}

fn save(path: &Path, report: &str) -> Result<()> {
    std::fs::write(path, report).map_err(|source| Error::io(path, source))
}

/// Checks one file.
///
/// # Errors
/// A file that cannot be judged at all: see [`Dump::read`] and [`Dump::choose`].
pub fn check_file(path: &Path, args: &CheckArgs) -> Result<Checked> {
    judge_file(path, args, &Progress::hidden())
}

fn judge_file(path: &Path, args: &CheckArgs, progress: &Progress) -> Result<Checked> {
    progress.step("reading");
    let mut dump = Dump::read(path, &args.conventions.overrides())?;
    if let Some(ulps) = args.function_ulps {
        dump.function_ulps = ulps;
    }
    let models = args.rounding_model.map_or_else(|| dump.models(), |model| vec![model]);
    let mut refused = Vec::new();
    let mut remaining = models.into_iter().peekable();
    while let Some(model) = remaining.next() {
        progress.step(&format!("truth and bounds as {}", model.words()));
        match Trial::run(&dump, model, |output| args.judges(output)) {
            Err(error) if remaining.peek().is_none() => return Err(error),
            Err(error) => refused.push((model, error.to_string())),
            Ok(trial) if !trial.passes() && remaining.peek().is_some() => refused.push((model, trial.failures())),
            Ok(mut trial) => {
                if trial.passes() {
                    progress.step("wrong results in the place of right ones");
                    trial.look_again(&dump)?;
                }
                let missing: Vec<Output> = dump.missing.iter().copied().filter(|output| args.judges(*output)).collect();
                let verdict = match missing.is_empty() {
                    true => trial.verdict(),
                    // Nothing that could have failed is no fault of a check that still waits for results.
                    false if trial.judged.is_empty() => Verdict::Incomplete,
                    false => trial.verdict().max(Verdict::Incomplete),
                };
                return Ok(Checked { dump, refused, trial, missing, verdict });
            }
        }
    }
    Err(Error::internal("no rounding model was left to try"))
}
