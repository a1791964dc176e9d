//! The exact regime: one value for every number, whatever the order of sums.

use half::{bf16, f16};
use ndarray::{arr2, arr3};
use sonicmoe::case::{Case, Pairing, Scale};
use sonicmoe::engine::{Numerics, Output, Results, RoundingModel, RouterRounding};
use sonicmoe::oracle::exact::{Difference, differences, expected};
use sonicmoe::routing::Routing;
use sonicmoe::sonic::cpu::{CpuEngine, RoundingPoint, Roundings};
use sonicmoe::{Activation, Biases, DType, Element, ExpertId, Gating, Problem, Real, Record, TokenId, run};

use super::bounds::naive::Naive;

const SCALES: [Scale; 2] = [Scale::Exact, Scale::ExactFineScores];

fn case(shape: &str) -> Case {
    Case::new(shape.parse().unwrap()).with_pairing(Pairing::TopK).with_scale(Scale::Exact)
}

/// Tokens and widths at tile edges, few and many tokens per expert, empty experts.
fn sizes() -> Vec<Case> {
    let counts = |d, n, counts: &[usize]| case(&format!("1,{d},{n},1,1")).with_counts(counts);
    let mut cases: Vec<Case> = [
        "0,8,8,4,2",
        "1,8,8,1,1",
        "1,8,16,4,4",
        "2,8,8,2,2",
        "17,16,24,3,1",
        "127,127,129,2,2",
        "128,128,128,3,2",
        "129,129,127,2,1",
        "33,136,72,8,8",
        "8,1024,16,2,1",
        "8,128,1024,2,1",
        "150,128,96,6,4",
        "4096,8,8,2,1",
    ]
    .map(case)
    .to_vec();
    cases.push(counts(72, 136, &[1, 127, 128, 129, 0, 63, 64, 65]));
    cases.push(counts(16, 24, &[0, 0, 2, 0, 33, 255, 256, 257]));
    let both = cases.into_iter().flat_map(|case| [case.clone(), case.with_biases()]);
    both.enumerate().map(|(seed, case)| case.with_seed(seed as u64)).collect()
}

fn problem<S: Element>(case: &Case) -> Problem<'static, S> {
    case.problem().unwrap_or_else(|error| panic!("{case}: {error}"))
}

fn exactly(case: &Case, storage: DType) -> Results {
    expected(&problem::<f64>(case), storage).unwrap_or_else(|error| panic!("{case} in {storage}: {error}"))
}

fn results<S: Element, A: Real>(problem: &Problem<'_, S>, roundings: Roundings) -> Results {
    run(&CpuEngine::<A>::with_roundings(roundings), problem, Record::Intermediates).unwrap().results
}

#[track_caller]
fn assert_exact(case: &Case, results: &Results, expected: &Results) {
    let found = differences(results, expected).unwrap();
    assert!(found.is_empty(), "{case}: {}", found[0]);
    assert!(expected.keys().all(|output| results.contains_key(output)));
}

/// bf16 storage with sums in f32 and in f64.
fn both_engines_are_exact(scale: Scale) {
    for case in sizes() {
        let case = case.with_scale(scale);
        let expected = exactly(&case, DType::BF16);
        let problem = problem::<bf16>(&case);
        assert_exact(&case, &results::<bf16, f32>(&problem, Roundings::FUSED), &expected);
        assert_exact(&case, &results::<bf16, f64>(&problem, Roundings::FUSED), &expected);
    }
}

#[test]
fn the_bits_are_exact_at_every_size_with_scores_of_one_bit() {
    both_engines_are_exact(Scale::Exact);
}

#[test]
fn the_bits_are_exact_at_every_size_with_scores_that_bf16_does_not_hold() {
    both_engines_are_exact(Scale::ExactFineScores);
}

/// Those with a part where σ is exactly 1: the clamp of gpt-oss ends before it.
fn exact_activations() -> impl Iterator<Item = Activation> {
    Activation::ALL.into_iter().filter(|&activation| activation != Activation::GptOss)
}

#[test]
fn an_activation_without_an_exact_part_is_refused_by_name() {
    let error = case("70,24,40,4,2").with_activation(Activation::GptOss).problem::<f32>().unwrap_err().to_string();
    assert!(error.contains("gpt_oss"), "{error}");
}

