//! What statistics see in a file that every element lets pass, and where they have to hold their tongue.

use half::bf16;
use ndarray::Array2;
use sonicmoe::case::{Case, Load, Pairing, Scale};
use sonicmoe::dump::{Metadata, write};
use sonicmoe::engine::{Outcome, Output, RoundingModel};
use sonicmoe::oracle::Verdict;
use sonicmoe::problem::{Gating, Problem};
use sonicmoe::sonic::cpu::CpuEngine;
use sonicmoe::{Convention, Record, run};

use super::edit::{File, save};
use super::{REAL, check};
use crate::swapped::with_gate_and_up_swapped;

/// A layer at scale 0.02, as SonicMoE's own test has it.
fn small() -> Problem<'static, bf16> {
    case().with_pairing(Pairing::TopK).problem().unwrap()
}

fn case() -> Case {
    Case::new("512,32,128,6,2".parse().unwrap()).with_scale(Scale::Small).with_seed(3)
}

fn cpu(problem: &Problem<'_, bf16>) -> Outcome {
    run(&CpuEngine::<f32>::new(), problem, Record::Results).unwrap()
}

fn file(name: &str, problem: &Problem<'_, bf16>, outcome: &Outcome) -> File {
    let path = save(name, &[]);
    let metadata = Metadata { rounding_model: Some(RoundingModel::Fused), ..Metadata::default() };
    write(&path, problem, &outcome.routing, &outcome.results, &metadata).unwrap();
    File::read(&path)
}

#[test]
fn at_scale_0_02_a_right_file_passes_and_one_with_gate_and_up_swapped_fails() {
    let problem = small();
    let right = check(&file("small_right", &problem, &cpu(&problem)).save("small_right")).unwrap();
    assert_eq!(right.verdict, Verdict::Pass, "{}", right.report());
    let swapped = file("small_swapped", &problem, &with_gate_and_up_swapped(&CpuEngine::<f32>::new(), &problem))
        .save("small_swapped");
    let swapped = check(&swapped).unwrap();
    assert_eq!(swapped.verdict, Verdict::NumericFailure, "{}", swapped.report());
    assert!(swapped.report().contains("of gate and up swapped"), "{}", swapped.report());
}

/// A router's roundings are shared by all rows of an expert, and hide there that gate and up are swapped.
/// With the scores in the file they are judged by themselves, and are given to the experts. drouter_w sums
/// the router's own gradients, and stays vacuous at this scale, unless the file has dlogits too: then it is
/// judged from them.
#[test]
fn behind_a_router_at_scale_0_02_the_file_s_scores_tell_gate_from_up() {
    let pairing = Pairing::Router { convention: Convention::SoftmaxOverTopK, load: Load::Uniform };
    let problem: Problem<'_, bf16> = case().with_pairing(pairing).problem().unwrap();
    let engine = CpuEngine::<f32>::new();
    let scores = run(&engine, &problem, Record::Intermediates).unwrap().results.remove(&Output::Scores).unwrap();
    let checked = |name: &str, outcome: &Outcome| check(&file(name, &problem, outcome).save(name)).unwrap();
    let vacuous = |checked: &sonicmoe::cli::check::Checked| -> Vec<Output> {
        assert_eq!(checked.verdict, Verdict::Vacuous, "{}", checked.report());
        checked.faults().into_iter().map(|(output, _)| output).collect()
    };
    let (mut right, mut swapped) = (cpu(&problem), with_gate_and_up_swapped(&engine, &problem));

    let silent = vacuous(&checked("small_router_silent", &right));
    assert!([Output::Dw1, Output::Dw2].iter().all(|output| silent.contains(output)), "{silent:?}");
    right.results.insert(Output::Scores, scores.clone());
    let dlogits = right.results.remove(&Output::Dlogits).unwrap();
    let without_dlogits = checked("small_router_right", &right);
    assert_eq!(vacuous(&without_dlogits), [Output::DrouterW]);
    assert!(without_dlogits.report().contains("with `dlogits` in the file"), "{}", without_dlogits.report());
    right.results.insert(Output::Dlogits, dlogits);
    let with_dlogits = checked("small_router_dlogits", &right);
    assert_eq!(with_dlogits.verdict, Verdict::Pass, "{}", with_dlogits.report());
    for wrong in [|_: f64| 0.0, |value: f64| -value, |value: f64| 1.02 * value] {
        let mut faulty = right.clone();
        let drouter_w = faulty.results.get_mut(&Output::DrouterW).unwrap();
        drouter_w.values.mapv_inplace(|value| drouter_w.dtype.round(wrong(value)));
        let faulty = checked("small_router_wrong_w", &faulty);
        assert_eq!(faulty.verdict, Verdict::NumericFailure, "{}", faulty.report());
    }
    swapped.results.insert(Output::Scores, scores);
    let swapped = checked("small_router_swapped", &swapped);
    assert_eq!(swapped.verdict, Verdict::NumericFailure, "{}", swapped.report());
    assert!(swapped.report().contains("of gate and up swapped"), "{}", swapped.report());
}

