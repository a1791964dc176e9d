//! `sonicmoe verify`: the main job on the command line.

use std::io::Write;

use clap::Args;
use serde_json::json;

use crate::activation::Activation;
use crate::case::Class;
use crate::case::campaign::Fixed;
use crate::cli::{Progress, complain, written};
use crate::element::DType;
use crate::engine::Engine;
use crate::error::Result;
use crate::oracle::Verdict;
use crate::report::{Align, Table, count, number};
use crate::shape::Shape;
use crate::sonic::gpu::{Arithmetic, GpuEngine};
use crate::verify::{Campaign, Findings, Shard, Subject, campaign};

/// Draws random MoE layers, runs them through standard autograd and through SonicMoE, and judges
/// every result.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  sonicmoe verify                                  200 problems in bf16, under a minute
  sonicmoe verify --dtype f32 --cases 1000
  sonicmoe verify --shape 2048,256,128,16,4 --activation geglu --cases 5
  sonicmoe verify --seed 7 --first 123 --cases 1   repeats one case of a campaign
  sonicmoe verify --cases 10000 --shard 3/8        the third of eight machines
  sonicmoe verify --device cuda --cases 500        the Hopper kernels alone

Exit code: 0 all claims hold, 1 a number is wrong, 2 bad input, 4 a claim was not judged, or\n--device cuda without a device.")]
pub struct VerifyArgs {
    /// How many problems to draw
    #[arg(long, default_value_t = 200)]
    cases: u64,
    /// The seed of the campaign
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The index of the first case: a failing case is repeated by its index
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Draw every n-th case only, from the i-th on: the n shards of a campaign are disjoint, and
    /// together they are the campaign
    #[arg(long, value_name = "I/N", default_value = "1/1")]
    shard: Shard,
    /// Draw only this size: T,d,n,E,K
    #[arg(long)]
    shape: Option<Shape>,
    /// The storage type of the SonicMoE path under judgement
    #[arg(long, default_value = "bf16")]
    dtype: DType,
    /// Draw only this activation
    #[arg(long)]
    activation: Option<Activation>,
    /// Where SonicMoE runs; without this on the CPU, and on a GPU too if there is one
    #[arg(long, value_enum)]
    device: Option<Place>,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// Where SonicMoE runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Place {
    Cpu,
    Cuda,
}

/// Runs the campaign where it can, prints what it found and what was skipped, and returns the
/// verdict.
///
/// # Errors
/// A size that cannot be drawn, a device that fails, or output that cannot be written.
pub fn verify(args: &VerifyArgs, out: &mut dyn Write) -> Result<Verdict> {
    let plan = Campaign {
        seed: args.seed,
        first: args.first,
        cases: args.cases,
        shard: args.shard,
        fixed: Fixed { shape: args.shape, activation: args.activation },
        dtype: args.dtype,
    };
    let mut verdict = Verdict::Pass;
    if args.device != Some(Place::Cuda) {
        verdict = verdict.max(run_and_print(args, &plan, Subject::Cpu, out)?);
    }
    if args.device != Some(Place::Cpu) {
        match GpuEngine::open() {
            Ok(engine) => {
                verdict = verdict.max(arithmetic(args, &engine, out)?);
                verdict = verdict.max(run_and_print(args, &plan, Subject::Cuda(&engine), out)?);
            }
            Err(absence) => {
                complain(&format!("skipped: the CUDA path: {absence}"));
                if args.device == Some(Place::Cuda) {
                    verdict = Verdict::Incomplete;
                }
            }
        }
    }
    Ok(verdict)
}

/// Measures what the bounds assume of the device's arithmetic, and prints it (not among JSON).
fn arithmetic(args: &VerifyArgs, engine: &GpuEngine, out: &mut dyn Write) -> Result<Verdict> {
    let arithmetic = Arithmetic::measure(engine.device(), &Engine::<half::bf16>::numerics(engine))?;
    let holds = arithmetic.as_declared();
    if !args.json {
        let outcome = if holds { "as the bounds assume" } else { "BEYOND what the bounds assume" };
        written(writeln!(out, "{arithmetic}\narithmetic of the device: {outcome}\n"))?;
    }
    Ok(if holds { Verdict::Pass } else { Verdict::NumericFailure })
}

fn run_and_print(args: &VerifyArgs, plan: &Campaign, subject: Subject<'_>, out: &mut dyn Write) -> Result<Verdict> {
    let progress = match args.json {
        true => Progress::hidden(),
        false => Progress::of_problems(plan.shard.of(plan.first, plan.cases)),
    };
    let findings = campaign(plan, subject, |done| progress.reach(done))?;
    progress.finish();
    let engine = match subject {
        Subject::Cpu if plan.dtype == DType::F64 => "the CPU in f64".to_owned(),
        Subject::Cpu => format!("the CPU in {} with f32 sums", plan.dtype),
        Subject::Cuda(engine) => format!("{} in bf16 with f32 sums", engine.device().properties().name),
    };
    let report = match args.json {
        true => as_json(plan, subject, &engine, &findings) + "\n",
        false => as_text(plan, subject, &engine, &findings),
    };
    written(out.write_all(report.as_bytes()))?;
    Ok(findings.verdict())
}

