//! Files made to harm: whatever is changed in one, the check ends with an exit code that says so.
//!
//! A seed makes one file: a right run (given pairs, a router with ids, a grouped router, a checkpoint of
//! either architecture; as safetensors, `.npz` or a directory of `.npy`) with one to three changes. Four in
//! five keep their form and are hostile by their content, and some are asked for in ways that do not fit
//! them; the form of the others is broken.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Instant;

use proptest::prelude::*;
use rand::seq::{IndexedMutRandom, IndexedRandom};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde_json::{Value, json};
use sonicmoe::case::{Case, Load, Pairing};
use sonicmoe::cli::check::CheckArgs;
use sonicmoe::dump::{Metadata, Model, write};
use sonicmoe::engine::Output;
use sonicmoe::routing::GroupedSigmoid;
use sonicmoe::sonic::cpu::CpuEngine;
use sonicmoe::{Activation, Convention, GateLayout, Record, run};

use super::arrays::{npy, npz};
use super::edit::{File, save, save_directory};
use super::{content, outcome, outcome_with};

/// Files in one quick run, and in the long one unless `SONICMOE_HOSTILE_FILES` says otherwise.
const QUICK: u64 = 1_000;
const LONG: u64 = 100_000;

/// Right runs, small.
pub fn runs() -> &'static [File] {
    static RUNS: OnceLock<Vec<File>> = OnceLock::new();
    RUNS.get_or_init(|| {
        let case = |shape: &str| Case::new(shape.parse().unwrap());
        let grouped = GroupedSigmoid { groups: 2, kept: 1, renormalized: true, factor: 2.5 };
        let grouped = Pairing::Router { convention: Convention::GroupedSigmoid(grouped), load: Load::Uniform };
        let of = |name: &str, case: Case| {
            let problem = case.problem::<f32>().unwrap();
            let outcome = run(&CpuEngine::<f32>::new(), &problem, Record::Intermediates).unwrap();
            let path = save(&format!("hostile_{name}"), &[]);
            write(&path, &problem, &outcome.routing, &outcome.results, &Metadata::default()).unwrap();
            File::read(&path)
        };
        let gpt_oss = of("gpt_oss", case("5,4,3,4,2").with_biases().with_activation(Activation::GptOss));
        let gpt_oss = checkpoint(
            gpt_oss,
            &[
                ("w1", "experts.gate_up_proj"),
                ("w2", "experts.down_proj"),
                ("b1", "experts.gate_up_proj_bias"),
                ("b2", "experts.down_proj_bias"),
                ("router_w", "router.weight"),
            ],
            r#"{"hidden_size": 4, "intermediate_size": 3, "num_local_experts": 4, "num_experts_per_tok": 2}"#,
        );
        let deepseek = of("deepseek", case("5,4,3,4,2").with_pairing(grouped.clone()));
        let deepseek = checkpoint(
            deepseek,
            &[("w1", "experts.gate_up_proj"), ("w2", "experts.down_proj"), ("router_w", "gate.weight")],
            r#"{"hidden_size": 4, "moe_intermediate_size": 3, "n_routed_experts": 4, "num_experts_per_tok": 2,
                "n_group": 2, "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 2.5}"#,
        );
        vec![
            of("router", case("5,4,3,4,2").with_biases()),
            of("given", case("5,4,3,4,2").with_pairing(Pairing::TopK)),
            of("grouped", case("5,4,3,4,2").with_pairing(grouped)),
            gpt_oss,
            deepseek,
        ]
    })
}

/// The names of a checkpoint; numbers stay, so that transposed tensors are wrong ones.
fn checkpoint(mut file: File, names: &[(&str, &str)], config: &str) -> File {
    for (ours, theirs) in names {
        file.tensor(ours).name = format!("param.{theirs}");
        file.tensor(&format!("d{ours}")).name = format!("grad.{theirs}");
    }
    file.tensors.retain(|tensor| {
        tensor.name.contains('.') || ["x", "dout", "o", "dx", "selection_bias"].contains(&tensor.name.as_str())
    });
    file.strings.clear();
    file.with_string("config", config)
}

/// What a file is written as.
enum Written {
    Bytes(Vec<u8>),
    Directory(Vec<(String, Vec<u8>)>),
}

