//! The command line says what it found, with the right exit code.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn sonicmoe() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sonicmoe"));
    command.env_remove("NO_COLOR");
    command
}

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name).with_extension("safetensors")
}

/// A changed copy of a real run. Several claims ask for the same one at a time: it is whole from the moment
/// that it has its name.
fn scratch(name: &str, change: impl FnOnce(&mut Vec<u8>)) -> PathBuf {
    let mut bytes = std::fs::read(data("hf_olmoe_bf16")).unwrap();
    change(&mut bytes);
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("command_line_{name}.safetensors"));
    let thread = std::thread::current();
    let unfinished = path.with_extension(thread.name().unwrap_or("unnamed").replace("::", "_"));
    std::fs::write(&unfinished, bytes).unwrap();
    std::fs::rename(&unfinished, &path).unwrap();
    path
}

/// Where a tensor's bytes lie in the file.
fn range(bytes: &[u8], tensor: &str) -> std::ops::Range<usize> {
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let table: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let at = |place: usize| 8 + header + table[tensor]["data_offsets"][place].as_u64().unwrap() as usize;
    at(0)..at(1)
}

fn zeroed_output() -> PathBuf {
    scratch("zeroed", |bytes| {
        let range = range(bytes, "o");
        bytes[range].fill(0);
    })
}

fn truncated() -> PathBuf {
    scratch("truncated", |bytes| bytes.truncate(1000))
}

fn unnamed_result() -> PathBuf {
    scratch("unnamed", |bytes| {
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let text = String::from_utf8(bytes[8..8 + header].to_vec()).unwrap().replacen("\"dw2\"", "\"dv2\"", 1);
        bytes[8..8 + header].copy_from_slice(text.as_bytes());
    })
}