fn as_text(plan: &Campaign, subject: Subject<'_>, engine: &str, findings: &Findings) -> String {
    let mut text = format!(
        "{} random MoE layers (seed {}), SonicMoE on {engine}, judged against f64.\n\n",
        findings.cases, plan.seed,
    );
    text += "drawn among them: ";
    let drawn = |class: Class| format!("{} {}", findings.classes.get(&class).unwrap_or(&0), class.name());
    text += &Class::ALL.map(drawn).join(" · ");
    text += "\n\n\
        error  |result − truth| of the worst element       ratio  error / bound: above 1 is a failure\n\
        bound  what a correct engine cannot exceed there   floor  the smallest uniform relative error\n       \
        (from the shapes and the number types)             that would have failed\n\n";

    let mut table = Table::new([
        ("claim", Align::Left),
        ("cases", Align::Right),
        ("judged", Align::Right),
        ("error", Align::Right),
        ("bound", Align::Right),
        ("ratio", Align::Right),
        ("floor", Align::Right),
        ("", Align::Left),
    ]);
    let mut section = None;
    for (claim, tally) in &findings.claims {
        if section.replace(claim.section) != Some(claim.section) {
            table.section(claim.section.title());
        }
        let (error, bound, ratio) = match &tally.worst {
            Some(worst) => (number((worst.value - worst.reference).abs()), number(worst.bound), number(worst.ratio)),
            None => ("—".to_owned(), "exact".to_owned(), "—".to_owned()),
        };
        let floor = if tally.floor.is_finite() { number(tally.floor) } else { "—".to_owned() };
        let mut outcome = if tally.met() { tally.verdict().name().to_lowercase() } else { "not met".to_owned() };
        if tally.failing > 0 {
            outcome += &format!(", {} wrong", count(tally.failing));
        }
        if tally.skipped > 0 {
            outcome += &format!(", {} beyond the type's range not judged", count(tally.skipped));
        }
        let judged = count(tally.judged);
        table.row([claim.subject.to_string(), tally.cases.to_string(), judged, error, bound, ratio, floor, outcome]);
    }
    text += &table.to_string();

    for failure in findings.failures.iter().take(8) {
        let claim = &failure.finding.claim;
        let id = failure.id(subject.name(plan.dtype));
        text += &format!(
            "\n{} / {}\n  {}\n  case {}: {}\n  repeat: sonicmoe replay {id}\n  smaller: sonicmoe shrink {id}\n  \
             with every oracle: sonicmoe verify --seed {} --first {} --cases 1 --dtype {}{}\n",
            claim.section.title(),
            claim.subject,
            failure.finding.explanation,
            failure.index,
            failure.case,
            plan.seed,
            failure.index,
            plan.dtype,
            held_fixed(plan, subject),
        );
    }
    let met: Vec<_> = findings.claims.values().filter(|tally| tally.met()).collect();
    let (held, total) = (met.iter().filter(|tally| tally.verdict() == Verdict::Pass).count(), met.len());
    text += &format!("\n{}: {held} of {total} claims hold on {} problems.\n", findings.verdict(), findings.cases);
    text
}

fn held_fixed(plan: &Campaign, subject: Subject<'_>) -> String {
    let device = matches!(subject, Subject::Cuda(_)).then(|| " --device cuda".to_owned());
    let shape = plan.fixed.shape.map(|shape| format!(" --shape {shape}"));
    let activation = plan.fixed.activation.map(|activation| format!(" --activation {activation}"));
    shape.into_iter().chain(activation).chain(device).collect()
}

fn as_json(plan: &Campaign, subject: Subject<'_>, engine: &str, findings: &Findings) -> String {
    let claims: Vec<_> = findings
        .claims
        .iter()
        .map(|(claim, tally)| {
            let worst = tally.worst.as_ref().map(|worst| {
                json!({
                    "at": worst.at, "value": finite(worst.value), "reference": finite(worst.reference),
                    "bound": finite(worst.bound), "ratio": finite(worst.ratio),
                })
            });
            json!({
                "section": claim.section.title(), "claim": claim.subject, "cases": tally.cases,
                "judged": tally.judged, "skipped": tally.skipped, "failing": tally.failing,
                "worst": worst, "floor": finite(tally.floor), "verdict": tally.verdict().name(),
            })
        })
        .collect();
    let failures: Vec<_> = findings
        .failures
        .iter()
        .map(|failure| {
            json!({
                "claim": failure.finding.claim.subject, "index": failure.index,
                "case": failure.case.to_string(), "id": failure.id(subject.name(plan.dtype)).to_string(),
                "explanation": failure.finding.explanation,
            })
        })
        .collect();
    let classes: serde_json::Map<_, _> = Class::ALL
        .iter()
        .map(|class| (class.name().to_owned(), json!(findings.classes.get(class).unwrap_or(&0))))
        .collect();
    json!({
        "engine": engine, "seed": plan.seed, "first": plan.first,
        "shard": plan.shard.to_string(), "cases": findings.cases, "dtype": plan.dtype.name(),
        "classes": classes, "claims": claims, "failures": failures, "verdict": findings.verdict().name(),
    })
    .to_string()
}

/// JSON has no infinities: they become null.
fn finite(value: f64) -> serde_json::Value {
    if value.is_finite() { json!(value) } else { serde_json::Value::Null }
}
