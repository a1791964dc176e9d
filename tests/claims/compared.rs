//! Two runs against each other, and the conventions that explain one.

use std::path::{Path, PathBuf};

use clap::Parser;
use serde_json::Value;
use sonicmoe::cli::Console;
use sonicmoe::cli::compare::{CompareArgs, compare};
use sonicmoe::cli::identify::{IdentifyArgs, identify};
use sonicmoe::oracle::Verdict;

use crate::dumps::edit::{File, data};
use crate::generated::generated;

#[derive(Parser)]
struct Compare {
    #[command(flatten)]
    args: CompareArgs,
}

#[derive(Parser)]
struct Identify {
    #[command(flatten)]
    args: IdentifyArgs,
}

const PLAIN: Console = Console { colours: false };

fn compared(a: &Path, b: &Path) -> (Verdict, Value) {
    let mut out = Vec::new();
    let args = Compare::parse_from(["compare", "--json", a.to_str().unwrap(), b.to_str().unwrap()]).args;
    let verdict = compare(&args, &PLAIN, &mut out).unwrap();
    compare(&CompareArgs { json: false, ..args }, &PLAIN, &mut Vec::new()).unwrap();
    (verdict, serde_json::from_slice(&out).unwrap())
}

fn row<'d>(document: &'d Value, name: &str) -> &'d Value {
    document["results"].as_array().unwrap().iter().find(|row| row["result"] == name).unwrap()
}

fn run(name: &str, words: &str) -> PathBuf {
    generated(&format!("compared_{name}"), &format!("--shape 40,24,16,5,2 --with-results {words}"))
}

/// The results of a file without its inputs.
fn results_of(path: &Path) -> File {
    let mut file = File::read(path);
    file.tensors.retain(|tensor| !["x", "w1", "w2", "dout", "router_w"].contains(&tensor.name.as_str()));
    file
}

#[test]
fn the_same_run_in_two_orders_of_gate_and_up_has_the_same_bits() {
    let (interleaved, concatenated) = (run("a", ""), run("b", "--layout concatenated_up_first"));
    let (verdict, document) = compared(&interleaved, &concatenated);
    assert_eq!(verdict, Verdict::Pass, "{document:#}");
    for row in document["results"].as_array().unwrap() {
        assert_eq!(row["difference"]["bitwise_equal"], true, "{row}");
    }
}

#[test]
fn a_difference_of_rounding_passes_where_the_inputs_are_and_a_larger_one_fails() {
    let right = run("right", "");
    // Neighbours in bf16 are 2⁻⁸ to 2⁻⁷ of a value apart, two roundings: this is 0.58 to 1.15 of that.
    let step = |values: &mut Vec<f64>| values[7] += values[7].abs() * 0.0045;
    let near = results_of(&right).edit("dw2", step).save("compared_near");
    let (verdict, document) = compared(&right, &near);
    assert_eq!(verdict, Verdict::Pass, "{document:#}");
    let dw2 = row(&document, "dw2");
    assert_eq!((&dw2["difference"]["differing"], &dw2["difference"]["ulps"]), (&1.into(), &1.into()));
    assert_eq!(dw2["difference"]["largest"]["at"], serde_json::json!([0, 0, 7]));
    assert!(dw2["ratio"].as_f64().unwrap() > 0.0);
    let far = results_of(&right).edit("dw2", |values| values[7] = 100.0).save("compared_far");
    let (verdict, document) = compared(&near, &far);
    assert_eq!((verdict, &row(&document, "dw2")["ratio"]), (Verdict::Incomplete, &Value::Null));
    for (a, b) in [(&right, &far), (&far, &right)] {
        let (verdict, document) = compared(a, b);
        assert_eq!((verdict, row(&document, "dw2")["verdict"].as_str()), (Verdict::NumericFailure, Some("FAIL")));
    }
}

#[test]
fn a_missing_result_is_incomplete_and_another_shape_breaks_the_contract() {
    let right = run("whole", "");
    let without = results_of(&right).without("dx").save("compared_without");
    assert_eq!(compared(&right, &without).0, Verdict::Incomplete);
    let other = generated("compared_other", "--shape 41,24,16,5,2 --with-results");
    assert_eq!(compared(&right, &other).0, Verdict::ContractViolated);
    let seed = run("seed", "--seed 1");
    let (verdict, document) = compared(&right, &seed);
    assert_eq!(verdict, Verdict::Incomplete);
    assert!(document["remarks"].to_string().contains("x differs"), "{document:#}");
}

fn identified(path: &Path) -> (Verdict, Value) {
    let mut out = Vec::new();
    let args = Identify::parse_from(["identify", "--json", path.to_str().unwrap()]).args;
    let verdict = identify(&args, &PLAIN, &mut out).unwrap();
    (verdict, serde_json::from_slice(&out).unwrap())
}

#[test]
fn every_real_file_is_explained_by_its_own_conventions_though_it_does_not_say_them() {
    for name in
        ["grouped_mm_a", "hf_olmoe_bf16", "hf_qwen3_f32", "scattermoe_a", "sonic_rounding_a", "sonic_topk_empty"]
    {
        let mut file = File::read(&data(name));
        let said = std::mem::take(&mut file.strings);
        let (verdict, document) = identified(&file.save(&format!("identified_{name}")));
        let best = &document["candidates"][0];
        let first = best["readings"].as_array().unwrap();
        let right = first.iter().any(|reading| {
            ["w1_layout", "router", "activation"].iter().all(|key| reading[key] == said[*key])
                && (reading["K"].is_null() || reading["K"] == said["K"].as_str().unwrap().parse::<u64>().unwrap())
        });
        assert!(right, "{name}: {best:#}");
        assert_eq!(verdict, Verdict::Pass, "{name}: {best:#}");
        // What two conventions share is said in one line, and what they do not is told apart.
        let mut routers: Vec<_> = first.iter().map(|reading| reading["router"].as_str().unwrap()).collect();
        routers.sort_unstable();
        match said["router"].as_str().unwrap() {
            "given" => assert_eq!(routers, ["given"], "{name}"),
            "topk_over_softmax" => assert_eq!(routers, ["topk_over_softmax"], "{name}"),
            _ => assert_eq!(routers, ["softmax_over_topk", "topk_over_softmax_renormalized"], "{name}"),
        }
        let residual = |place: usize| {
            let residuals = document["candidates"][place]["residuals"].as_object().unwrap();
            residuals.values().map(|value| value.as_f64().unwrap()).fold(0.0, f64::max)
        };
        assert!(residual(1) > 2.0 * residual(0), "{name}: {} and {}", residual(0), residual(1));
    }
}

#[test]
fn results_that_no_combination_gives_are_said_to_be_unexplained() {
    let file = File::of_data("hf_olmoe_bf16").edit("o", |values| values.iter_mut().for_each(|value| *value *= 1.5));
    let path = file.save("identified_wrong");
    let (verdict, document) = identified(&path);
    assert_eq!((verdict, &document["candidates"][0]["fits"]), (Verdict::NumericFailure, &false.into()));
    let mut text = Vec::new();
    identify(&Identify::parse_from(["identify", "--k", "3", path.to_str().unwrap()]).args, &PLAIN, &mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    for part in
        ["declares: swiglu, topk_over_softmax", "check it: sonicmoe check --router", "no combination explains it: FAIL"]
    {
        assert!(text.contains(part), "{text}");
    }
}