fn run(arguments: &[&str]) -> Output {
    sonicmoe().args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn check(files: &[&Path], flags: &[&str]) -> Output {
    sonicmoe().arg("check").args(flags).args(files).stdin(Stdio::null()).output().unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("ended by a signal: {output:?}"))
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn the_exit_code_is_the_worst_of_all_files() {
    let right = data("hf_olmoe_bf16");
    let (wrong, malformed, incomplete) = (zeroed_output(), truncated(), unnamed_result());
    assert_eq!(code(&check(&[&right], &[])), 0);
    assert_eq!(code(&check(&[&wrong], &[])), 1);
    assert_eq!(code(&check(&[&malformed], &[])), 2);
    assert_eq!(code(&check(&[&incomplete], &[])), 4);
    assert_eq!(code(&check(&[&right, &incomplete], &[])), 4);
    assert_eq!(code(&check(&[&incomplete, &wrong, &right], &[])), 1);
    let all = check(&[&wrong, &malformed, &incomplete, &right], &[]);
    assert_eq!(code(&all), 2);
    let last = text(&all).lines().last().unwrap().to_string();
    assert_eq!(last, "4 files: 1 PASS, 1 INCOMPLETE, 1 FAIL, 1 CONTRACT VIOLATED; together: CONTRACT VIOLATED");
}

#[test]
fn each_exit_code_has_its_reason() {
    let right = data("hf_olmoe_bf16");
    let path = right.to_str().unwrap();
    let (wrong, malformed, incomplete) = (zeroed_output(), truncated(), unnamed_result());
    let missing = std::env::temp_dir().join("no such file");
    for (expected, words) in [
        (0, vec!["check", path]),
        (0, vec!["memory", "--shape", "8,8,8,2,1"]),
        (0, vec!["replay", "1/9,8,8,2,1/swiglu/given/unit/0/cpu-bf16/layer:o"]),
        (1, vec!["check", wrong.to_str().unwrap()]),
        (1, vec!["compare", path, wrong.to_str().unwrap()]),
        (1, vec!["identify", "--layout", "concatenated_up_first", path]),
        (2, vec!["check", malformed.to_str().unwrap()]),
        (2, vec!["check", missing.to_str().unwrap()]),
        (2, vec!["replay", "1/9,8,8,2,3/swiglu/given/unit/0/cpu-bf16/layer:o"]),
        (2, vec!["shrink", "1/9,8,8,2,1/swiglu/given/unit/0/cpu-bf16/layer:o"]),
        (2, vec!["verify", "--shard", "3/2"]),
        // With functions that may be off by a billion last places nothing could fail.
        (3, vec!["check", "--function-ulps", "1e9", "--only", "dw1", path]),
        (4, vec!["check", incomplete.to_str().unwrap()]),
        (4, vec!["compare", path, incomplete.to_str().unwrap()]),
        (4, vec!["replay", "1/9,8,8,2,1/swiglu/given/unit/0/cpu-bf16/layer:db1"]),
        (5, vec!["broken-promise"]),
    ] {
        let output = run(&words);
        assert_eq!(code(&output), expected, "{words:?}: {output:?}");
    }
}

#[test]
fn an_exit_code_survives_readers_of_output_and_of_errors_that_have_gone() {
    for (expected, words) in [
        (0, &["verify", "--cases", "1", "--shape", "3,8,8,2,1", "--device", "cpu"][..]),
        (2, &["check", "no such file"]),
        (2, &["memory", "--shape", "8,8,8,2,3"]),
        (5, &["broken-promise"]),
    ] {
        let mut child =
            sonicmoe().args(words).stdout(Stdio::piped()).stderr(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap();
        drop((child.stdout.take(), child.stderr.take()));
        assert_eq!(child.wait().unwrap().code(), Some(expected), "{words:?}");
    }
}

#[test]
fn a_failure_names_the_result_the_place_both_numbers_and_how_to_repeat_it() {
    let wrong = zeroed_output();
    let report = text(&check(&[&wrong], &[]));
    let failure = report.lines().find(|line| line.trim_start().starts_with("o: ")).unwrap();
    for part in ["elements are beyond their bound", "worst at [", "truth ", "bound ", "ratio "] {
        assert!(failure.contains(part), "{report}");
    }
    assert!(report.contains("repeat: sonicmoe check --rounding-model eager --only o"), "{report}");
    assert_eq!(code(&check(&[&wrong], &["--only", "dx", "--only", "dw1"])), 0);
    assert_eq!(code(&check(&[&wrong], &["--only", "o"])), 1);
}

#[test]
fn json_says_the_same_as_the_tables() {
    let (right, wrong, malformed) = (data("hf_olmoe_bf16"), zeroed_output(), truncated());
    let output = check(&[&right, &wrong, &malformed], &["--json"]);
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["schema"], "sonicmoe.check/1");
    assert_eq!((document["verdict"].as_str(), document["exit_code"].as_u64()), (Some("CONTRACT VIOLATED"), Some(2)));
    let file = |place: usize| &document["files"][place];
    assert_eq!((&file(0)["verdict"], &file(0)["model"]), (&"PASS".into(), &"fused_tensor_router".into()));
    let o = |place: usize| file(place)["results"].as_array().unwrap().iter().find(|row| row["result"] == "o").unwrap();
    assert_eq!((o(0)["elements"].as_u64(), o(0)["failing"].as_u64()), (Some(8320), Some(0)));
    assert!(o(0)["worst"]["ratio"].as_f64().unwrap() <= 1.0 && o(1)["worst"]["ratio"].as_f64().unwrap() > 1.0);
    assert!(o(1)["failing"].as_u64().unwrap() > 1000);
    assert!(file(2)["error"].as_str().unwrap().contains("its header claims"));
}

#[test]
fn a_declared_model_is_the_only_one_tried() {
    let right = data("hf_olmoe_bf16");
    assert_eq!(code(&check(&[&right], &["--rounding-model", "fused"])), 1);
    assert_eq!(code(&check(&[&right], &["--rounding-model", "fused_tensor_router"])), 0);
}

#[test]
fn flags_win_over_metadata_and_names_can_be_mapped() {
    let right = data("hf_olmoe_bf16");
    assert_eq!(code(&check(&[&right], &["--layout", "concatenated_up_first"])), 1);
    assert_eq!(code(&check(&[&right], &["--router", "topk_over_softmax_renormalized"])), 1);
    assert_eq!(code(&check(&[&right], &["--k", "9"])), 2);
    let unnamed = unnamed_result();
    assert_eq!(code(&check(&[&unnamed], &["--map", "dw2=dv2"])), 0);
    assert_eq!(code(&check(&[&unnamed], &["--map", "dw2=dv3"])), 2);
    assert_eq!(code(&check(&[&unnamed], &["--map", "dw3=dv2"])), 2);
}

#[test]
fn wrong_usage_is_a_broken_contract_and_help_is_none() {
    for wrong in [&["check"][..], &["chekc"], &["check", "--activation", "swish", "f"], &["check", "--only", "p", "f"]]
    {
        let output = run(wrong);
        assert_eq!((code(&output), output.stdout.len()), (2, 0), "{wrong:?}");
        assert!(!output.stderr.is_empty());
    }
    for help in [&["--help"][..], &["--version"]] {
        assert_eq!(code(&run(help)), 0, "{help:?}");
    }
}

#[test]
fn help_shows_examples_that_work() {
    let help = text(&run(&["check", "--help"]));
    assert!(help.contains("sonicmoe check run.safetensors"), "{help}");
    for name in ["--router", "--layout", "--activation", "--k", "--rounding-model", "--json", "Exit codes"] {
        assert!(help.contains(name), "{name}: {help}");
    }
    let top = text(&run(&["--help"]));
    let verbs = top.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let verbs: Vec<&str> =
        verbs.filter_map(|line| line.split_whitespace().next()).filter(|verb| *verb != "help").collect();
    assert!(verbs.len() >= 9 && !verbs.contains(&"broken-promise"), "{verbs:?}");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("help");
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["run", "other"] {
        std::fs::copy(data("hf_olmoe_bf16"), folder.join(name).with_extension("safetensors")).unwrap();
    }
    for verb in verbs {
        let help = text(&run(&[verb, "--help"]));
        let examples = help.split("Example").nth(1).unwrap_or_else(|| panic!("{verb}: {help}"));
        let start = format!("  sonicmoe {verb}");
        let example =
            examples.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("{verb}: {help}"));
        // What takes long has its own tests, `shrink` needs a case that fails, and `tune` a device.
        if ["verify", "bench", "score", "explain", "shrink", "tune"].contains(&verb) {
            continue;
        }
        let command = example.trim().split("   ").next().unwrap().split(" > ").next().unwrap();
        let words: Vec<&str> = command.split_whitespace().skip(1).collect();
        let output = sonicmoe().args(&words).current_dir(&folder).stdin(Stdio::null()).output().unwrap();
        assert_eq!(code(&output), 0, "{command}: {output:?}");
    }
    let example = top.lines().find_map(|line| line.trim().strip_prefix("sonicmoe memory ")).unwrap();
    let arguments: Vec<&str> = std::iter::once("memory").chain(example.split_whitespace().take(2)).collect();
    let output = run(&arguments);
    assert_eq!(code(&output), 0, "{arguments:?}");
    assert!(text(&output).contains("264 MiB"), "{output:?}");
}

