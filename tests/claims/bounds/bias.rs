//! Errors of one sign: correct engines have none beyond λ, in any type and order of summation, and
//! faults that every element alone lets pass have them.

use std::collections::BTreeMap;

use half::{bf16, f16};
use ndarray::{ArrayD, Axis};
use proptest::prelude::*;
use sonicmoe::case::strategy::any_case;
use sonicmoe::case::{Case, Pairing, Scale};
use sonicmoe::engine::{Numerics, Output, Results, Stored};
use sonicmoe::oracle::bias::{Bias, Twin};
use sonicmoe::oracle::{bound, judge, statistic};
use sonicmoe::problem::{Biases, Gating, Problem};
use sonicmoe::routing::Routing;
use sonicmoe::sonic::cpu::CpuEngine;
use sonicmoe::{DType, Element, Engine, Record, run};

use crate::swapped::with_gate_and_up_swapped;

use super::{LIMITS, LIMITS_OF_ENGINES, UNIT, arithmetic, config, naive, problem_of};

/// What is biased of `results`: signed in any group, or directed towards one of `wrong`.
fn biased(twin: &Twin, results: &Results, wrong: &[BTreeMap<Output, ArrayD<f64>>]) -> Vec<String> {
    let mut biased = Vec::new();
    for (&output, stored) in results.iter().filter(|(output, _)| Output::RESULTS.contains(output)) {
        for (group, bias) in twin.signed(output, stored).unwrap().into_iter().filter(|(_, bias)| !bias.passes()) {
            biased.push(format!("{output}, {group}: {bias:?}"));
        }
        for wrong in wrong.iter().filter_map(|wrong| wrong.get(&output)) {
            let bias = twin.directed(output, stored, wrong).unwrap().unwrap_or_default();
            if !bias.passes() {
                biased.push(format!("{output}, directed: {bias:?}"));
            }
        }
    }
    biased
}

/// Other results of the right shapes: tokens or experts shifted by one, and every second column doubled.
fn wrong(twin: &Twin) -> Vec<BTreeMap<Output, ArrayD<f64>>> {
    let each = |change: fn(&ArrayD<f64>) -> ArrayD<f64>| {
        Output::RESULTS.iter().filter_map(|&output| Some((output, change(twin.truth(output)?)))).collect()
    };
    let shifted = |truth: &ArrayD<f64>| {
        let length = truth.len_of(Axis(0));
        truth.select(Axis(0), &(0..length).map(|index| (index + 1) % length).collect::<Vec<_>>())
    };
    let stripes = |truth: &ArrayD<f64>| {
        let mut stripes = truth.clone();
        stripes.iter_mut().step_by(2).for_each(|value| *value *= 2.0);
        stripes
    };
    vec![each(shifted), each(stripes)]
}

fn no_bias(
    problem: &Problem<'_, f64>,
    routing: &Routing,
    results: &Results,
    numerics: &Numerics,
) -> Result<(), TestCaseError> {
    let twin = Twin::new(problem, routing, numerics).unwrap();
    let found = biased(&twin, results, &wrong(&twin));
    prop_assert!(found.is_empty(), "{found:?}");
    Ok(())
}

fn cpu_has_no_bias<S: Element>(case: &Case, engine: &dyn Engine<S>) -> Result<(), TestCaseError> {
    let problem = case.problem::<S>().unwrap();
    let outcome = run(engine, &problem, Record::Results).unwrap();
    no_bias(&problem.widen(), &outcome.routing, &outcome.results, &engine.numerics())
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn no_correct_engine_is_biased(case in any_case(LIMITS), numerics in arithmetic()) {
        let (problem, routing) = problem_of(&case, &numerics, UNIT);
        let results = naive(&problem, &routing, numerics, case.seed);
        no_bias(&problem, &routing, &results, &numerics)?;
    }
}

proptest! {
    #![proptest_config(config(ProptestConfig::default().cases.max(20_000)))]

    /// `cargo test --release --test claims biased_in_a_long_run -- --ignored`.
    #[test]
    #[ignore = "the long run"]
    fn no_correct_engine_is_biased_in_a_long_run(case in any_case(LIMITS), numerics in arithmetic()) {
        let (problem, routing) = problem_of(&case, &numerics, UNIT);
        let results = naive(&problem, &routing, numerics, case.seed);
        no_bias(&problem, &routing, &results, &numerics)?;
    }
}

