//! The museum of public bugs: a test for every exhibit, on every engine.

use half::{bf16, f16};
use sonicmoe::case::museum::{Answer, EXHIBITS, by_name};
use sonicmoe::engine::{Outcome, Output};
use sonicmoe::sonic::cpu::CpuEngine;
use sonicmoe::sonic::gpu::GpuEngine;
use sonicmoe::verify::{CaseId, EngineName, show};
use sonicmoe::{DType, Element, Engine, Record, run};

fn holds<S: Element>(engine: &dyn Engine<S>, named: EngineName, name: &str) {
    match show(engine, by_name(name).unwrap()).unwrap() {
        Ok(finding) => {
            let id = CaseId::of_exhibit(name, named).unwrap();
            let said = &finding.explanation;
            assert_eq!(finding.failing, 0, "{name} on {} in {}: {said}\nsonicmoe replay {id}", engine.name(), S::DTYPE);
            assert!(finding.judged > 0);
        }
        Err(skipped) => eprintln!("skipped: {name} on {}: {}", engine.name(), skipped.reason),
    }
}

fn holds_on_every_engine(name: &str) {
    holds::<bf16>(&CpuEngine::<f32>::new(), EngineName::Cpu(DType::BF16), name);
    holds::<f16>(&CpuEngine::<f32>::new(), EngineName::Cpu(DType::F16), name);
    holds::<f32>(&CpuEngine::<f32>::new(), EngineName::Cpu(DType::F32), name);
    holds::<f64>(&CpuEngine::<f64>::new(), EngineName::Cpu(DType::F64), name);
    match GpuEngine::open() {
        Ok(engine) => holds::<bf16>(&engine, EngineName::Cuda, name),
        Err(absence) => eprintln!("skipped: {name} on cuda: {absence}"),
    }
}

macro_rules! exhibits {
    ($($test:ident: $name:literal,)*) => {
        $(#[test]
        fn $test() {
            holds_on_every_engine($name);
        })*

        #[test]
        fn every_exhibit_has_its_test() {
            assert_eq!(EXHIBITS.map(|exhibit| exhibit.name), [$($name),*]);
        }
    };
}

exhibits! {
    an_empty_experts_gradients_are_written: "empty-expert-unwritten",
    no_token_is_no_launch: "no-token",
    a_last_tile_of_one_row_is_computed: "row-tails",
    a_last_tile_of_eight_columns_is_computed: "column-tail",
    nan_in_tokens_that_no_expert_has_stays_there: "nan-beside-the-rows",
    gate_and_up_are_not_taken_for_each_other: "gate-up-order",
    equal_logits_go_to_the_smaller_id: "equal-logits",
    logits_that_are_equal_in_bf16_alone_are_not_equal: "logits-equal-in-bf16",
    zeros_of_both_signs_are_one_logit: "signed-zero-logits",
    a_nan_logit_is_refused: "nan-logits",
    an_infinite_logit_is_refused: "infinite-logits",
    expert_256_gets_its_tokens: "expert-256",
    every_expert_may_be_chosen: "every-expert",
    more_than_every_expert_is_refused: "more-than-every-expert",
    a_small_number_between_large_ones_survives_the_combine: "small-between-large",
    a_balanced_router_has_a_gradient: "perfectly-balanced",
    biases_alone_are_weighted_and_show_in_ds: "biases-only",
    softmax_over_topk_is_no_other_convention: "softmax-over-topk",
    topk_over_softmax_is_no_other_convention: "topk-over-softmax",
    renormalized_is_no_other_convention: "topk-over-softmax-renormalized",
    a_count_is_not_rounded_beyond_t: "rounded-down-beyond-t",
    column_major_tensors_are_read_by_their_strides: "strided",
    tensors_stored_backwards_are_read_by_their_strides: "negative-strides",
    transposed_weights_are_read_by_their_strides: "transposed-weights",
    indices_beyond_32_bits_are_for_devices: "beyond-32-bits",
    settings_are_for_devices: "every-setting",
}

fn outcome(name: &str) -> Outcome {
    let problem = by_name(name).unwrap().problem::<f32>().unwrap();
    run(&CpuEngine::<f32>::new(), &problem, Record::Intermediates).unwrap()
}

fn chosen(name: &str) -> Vec<u32> {
    outcome(name).routing.pair_expert().iter().map(|expert| expert.0).collect()
}

#[test]
fn ties_and_near_ties_are_chosen_as_their_names_say() {
    assert_eq!(chosen("equal-logits"), [0, 1]);
    assert_eq!(chosen("logits-equal-in-bf16"), [3, 2]);
    assert_eq!(chosen("signed-zero-logits"), [0, 1]);
    assert_eq!(chosen("perfectly-balanced"), [0, 1]);
}

#[test]
fn the_exhibits_hold_what_they_are_made_for() {
    let values = |name: &str, output| outcome(name).results[&output].values.clone();
    assert!(values("small-between-large", Output::O).iter().all(|&o| o == 2f64.powi(-9)));
    let dlogits = values("perfectly-balanced", Output::Dlogits);
    assert!(dlogits.iter().all(|value| value.is_finite() && *value != 0.0), "{dlogits}");
    let scores = |name| values(name, Output::Scores);
    let (over, all) = (scores("softmax-over-topk"), scores("topk-over-softmax"));
    assert!((&over - &scores("topk-over-softmax-renormalized")).iter().all(|off| off.abs() < 1e-6));
    assert!((over[0] - all[0]).abs() > 0.05, "two functions");
    assert!(values("biases-only", Output::Ds).iter().all(|&ds| ds != 0.0));
    assert_eq!(outcome("rounded-down-beyond-t").routing.routed(), 4);
    assert!(EXHIBITS.iter().all(|exhibit| exhibit.address().starts_with("https://github.com/")));
    assert_eq!(EXHIBITS.iter().filter(|exhibit| matches!(exhibit.answer, Answer::DeviceOnly(_))).count(), 2);
}
