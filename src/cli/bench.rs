//! `sonicmoe bench`: how fast the layer runs on this machine's CPU, beside plain products and
//! standard autograd; or on its GPU, beside the vendor's products and SonicMoE.

mod device;
mod products;
mod rounding;

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use rayon::ThreadPoolBuilder;
use serde_json::json;

use crate::case::Case;
use crate::element::{DType, Element, Real};
use crate::engine::{Engine, Record};
use crate::error::{Error, Result};
use crate::problem::Problem;
use crate::reference::StandardMoe;
use crate::report::{Align, Table, number};
use crate::routing::rounding::TokenRounding;
use crate::routing::scores::softmax;
use crate::routing::{Routing, top_k};
use crate::shape::Shape;
use crate::sonic::cpu::CpuEngine;
use crate::sonic::gpu::Load;

pub use device::named;
use products::PlainProducts;

/// Measures forward and backward of a SwiGLU layer on the CPU or on a GPU, on random data.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  sonicmoe bench                                         f32 and bf16 at 2048,1024,256,32,4
  sonicmoe bench --shape 512,256,64,8,2 --dtype bf16 --threads 1
  sonicmoe bench --json
  sonicmoe bench --device cuda --configs olmoe,sparse    the kernels on a Hopper GPU
  sonicmoe bench --device cuda --rounding 128            what token rounding saves there

Everything runs in turn, once to warm up and then `--runs` times; the medians are shown. GFLOP/s
counts the 18·R·n·d operations (R = T·K) of forward's and backward's products, whatever else a
layer does. Plain products are six dense ones of as many operations, through the gemm crate, which
SonicMoE multiplies with too, on as many threads. Other work on the machine makes all of it slower: `share`,
SonicMoE's GFLOP/s over those of plain products, is what can be compared.")]
pub struct BenchArgs {
    /// T,d,n,E,K: tokens, model width, expert width, experts, experts per token
    #[arg(long, default_value = "2048,1024,256,32,4")]
    shape: Shape,
    /// The storage types of SonicMoE, with commas between them
    #[arg(long, value_delimiter = ',', default_value = "f32,bf16")]
    dtype: Vec<DType>,
    /// Threads; without this as many as the machine has
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// How many times each thing is measured
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    runs: u16,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Measure the eight kernels on a GPU, by replayed graphs, beside cuBLAS
    #[arg(long, value_enum, default_value_t = Place::Cpu)]
    device: Place,
    /// On a GPU: the layers, with commas between them; all without it
    #[arg(long, value_delimiter = ',')]
    configs: Vec<String>,
    /// On a GPU: how tokens spread over the experts
    #[arg(long, value_enum, default_value_t = Spread::Uniform)]
    load: Spread,
    /// On a GPU: what rounding tokens to multiples of M saves instead, beside top-K on the same logits
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u16).range(1..))]
    rounding: Option<u16>,
    /// On a GPU: write a roofline of what was measured to this file, as SVG
    #[arg(long, value_name = "FILE", conflicts_with = "rounding")]
    roofline: Option<PathBuf>,
    /// On a GPU: print lines of comma-separated values
    #[arg(long, conflicts_with = "json")]
    csv: bool,
    /// On a GPU: print tables for a README
    #[arg(long, conflicts_with_all = ["json", "csv"])]
    markdown: bool,
}

/// Where the layer runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Place {
    Cpu,
    Cuda,
}

/// How tokens spread over the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Spread {
    /// Every choice as likely as any other
    Uniform,
    /// Expert i with weight 1/(i + 1)
    Zipf,
}