proptest! {
    #![proptest_config(config(30))]

    #[test]
    fn the_cpu_engine_is_not_biased_in_any_type(case in any_case(LIMITS_OF_ENGINES)) {
        cpu_has_no_bias::<bf16>(&case, &CpuEngine::<f32>::default())?;
        cpu_has_no_bias::<f16>(&case, &CpuEngine::<f32>::default())?;
        cpu_has_no_bias::<f32>(&case, &CpuEngine::<f32>::default())?;
        cpu_has_no_bias::<f64>(&case, &CpuEngine::<f64>::default())?;
    }
}

/// A case's problem, what the CPU engine makes of it in bf16, and its twin.
struct Made {
    problem: Problem<'static, bf16>,
    results: Results,
    twin: Twin,
    bounds: BTreeMap<Output, sonicmoe::oracle::Bounded>,
}

fn made(scale: Scale) -> Made {
    let case = Case { scale, ..Case::new("512,32,128,6,2".parse().unwrap()).with_seed(3) };
    let problem = case.problem::<bf16>().unwrap();
    let engine = CpuEngine::<f32>::new();
    let outcome = run(&engine, &problem, Record::Results).unwrap();
    let (wide, numerics) = (problem.widen(), Engine::<bf16>::numerics(&engine));
    let twin = Twin::new(&wide, &outcome.routing, &numerics).unwrap();
    let bounds = bound::layer(&wide, &outcome.routing, &numerics).unwrap();
    Made { problem, results: outcome.results, twin, bounds }
}

#[test]
fn a_gate_swapped_at_scale_0_02_is_inside_every_bound_and_far_beyond_the_directed_limit() {
    let Made { problem, results, twin, bounds } = made(Scale::Small);
    let faulty = with_gate_and_up_swapped(&CpuEngine::<f32>::new(), &problem).results;
    let wrong = with_gate_and_up_swapped(&CpuEngine::<f64>::new(), &problem.widen()).results;
    for output in [Output::O, Output::Dx, Output::Dw1, Output::Dw2] {
        let directed = |results: &Results| -> Bias {
            twin.directed(output, &results[&output], &wrong[&output].values).unwrap().unwrap()
        };
        assert!(judge(output, &faulty[&output], &bounds[&output]).unwrap().passes(), "{output} leaves its bound");
        let (right, fault) = (directed(&results), directed(&faulty));
        assert!(right.passes(), "{output}: {right:?}");
        // β of the faulty run is 1 but for its own roundings.
        assert!((fault.beta - 1.0).abs() < 0.5, "{output}: {fault:?}");
        assert!(!fault.passes(), "{output}: {fault:?}");
    }
}

#[test]
fn a_scale_error_of_one_and_a_half_percent_is_a_signed_bias_of_that_size() {
    for scale in [Scale::Unit, Scale::Small] {
        let Made { results, twin, .. } = made(scale);
        for output in [Output::O, Output::Dx, Output::Dw1, Output::Dw2] {
            let stored = &results[&output];
            let scaled = Stored { values: stored.values.mapv(|value| stored.dtype.round(1.015 * value)), ..*stored };
            let whole = |stored: &Stored| twin.signed(output, stored).unwrap()[0].1;
            let (right, fault) = (whole(stored), whole(&scaled));
            assert!(right.passes(), "{output}, {scale:?}: {right:?}");
            assert!(!fault.passes() && (fault.beta - 0.015).abs() < 0.003, "{output}, {scale:?}: {fault:?}");
        }
    }
}

#[test]
fn one_scaled_expert_is_found_by_its_index_and_a_tile_of_columns_by_its_range() {
    let Made { results, twin, .. } = made(Scale::Unit);
    let mut expert = results[&Output::Dw1].clone();
    expert.values.index_axis_mut(Axis(0), 4).mapv_inplace(|value| 1.1 * value);
    let worst = |output, stored: &Stored| {
        let groups = twin.signed(output, stored).unwrap();
        groups.into_iter().max_by(|(_, a), (_, b)| a.z.total_cmp(&b.z)).unwrap().0.to_string()
    };
    assert_eq!(worst(Output::Dw1, &expert), "index 4");
    for (range, name) in [(0..16, "columns 0..16"), (16..32, "columns 16..32")] {
        let mut columns = results[&Output::O].clone();
        columns.values.slice_axis_mut(Axis(1), range.into()).mapv_inplace(|value| 1.1 * value);
        assert_eq!(worst(Output::O, &columns), name);
    }
}

/// What is no number has no direction, and what is right none either.
#[test]
fn nothing_leans_to_where_a_wrong_result_is_right_or_no_number() {
    let Made { results, twin, .. } = made(Scale::Small);
    let truth = twin.truth(Output::O).unwrap();
    assert_eq!(twin.directed(Output::O, &results[&Output::O], truth).unwrap(), None);
    let mut stored = results[&Output::O].clone();
    stored.values[[3, 4]] += 1.0;
    let towards = |value: f64| {
        let mut wrong = truth.mapv(|value| -value);
        wrong[[3, 4]] = value;
        twin.directed(Output::O, &stored, &wrong).unwrap().unwrap()
    };
    let right_there = towards(truth[[3, 4]]);
    assert!(right_there.passes(), "{right_there:?}");
    for none in [f64::NAN, f64::INFINITY] {
        assert_eq!(towards(none), right_there);
    }
}