/// Scores that are wrong are wrong, whatever the experts make of them.
#[test]
fn scores_that_are_wrong_fail_by_their_own_bound() {
    let pairing = Pairing::Router { convention: Convention::SoftmaxOverTopK, load: Load::Uniform };
    let problem: Problem<'_, bf16> = case().with_pairing(pairing).problem().unwrap();
    let mut outcome = cpu(&problem);
    let mut scores = run(&CpuEngine::<f32>::new(), &problem, Record::Intermediates)
        .unwrap()
        .results
        .remove(&Output::Scores)
        .unwrap();
    scores.values[[7]] *= 1.05;
    outcome.results.insert(Output::Scores, scores);
    let checked = check(&file("small_router_scores", &problem, &outcome).save("small_router_scores")).unwrap();
    assert_eq!(checked.verdict, Verdict::NumericFailure, "{}", checked.report());
    assert!(checked.faults().iter().any(|(output, _)| *output == Output::Scores), "{}", checked.report());
}

/// Two equal tokens make equal errors: statistics judge nothing, and what only they could have seen is
/// said to be vacuous, not right.
#[test]
fn repeated_tokens_silence_the_statistics() {
    let drawn = small();
    let mut x: Array2<bf16> = drawn.x().to_owned();
    let first = x.row(0).to_owned();
    x.row_mut(1).assign(&first);
    let gating = Gating::borrowed(drawn.gating());
    let problem = Problem::new(x, drawn.w1(), drawn.w2(), None, gating, drawn.activation(), drawn.dout()).unwrap();
    let checked = check(&file("repeated", &problem, &cpu(&problem)).save("repeated")).unwrap();
    assert_eq!(checked.verdict, Verdict::Vacuous, "{}", checked.report());
    assert!(checked.report().contains("x of tokens 0 and 1 are equal"), "{}", checked.report());
}

#[test]
fn a_scale_error_of_one_and_a_half_percent_fails_in_the_output_of_every_file() {
    for (name, _) in REAL {
        let scaled = File::of_data(name).edit("o", |values| values.iter_mut().for_each(|value| *value *= 1.015));
        let path = scaled.save(&format!("scaled_{name}"));
        let checked = check(&path).unwrap();
        assert_eq!(checked.verdict, Verdict::NumericFailure, "{name}: {}", checked.report());
        assert!(checked.faults().iter().any(|(output, _)| *output == Output::O), "{name}: {}", checked.report());
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn a_scale_error_of_one_and_a_half_percent_fails_in_any_result_of_a_fused_run() {
    for output in ["o", "dx", "dw1", "dw2"] {
        let scaled = |file: File| file.edit(output, |values| values.iter_mut().for_each(|value| *value *= 1.015));
        let path = scaled(File::of_data("sonic_rounding_a")).save(&format!("scaled_{output}"));
        let checked = check(&path).unwrap();
        assert_eq!(checked.verdict, Verdict::NumericFailure, "{output}: {}", checked.report());
    }
}

#[test]
fn a_swapped_pair_of_ds_a_tail_of_eight_left_out_and_garbage_in_an_empty_expert_fail() {
    let fails = |name: &str, output: Output, file: File| {
        let checked = check(&file.save(name)).unwrap();
        assert_eq!(checked.verdict, Verdict::NumericFailure, "{name}: {}", checked.report());
        assert!(checked.faults().iter().any(|(fault, _)| *fault == output), "{name}: {}", checked.report());
    };
    for name in ["sonic_rounding_a", "scattermoe_a", "grouped_mm_a"] {
        let swapped = File::of_data(name).edit("ds", |values| values.swap(4, 5));
        fails(&format!("swapped_ds_{name}"), Output::Ds, swapped);
    }
    for (name, _) in REAL {
        let mut file = File::of_data(name);
        let n = *file.tensor("w2").shape.last().unwrap();
        let tail = file.edit("dw2", |values| values.chunks_mut(n).for_each(|row| row[n - 8..].fill(0.0)));
        fails(&format!("tail_{name}"), Output::Dw2, tail);
    }
    for output in ["dw1", "dw2"] {
        let garbage = File::of_data("sonic_topk_empty").edit(output, |values| {
            let expert = values.len() / 8;
            values[3 * expert..4 * expert].iter_mut().for_each(|value| *value = 0.5);
        });
        let output = if output == "dw1" { Output::Dw1 } else { Output::Dw2 };
        fails(&format!("garbage_{output}"), output, garbage);
    }
}
