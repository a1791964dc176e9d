//! What the bound of a whole layer costs beside the f64 truth by tape autograd, one thread each:
//!
//! ```text
//! cargo run --release --example cost_of_bounds [T,d,n,E,K]...
//! ```
//!
//! Both compute every result and intermediate of forward and backward; the bound computes the truth once
//! more by the closed form, and beside each product the sums of magnitudes. Medians of runs that take turns.

use std::time::{Duration, Instant};

use sonicmoe::case::Case;
use sonicmoe::engine::{Numerics, RoundingModel, RouterRounding};
use sonicmoe::oracle::bound;
use sonicmoe::reference::run_with;
use sonicmoe::routing::Routing;
use sonicmoe::{DType, Record, run, sonic::cpu::CpuEngine};

/// How often each is measured at least, and for how long.
const RUNS: usize = 9;
const SECONDS: f64 = 1.0;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
    println!(
        "| T,d,n,E,K | model | f64 reference, s | bound, s | bound / reference |\n| --- | --- | --- | --- | --- |"
    );
    let mut shapes: Vec<String> = std::env::args().skip(1).collect();
    if shapes.is_empty() {
        shapes = ["256,128,64,8,2", "1024,512,128,16,4", "1024,1024,256,16,4"].map(String::from).to_vec();
    }
    for shape in shapes {
        let problem = Case::new(shape.parse()?).problem::<f64>()?;
        let routing: Routing = run(&CpuEngine::<f64>::new(), &problem, Record::Results)?.routing;
        for rounding in [RoundingModel::Fused, RoundingModel::Eager] {
            let numerics = Numerics {
                storage: DType::BF16,
                score: DType::F32,
                accumulator: DType::F32.unit_roundoff(),
                rounding,
                router: RouterRounding::Score,
                function_ulps: 8.0,
                flushes_denormals: false,
            };
            let (mut of_reference, mut of_bound) = (Vec::new(), Vec::new());
            while of_bound.len() < RUNS || of_bound.iter().sum::<f64>() < SECONDS {
                of_reference.push(seconds(|| pool.install(|| run_with(&problem, &routing)))?);
                of_bound.push(seconds(|| pool.install(|| bound::layer(&problem, &routing, &numerics)))?);
            }
            let (reference, bound) = (median(of_reference), median(of_bound));
            println!("| {shape} | {rounding:?} | {reference:.4} | {bound:.4} | {:.2} |", bound / reference);
        }
    }
    Ok(())
}

fn seconds<V>(task: impl FnOnce() -> sonicmoe::Result<V>) -> sonicmoe::Result<f64> {
    let started = Instant::now();
    task()?;
    let taken: Duration = started.elapsed();
    Ok(taken.as_secs_f64())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
