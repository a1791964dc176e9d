//! The eight kernels on the CPU: rounding points, threads, memory, empty experts.

mod bitwise;
mod numbers;

use std::collections::BTreeSet;

use half::{bf16, f16};
use ndarray::{Array2, ArrayD};
use sonicmoe::case::{Case, Load, Pairing};
use sonicmoe::engine::{Output, Results};
use sonicmoe::routing::Routing;
use sonicmoe::sonic::cpu::CpuEngine;
use sonicmoe::{
    Activation, Biases, Convention, Element, Engine, ExpertId, Gating, Gelu, Problem, Real, Record, TokenId, run,
};

fn case(shape: &str) -> Case {
    Case::new(shape.parse().unwrap())
}

fn results<S: Element, A: Real>(problem: &Problem<'_, S>) -> Results {
    run(&CpuEngine::<A>::new(), problem, Record::Intermediates).unwrap().results
}

fn bits(values: &ArrayD<f64>) -> Vec<u64> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The outputs whose bits differ.
fn changed(before: &Results, after: &Results) -> BTreeSet<Output> {
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
    before
        .iter()
        .filter(|(output, stored)| bits(&stored.values) != bits(&after[output].values))
        .map(|(&o, _)| o)
        .collect()
}

#[track_caller]
fn assert_same_bits(before: &Results, after: &Results, why: &str) {
    assert_eq!(changed(before, after), BTreeSet::new(), "{why}");
}

#[test]
fn an_expert_without_tokens_gets_positive_zero_gradients_wherever_it_stands() {
    fn check<S: Element>() {
        for empty in 0..4 {
            let mut counts = [5, 17, 3, 9];
            counts[empty] = 0;
            let problem = case("20,12,10,4,1").with_counts(&counts).with_biases().problem::<S>().unwrap();
            let found = results::<S, f32>(&problem);
            for output in [Output::Dw1, Output::Dw2, Output::Db1, Output::Db2] {
                for (expert, gradient) in found[&output].values.outer_iter().enumerate() {
                    let zero = gradient.iter().all(|value| value.to_bits() == 0);
                    assert_eq!(zero, expert == empty, "{output} of expert {expert} where {empty} is empty");
                }
            }
        }
    }
    check::<f32>();
    check::<bf16>();
    check::<f16>();
}

#[test]
fn a_token_without_pairs_gets_positive_zero() {
    let pairs = [(0, 1), (2, 0), (2, 1)].map(|(token, expert)| (TokenId(token), ExpertId(expert)));
    let routing = Routing::new(4, 2, pairs).unwrap();
    let base = case("4,8,6,2,1").with_biases().problem::<bf16>().unwrap();
    let problem = Problem::new(
        base.x(),
        base.w1(),
        base.w2(),
        Some(Biases { b1: base.b1().unwrap().into(), b2: base.b2().unwrap().into() }),
        Gating::Given { routing, scores: vec![-0.5; 3] },
        base.activation(),
        base.dout(),
    )
    .unwrap();
    let found = results::<bf16, f32>(&problem);
    for output in [Output::O, Output::Dx] {
        for (token, row) in found[&output].values.outer_iter().enumerate() {
            let zero = row.iter().all(|value| value.to_bits() == 0);
            assert_eq!(zero, [1, 3].contains(&token), "{output} of token {token}");
        }
    }
}

#[test]
fn no_token_at_all_gives_empty_outputs_and_zero_gradients() {
    let base = case("0,8,6,4,2").with_biases();
    let router = Pairing::Router { convention: Convention::TopKOverSoftmax, load: Load::Biased };
    for case in [base.clone().with_pairing(Pairing::TopK), base.with_pairing(router)] {
        let found = results::<bf16, f32>(&case.problem().unwrap());
        for (output, stored) in &found {
            let weights = [Output::Dw1, Output::Dw2, Output::Db1, Output::Db2, Output::DrouterW, Output::DrouterB];
            assert_eq!(stored.values.is_empty(), !weights.contains(output), "{case}: {output}");
            assert!(stored.values.iter().all(|value| value.to_bits() == 0), "{case}: {output}");
        }
    }
}

