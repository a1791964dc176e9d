//! Writes a right dump of any size, so that `sonicmoe check` can be timed on it:
//!
//! ```text
//! cargo run --release --example dump_of_the_cpu_path -- 4096,2048,256,64,8 run.safetensors
//! /usr/bin/time -v target/release/sonicmoe check run.safetensors
//! ```
//!
//! A bf16 layer behind a router, forward and backward by the CPU path. A third argument `intermediates`
//! adds what passes between the kernels, `given` takes given routing in the place of the router.

use half::bf16;
use sonicmoe::case::{Case, Pairing};
use sonicmoe::dump::{Metadata, write};
use sonicmoe::sonic::cpu::CpuEngine;
use sonicmoe::{Record, run};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [shape, path, options @ ..] = arguments.as_slice() else {
        return Err("dump_of_the_cpu_path T,d,n,E,K FILE [intermediates] [given]".into());
    };
    let asked = |option: &str| options.iter().any(|other| other == option);
    let case = Case::new(shape.parse()?);
    let case = if asked("given") { case.with_pairing(Pairing::TopK) } else { case };
    let problem = case.problem::<bf16>()?;
    let record = if asked("intermediates") { Record::Intermediates } else { Record::Results };
    let outcome = run(&CpuEngine::<f32>::new(), &problem, record)?;
    write(path, &problem, &outcome.routing, &outcome.results, &Metadata::default())?;
    Ok(())
}