/// dlogits of a token reach all of drouter_w, so all of its elements may be off by as many deviations at once.
#[test]
fn elements_that_may_share_their_roundings_are_together_off_by_as_many_deviations_as_each() {
    let case = Case::new("512,32,16,6,2".parse().unwrap()).with_seed(3);
    let problem = case.problem::<bf16>().unwrap();
    let engine = CpuEngine::<f32>::new();
    let routing = run(&engine, &problem, Record::Results).unwrap().routing;
    let (wide, numerics) = (problem.widen(), Engine::<bf16>::numerics(&engine));
    let twin = Twin::new(&wide, &routing, &numerics).unwrap();
    let deviations = &statistic::deviations(&wide, &routing, &numerics).unwrap()[&Output::DrouterW];
    for (times, passes) in [(5.0, true), (5.9, true), (8.0, false)] {
        let mut values = deviations.truth.clone();
        values.zip_mut_with(&deviations.bound, |value, sigma| *value += times * sigma * value.signum());
        let whole = twin.signed(Output::DrouterW, &Stored { dtype: DType::BF16, values }).unwrap()[0].1;
        assert_eq!(whole.passes(), passes, "{times}: {whole:?}");
    }
}

/// What is not a rounding to the storage type may lean to one side, by its bound: an accumulator may cut off
/// instead of rounding.
#[test]
fn errors_that_lean_to_one_side_within_their_systematic_bound_are_no_bias() {
    let case = Case::new("64,32,48,3,2".parse().unwrap()).with_biases().with_seed(8);
    let problem = case.problem::<f32>().unwrap();
    let engine = CpuEngine::<f32>::new();
    let routing = run(&engine, &problem, Record::Results).unwrap().routing;
    let (wide, numerics) = (problem.widen(), Engine::<f32>::numerics(&engine));
    let twin = Twin::new(&wide, &routing, &numerics).unwrap();
    let of_sums = Numerics { storage: DType::F64, ..numerics };
    let systematic = bound::layer(&wide, &routing, &of_sums).unwrap();
    for output in [Output::O, Output::Dx, Output::Dw1, Output::Dw2, Output::Db2, Output::DrouterW] {
        let leaning = |times: f64| {
            let mut values = systematic[&output].truth.clone();
            values.zip_mut_with(&systematic[&output].bound, |value, s| *value += times * s * value.signum());
            twin.signed(output, &Stored { dtype: DType::F32, values }).unwrap()
        };
        assert!(leaning(0.99).iter().all(|(_, bias)| bias.passes()), "{output}: {:?}", leaning(0.99)[0]);
        assert!(!leaning(100.0)[0].1.passes(), "{output}: {:?}", leaning(100.0)[0]);
    }
}

#[test]
fn a_number_that_is_none_is_no_small_bias() {
    let Made { results, twin, .. } = made(Scale::Unit);
    let mut stored = results[&Output::O].clone();
    stored.values[[5, 5]] = f64::NAN;
    let whole = twin.signed(Output::O, &stored).unwrap()[0].1;
    assert!(whole.beta.is_nan() && !whole.passes());
}

/// Scores that a sigmoid far below 0 gives: every number of db2 is below half the smallest f16, and the
/// engine is right to store 0 throughout.
#[test]
fn numbers_that_all_underflow_are_no_bias() {
    let case = Case::new("64,8,8,2,1".parse().unwrap()).with_biases().with_pairing(Pairing::TopK);
    let drawn = case.problem::<f16>().unwrap();
    let Gating::Given { routing, scores } = drawn.gating() else { panic!("pairs are given") };
    let gating = Gating::Given { routing: routing.clone(), scores: vec![1e-10; scores.len()] };
    let biases = drawn.biases().map(Biases::borrowed);
    let problem =
        Problem::new(drawn.x(), drawn.w1(), drawn.w2(), biases, gating, drawn.activation(), drawn.dout()).unwrap();
    let engine = CpuEngine::<f32>::default();
    let outcome = run(&engine, &problem, Record::Results).unwrap();
    assert!(outcome.results[&Output::Db2].values.iter().all(|&value| value == 0.0));
    no_bias(&problem.widen(), &outcome.routing, &outcome.results, &Engine::<f16>::numerics(&engine)).unwrap();
}