#[test]
fn every_activation_and_storage_type_is_exact() {
    for (seed, activation) in exact_activations().enumerate() {
        let case = case("70,24,40,4,2").with_activation(activation).with_seed(seed as u64);
        for case in [case.clone(), case.with_biases()] {
            let exact = |storage| exactly(&case, storage);
            // 208 units off the switch, times the slope 2h of relu², are beyond the range of f16.
            if activation != Activation::ReluSquared {
                assert_exact(&case, &results::<f16, f32>(&problem(&case), Roundings::FUSED), &exact(DType::F16));
            }
            assert_exact(&case, &results::<f32, f32>(&problem(&case), Roundings::FUSED), &exact(DType::F32));
            for scale in SCALES {
                let case = case.clone().with_scale(scale);
                let expected = exactly(&case, DType::BF16);
                assert_exact(&case, &results::<bf16, f32>(&problem(&case), Roundings::FUSED), &expected);
                assert_exact(&case, &results::<bf16, f64>(&problem(&case), Roundings::FUSED), &expected);
            }
        }
    }
}

#[test]
fn sums_in_random_order_over_random_trees_have_the_exact_bits() {
    for (seed, activation) in exact_activations().enumerate() {
        for scale in SCALES {
            let case = case("19,16,24,3,2").with_activation(activation).with_scale(scale).with_seed(seed as u64);
            for case in [case.clone(), case.with_biases()] {
                let (wide, expected) = (problem::<f64>(&case), exactly(&case, DType::BF16));
                let Gating::Given { routing, .. } = wide.gating() else { panic!("{case} gives its pairs") };
                let numerics = Numerics {
                    storage: DType::BF16,
                    score: DType::F32,
                    accumulator: DType::F32.unit_roundoff(),
                    rounding: RoundingModel::Fused,
                    router: RouterRounding::Score,
                    function_ulps: 0.0,
                    flushes_denormals: seed % 2 == 0,
                };
                let engine = Naive::new(numerics, seed as u64);
                for _ in 0..3 {
                    assert_exact(&case, &engine.run::<f32>(&wide, routing), &expected);
                }
                assert_exact(&case, &engine.run::<f64>(&wide, routing), &expected);
            }
        }
    }
}

fn faulty(case: &Case, results: &Results, expected: &Results) -> Vec<Output> {
    let found: Vec<Difference> = differences(results, expected).unwrap_or_else(|error| panic!("{case}: {error}"));
    found.into_iter().map(|difference| difference.output).collect()
}

#[test]
fn one_last_place_in_one_element_of_any_result_fails() {
    let case = case("40,24,16,3,2").with_biases();
    let expected = exactly(&case, DType::BF16);
    for (&output, stored) in &expected {
        for place in [0, stored.values.len() / 2, stored.values.len() - 1] {
            let mut off = expected.clone();
            let value = off.get_mut(&output).unwrap().values.iter_mut().nth(place).unwrap();
            // The neighbour in the storage type: half an ulp more rounds up to it.
            let ulp = 2.0 * stored.dtype.unit_roundoff() * value.abs();
            *value = if *value == 0.0 { stored.dtype.smallest_normal() } else { stored.dtype.round(*value + ulp) };
            assert_eq!(faulty(&case, &off, &expected), [output], "{output} at place {place}");
        }
    }
}

#[test]
fn a_rounding_left_out_or_added_fails_where_a_number_has_more_bits_than_are_stored() {
    use RoundingPoint::{APrime, Dh, DxExpanded, ScoredY, Y};
    let base = case("90,24,96,3,2");
    for (scale, points) in
        [(Scale::Exact, &[Y, DxExpanded][..]), (Scale::ExactFineScores, &[Y, DxExpanded, Dh, APrime, ScoredY])]
    {
        let case = base.clone().with_scale(scale);
        let (problem, expected) = (problem::<bf16>(&case), exactly(&case, DType::BF16));
        for &point in points {
            let found = results::<bf16, f32>(&problem, Roundings::FUSED.flipped(point));
            assert!(!faulty(&case, &found, &expected).is_empty(), "{scale:?}: {point:?}");
        }
    }
}