/// The file of a seed, and how it is asked for.
fn mutated(seed: u64) -> (Written, CheckArgs) {
    let random = &mut ChaCha8Rng::seed_from_u64(seed);
    let mut file = runs().choose(random).unwrap().clone();
    if random.random_bool(0.8) {
        for _ in 0..random.random_range(1..4) {
            content::change(&mut file, random);
        }
        let written = match random.random_range(0..10) {
            0..7 => Written::Bytes(file.to_bytes()),
            7..9 => Written::Bytes(npz(&file, |_| {})),
            _ => Written::Directory(npy(&file)),
        };
        let args = if random.random_bool(0.2) { unfit(random) } else { CheckArgs::default() };
        return (written, args);
    }
    (broken(file, random), CheckArgs::default())
}

/// Flags that most files do not fit: a name that is not there, another convention.
fn unfit(random: &mut ChaCha8Rng) -> CheckArgs {
    let mut args = CheckArgs::default();
    match random.random_range(0..6) {
        0 => args.conventions.map = vec![("x".into(), "nowhere".into())],
        1 => args.conventions.map = vec![("nothing".into(), "x".into())],
        2 => args.conventions.layout = GateLayout::ALL.choose(random).copied(),
        3 => args.conventions.k = Some(*[0, 1, 3, 4, 5, usize::MAX].choose(random).unwrap()),
        4 => args.rounding_model = Model::ALL.choose(random).copied(),
        _ => args.only = vec![*Output::RESULTS.choose(random).unwrap()],
    }
    args
}

fn broken(mut file: File, random: &mut ChaCha8Rng) -> Written {
    for _ in 0..random.random_range(0..3) {
        change_tensors(&mut file, random);
    }
    match random.random_range(0..10) {
        0..6 => {
            let mut header = serde_json::to_string(&file.table()).unwrap();
            if random.random_bool(0.4) {
                header = changed_header(&file, random);
            }
            let mut bytes = file.to_bytes_with(&header);
            change_bytes(&mut bytes, 8 + header.len(), random);
            Written::Bytes(bytes)
        }
        6..8 => {
            let mut bytes = npz(&file, |array| change_array(array, random));
            let length = bytes.len();
            // Its directory stands at the end.
            change_bytes(&mut bytes, length, random);
            Written::Bytes(bytes)
        }
        _ => {
            let mut arrays = npy(&file);
            for (_, array) in &mut arrays {
                change_array(array, random);
            }
            Written::Directory(arrays)
        }
    }
}

/// One change of meaning: names, types, shapes, strings, numbers.
fn change_tensors(file: &mut File, random: &mut ChaCha8Rng) {
    const DTYPES: [&str; 9] = ["F64", "F32", "BF16", "F16", "I64", "I32", "U8", "BOOL", "F8_E4M3"];
    let at = random.random_range(0..file.tensors.len());
    let other = file.tensors.choose(random).unwrap().name.clone();
    let tensor = &mut file.tensors[at];
    match random.random_range(0..9) {
        0 => tensor.name = other,
        1 => drop(file.tensors.remove(at)),
        2 => tensor.dtype = (*DTYPES.choose(random).unwrap()).into(),
        3 => tensor.shape.reverse(),
        4 => {
            if let Some(size) = tensor.shape.choose_mut(random) {
                *size = *[0, 1, 2, 7, 1 << 31, (1 << 31) - 1, 1 << 62, usize::MAX].choose(random).unwrap();
            }
        }
        // Two billion rows of nothing.
        5 => {
            tensor.bytes.clear();
            tensor.shape =
                (0..tensor.shape.len()).map(|_| *[0, (1 << 31) - 1, 1 << 40].choose(random).unwrap()).collect();
        }
        6 => {
            let values = [f64::NAN, f64::INFINITY, -f64::INFINITY, 0.0, -1.0, 3e38, 1e-45, 1e9];
            let (value, all) = (*values.choose(random).unwrap(), random.random_bool(0.5));
            if ["F64", "F32", "BF16", "I32"].contains(&tensor.dtype.as_str()) {
                let mut numbers = tensor.values();
                let place = random.random_range(0..numbers.len().max(1));
                numbers.iter_mut().enumerate().filter(|(at, _)| all || *at == place).for_each(|(_, it)| *it = value);
                tensor.set(&numbers);
            }
        }
        7 => {
            let key = *["router", "w1_layout", "activation", "K", "config", "T", "d", "tile", "token_rounding"]
                .choose(random)
                .unwrap();
            let value = *[
                "",
                "given",
                "softmax_over_topk",
                "topk_over_softmax",
                "grouped_sigmoid:groups=2,kept=1,renormalized=true,factor=1",
                "grouped_sigmoid:groups=18446744073709551615,kept=4294967296,renormalized=false,factor=nan",
                "interleaved_gate_first",
                "relu",
                "gpt_oss",
                "1",
                "4",
                "18446744073709551615",
                "-1",
                "nearest_frequency_ties_down",
                "{\"hidden_size\": 1e30}",
                "[[[[[[",
                "two\nlines \u{1b}[31m",
            ]
            .choose(random)
            .unwrap();
            file.strings.insert(key.into(), value.into());
        }
        _ => {
            let copy = file.tensors[at].clone();
            file.tensors.push(copy);
        }
    }
}

