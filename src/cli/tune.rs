//! `sonicmoe tune`: which settings make the six GEMMs fast on this device.

use std::path::PathBuf;

use clap::Args;

use crate::error::{Error, Result};
use crate::report::{Align, Table, number};
use crate::shape::Shape;
use crate::sonic::gpu::tuning::{self, Search, Tuned, predicted_cycles};
use crate::sonic::gpu::{Device, Load, Workload};

use super::bench::named;

/// Times settings of the six GEMMs on a Hopper GPU and writes the fastest that are right.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  sonicmoe tune                                      the layers of `bench`, every kernel
  sonicmoe tune --shape 8192,2048,768,64,8           a layer of one's own
  sonicmoe tune --write settings.json                a table; name it in SONICMOE_SETTINGS to use it

From a kernel's own setting one axis is tried after the other: columns and stages of a tile, blocks of a
cluster, tiles of a band. Candidates run in turn, the medians are compared, and the best three meet the kernel's
own setting once more. A setting is chosen if it gains 3% and if, on poisoned buffers, every element that it
stores lies within its bound of an f64 product made on the device.")]
pub struct TuneArgs {
    /// Layers of `bench`, with commas between them; all without it
    #[arg(long, value_delimiter = ',')]
    configs: Vec<String>,
    /// T,d,n,E,K of a layer instead
    #[arg(long, conflicts_with = "configs")]
    shape: Option<Shape>,
    /// How many times each candidate is measured; the last comparison takes three times as many
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u16).range(1..))]
    runs: u16,
    /// Write the table to this file
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// Show every candidate
    #[arg(long)]
    all: bool,
}

/// The text that the command prints.
///
/// # Errors
/// No Hopper device, not enough of its memory, a kernel that is wrong with its own setting, or a file that
/// cannot be written.
pub fn tune(args: &TuneArgs) -> Result<String> {
    let shapes = match args.shape {
        Some(shape) => vec![(shape.to_string(), shape)],
        None => named(&args.configs)?.into_iter().map(|layer| (layer.name.to_owned(), layer.shape)).collect(),
    };
    let mut written = tuning::Table::default();
    let mut text = String::new();
    for (name, shape) in shapes {
        let device = Device::open().map_err(|absence| Error::device(absence.to_string()))?;
        written.device = device.properties().name.clone();
        let workload = Workload { shape, load: Load::Uniform, rounding: None, seed: 1 };
        let found = Search::load(&device, &workload, usize::from(args.runs))?.run()?;
        text += &report(&name, &shape, &found, device.properties().multiprocessors, args.all);
        written.layers.push(tuning::Measured {
            shape: shape.to_string(),
            kernels: found.iter().map(|tuned| (tuned.kernel.name().to_owned(), tuned.chosen.setting)).collect(),
        });
    }
    if let Some(path) = &args.write {
        let json = serde_json::to_string_pretty(&written).map_err(|error| Error::internal(error.to_string()))?;
        std::fs::write(path, json + "\n").map_err(|error| Error::io(path, error))?;
        text += &format!("wrote {}\n", path.display());
    }
    Ok(text)
}

fn report(name: &str, shape: &Shape, found: &[Tuned], multiprocessors: u32, all: bool) -> String {
    let columns = [
        ("kernel", Align::Left),
        ("own, ms", Align::Right),
        ("ratio", Align::Right),
        ("model", Align::Right),
        ("setting", Align::Left),
    ];
    let mut table = Table::new(columns);
    for Tuned { kernel, own, own_ms, candidates, chosen, .. } in found {
        let cycles = |setting| predicted_cycles(*kernel, shape, setting, multiprocessors);
        for candidate in candidates.iter().filter(|candidate| all || *candidate == chosen) {
            let mark = if candidate == chosen { "*" } else { "" };
            table.row([
                format!("{}{mark}", kernel.name()),
                number(*own_ms),
                format!("{:.3}", candidate.ratio),
                format!("{:.3}", cycles(&candidate.setting) / cycles(own)),
                candidate.setting.to_string(),
            ]);
        }
    }
    let mut text = format!("{name} ({shape})\n\n{table}\n");
    for Tuned { kernel, rejected, .. } in found {
        for (setting, said) in rejected {
            text += &format!("{} with {setting} is WRONG and was not chosen: {said}\n", kernel.name());
        }
    }
    text
}
