//! Files that are no dumps: refused in one clear line, with the right exit code, never a panic.

use std::sync::OnceLock;

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::FileFailurePersistence;
use serde_json::Value;
use sonicmoe::case::{Case, Pairing};
use sonicmoe::cli::check::{CheckArgs, check_file};
use sonicmoe::dump::{Metadata, write};
use sonicmoe::sonic::cpu::CpuEngine;
use sonicmoe::{Record, run};

use super::edit::{File, save};
use super::outcome;

/// A small right file: a router with ids and logits, biases, everything between the kernels.
fn small() -> &'static File {
    static FILE: OnceLock<File> = OnceLock::new();
    FILE.get_or_init(|| run_of("router", Case::new("9,8,6,4,2".parse().unwrap()).with_biases()))
}

/// The same with given routing.
fn given() -> &'static File {
    static FILE: OnceLock<File> = OnceLock::new();
    FILE.get_or_init(|| run_of("given", Case::new("9,8,6,4,2".parse().unwrap()).with_pairing(Pairing::TopK)))
}

fn run_of(name: &str, case: Case) -> File {
    let problem = case.problem::<f32>().unwrap();
    let outcome = run(&CpuEngine::<f32>::new(), &problem, Record::Intermediates).unwrap();
    let path = save(&format!("small_{name}"), &[]);
    write(&path, &problem, &outcome.routing, &outcome.results, &Metadata::default()).unwrap();
    let file = File::read(&path);
    assert_eq!(super::outcome(&path).0, 0, "{}", super::outcome(&path).1);
    file
}