#[test]
fn what_stays_until_backward_is_2td_and_4rn_bytes_or_2rn_without_a_gate() {
    fn check<S: Element>() {
        for (shape, activation) in [
            ("64,24,16,4,2", Activation::SwiGlu),
            ("64,24,8,4,4", Activation::SwiGlu),
            ("33,17,5,7,3", Activation::GeGlu(Gelu::Tanh)),
            ("64,24,16,4,2", Activation::ReluSquared),
            ("0,24,16,4,2", Activation::SwiGlu),
        ] {
            let problem = case(shape).with_activation(activation).with_biases().problem::<S>().unwrap();
            let engine = CpuEngine::<f32>::new();
            let ledger = engine.forward(&problem, Record::Results).unwrap().pass.kept();
            let (td, rn) = (problem.t() * problem.d(), problem.routed() * problem.n());
            let expected = if activation.gated() { 2 * td + 4 * rn } else { 2 * td + 2 * rn };
            assert_eq!(ledger.activations(), expected, "{shape} {activation}");
        }
    }
    check::<bf16>();
    check::<f16>();
}

#[test]
fn metadata_are_counted_apart_and_hold_the_logits_only_where_backward_needs_all_of_them() {
    let (t, e, r) = (33, 8, 66);
    // Tokens and experts by pair, rows of pairs and back, tokens of rows and back; two lists of offsets.
    let indices = 4 * (6 * r + (e + 1) + (t + 1));
    for convention in Convention::ALL {
        let pairing = Pairing::Router { convention, load: Load::Uniform };
        let problem = case("33,16,16,8,2").with_pairing(pairing).problem::<bf16>().unwrap();
        let engine = CpuEngine::<f32>::new();
        let ledger = engine.forward(&problem, Record::Results).unwrap().pass.kept();
        let bytes = |name: &str| ledger.0.iter().find(|kept| kept.tensor == name).map(|kept| kept.bytes);
        let logits = (convention == Convention::TopKOverSoftmax).then_some(4 * t * e);
        assert_eq!(bytes("routing"), Some(indices), "{convention}");
        assert_eq!(bytes("scores"), Some(4 * r), "{convention}");
        assert_eq!(bytes("router_logits"), logits, "{convention}");
        assert_eq!(ledger.activations(), bytes("x").unwrap() + bytes("h").unwrap(), "{convention}");
    }
}

#[test]
fn a_nan_in_one_token_stays_in_its_rows_and_in_its_experts() {
    let case = case("70,24,20,5,2").with_pairing(Pairing::TopK).with_biases();
    let clean = case.problem::<bf16>().unwrap();
    let Gating::Given { routing, scores } = clean.gating() else { panic!("the case has given routing") };
    let (sick, mut x) = (37, clean.x().to_owned());
    x[[sick, 5]] = bf16::NAN;
    let problem = Problem::new(
        x,
        clean.w1(),
        clean.w2(),
        Some(Biases { b1: clean.b1().unwrap().into(), b2: clean.b2().unwrap().into() }),
        Gating::Given { routing: routing.clone(), scores: scores.clone() },
        clean.activation(),
        clean.dout(),
    )
    .unwrap();
    let experts: BTreeSet<usize> = (0..routing.routed())
        .filter(|&pair| routing.pair_token()[pair].index() == sick)
        .map(|pair| routing.pair_expert()[pair].index())
        .collect();
    let (before, after) = (results::<bf16, f32>(&clean), results::<bf16, f32>(&problem));
    let rows = |output: Output| {
        let (before, after) = (&before[&output].values, &after[&output].values);
        let differs = |row: &usize| {
            let of = |values: &ArrayD<f64>| values.index_axis(ndarray::Axis(0), *row).mapv(f64::to_bits);
            of(before) != of(after)
        };
        (0..before.shape()[0]).filter(differs).collect::<BTreeSet<_>>()
    };
    assert_eq!(rows(Output::O), BTreeSet::from([sick]));
    assert_eq!(rows(Output::Dx), BTreeSet::from([sick]));
    for output in [Output::Dw1, Output::Dw2, Output::Db1] {
        assert_eq!(rows(output), experts, "{output}");
    }
    assert_eq!(rows(Output::Db2), BTreeSet::new());
}

