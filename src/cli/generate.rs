//! `sonicmoe gen`: inputs of a layer as a file, without the answers.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use half::{bf16, f16};

use crate::activation::Activation;
use crate::case::museum::{self, Exhibit};
use crate::case::{Case, Load, Pairing, Scale};
use crate::cli::written;
use crate::dump::{GatingKind, Metadata, write, write_inputs};
use crate::element::{DType, Element};
use crate::engine::{Record, RoundingModel, run};
use crate::error::{Error, Result};
use crate::layout::GateLayout;
use crate::problem::Problem;
use crate::report::count;
use crate::routing::Convention;
use crate::shape::Shape;
use crate::sonic::cpu::CpuEngine;

/// Writes the inputs of a random MoE layer as a safetensors file, without the answers.
///
/// The same arguments give the same bytes on every machine and for any number of threads. Run your
/// layer on the tensors, add what it returned, and `sonicmoe check` judges it.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  sonicmoe gen --shape 256,128,64,8,2 inputs.safetensors
  sonicmoe gen --shape 256,128,64,8,2 --router given --layout concatenated_gate_first inputs.safetensors
  sonicmoe gen --shape 256,128,64,8,2 --regime exact inputs.safetensors
  sonicmoe gen --museum column-tail inputs.safetensors    a wrong name lists all
  sonicmoe gen --shape 33,16,24,5,2 --with-results run.safetensors    answers of this crate's CPU path

Regimes: `unit` draws x and dout at 1, weights at fan_in^-1/2, biases at 0.1, so that every term of
every sum matters; `small` draws everything at 0.02, where a gated layer is nearly bilinear and
tolerances in the wild let an all-zero kernel pass; `exact` draws small integers such that every f32
sum is exact in any order and all right kernels give the same bits (given routing, d and n from 8 to
4096); `exact-fine-scores` the same with scores that bf16 cannot hold.")]
pub struct GenArgs {
    /// The file to write
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// T,d,n,E,K: tokens, model width, expert width, experts, experts per token
    #[arg(long, required_unless_present = "museum")]
    pub shape: Option<Shape>,
    /// An exhibit of the museum instead of a random layer: the smallest problem that exposed a public
    /// bug, by its name
    #[arg(long, value_name = "NAME", value_parser = museum::by_name, conflicts_with_all = ["shape", "regime", "router", "activation", "biases", "seed"])]
    pub museum: Option<Exhibit>,
    /// The size of the numbers
    #[arg(long, value_enum, default_value = "unit")]
    pub regime: Regime,
    /// How scores follow from the logits: softmax_over_topk, topk_over_softmax,
    /// topk_over_softmax_renormalized; or given: random pairs with random scores. Without it
    /// softmax_over_topk, and given in the exact regimes
    #[arg(long, value_name = "CONVENTION")]
    pub router: Option<GatingKind>,
    /// The storage type
    #[arg(long, default_value = "bf16")]
    pub dtype: DType,
    /// Where gate and up stand in w1: interleaved_gate_first, concatenated_gate_first or
    /// concatenated_up_first
    #[arg(long, value_name = "ORDER", default_value = "interleaved_gate_first")]
    pub layout: GateLayout,
    /// The activation
    #[arg(long, value_name = "NAME", default_value = "swiglu")]
    pub activation: Activation,
    /// With b1 and b2
    #[arg(long)]
    pub biases: bool,
    /// What the tensors are drawn from
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Add the results of this crate's CPU path (f32 sums)
    #[arg(long)]
    pub with_results: bool,
    /// Add what its kernels hand to each other too: h, a, y, dh, a_prime, dx_expanded
    #[arg(long, requires = "with_results")]
    pub with_intermediates: bool,
}

/// The size of the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Regime {
    /// Every term of every sum matters.
    Unit,
    /// Everything at 0.02.
    Small,
    /// Integers: every sum is exact.
    Exact,
    /// The same, with scores of 9 to 12 bits.
    ExactFineScores,
}

impl GenArgs {
    /// The random layer; none for an exhibit.
    fn case(&self) -> Option<Case> {
        let shape = self.shape?;
        let (scale, router) = match self.regime {
            Regime::Unit => (Scale::Unit, GatingKind::Router(Convention::SoftmaxOverTopK)),
            Regime::Small => (Scale::Small, GatingKind::Router(Convention::SoftmaxOverTopK)),
            Regime::Exact => (Scale::Exact, GatingKind::Given),
            Regime::ExactFineScores => (Scale::ExactFineScores, GatingKind::Given),
        };
        let pairing = match self.router.unwrap_or(router) {
            GatingKind::Router(convention) => Pairing::Router { convention, load: Load::Uniform },
            GatingKind::Given => Pairing::TopK,
        };
        let case = Case::new(shape).with_activation(self.activation).with_pairing(pairing).with_seed(self.seed);
        Some(Case { biases: self.biases, scale, ..case })
    }

    fn problem<S: Element>(&self) -> Result<Problem<'static, S>> {
        match (self.museum, self.case()) {
            (Some(exhibit), _) => exhibit.problem(),
            (None, Some(case)) => case.problem(),
            (None, None) => Err(Error::missing("--shape", "say T,d,n,E,K")),
        }
    }

    /// What the file holds, in words.
    fn subject(&self) -> String {
        match (self.museum, self.case()) {
            (Some(exhibit), _) => format!("{}: {}", exhibit.name, exhibit.exposes),
            (None, case) => case.map(|case| case.to_string()).unwrap_or_default(),
        }
    }
}

/// Writes the file and says what is in it.
///
/// # Errors
/// A case that cannot be drawn, or a file that cannot be written.
pub fn generate(args: &GenArgs, out: &mut dyn Write) -> Result<()> {
    match args.dtype {
        DType::F64 => of_type::<f64>(args),
        DType::F32 => of_type::<f32>(args),
        DType::BF16 => of_type::<bf16>(args),
        DType::F16 => of_type::<f16>(args),
    }?;
    let bytes = std::fs::metadata(&args.file).map_or(0, |attributes| attributes.len());
    let (file, subject) = (args.file.display(), args.subject());
    let next = if args.with_results { "has results: " } else { "add what your layer returns, then: " };
    written(writeln!(out, "{file}: {subject}, {}, {} bytes\n{next}sonicmoe check {file}", args.dtype, count(bytes)))
}

fn of_type<S: Element>(args: &GenArgs) -> Result<()> {
    let problem = args.problem::<S>()?;
    let metadata = Metadata {
        layout: Some(args.layout),
        k: args.shape.map(|shape| shape.k),
        producer: Some(
            args.museum.map_or("sonicmoe gen".into(), |exhibit| format!("sonicmoe gen --museum {}", exhibit.name)),
        ),
        seed: args.museum.is_none().then(|| args.seed.to_string()),
        ..Metadata::default()
    };
    if !args.with_results {
        return write_inputs(&args.file, &problem, &metadata);
    }
    let record = if args.with_intermediates { Record::Intermediates } else { Record::Results };
    let outcome = match S::DTYPE {
        DType::F64 => run(&CpuEngine::<f64>::new(), &problem, record),
        _ => run(&CpuEngine::<f32>::new(), &problem, record),
    }?;
    let metadata = Metadata {
        producer: Some("sonicmoe gen --with-results, CPU path".into()),
        rounding_model: Some(RoundingModel::Fused),
        ..metadata
    };
    write(&args.file, &problem, &outcome.routing, &outcome.results, &metadata)
}
