//! `sonicmoe bench --device cuda --rounding M`: what token rounding saves, on the same kernels.

use serde_json::json;

use super::device::{Configuration, named};
use crate::error::{Error, Result};
use crate::report::{Align, Table, number};
use crate::routing::rounding::{TokenRounding, padding};
use crate::sonic::gpu::{Device, Load, Measurement, Subject, Times, Workload};

/// The layers that are measured unless others are named: many experts with few tokens each.
const SPARSE: [&str; 2] = ["sparse", "qwen3-next"];

/// One layer with both routings of the same logits.
pub struct Gain {
    configuration: Configuration,
    load: Load,
    tile: usize,
    rounds: usize,
    of_top_k: Side,
    rounded: Side,
}

/// One of the two.
struct Side {
    rows: usize,
    /// Rows that tiles of M hold beyond these.
    padding: usize,
    /// Median ms of forward and backward.
    ms: [f64; 2],
}

/// Measures both routings in turn, round after round, each layer in a context of its own.
///
/// # Errors
/// M = 0, an unknown layer, no Hopper device, not enough of its memory, or one that fails.
pub fn measure(names: &[String], load: Load, tile: usize, rounds: usize) -> Result<Vec<Gain>> {
    let names = if names.is_empty() { SPARSE.map(String::from).to_vec() } else { names.to_vec() };
    let gain = |configuration: Configuration| {
        let device = Device::open().map_err(|absence| Error::device(absence.to_string()))?;
        let top_k = Workload { shape: configuration.shape, load, rounding: None, seed: 1 };
        let rounded = Workload { rounding: Some(TokenRounding::new(tile)), ..top_k };
        let mut top_k = Measurement::of_passes(&device, &top_k)?;
        let mut rounded = Measurement::of_passes(&device, &rounded)?;
        let [of_top_k, of_rounded] = Measurement::run_in_turn([&mut top_k, &mut rounded], rounds)?;
        let (of_top_k, rounded) = (Side::of(&top_k, &of_top_k, tile), Side::of(&rounded, &of_rounded, tile));
        Ok(Gain { configuration, load, tile, rounds, of_top_k, rounded })
    };
    named(&names)?.into_iter().map(gain).collect()
}

impl Side {
    fn of(measurement: &Measurement, times: &[Times], tile: usize) -> Self {
        let counts = measurement.tokens_per_expert();
        let median = |subject| times.iter().find(|times| times.subject == subject).map_or(f64::NAN, Times::median);
        let ms = [Subject::Forward, Subject::Backward].map(median);
        Self { rows: counts.iter().sum(), padding: padding(counts, tile), ms }
    }
}

impl Gain {
    /// The time with top-K over the time rounded, forward and backward.
    fn gains(&self) -> [f64; 2] {
        [0, 1].map(|pass| self.of_top_k.ms[pass] / self.rounded.ms[pass])
    }

    fn cells(&self) -> [String; 9] {
        let Self { configuration, of_top_k, rounded, .. } = self;
        let [forward, backward] = self.gains();
        let padded = 100.0 * of_top_k.padding as f64 / of_top_k.rows as f64;
        [
            configuration.name.to_owned(),
            format!("{} → {}", of_top_k.rows, rounded.rows),
            format!("{padded:.0}%"),
            number(of_top_k.ms[0]),
            number(rounded.ms[0]),
            format!("{forward:.2}"),
            number(of_top_k.ms[1]),
            number(rounded.ms[1]),
            format!("{backward:.2}"),
        ]
    }
}

const COLUMNS: [&str; 9] =
    ["layer", "rows, rounded", "padding", "forward, ms", "rounded, ms", "gain", "backward, ms", "rounded, ms", "gain"];

/// A table for a terminal.
pub fn text(gains: &[Gain]) -> String {
    let mut table =
        Table::new(COLUMNS.map(|column| (column, if column == "layer" { Align::Left } else { Align::Right })));
    gains.iter().for_each(|gain| table.row(gain.cells()));
    let title = gains.first().map_or_else(String::new, |Gain { load, tile, rounds, .. }| {
        format!("token rounding to multiples of {tile}, {load} load, medians of {rounds}\n\n")
    });
    format!(
        "{title}{table}\npadding   rows that tiles of M compute beyond the routed ones, with top-K; rounded there are none\n\
         gain      the time with top-K over the time rounded\n"
    )
}

/// A table for a README.
pub fn markdown(gains: &[Gain]) -> String {
    let mut text = format!("| {} |\n|{}\n", COLUMNS.join(" | "), " --- |".repeat(COLUMNS.len()));
    gains.iter().for_each(|gain| text += &format!("| {} |\n", gain.cells().join(" | ")));
    text
}

/// One line a layer.
pub fn csv(gains: &[Gain]) -> String {
    let mut text =
        "config,load,tile,rows,rounded_rows,padding,forward_ms,rounded_forward_ms,backward_ms,rounded_backward_ms\n"
            .to_owned();
    for Gain { configuration, load, tile, of_top_k, rounded, .. } in gains {
        let [forward, backward] = of_top_k.ms;
        let [rounded_forward, rounded_backward] = rounded.ms;
        text += &format!(
            "{},{load},{tile},{},{},{},{forward},{rounded_forward},{backward},{rounded_backward}\n",
            configuration.name, of_top_k.rows, rounded.rows, of_top_k.padding
        );
    }
    text
}

/// All of it for a program.
pub fn as_json(gains: &[Gain]) -> String {
    let side = |side: &Side| {
        json!({
            "rows": side.rows, "padding": side.padding, "forward_ms": side.ms[0], "backward_ms": side.ms[1],
        })
    };
    let gains: Vec<_> = gains
        .iter()
        .map(|gain| {
            let [forward, backward] = gain.gains();
            json!({
                "name": gain.configuration.name, "load": gain.load.to_string(), "tile": gain.tile,
                "rounds": gain.rounds, "top_k": side(&gain.of_top_k), "rounded": side(&gain.rounded),
                "forward_gain": forward, "backward_gain": backward,
            })
        })
        .collect();
    format!("{:#}\n", json!({ "device": "cuda", "token_rounding": gains }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gain_is_the_time_of_top_k_over_the_time_rounded_in_every_format() {
        let configuration = named(&["sparse".to_owned()]).unwrap()[0];
        let gain = Gain {
            configuration,
            load: Load::Uniform,
            tile: 128,
            rounds: 5,
            of_top_k: Side { rows: 65536, padding: 16384, ms: [3.0, 8.0] },
            rounded: Side { rows: 65408, padding: 0, ms: [2.5, 6.4] },
        };
        assert_eq!(gain.gains(), [1.2, 1.25]);
        assert!(gain.cells().contains(&"25%".to_owned()));
        let gains = [gain];
        for report in [text(&gains), markdown(&gains)] {
            assert!(report.contains("sparse") && report.contains("1.20") && report.contains("1.25"), "{report}");
        }
        assert!(csv(&gains).contains("sparse,uniform,128,65536,65408,16384,3,2.5,8,6.4"));
        assert!(as_json(&gains).contains("\"forward_gain\": 1.2"));
    }
}