#[test]
fn what_is_no_terminal_gets_no_colours() {
    for no_color in [None, Some("1")] {
        let mut command = sonicmoe();
        command.arg("check").arg(data("hf_olmoe_bf16"));
        if let Some(value) = no_color {
            command.env("NO_COLOR", value);
        }
        assert!(!text(&command.output().unwrap()).contains('\x1b'));
    }
}

#[test]
fn a_reader_that_leaves_early_does_not_change_the_verdict() {
    let mut child = sonicmoe()
        .arg("check")
        .args([data("hf_olmoe_bf16"), data("hf_qwen3_f32")])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((code(&output), String::from_utf8(output.stderr).unwrap().as_str()), (0, ""));
}

#[test]
fn explain_names_the_cause_and_keeps_the_exit_code_of_check() {
    let path = scratch("explained", |bytes| {
        let range = range(bytes, "o");
        bytes[range].fill(0);
    });
    let wrong = sonicmoe().args(["explain", "--json"]).arg(&path).stdin(Stdio::null()).output().unwrap();
    assert_eq!(wrong.status.code(), Some(1));
    let document: Value = serde_json::from_slice(&wrong.stdout).unwrap();
    assert_eq!(document["causes"][0]["cause"], "zero o", "{document}");
    let report = String::from_utf8(check(&[&path], &[]).stdout).unwrap();
    assert!(report.contains(&format!("why: sonicmoe explain {}", path.display())), "{report}");
    let right = sonicmoe().arg("explain").arg(data("hf_olmoe_bf16")).stdin(Stdio::null()).output().unwrap();
    assert_eq!(right.status.code(), Some(0));
    assert!(String::from_utf8(right.stdout).unwrap().contains("nothing needs explaining"));
}
