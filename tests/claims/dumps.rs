//! Real dumps pass, wrong copies of them fail, malformed files are refused.

mod arrays;
mod checkpoint;
mod content;
pub mod edit;
mod explained;
mod hostile;
mod malformed;
mod numpy;
mod real;
mod round_trip;
mod statistics;
mod wrong;

use std::path::Path;

use sonicmoe::Error;
use sonicmoe::cli::check::{CheckArgs, Checked, check_file};
use sonicmoe::dump::Model;
use sonicmoe::oracle::Verdict;

/// The files in tests/data, and the rounding model that each needs.
const REAL: [(&str, Model); 6] = [
    ("sonic_topk_empty", Model::FusedTensorRouter),
    ("sonic_rounding_a", Model::Fused),
    ("hf_qwen3_f32", Model::Fused),
    ("hf_olmoe_bf16", Model::FusedTensorRouter),
    ("scattermoe_a", Model::Fused),
    ("grouped_mm_a", Model::Eager),
];

fn check(path: &Path) -> Result<Checked, Error> {
    check_file(path, &CheckArgs::default())
}

/// The exit code, and what was said.
fn outcome(path: &Path) -> (u8, String) {
    outcome_with(path, &CheckArgs::default())
}

fn outcome_with(path: &Path, args: &CheckArgs) -> (u8, String) {
    match check_file(path, args) {
        Ok(checked) => (checked.verdict.code(), checked.report()),
        Err(error) => (Verdict::from(&error).code(), error.to_string()),
    }
}
