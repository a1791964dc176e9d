//! The map for auditors is true: every file and test that it names exists, and the README shows it.

use std::fs;
use std::path::{Path, PathBuf};

const MAP: &str = include_str!("../../src/audit.md");
const README: &str = include_str!("../../README.md");

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every Rust file below `folder`.
fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            files.extend(rust_files(&entry));
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            files.push(entry);
        }
    }
    files
}

/// What stands between backticks in a cell.
fn items(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

#[test]
fn every_file_and_test_that_the_map_names_exists() {
    let tests: String =
        rust_files(&root().join("tests")).into_iter().map(|file| fs::read_to_string(file).unwrap()).collect();
    let rows: Vec<Vec<&str>> =
        MAP.lines().skip(2).map(|row| row.trim_matches('|').split(" | ").map(str::trim).collect()).collect();
    assert!(rows.len() > 15, "the map has {} rows", rows.len());
    let mut missing = Vec::new();
    for row in &rows {
        let [claim, cpu, cuda, proofs, oracles] = row[..] else { panic!("five columns: {row:?}") };
        for (column, cell) in [("CPU", cpu), ("tests", proofs), ("oracle", oracles)] {
            assert!(items(cell).next().is_some(), "{claim}: nothing under {column}");
        }
        let files = [cpu, cuda, oracles].into_iter().flat_map(items);
        missing.extend(files.filter(|file| !root().join(file).is_file()));
        missing.extend(items(proofs).filter(|test| !tests.contains(&format!("fn {test}("))));
    }
    assert!(missing.is_empty(), "the map names what does not exist: {missing:?}");
}

#[test]
fn every_kernel_stands_in_the_map() {
    for folder in ["src/sonic/cpu", "kernels"] {
        for kernel in [
            "up_forward",
            "down_forward",
            "combine_output",
            "down_backward_activation",
            "down_backward_weight",
            "up_backward_activation",
            "up_backward_weight",
            "combine_input_gradient",
            "up_bias_gradient",
            "down_bias_gradient",
        ] {
            let extension = if folder == "kernels" { "cu" } else { "rs" };
            assert!(MAP.contains(&format!("`{folder}/{kernel}.{extension}`")), "{folder}/{kernel}");
        }
    }
}

#[test]
fn the_readme_shows_the_map_as_it_is() {
    assert!(README.contains(MAP.trim()), "copy src/audit.md into the README");
}