#[test]
fn scores_kept_in_bf16_fail_with_fine_scores_wherever_a_score_is_read() {
    let kept_in_bf16 = |case: &Case| {
        let p = problem::<bf16>(case);
        let Gating::Given { routing, scores } = p.gating() else { panic!("{case} gives its pairs") };
        let scores = scores.iter().map(|&score| DType::BF16.round(f64::from(score)) as f32).collect();
        let gating = Gating::Given { routing: routing.clone(), scores };
        let rounded =
            Problem::new(p.x(), p.w1(), p.w2(), p.biases().map(Biases::borrowed), gating, p.activation(), p.dout())
                .unwrap();
        faulty(case, &results::<bf16, f32>(&rounded, Roundings::FUSED), &exactly(case, DType::BF16))
    };
    let fine = case("90,24,32,3,2").with_biases().with_scale(Scale::ExactFineScores);
    let read = [Output::O, Output::Dx, Output::Dw1, Output::Dw2, Output::Db1, Output::Db2];
    let between = [Output::Dh, Output::APrime, Output::DxExpanded];
    assert_eq!(kept_in_bf16(&fine), read.into_iter().chain(between).collect::<Vec<_>>());
    assert_eq!(kept_in_bf16(&fine.with_scale(Scale::Exact)), []);
}

#[test]
fn numbers_that_may_round_are_refused_with_their_place() {
    let unit = case("20,16,24,3,1").with_scale(Scale::Unit);
    let error = expected(&problem::<bf16>(&unit).widen(), DType::BF16).unwrap_err().to_string();
    assert!(error.contains("outside the exact regime") && error.contains("`h` at ["), "{error}");
    let wide = expected(&problem::<f64>(&case("20,16,24,3,1")), DType::F64).unwrap_err().to_string();
    assert!(wide.contains("f64"), "{wide}");
}

/// relu has its kink at 0 and no gate that would have to be flat.
#[test]
fn a_number_that_h_cannot_hold_is_refused_in_any_row() {
    let p = problem::<f64>(&case("20,16,24,3,1").with_activation(Activation::Relu));
    let Gating::Given { routing, .. } = p.gating() else { panic!("the case gives its pairs") };
    for row in [0, 9, routing.routed() - 1] {
        let mut x = p.x().to_owned();
        // Nine bits and more of each number; bf16 has eight.
        x.row_mut(routing.row_token()[row].index()).mapv_inplace(|value| 257.0 * value);
        let gating = Gating::borrowed(p.gating());
        let off = Problem::new(x, p.w1(), p.w2(), None, gating, p.activation(), p.dout()).unwrap();
        let error = expected(&off, DType::BF16).unwrap_err().to_string();
        assert!(error.contains(&format!("`h` at [{row}, ")), "row {row}: {error}");
    }
}

/// A power of two as a factor of dO changes exponents alone: bf16 has them all. In f16 the sums over tokens are
/// the first to leave the range.
#[test]
fn a_number_beyond_the_range_of_the_type_is_refused() {
    let p = problem::<f64>(&case("20,16,24,3,1"));
    let of_exponent = |exponent: i32, storage: DType| {
        let dout = p.dout().mapv(|value| libm::ldexp(value, exponent));
        let scaled = Problem::new(p.x(), p.w1(), p.w2(), None, p.gating().borrowed(), p.activation(), dout).unwrap();
        expected(&scaled, storage)
    };
    assert!((0..20).all(|exponent| of_exponent(exponent, DType::BF16).is_ok()));
    let first = (0..20).find_map(|exponent| of_exponent(exponent, DType::F16).err());
    let error = first.unwrap().to_string();
    assert!(error.contains("is beyond the range of f16"), "{error}");
}

/// A row that was never written must not look like a right one.
#[test]
fn a_problem_with_a_row_of_zeros_is_refused() {
    let case = case("20,16,24,3,1");
    let p = problem::<f64>(&case);
    let mut w2 = p.w2().to_owned();
    w2.index_axis_mut(ndarray::Axis(0), 1).fill(0.0);
    let silent = Problem::new(p.x(), p.w1(), w2, None, p.gating().borrowed(), p.activation(), p.dout()).unwrap();
    let error = expected(&silent, DType::BF16).unwrap_err().to_string();
    assert!(error.contains("never been written"), "{error}");
}

/// s·a = 2⁻²⁵ is half the smallest f16, and dh is 1.
#[test]
fn an_a_prime_that_the_type_does_not_have_is_outside_the_regime() {
    let one = |value: f64| arr3(&[[[value]]]);
    let routing = Routing::new(1, 1, [(TokenId(0), ExpertId(0))]).unwrap();
    let gating = Gating::Given { routing, scores: vec![0.5] };
    let x = arr2(&[[libm::exp2(-24.0)]]);
    let problem = Problem::new(x, one(1.0), one(1.0), None, gating, Activation::Relu, arr2(&[[2.0]])).unwrap();
    let error = expected(&problem, DType::F16).unwrap_err().to_string();
    assert!(error.contains("`a_prime` at [0, 0]") && error.contains("f16 does not have"), "{error}");
}