/// Refused with this exit code, in one line that says this.
#[track_caller]
fn refused(name: &str, bytes: &[u8], code: u8, says: &str) {
    let path = save(name, bytes);
    let (found, message) = outcome(&path);
    assert!(found == code && message.contains(says) && message.lines().count() == 1, "{name}: {found}: {message}");
    assert!(message.len() < 700, "{name}: {message}");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn truncated_files_are_refused_wherever_they_end() {
    let bytes = small().to_bytes();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for (length, says) in [
        (0, "at least 8 bytes"),
        (7, "at least 8 bytes"),
        (8, "only 0 follow"),
        (8 + header / 2, "its header claims"),
        (8 + header, "truncated"),
        (bytes.len() / 2, "truncated"),
        (bytes.len() - 1, "truncated"),
    ] {
        refused(&format!("truncated_{length}"), &bytes[..length], 2, says);
    }
    refused("appended", &[&bytes[..], b"x"].concat(), 2, "appended");
}

#[test]
fn a_header_cannot_claim_more_than_the_file_has() {
    let mut bytes = small().to_bytes();
    for claim in [1u64 << 60, u64::MAX, bytes.len() as u64] {
        bytes[..8].copy_from_slice(&claim.to_le_bytes());
        refused(&format!("claim_{claim}"), &bytes, 2, &format!("claims {claim} bytes"));
    }
}

#[test]
fn tensors_that_overlap_leave_gaps_or_do_not_fit_are_refused() {
    let with = |change: &dyn Fn(&mut serde_json::Map<String, Value>)| {
        let mut table = small().table();
        change(&mut table);
        small().to_bytes_with(&serde_json::to_string(&table).unwrap())
    };
    let second = small().tensors[1].name.clone();
    let overlapping = with(&|table| {
        let offsets = &mut table[&second]["data_offsets"];
        *offsets = serde_json::json!([offsets[0].as_u64().unwrap() - 4, offsets[1].as_u64().unwrap() - 4]);
    });
    refused("overlap", &overlapping, 2, "overlap");
    let gap = with(&|table| drop(table.remove(&second)));
    refused("gap", &gap, 2, "gap");
    let larger = with(&|table| table["x"]["shape"] = serde_json::json!([9, 9]));
    refused("misfit", &larger, 2, "do not fit");
    let huge = with(&|table| table["x"]["shape"] = serde_json::json!([u32::MAX, u32::MAX, u32::MAX]));
    refused("huge", &huge, 2, "more elements than any memory");
    let negative = with(&|table| table["x"]["shape"] = serde_json::json!([-1, 8]));
    refused("negative", &negative, 2, "header");
    let word = with(&|table| table["x"]["dtype"] = "F33".into());
    refused("unknown_type", &word, 2, "F33");
}

#[test]
fn headers_that_are_no_table_are_refused() {
    for (name, header) in [
        ("empty", ""),
        ("array", "[1,2]"),
        ("unclosed", "{\"x\":"),
        ("deep", &"[".repeat(100_000)),
        ("binary", "\u{0}\u{1}\n\n"),
    ] {
        refused(&format!("header_{name}"), &small().to_bytes_with(header), 2, "header");
    }
    let mut bytes = small().to_bytes();
    bytes[9] = 0xff;
    refused("header_utf8", &bytes, 2, "UTF-8");
    let text = serde_json::to_string(&small().table()).unwrap();
    let x = serde_json::to_string(&small().table()["x"]).unwrap();
    let twice = text.replacen('{', &format!("{{\"x\":{x},"), 1);
    refused("header_twice", &small().to_bytes_with(&twice), 2, "`x` is there twice");
}

#[test]
fn shapes_and_types_that_do_not_fit_each_other_are_refused_by_name() {
    let reshaped = |name: &str, shape: &[usize]| {
        let mut file = small().clone().without("token_idx").without("expert_idx");
        file.tensor(name).shape = shape.to_vec();
        file.to_bytes()
    };
    refused("flat_x", &reshaped("x", &[72]), 2, "`x`");
    refused("turned_x", &reshaped("x", &[8, 9]), 2, "`w2`");
    refused("turned_w2", &reshaped("w2", &[4, 6, 8]), 2, "`w2`");
    refused("turned_w1", &reshaped("w1", &[4, 8, 12]), 2, "`w1`");
    refused("turned_o", &reshaped("o", &[8, 9]), 2, "`o`");
    refused("turned_dw1", &reshaped("dw1", &[4, 8, 12]), 2, "`dw1`");
    let mut integers = small().clone();
    integers.tensor("x").dtype = "I32".into();
    refused("integers", &integers.to_bytes(), 2, "`x`");
    let mut floats = given().clone();
    floats.tensor("token_idx").dtype = "F32".into();
    refused("float_ids", &floats.to_bytes(), 2, "`token_idx`");
}

#[test]
fn routings_that_are_none_are_refused() {
    let with = |name: &str, at: usize, value: f64| given().clone().edit(name, |values| values[at] = value).to_bytes();
    refused("token_beyond", &with("token_idx", 3, 9.0), 2, "entry 3 is 9");
    refused("token_negative", &with("token_idx", 3, -1.0), 2, "entry 3 is -1");
    refused("expert_beyond", &with("expert_idx", 0, 4.0), 2, "entry 0 is 4");
    refused("score_nan", &with("scores", 2, f64::NAN), 2, "`scores`");
    let twice = given().clone().edit("expert_idx", |experts| experts[1] = experts[0]).to_bytes();
    refused("pair_twice", &twice, 2, "twice");
    let worse = small().clone().edit("expert_idx", |experts| {
        // The first expert that token 0 was not sent to takes the place of its best.
        let other = (0..4).map(f64::from).find(|expert| !experts[..2].contains(expert)).unwrap();
        experts[0] = other;
    });
    refused("worse_choice", &worse.to_bytes(), 2, "token 0 goes to expert");
}

#[test]
fn numbers_that_no_layer_takes_are_refused() {
    for value in [f64::NAN, f64::INFINITY] {
        let file = small().clone().edit("router_logits", |values| values[5] = value);
        refused(&format!("logit_{value}"), &file.to_bytes(), 2, "logit of token 1, expert 1");
        for input in ["x", "w1", "w2", "b1", "dout", "router_w"] {
            let file = small().clone().edit(input, |values| values[0] = value);
            refused(&format!("{input}_{value}"), &file.to_bytes(), 2, &format!("`{input}`"));
        }
    }
    let k = |k: &str| small().clone().with_string("K", k).to_bytes();
    refused("k_beyond", &k("5"), 2, "K = 5");
    refused("k_zero", &k("0"), 2, "K = 0");
    refused("k_other", &k("3"), 2, "K = 3");
    refused("k_word", &k("two\nlines"), 2, "`K`");
}

#[test]
fn conventions_are_never_guessed() {
    for (key, flag) in [("router", "--router"), ("w1_layout", "--layout"), ("activation", "--activation"), ("K", "--k")]
    {
        refused(&format!("no_{key}"), &small().clone().without_string(key).to_bytes(), 4, flag);
        if key != "K" {
            let file = small().clone().with_string(key, "some\nthing else");
            refused(&format!("unknown_{key}"), &file.to_bytes(), 2, "known are");
        }
    }
    let file = small().clone().with_string("rounding_model", "none");
    refused("unknown_model", &file.to_bytes(), 2, "fused, eager");
    refused("other_size", &small().clone().with_string("d", "16").to_bytes(), 2, "`d`");
}

#[test]
fn a_missing_tensor_makes_the_check_incomplete_and_is_named() {
    for input in ["x", "w1", "w2", "dout", "router_w", "b1", "b2"] {
        refused(&format!("no_{input}"), &small().clone().without(input).to_bytes(), 4, &format!("`{input}`"));
    }
    for input in ["scores", "token_idx", "expert_idx"] {
        refused(&format!("no_{input}"), &given().clone().without(input).to_bytes(), 4, &format!("`{input}`"));
    }
    for result in ["o", "dx", "dw1", "dw2", "db1", "db2", "drouter_w"] {
        let path = small().clone().without(result).save(&format!("without_{result}"));
        let (code, report) = outcome(&path);
        assert_eq!(code, 4, "{report}");
        assert!(report.contains(&format!("required and not in the file: {result}\n")), "{report}");
    }
    let path = given().clone().without("ds").save("without_ds");
    assert_eq!(outcome(&path).0, 4);
    // A number that is wrong weighs more than one that is missing.
    let path = small().clone().without("dw1").edit("dw2", |values| values.fill(0.0)).save("missing_and_wrong");
    assert_eq!(outcome(&path).0, 1);
}

#[test]
fn names_that_nobody_knows_are_listed() {
    let mut file = small().clone();
    file.tensor("b2").name = "bias\n2".into();
    file.tensor("b1").name = "bias 1".into();
    let file = file.without("db1").without("db2");
    let report = outcome(&file.save("unknown_names")).1;
    assert!(report.contains(r"not read: `bias\n2`, `bias 1`"), "{report}");
}

#[test]
fn a_wrong_count_contradicts_the_routing() {
    let file = File::of_data("sonic_rounding_a");
    let moved = |name: &str| {
        file.clone()
            .edit(name, |counts| {
                counts[0] += 1.0;
                counts[1] -= 1.0;
            })
            .to_bytes()
    };
    refused("moved_count", &moved("expert_frequency"), 2, "`expert_frequency`");
    refused("moved_top_k", &moved("topk_frequency"), 2, "`topk_frequency`");
    refused("other_tile", &file.clone().with_string("tile", "96").to_bytes(), 2, "no multiple of the tile 96");
}

#[test]
fn a_folder_and_a_missing_file_are_named() {
    for path in [std::env::temp_dir(), std::env::temp_dir().join("no such file")] {
        let (code, message) = outcome(&path);
        assert_eq!(code, 2);
        assert!(message.starts_with(&path.display().to_string()) && message.lines().count() == 1, "{message}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 256,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct("proptest-regressions/dumps.txt"))),
        ..ProptestConfig::default()
    })]

    /// Half of the changes hit the header, which is where a reader can go wrong.
    #[test]
    fn no_change_of_bytes_makes_it_panic(
        of_given: bool,
        changes in prop::collection::vec((any::<bool>(), any::<Index>(), any::<u8>()), 1..6),
        cut in prop::option::weighted(0.1, any::<Index>()),
    ) {
        let mut bytes = if of_given { given().to_bytes() } else { small().to_bytes() };
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        for (in_header, at, value) in changes {
            let length = if in_header { header } else { bytes.len() };
            bytes[at.index(length)] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let path = save(&format!("mutated_{:?}", std::thread::current().id()).replace(['(', ')'], "_"), &bytes);
        let code = match check_file(&path, &CheckArgs::default()) {
            Ok(checked) => checked.verdict.code(),
            Err(error) => {
                prop_assert_eq!(error.to_string().lines().count(), 1);
                sonicmoe::oracle::Verdict::from(&error).code()
            }
        };
        prop_assert!(code != 5, "exit code {}", code);
    }
}
