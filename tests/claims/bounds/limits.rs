//! What a bound is where a sentence says it: numbers without any error, and numbers of which nothing is known.

use ndarray::{Array1, Array2, Array3, arr2, arr3};
use sonicmoe::case::{Case, Pairing};
use sonicmoe::engine::{Output, RoundingModel, RouterRounding};
use sonicmoe::oracle::{bound, statistic};
use sonicmoe::problem::Biases;
use sonicmoe::routing::Routing;
use sonicmoe::{Activation, DType, ExpertId, Gating, Problem, TokenId};

use super::{UNIT, numerics, problem_of};

/// One token, one expert, score 1.
fn gating() -> Gating<'static, f64> {
    let routing = Routing::new(1, 1, [(TokenId(0), ExpertId(0))]).unwrap();
    Gating::Given { routing, scores: vec![1.0] }
}

/// A bias is one more term of its sum, in ds (of n + d terms) d more, and γ grows with the terms.
#[test]
fn biases_of_next_to_nothing_cost_the_terms_that_they_are_and_nothing_else() {
    for (storage, bias) in [DType::BF16, DType::F32].into_iter().flat_map(|dtype| [0.0, 1e-12].map(|b| (dtype, b))) {
        let numerics = numerics(storage, RoundingModel::Fused, RouterRounding::Score);
        let case = Case::new("40,16,16,3,2".parse().unwrap()).with_pairing(Pairing::TopK);
        let (without, routing) = problem_of(&case, &numerics, UNIT);
        let (x, w1, w2) = (without.x().to_owned(), without.w1().to_owned(), without.w2().to_owned());
        let [b1, b2] = [32, 16].map(|width| Array2::from_elem((3, width), storage.round(bias)).into());
        let (gating, dout) = (without.gating().clone(), without.dout().to_owned());
        let biases = Some(Biases { b1, b2 });
        let with = Problem::new(x, w1, w2, biases, gating, without.activation(), dout).unwrap();
        let of = |problem: &Problem<'_, f64>| {
            let limits = [bound::layer(problem, &routing, &numerics), statistic::layer(problem, &routing, &numerics)];
            limits.map(Result::unwrap)
        };
        for (without, with) in of(&without).into_iter().zip(of(&with)) {
            for (output, without) in without {
                for (some, none) in with[&output].bound.iter().zip(&without.bound) {
                    assert!(
                        (0.999 * none..=2.01 * none).contains(some),
                        "{output}, {storage}: {none:e}, then {some:e}"
                    );
                }
            }
        }
    }
}

/// Under the eager model every partial sum is stored. 40000 − 40000 + 1 in f16 may come by 80000 for all that the sum
/// of magnitudes says, and 65408 + 60 + 1 be rounded up beyond 65504.
#[test]
fn nothing_is_known_of_stored_partial_sums_that_may_leave_the_range() {
    let pairs = (0..3).map(|expert| (TokenId(0), ExpertId(expert)));
    let routing = Routing::new(1, 3, pairs).unwrap();
    let layer = |y: [f64; 3]| {
        // a = relu(1) = 1, and y of each expert its w2.
        let gating = Gating::Given { routing: routing.clone(), scores: vec![1.0; 3] };
        let w2 = Array3::from_shape_fn((3, 1, 1), |(expert, ..)| y[expert]);
        Problem::new(arr2(&[[1.0]]), Array3::ones((3, 1, 1)), w2, None, gating, Activation::Relu, arr2(&[[1.0]]))
            .unwrap()
    };
    let numerics = numerics(DType::F16, RoundingModel::Eager, RouterRounding::Score);
    for (y, known) in [
        ([40000.0, -40000.0, 1.0], false),
        ([20000.0, -20000.0, 1.0], true),
        ([65408.0, 60.0, 1.0], false),
        ([30000.0, 30000.0, 1.0], true),
    ] {
        let o = &bound::layer(&layer(y), &routing, &numerics).unwrap()[&Output::O];
        assert_eq!(o.bound[[0, 0]].is_finite(), known, "{y:?}: {o:?}");
    }
}

/// h = 2¹³⁰ − 2¹³⁰ is 0 in the truth, and ∞ − ∞ in an f32 accumulator.
#[test]
fn nothing_is_known_of_a_sum_that_may_overflow_on_its_way() {
    let x = arr2(&[[libm::exp2(70.0), libm::exp2(70.0)]]);
    let of_h = |size: f64| {
        let w1 = arr3(&[[[libm::exp2(size), -libm::exp2(size)]]]);
        let (w2, dout) = (arr3(&[[[1.0], [1.0]]]), arr2(&[[1.0, 1.0]]));
        let problem = Problem::new(x.clone(), w1, w2, None, gating(), Activation::Relu, dout).unwrap();
        let Gating::Given { routing, .. } = problem.gating() else { panic!("given") };
        let numerics = numerics(DType::BF16, RoundingModel::Fused, RouterRounding::Score);
        bound::layer(&problem, routing, &numerics).unwrap()[&Output::H].bound[[0, 0]]
    };
    assert_eq!(of_h(60.0), f64::INFINITY);
    assert!(of_h(20.0).is_finite());
}

/// An f16 that overflowed may be ∞, and ∞·0 is NaN in the engine: unknown, and no NaN that comparisons pass
/// over.
#[test]
fn an_unknown_number_times_0_is_unknown() {
    let one = |value: f64| arr3(&[[[value]]]);
    let (x, dout) = (arr2(&[[6e4]]), arr2(&[[1.0]]));
    let problem = Problem::new(x, one(6e4), one(0.0), None, gating(), Activation::Relu, dout).unwrap();
    let Gating::Given { routing, .. } = problem.gating() else { panic!("given") };
    for rounding in [RoundingModel::Fused, RoundingModel::Eager] {
        let numerics = numerics(DType::F16, rounding, RouterRounding::Score);
        let limits = [bound::layer(&problem, routing, &numerics), statistic::layer(&problem, routing, &numerics)];
        for limits in limits.map(Result::unwrap) {
            for output in [Output::H, Output::A, Output::Y, Output::O, Output::Ds] {
                let bound = Array1::from_iter(limits[&output].bound.iter().copied());
                assert_eq!(bound, Array1::from_elem(1, f64::INFINITY), "{output}, {rounding:?}");
            }
        }
    }
}