/// The text that the command prints.
///
/// # Errors
/// T = 0, threads that the system does not give, or what the engines refuse.
pub fn bench(args: &BenchArgs) -> Result<String> {
    if args.device == Place::Cuda {
        let load = match args.load {
            Spread::Uniform => Load::Uniform,
            Spread::Zipf => Load::Zipf,
        };
        let rounds = usize::from(args.runs);
        if let Some(tile) = args.rounding {
            let gains = rounding::measure(&args.configs, load, usize::from(tile), rounds)?;
            return Ok(match args {
                BenchArgs { json: true, .. } => rounding::as_json(&gains),
                BenchArgs { csv: true, .. } => rounding::csv(&gains),
                BenchArgs { markdown: true, .. } => rounding::markdown(&gains),
                _ => rounding::text(&gains),
            });
        }
        let measured = device::measure(&device::named(&args.configs)?, load, rounds)?;
        if let Some(path) = &args.roofline {
            std::fs::write(path, device::picture(&measured)).map_err(|error| Error::io(path, error))?;
        }
        return Ok(match args {
            BenchArgs { json: true, .. } => device::as_json(&measured),
            BenchArgs { csv: true, .. } => device::csv(&measured),
            BenchArgs { markdown: true, .. } => device::markdown(&measured),
            _ => device::text(&measured),
        });
    }
    if args.shape.t == 0 {
        return Err(Error::size("T", 0, "a layer without tokens has nothing to measure"));
    }
    let threads = match args.threads {
        Some(threads) => usize::from(threads),
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    let pool = ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .map_err(|error| Error::missing(format!("a pool of {threads} threads"), format!("{error}; use fewer")))?;
    let report = pool.install(|| measure(args, threads))?;
    Ok(if args.json { report.json() } else { report.text() })
}

/// What is measured, in the order of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    PlainProducts,
    SonicMoe,
    StandardAutograd,
    TopK,
    Metadata,
    TokenRounding,
}

impl Subject {
    fn name(self) -> &'static str {
        match self {
            Self::PlainProducts => "plain products",
            Self::SonicMoe => "SonicMoE",
            Self::StandardAutograd => "standard autograd",
            Self::TopK => "top-K",
            Self::Metadata => "metadata",
            Self::TokenRounding => "token rounding",
        }
    }

    /// Whether it computes the layer's products.
    fn multiplies(self) -> bool {
        matches!(self, Self::PlainProducts | Self::SonicMoe | Self::StandardAutograd)
    }
}

/// Something to run, again and again.
struct Work<'w> {
    subject: Subject,
    dtype: DType,
    run: Box<dyn FnMut() -> Result<()> + Send + 'w>,
}

/// One subject's time.
#[derive(Clone, Copy, Debug)]
struct Measured {
    subject: Subject,
    dtype: DType,
    seconds: f64,
}