/// A header that lies: offsets moved, exchanged or overlapping, entries of other kinds, names twice.
fn changed_header(file: &File, random: &mut ChaCha8Rng) -> String {
    let mut table = file.table();
    let names: Vec<String> = table.keys().cloned().collect();
    let name = names.choose(random).unwrap().clone();
    let other = names.choose(random).unwrap().clone();
    match random.random_range(0..6) {
        0 => {
            let wild = [json!(0), json!(-1), json!(u64::MAX), json!(1e300), json!("4"), Value::Null];
            if let Some(offsets) = table[&name].get_mut("data_offsets") {
                offsets[random.random_range(0..2)] = wild.choose(random).unwrap().clone();
            }
        }
        1 => table[&name] = table[&other].clone(),
        2 => table[&name] = [json!({}), json!([]), json!(1), Value::Null].choose(random).unwrap().clone(),
        3 => drop(table.remove(&name)),
        4 => {
            let text = serde_json::to_string(&table).unwrap();
            let entry = serde_json::to_string(&table[&name]).unwrap();
            return text.replacen('{', &format!("{{\"{name}\":{entry},"), 1);
        }
        _ => return format!("{}{}", "[".repeat(random.random_range(1..4000)), serde_json::to_string(&table).unwrap()),
    }
    serde_json::to_string(&table).unwrap()
}

/// Bytes overwritten, most of them among the first `header`; the end cut off, or more appended.
fn change_bytes(bytes: &mut Vec<u8>, header: usize, random: &mut ChaCha8Rng) {
    for _ in 0..random.random_range(0..4) {
        let length = if random.random_bool(0.7) { header.min(bytes.len()) } else { bytes.len() };
        let place = random.random_range(0..length);
        bytes[place] = random.random();
    }
    match random.random_range(0..8) {
        0 => bytes.truncate(random.random_range(0..bytes.len())),
        1 => bytes.extend((0..random.random_range(1..40)).map(|_| random.random::<u8>())),
        2 => {
            let claim = [0, 1, 1 << 20, 1 << 40, u64::MAX, bytes.len() as u64];
            bytes[..8].copy_from_slice(&claim.choose(random).unwrap().to_le_bytes());
        }
        _ => {}
    }
}

/// One array in twenty gets other bytes, most of them in its header.
fn change_array(array: &mut Vec<u8>, random: &mut ChaCha8Rng) {
    if random.random_bool(0.05) {
        let header = array.len().min(80);
        change_bytes(array, header, random);
    }
}

fn save_mutated(name: &str, written: &Written) -> PathBuf {
    match written {
        Written::Bytes(bytes) => save(name, bytes),
        Written::Directory(arrays) => save_directory(name, arrays),
    }
}

/// How a seed's file is judged; a panic or an exit code that no file may cause is an error.
fn judged(seed: u64) -> Result<u8, String> {
    let thread = format!("{:?}", std::thread::current().id()).replace(['(', ')'], "_");
    let (written, args) = mutated(seed);
    let path = save_mutated(&format!("hostile_{thread}"), &written);
    match catch_unwind(AssertUnwindSafe(|| outcome_with(&path, &args))) {
        Ok((code @ 0..=4, _)) => Ok(code),
        Ok((code, said)) => Err(format!("seed {seed} ends with exit code {code}: {said}")),
        Err(_) => Err(format!("seed {seed} makes the check panic")),
    }
}

