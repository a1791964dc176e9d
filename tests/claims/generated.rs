//! `gen` writes the same inputs everywhere, and `check` waits for their results.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use clap::Parser;
use safetensors::SafeTensors;
use safetensors::tensor::{TensorView, serialize_to_file};
use sonicmoe::case::museum::{Answer, EXHIBITS};
use sonicmoe::cli::check::{CheckArgs, check_file};
use sonicmoe::cli::generate::{GenArgs, generate};
use sonicmoe::dump::{Dump, Overrides};
use sonicmoe::engine::Output;
use sonicmoe::oracle::Verdict;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: GenArgs,
}

/// Runs `gen` with these words and returns the file's path.
pub fn generated(name: &str, words: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("generated_{name}.safetensors"));
    let line = ["gen"].into_iter().chain(words.split_whitespace()).chain([path.to_str().unwrap()]);
    generate(&Line::parse_from(line).args, &mut Vec::new()).unwrap();
    path
}

fn bytes(name: &str, words: &str) -> Vec<u8> {
    std::fs::read(generated(name, words)).unwrap()
}

/// FNV-1a, 64 bits.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

fn in_a_pool_of<V: Send>(threads: usize, work: impl FnOnce() -> V + Send) -> V {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(work)
}

const SMALL: &str = "--shape 17,8,12,5,2 --biases --seed 7";

#[test]
fn the_same_arguments_give_the_same_bytes_for_any_number_of_threads() {
    for words in [SMALL, "--shape 40,24,16,6,3 --router given --dtype f32 --with-results --with-intermediates"] {
        let alone = in_a_pool_of(1, || bytes("alone", words));
        assert!(alone == in_a_pool_of(3, || bytes("three", words)), "{words}");
        assert!(alone != bytes("other", &format!("{words} --activation geglu")), "{words}");
    }
}

#[test]
fn the_bytes_of_a_small_file_are_those_of_every_machine() {
    let inputs = bytes("stored", SMALL);
    assert_eq!((inputs.len(), hash(&inputs)), (4464, 6_757_191_971_851_134_462));
}

#[test]
fn every_choice_of_arguments_is_read_back_as_it_was_said() {
    for (row, words) in [
        "--shape 9,8,8,4,2 --router topk_over_softmax --dtype f64 --layout concatenated_up_first --regime small",
        "--shape 9,8,8,4,2 --router given --dtype f16 --layout concatenated_gate_first --activation reglu --biases",
        "--shape 0,8,8,4,2 --router topk_over_softmax_renormalized --dtype f32 --activation relu_squared",
    ]
    .into_iter()
    .enumerate()
    {
        let path = generated(&format!("said_{row}"), words);
        let dump = Dump::read(path, &Overrides::default()).unwrap();
        let problem = &dump.problem;
        let said = |flag: &str| words.split(&format!("--{flag} ")).nth(1).map(|rest| rest.split(' ').next().unwrap());
        assert_eq!(dump.metadata.router.map(|kind| kind.name()), said("router"));
        assert_eq!(Some(dump.storage.name()), said("dtype"));
        assert_eq!(problem.activation().name(), said("activation").unwrap_or("swiglu"));
        assert_eq!(problem.b1().is_some(), words.contains("--biases"));
        if let Some(layout) = said("layout") {
            assert_eq!(dump.layout.name(), layout);
        }
        let largest = problem.x().fold(0.0f64, |largest, value| largest.max(value.abs()));
        assert_eq!(largest < 0.1, words.contains("--regime small") || problem.t() == 0);
        assert!(dump.results.is_empty() && dump.unused.is_empty());
    }
}

#[test]
fn the_exact_regime_is_given_routing_and_its_right_results_pass() {
    for regime in ["exact", "exact-fine-scores"] {
        let words = format!("--shape 40,32,24,5,2 --regime {regime} --biases --with-results --with-intermediates");
        let path = generated(&format!("regime_{regime}"), &words);
        let dump = Dump::read(&path, &Overrides::default()).unwrap();
        assert!(dump.problem.router_w().is_none() && dump.problem.dout().iter().all(|value| value.abs() == 1.0));
        let checked = check_file(&path, &CheckArgs::default()).unwrap();
        assert_eq!(checked.faults().iter().filter(|(_, verdict)| *verdict == Verdict::NumericFailure).count(), 0);
    }
}

#[test]
fn every_exhibit_with_results_becomes_a_file_that_passes() {
    for exhibit in EXHIBITS.into_iter().filter(|exhibit| exhibit.answer == Answer::Results) {
        let path = generated(&format!("museum_{}", exhibit.name), &format!("--museum {} --with-results", exhibit.name));
        let checked = match check_file(&path, &CheckArgs::default()) {
            Ok(checked) => checked,
            // NaN in tokens that no expert has is for an engine to survive; a dump's inputs are finite.
            Err(error) if exhibit.name == "nan-beside-the-rows" => {
                assert!(error.to_string().contains("`x`"), "{error}");
                continue;
            }
            Err(error) => panic!("{}: {error}", exhibit.name),
        };
        assert!(checked.missing.is_empty(), "{}: {}", exhibit.name, checked.report());
        // Some exhibits are so small that a wrong result has the right numbers too.
        let wrong = checked.faults().into_iter().find(|(_, verdict)| *verdict != Verdict::Vacuous);
        assert!(wrong.is_none(), "{}: {}", exhibit.name, checked.report());
    }
}

#[test]
fn inputs_alone_are_incomplete_and_complete_with_an_engine_s_results() {
    for router in ["softmax_over_topk", "given"] {
        let words = format!("--shape 65,24,40,6,2 --biases --router {router}");
        let inputs = generated(&format!("inputs_{router}"), &words);
        let waiting = check_file(&inputs, &CheckArgs::default()).unwrap();
        assert_eq!(waiting.verdict, Verdict::Incomplete, "{}", waiting.report());
        for output in [Output::O, Output::Dx, Output::Dw1, Output::Dw2, Output::Db1, Output::Db2] {
            assert!(waiting.dump.missing.contains(&output));
        }
        assert!(waiting.report().contains("add o, dx, dw1, dw2, db1, db2, d"), "{}", waiting.report());

        let answered = std::fs::read(generated(&format!("answered_{router}"), &format!("{words} --with-results")));
        let (inputs, answered) = (std::fs::read(inputs).unwrap(), answered.unwrap());
        let (_, header) = SafeTensors::read_metadata(&inputs).unwrap();
        let (inputs, answered) =
            (SafeTensors::deserialize(&inputs).unwrap(), SafeTensors::deserialize(&answered).unwrap());
        let mut tensors: HashMap<String, TensorView<'_>> = HashMap::new();
        for name in ["o", "dx", "dw1", "dw2", "db1", "db2", "ds", "drouter_w"] {
            tensors.extend(answered.tensor(name).ok().map(|view| (name.to_owned(), view)));
        }
        for (name, view) in inputs.iter() {
            assert_eq!(answered.tensor(name).unwrap(), view, "{name} is an input");
            tensors.insert(name.to_owned(), view);
        }
        let completed = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("completed_{router}.safetensors"));
        serialize_to_file(tensors, header.metadata().clone(), &completed).unwrap();
        let checked = check_file(&completed, &CheckArgs::default()).unwrap();
        assert_eq!(checked.verdict, Verdict::Pass, "{}", checked.report());
    }
}