/// Behind a router the experts see the scores as if they were given, and dx gains dlogits W_r.
#[test]
fn a_router_is_given_routing_with_its_part_of_dx_added() {
    for convention in Convention::ALL {
        let pairing = Pairing::Router { convention, load: Load::Biased };
        let problem = case("50,20,12,6,3").with_biases().with_pairing(pairing).problem::<f64>().unwrap();
        let engine = CpuEngine::<f64>::new();
        let routed = run(&engine, &problem, Record::Intermediates).unwrap();
        let given = Problem::new(
            problem.x(),
            problem.w1(),
            problem.w2(),
            Some(Biases { b1: problem.b1().unwrap().into(), b2: problem.b2().unwrap().into() }),
            Gating::Given {
                routing: routed.routing.clone(),
                scores: routed.results[&Output::Scores].values.iter().copied().collect(),
            },
            problem.activation(),
            problem.dout(),
        )
        .unwrap();
        let given = results::<f64, f64>(&given);
        for (output, stored) in given.iter().filter(|(output, _)| **output != Output::Dx) {
            assert_eq!(bits(&stored.values), bits(&routed.results[output].values), "{convention}: {output}");
        }
        let dlogits = &routed.results[&Output::Dlogits].values;
        let (w, x) = (problem.router_w().unwrap(), problem.x());
        let gamma = |terms: usize| (terms + 2) as f64 * f64::EPSILON;
        for ((token, i), &experts) in
            given[&Output::Dx].values.view().into_dimensionality::<ndarray::Ix2>().unwrap().indexed_iter()
        {
            let terms = || (0..problem.e()).map(|e| dlogits[[token, e]] * w[[e, i]]);
            let size = experts.abs() + terms().map(f64::abs).sum::<f64>();
            let error = routed.results[&Output::Dx].values[[token, i]] - (experts + terms().sum::<f64>());
            assert!(error.abs() <= gamma(problem.e()) * size, "{convention}: dx at {token}, {i}");
        }
        for e in 0..problem.e() {
            let size: f64 = (0..problem.t()).map(|t| dlogits[[t, e]].abs()).sum();
            let sum: f64 = (0..problem.t()).map(|t| dlogits[[t, e]]).sum();
            assert!((routed.results[&Output::DrouterB].values[[e]] - sum).abs() <= gamma(problem.t()) * size);
            for i in 0..problem.d() {
                let terms = || (0..problem.t()).map(|t| dlogits[[t, e]] * x[[t, i]]);
                let error = routed.results[&Output::DrouterW].values[[e, i]] - terms().sum::<f64>();
                let size: f64 = terms().map(f64::abs).sum();
                assert!(error.abs() <= gamma(problem.t()) * size, "{convention}: drouter_w at {e}, {i}");
            }
        }
    }
}

#[test]
fn an_accumulator_narrower_than_the_storage_is_refused() {
    let problem = case("4,8,8,2,1").problem::<f64>().unwrap();
    let error = run(&CpuEngine::<f32>::new(), &problem, Record::Results).unwrap_err();
    assert!(error.to_string().contains("CpuEngine::<f64>"), "{error}");
}

#[test]
fn a_dout_of_another_shape_is_refused_by_name() {
    let problem = case("4,8,8,2,1").problem::<f32>().unwrap();
    let engine = CpuEngine::<f32>::new();
    let pass = engine.forward(&problem, Record::Results).unwrap().pass;
    let error = pass.backward(Array2::zeros((4, 9)).view(), Record::Results).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("`dout`"), "{error}");
}