/// How many files ended with each exit code.
fn campaign(seeds: std::ops::Range<u64>) -> [u64; 5] {
    let started = Instant::now();
    let codes: Vec<Result<u8, String>> = seeds.clone().into_par_iter().map(judged).collect();
    let mut counts = [0; 5];
    let mut faults = Vec::new();
    for code in codes {
        match code {
            Ok(code) => counts[code as usize] += 1,
            Err(fault) => faults.push(fault),
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("{} files in {seconds:.1} s; exit codes 0 to 4: {counts:?}", seeds.end - seeds.start);
    assert!(faults.is_empty(), "{} files: {}", faults.len(), faults[..faults.len().min(10)].join("\n"));
    counts
}

#[test]
fn no_change_of_a_file_makes_the_check_panic_or_blame_itself() {
    let counts = campaign(0..QUICK);
    // Every code is met, and a quarter of all files go on to the numbers: ids out of range and shapes that
    // do not fit break the contract in a form of their own.
    assert!(counts.iter().all(|&count| count > 0), "{counts:?}");
    assert!(counts[2] > QUICK / 8, "{counts:?}");
    assert!(counts[2] <= QUICK * 3 / 4, "{counts:?}");
}

/// `SONICMOE_HOSTILE_FILES=1000000 cargo test --test claims hostile -- --ignored --nocapture`
#[test]
#[ignore = "the long run"]
fn no_change_of_a_hundred_thousand_files_does_either() {
    let files = std::env::var("SONICMOE_HOSTILE_FILES").ok().and_then(|files| files.parse().ok()).unwrap_or(LONG);
    campaign(QUICK..QUICK + files);
}

#[test]
fn huge_axes_beside_one_of_nothing_are_refused() {
    let rows = (1usize << 31) - 1;
    for (name, shape) in [
        ("x", vec![rows, 0]),
        ("w2", vec![rows, 4, 0]),
        ("w2", vec![rows, 0, 3]),
        ("w1", vec![rows, 0, 4]),
        ("w1", vec![0, 1 << 40, 4]),
        ("b1", vec![0, 1 << 40]),
    ] {
        for file in runs()[..3].iter().filter(|file| file.tensors.iter().any(|tensor| tensor.name == name)) {
            let mut file = file.clone();
            file.tensor(name).bytes.clear();
            file.tensor(name).shape = shape.clone();
            let (code, said) = outcome(&file.save("nothing"));
            assert!(code == 2 && said.lines().count() == 1, "{name} {shape:?}: {code} {said}");
        }
    }
}

/// With d = 1 a file of a megabyte describes a layer of terabytes: every token goes to every expert.
#[test]
fn a_layer_whose_truth_needs_far_more_memory_than_its_file_is_refused() {
    let (t, e, n) = (20_000, 2_000, 20);
    let mut file = runs()[0].clone();
    file.tensors.retain(|tensor| ["x", "dout", "w1", "w2", "router_w"].contains(&tensor.name.as_str()));
    for (name, shape) in [
        ("x", vec![t, 1]),
        ("dout", vec![t, 1]),
        ("w1", vec![e, 2 * n, 1]),
        ("w2", vec![e, 1, n]),
        ("router_w", vec![e, 1]),
    ] {
        let tensor = file.tensor(name);
        tensor.bytes = vec![0; 4 * shape.iter().product::<usize>()];
        tensor.shape = shape;
    }
    for key in ["T", "d", "n", "E"] {
        file.strings.remove(key);
    }
    let (code, said) = outcome(&file.with_string("K", "2000").save("terabytes"));
    assert!(code == 2 && said.contains("R·(d + n)"), "{code} {said}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// The long run's seeds are these numbers: a failing one is repeated by itself.
    #[test]
    fn a_seed_makes_the_same_file_again(seed: u64) {
        let bytes = |written: Written| match written {
            Written::Bytes(bytes) => vec![(String::new(), bytes)],
            Written::Directory(arrays) => arrays,
        };
        prop_assert_eq!(bytes(mutated(seed).0), bytes(mutated(seed).0));
    }
}