fn measure(args: &BenchArgs, threads: usize) -> Result<Report> {
    let case = Case::new(args.shape);
    let wide = args.dtype.contains(&DType::F64);
    let narrow = args.dtype.iter().any(|&dtype| dtype != DType::F64);

    let mut works = Vec::new();
    if narrow {
        beside::<f32>(&case, threads, &mut works)?;
    }
    if wide {
        beside::<f64>(&case, threads, &mut works)?;
    }
    for &dtype in &args.dtype {
        works.push(match dtype {
            DType::F64 => sonic::<f64, f64>(&case)?,
            DType::F32 => sonic::<f32, f32>(&case)?,
            DType::BF16 => sonic::<half::bf16, f32>(&case)?,
            DType::F16 => sonic::<half::f16, f32>(&case)?,
        });
    }
    routing(&case, &mut works)?;

    let mut seconds = vec![Vec::new(); works.len()];
    for round in 0..=args.runs {
        for (work, seconds) in works.iter_mut().zip(&mut seconds) {
            let start = Instant::now();
            (work.run)()?;
            if round > 0 {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
    }
    let measured = works.iter().zip(seconds).map(|(work, seconds)| Measured {
        subject: work.subject,
        dtype: work.dtype,
        seconds: median(seconds),
    });
    Ok(Report { shape: args.shape, threads, runs: args.runs, measured: measured.collect() })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    if values.len() % 2 == 1 { values[half] } else { (values[half - 1] + values[half]) / 2.0 }
}

/// Forward and backward; what they return is dropped within the time.
fn forward_and_backward<S: Element>(engine: &dyn Engine<S>, problem: &Problem<'_, S>) -> Result<()> {
    let forward = engine.forward(problem, Record::Results)?;
    forward.pass.backward(problem.dout(), Record::Results)?;
    Ok(())
}

fn sonic<S: Element, A: Real>(case: &Case) -> Result<Work<'static>> {
    let problem = case.problem::<S>()?;
    let engine = CpuEngine::<A>::new();
    let run = Box::new(move || forward_and_backward(&engine, &problem));
    Ok(Work { subject: Subject::SonicMoe, dtype: S::DTYPE, run })
}

/// What SonicMoE with sums in `A` is measured beside: plain products and standard autograd in `A`.
fn beside<A: Real>(case: &Case, threads: usize, works: &mut Vec<Work<'_>>) -> Result<()> {
    let problem = case.problem::<A>()?;
    let x = problem.x();
    let mut products = PlainProducts::new(case.shape, threads, x.iter().copied());
    let run = Box::new(move || {
        products.run();
        Ok(())
    });
    works.push(Work { subject: Subject::PlainProducts, dtype: A::DTYPE, run });
    let engine = StandardMoe::<A>::new();
    let run = Box::new(move || forward_and_backward(&engine, &problem));
    works.push(Work { subject: Subject::StandardAutograd, dtype: A::DTYPE, run });
    Ok(())
}

/// The steps between logits and products, for random logits.
fn routing(case: &Case, works: &mut Vec<Work<'_>>) -> Result<()> {
    /// Tokens of a tile of the grouped GEMMs.
    const TILE: usize = 128;
    let Shape { t, e, k, .. } = case.shape;
    let problem = Case::new(Shape { d: 64, n: 1, ..case.shape }).problem::<f32>()?;
    let engine = CpuEngine::<f32>::new();
    let engine: &dyn Engine<f32> = &engine;
    let forward = engine.forward(&problem, Record::Intermediates)?;
    let logits = forward.pass.logits().ok_or_else(|| Error::internal("a router gave no logits"))?.to_owned();
    let choice = top_k(logits.view(), k)?;
    let p = softmax(logits.view())?;
    let chosen = choice.routing();
    let pairs: Vec<_> = chosen.pair_token().iter().copied().zip(chosen.pair_expert().iter().copied()).collect();

    let run = Box::new(move || top_k(logits.view(), k).map(drop));
    works.push(Work { subject: Subject::TopK, dtype: DType::F32, run });
    let run = Box::new(move || Routing::new(t, e, pairs.iter().copied()).map(drop));
    works.push(Work { subject: Subject::Metadata, dtype: DType::F32, run });
    let run = Box::new(move || TokenRounding::new(TILE).round(p.view(), &choice).map(drop));
    works.push(Work { subject: Subject::TokenRounding, dtype: DType::F32, run });
    Ok(())
}

struct Report {
    shape: Shape,
    threads: usize,
    runs: u16,
    measured: Vec<Measured>,
}

impl Report {
    /// 18·R·n·d: 2 for each of the 9 multiplications by an n×d part of the weights.
    fn operations(&self) -> f64 {
        let Shape { d, n, .. } = self.shape;
        18.0 * self.shape.routed() as f64 * n as f64 * d as f64
    }

    fn gflops(&self, measured: &Measured) -> f64 {
        self.operations() / measured.seconds / 1e9
    }

    /// What `subject` took in the accumulator's type beside `measured`.
    fn beside(&self, measured: &Measured, subject: Subject) -> Option<&Measured> {
        let accumulator = if measured.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        self.measured.iter().find(|other| other.subject == subject && other.dtype == accumulator)
    }

    /// The part of plain products' speed that `measured` reaches.
    fn share(&self, measured: &Measured) -> Option<f64> {
        self.beside(measured, Subject::PlainProducts).map(|plain| plain.seconds / measured.seconds)
    }

    fn sonic(&self) -> impl Iterator<Item = &Measured> {
        self.measured.iter().filter(|measured| measured.subject == Subject::SonicMoe)
    }

    /// One sentence per storage type.
    fn sentences(&self) -> Vec<String> {
        let sentence = |sonic: &Measured| {
            let standard = self.beside(sonic, Subject::StandardAutograd)?;
            let times = standard.seconds / sonic.seconds;
            let which = if standard.dtype == sonic.dtype { String::new() } else { format!(" in {}", standard.dtype) };
            Some(if times >= 1.0 {
                format!("SonicMoE in {} ran {times:.1} times faster than standard autograd{which}.", sonic.dtype)
            } else {
                let times = 1.0 / times;
                format!("SonicMoE in {} took {times:.1} times as long as standard autograd{which}.", sonic.dtype)
            })
        };
        self.sonic().filter_map(sentence).collect()
    }

    fn text(&self) -> String {
        let Self { shape, threads, runs, .. } = self;
        let mut table = Table::new([
            ("forward and backward", Align::Left),
            ("dtype", Align::Left),
            ("ms", Align::Right),
            ("GFLOP/s", Align::Right),
            ("share", Align::Right),
        ]);
        let ms = |measured: &Measured| number(measured.seconds * 1e3);
        for measured in self.measured.iter().filter(|measured| measured.subject.multiplies()) {
            table.row([
                measured.subject.name().to_owned(),
                measured.dtype.to_string(),
                ms(measured),
                number(self.gflops(measured)),
                self.share(measured).map(|share| format!("{share:.2}")).unwrap_or_default(),
            ]);
        }
        table.section("before the products");
        for measured in self.measured.iter().filter(|measured| !measured.subject.multiplies()) {
            table.row([measured.subject.name().to_owned(), measured.dtype.to_string(), ms(measured)]);
        }
        let mut text = format!("T,d,n,E,K = {shape}, swiglu, threads: {threads}, median of {runs}\n\n{table}\n");
        for sentence in self.sentences() {
            text += &sentence;
            text.push('\n');
        }
        text
    }

    fn json(&self) -> String {
        let measured = |measured: &Measured| {
            let mut row = json!({
                "subject": measured.subject.name(),
                "dtype": measured.dtype.name(),
                "ms": measured.seconds * 1e3,
            });
            if measured.subject.multiplies() {
                row["gflops"] = json!(self.gflops(measured));
                row["share"] = json!(self.share(measured));
            }
            row
        };
        let Shape { t, d, n, e, k } = self.shape;
        let report = json!({
            "shape": { "t": t, "d": d, "n": n, "e": e, "k": k },
            "activation": "swiglu",
            "threads": self.threads,
            "runs": self.runs,
            "operations": self.operations(),
            "measured": self.measured.iter().map(measured).collect::<Vec<_>>(),
            "sentences": self.sentences(),
        });
        format!("{report:#}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(dtype: &[DType], json: bool) -> BenchArgs {
        BenchArgs {
            shape: "9,16,8,4,2".parse().unwrap(),
            dtype: dtype.to_vec(),
            threads: Some(2),
            runs: 2,
            json,
            device: Place::Cpu,
            configs: Vec::new(),
            load: Spread::Uniform,
            rounding: None,
            roofline: None,
            csv: false,
            markdown: false,
        }
    }

    #[test]
    fn the_table_has_every_subject_and_a_sentence_per_type() {
        let text = bench(&args(&[DType::F32, DType::BF16, DType::F64], false)).unwrap();
        for (row, times) in [
            ("plain products", 2),
            ("standard autograd ", 2),
            ("SonicMoE  ", 3),
            ("top-K", 1),
            ("metadata", 1),
            ("token rounding", 1),
            ("SonicMoE in ", 3),
        ] {
            assert_eq!(text.lines().filter(|line| line.starts_with(row)).count(), times, "{row}: {text}");
        }
    }

    #[test]
    fn speeds_and_shares_follow_from_the_times() {
        let of = |subject, dtype, seconds| Measured { subject, dtype, seconds };
        let report = Report {
            shape: "1000,1000,1000,2,1".parse().unwrap(),
            threads: 1,
            runs: 1,
            measured: vec![
                of(Subject::PlainProducts, DType::F32, 1.0),
                of(Subject::StandardAutograd, DType::F32, 8.6),
                of(Subject::SonicMoe, DType::F32, 2.0),
                of(Subject::SonicMoe, DType::BF16, 17.2),
            ],
        };
        let text = report.text();
        assert!(text.contains("2000     9.00   0.50"), "{text}");
        assert!(text.contains("SonicMoE in f32 ran 4.3 times faster than standard autograd.\n"), "{text}");
        assert!(text.contains("SonicMoE in bf16 took 2.0 times as long as standard autograd in f32.\n"), "{text}");
        let json: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
        assert_eq!(json["measured"][2]["gflops"], 9.0);
        assert_eq!(json["measured"][2]["share"], 0.5);
    }

    #[test]
    fn nothing_to_measure_is_refused() {
        let error = bench(&BenchArgs { shape: "0,16,8,4,2".parse().unwrap(), ..args(&[DType::F32], true) });
        assert!(error.unwrap_err().to_string().contains('T'));
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
