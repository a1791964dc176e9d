//! Faults leave the bounds: what correct engines use of them, and what they let through.

use std::collections::BTreeMap;

use half::bf16;
use ndarray::{Axis, arr1, arr2, arr3};
use sonicmoe::case::{Case, Load, Pairing};
use sonicmoe::engine::{Numerics, Output, Results, RoundingModel, RouterRounding, Stored};
use sonicmoe::oracle::{Bounded, Judgement, bound, judge, kernel, statistic};
use sonicmoe::routing::Routing;
use sonicmoe::sonic::cpu::CpuEngine;
use sonicmoe::{Activation, Convention, DType, Engine, ExpertId, Gating, Problem, Record, TokenId, run};

use super::{UNIT, naive, numerics, problem_of, shared_expert};

/// Every part of a layer at unit scale: SwiGLU, biases, a router with a bias.
fn case() -> Case {
    let pairing = Pairing::Router { convention: Convention::SoftmaxOverTopK, load: Load::Biased };
    Case::new("192,128,64,6,2".parse().unwrap()).with_biases().with_pairing(pairing).with_seed(41)
}

/// What the CPU engine makes of a case in bf16.
struct Made {
    problem: Problem<'static, f64>,
    routing: Routing,
    results: Results,
    numerics: Numerics,
}

fn made(case: &Case) -> Made {
    let engine = CpuEngine::<f32>::default();
    let problem = case.problem::<bf16>().unwrap();
    let outcome = run(&engine, &problem, Record::Intermediates).unwrap();
    let numerics = Engine::<bf16>::numerics(&engine);
    Made { problem: problem.widen(), routing: outcome.routing, results: outcome.results, numerics }
}

impl Made {
    /// The given results by this layer's bound.
    fn judge(&self, results: &Results) -> BTreeMap<Output, Judgement> {
        let bounds = bound::layer(&self.problem, &self.routing, &self.numerics).unwrap();
        results.iter().map(|(&output, stored)| (output, judge(output, stored, &bounds[&output]).unwrap())).collect()
    }
}

fn changed(results: &Results, change: impl Fn(&mut Stored)) -> Results {
    let mut results = results.clone();
    results.values_mut().for_each(change);
    results
}

#[test]
fn an_error_of_8_ulp_in_one_element_fails_its_kernel() {
    let Made { problem, routing, results, numerics } = made(&case());
    let mut judged = 0;
    for kernel::KernelBound { kernel, output, bounded } in
        kernel::kernels(&problem, &routing, &results, &numerics).unwrap()
    {
        let stored = &results[&output];
        if stored.dtype != DType::BF16 {
            continue; // f32 results of f32 sums: their own ulp is far below the roundoff of the sum
        }
        judged += 1;
        let mut magnitudes: Vec<f64> =
            stored.values.iter().map(|value| value.abs()).filter(|&value| value > 0.0).collect();
        magnitudes.sort_by(f64::total_cmp);
        // Where the terms of a sum cancel, its roundoff is many ulps of what is left. One element in
        // ten is smaller than this.
        let magnitude = magnitudes[magnitudes.len() / 10];
        let mut faulty = stored.clone();
        let value = faulty.values.iter_mut().find(|value| value.abs() == magnitude).unwrap();
        let ulp = 2.0 * DType::BF16.unit_roundoff() * libm::exp2(libm::floor(libm::log2(magnitude)));
        *value += 8.0 * ulp;
        assert!(judge(output, stored, &bounded).unwrap().passes());
        let judgement = judge(output, &faulty, &bounded).unwrap();
        assert_eq!(judgement.failing, 1, "{kernel}: {judgement}");
    }
    assert_eq!(judged, 14, "o, dx, dw1, dw2, db1, db2, drouter_w, drouter_b, h, a, y, dh, a′, dx̃");
}

#[test]
fn zeros_fail_in_every_output() {
    let made = made(&case());
    for (output, judgement) in made.judge(&changed(&made.results, |stored| stored.values.fill(0.0))) {
        assert!(!judgement.passes(), "a {output} of zeros passes");
    }
}

#[test]
fn a_lost_token_row_pair_or_expert_fails_in_every_output() {
    let made = made(&case());
    let lost = changed(&made.results, |stored| stored.values.index_axis_mut(Axis(0), 1).fill(0.0));
    let mut judgements = made.judge(&lost);
    // One number that sums dlogits of both signs over all tokens is small beside the worst case of
    // that sum. The kernel oracle, which knows the dlogits, has no such excuse.
    let Made { problem, routing, numerics, .. } = &made;
    let alone = Results::from(
        [Output::Dlogits, Output::DrouterB]
            .map(|output| (output, if output == Output::DrouterB { &lost } else { &made.results }[&output].clone())),
    );
    for kernel::KernelBound { output, bounded, .. } in kernel::kernels(problem, routing, &alone, numerics).unwrap() {
        if output == Output::DrouterB {
            judgements.insert(output, judge(output, &lost[&output], &bounded).unwrap());
        }
    }
    for (output, judgement) in judgements {
        assert!(!judgement.passes(), "{output} without its index 1 passes");
        assert!(judgement.clusters.iter().any(|cluster| (cluster.from, cluster.to) == (1, 2)), "{judgement}");
    }
}

#[test]
fn gate_and_up_swapped_fail_in_every_output_that_they_reach() {
    let made = made(&case());
    let swapped = {
        let (w1, b1) = (made.problem.w1(), made.problem.b1().unwrap());
        let order: Vec<usize> = (0..made.problem.h_width()).map(|row| row ^ 1).collect();
        let biases = sonicmoe::Biases {
            b1: b1.select(Axis(1), &order).into(),
            b2: made.problem.b2().unwrap().to_owned().into(),
        };
        Problem::new(
            made.problem.x().to_owned(),
            w1.select(Axis(1), &order),
            made.problem.w2().to_owned(),
            Some(biases),
            made.problem.gating().clone(),
            made.problem.activation(),
            made.problem.dout().to_owned(),
        )
        .unwrap()
    };
    let results = naive(&swapped, &made.routing, made.numerics, 1);
    let blind = [Output::Logits, Output::Scores, Output::Db2];
    for (output, judgement) in made.judge(&results) {
        assert_eq!(judgement.passes(), blind.contains(&output), "{judgement}");
    }
}

#[test]
fn an_expert_without_tokens_has_gradients_of_exactly_0() {
    let case = Case::new("20,24,16,3,1".parse().unwrap()).with_biases().with_counts(&[0, 17, 5]);
    let made = made(&case);
    let touched = changed(&made.results, |stored| {
        if stored.values.shape()[0] == 3 {
            // The smallest bf16 number.
            stored.values.index_axis_mut(Axis(0), 0).fill(libm::exp2(-133.0));
        }
    });
    for output in [Output::Dw1, Output::Dw2, Output::Db1, Output::Db2] {
        assert!(made.judge(&made.results)[&output].passes());
        let judgement = &made.judge(&touched)[&output];
        let of_expert = touched[&output].values.index_axis(Axis(0), 0).len();
        assert_eq!((judgement.failing, judgement.ratio()), (of_expert, f64::INFINITY), "{judgement}");
    }
}

/// Prints, for `cargo test -- --nocapture`, what a correct engine uses of its bound and what a
/// median bound is worth.
#[test]
fn the_fused_bound_is_neither_vacuous_nor_far_from_what_a_correct_engine_uses() {
    let made = made(&case());
    let deviations = statistic::deviations(&made.problem, &made.routing, &made.numerics).unwrap();
    println!("output         worst ratio   floor      median bound / rms   deviations");
    for (output, judgement) in made.judge(&made.results) {
        let in_deviations = judge(output, &made.results[&output], &deviations[&output]).unwrap().ratio();
        let Judgement { floor, median_bound_over_rms: median, .. } = judgement;
        println!(
            "{:14} {:11.3}   {floor:.1e}   {median:18.4}   {in_deviations:10.2}",
            output.name(),
            judgement.ratio()
        );
        assert!(judgement.passes(), "{judgement}");
        if Output::RESULTS.contains(&output) {
            assert!(median < 0.2, "{output}: the median bound is {median} of the rms");
        }
    }
}

/// Below the normal range a store errs by half the smallest subnormal, whatever the number; where an engine
/// flushes, by all of it.
#[test]
fn an_underflow_counts_half_the_smallest_subnormal_and_a_flush_the_whole_number() {
    let one = |value: f64| arr3(&[[[value]]]);
    let gating = Gating::Given { routing: Routing::new(1, 1, [(TokenId(0), ExpertId(0))]).unwrap(), scores: vec![1.0] };
    let x = arr2(&[[libm::exp2(-70.0)]]);
    let (w1, dout) = (one(libm::exp2(-60.0)), arr2(&[[1.0]]));
    let problem = Problem::new(x, w1, one(1.0), None, gating, Activation::Relu, dout).unwrap();
    let Gating::Given { routing, .. } = problem.gating() else { panic!("given") };
    let bound_of_h = |flushes_denormals: bool| {
        let fused = numerics(DType::BF16, RoundingModel::Fused, RouterRounding::Score);
        let bounds = bound::layer(&problem, routing, &Numerics { flushes_denormals, ..fused }).unwrap();
        bounds[&Output::H].bound[[0, 0]]
    };
    // Of 2⁻¹³⁰, three binades above the smallest bf16.
    let eta = libm::exp2(-134.0);
    assert!((eta..1.01 * eta).contains(&bound_of_h(false)), "{:e}", bound_of_h(false));
    assert!((16.0 * eta..49.0 * eta).contains(&bound_of_h(true)), "{:e}", bound_of_h(true));
}

/// A lone expert has the score 1 whatever its logit, and every type has 1.
#[test]
fn a_number_that_its_type_holds_is_stored_without_error() {
    let case = Case::new("9,16,8,3,1".parse().unwrap());
    let (numerics, made) = (numerics(DType::BF16, RoundingModel::Fused, RouterRounding::TensorType), made(&case));
    let scores = &bound::layer(&made.problem, &made.routing, &numerics).unwrap()[&Output::Scores];
    assert!(scores.truth.iter().all(|score| *score == 1.0) && scores.bound.iter().all(|bound| *bound == 0.0));
}

#[test]
fn the_median_bound_is_in_units_of_the_root_mean_square_and_a_vector_s_map_is_one_row() {
    let (truth, bound) = (arr1(&[3.0, -4.0, 0.0]).into_dyn(), arr1(&[1.0, 7.0, 2.0]).into_dyn());
    let stored = Stored { dtype: DType::F32, values: truth.clone() };
    let judgement = judge(Output::Ds, &stored, &Bounded { truth, bound }).unwrap();
    assert_eq!(judgement.median_bound_over_rms, 2.0 / (25.0f64 / 3.0).sqrt());
    assert_eq!((judgement.heat.bins(), judgement.heat.lengths), ([1, 3], [1, 3]));
}

/// Half a unit in the last place, uniform, is a deviation of u·2^e/√3; the twin takes u|v|/√3. With the
/// significand m = |v|/2^e spread as 1/m, E[1/m²] = 3/(8 ln 2), and the errors are 0.736 deviations in the
/// root mean square. Normal numbers are near that, whatever their scale.
#[test]
fn a_deviation_is_the_spread_of_one_rounding() {
    let made = made(&case());
    let deviations = statistic::deviations(&made.problem, &made.routing, &made.numerics).unwrap();
    let (stored, twin) = (&made.results[&Output::H].values, &deviations[&Output::H]);
    let squares = stored.iter().zip(&twin.truth).zip(&twin.bound).map(|((h, r), sigma)| ((h - r) / sigma).powi(2));
    let root_mean_square = (squares.sum::<f64>() / stored.len() as f64).sqrt();
    assert!((root_mean_square - 0.736).abs() < 0.04, "{root_mean_square} deviations");
}

/// The same of scores that a router keeps in the tensors' type: the roundings of both logits and of the
/// score itself, each uniform.
#[test]
fn the_deviation_of_a_score_is_the_spread_of_the_roundings_that_it_has() {
    let numerics = numerics(DType::BF16, RoundingModel::Fused, RouterRounding::TensorType);
    let (problem, routing) = problem_of(&Case::new("2000,24,8,4,2".parse().unwrap()), &numerics, UNIT);
    let scores = &naive(&problem, &routing, numerics, 5)[&Output::Scores].values;
    let twin = &statistic::deviations(&problem, &routing, &numerics).unwrap()[&Output::Scores];
    let squares = scores.iter().zip(&twin.truth).zip(&twin.bound).map(|((s, r), sigma)| ((s - r) / sigma).powi(2));
    let root_mean_square = (squares.sum::<f64>() / scores.len() as f64).sqrt();
    assert!((0.6..0.9).contains(&root_mean_square), "{root_mean_square} deviations");
}

/// An engine that hands out some results only: each that is there is judged, from what is there.
#[test]
fn a_result_of_a_kernel_is_judged_without_the_other_results_of_its_kernel() {
    let Made { problem, routing, results, numerics } = made(&case());
    let judged = |results: &Results| -> Vec<Output> {
        let bounds = kernel::kernels(&problem, &routing, results, &numerics).unwrap();
        bounds.into_iter().map(|kernel| kernel.output).collect()
    };
    let of_all = judged(&results);
    // What stands on each result, which nothing is judged from where it is missing.
    for (missing, behind) in [
        (Output::A, vec![Output::Y]),
        (Output::APrime, vec![Output::Dw2]),
        (Output::Ds, vec![Output::Dlogits]),
        (Output::Y, vec![Output::O]),
        (Output::Dh, vec![Output::DxExpanded, Output::Dw1, Output::Db1]),
        (Output::H, vec![Output::Dh, Output::APrime, Output::Ds]),
    ] {
        let mut some = results.clone();
        some.remove(&missing);
        let left = of_all.iter().copied().filter(|output| *output != missing && !behind.contains(output));
        assert!(judged(&some).into_iter().eq(left), "without {missing}: {:?}", judged(&some));
    }
}

#[test]
fn a_result_of_another_shape_is_refused_by_its_kernel() {
    let Made { problem, routing, results, numerics } = made(&case());
    for output in results.keys() {
        let mut wrong = results.clone();
        let stored = wrong.get_mut(output).unwrap();
        let expected = stored.values.shape().to_vec();
        stored.values = stored.values.slice_axis(Axis(0), (1..).into()).to_owned();
        let shapes = format!("`{output}` has shape {:?}, expected {expected:?}", stored.values.shape());
        let error = kernel::kernels(&problem, &routing, &wrong, &numerics).unwrap_err().to_string();
        assert!(error.contains(&shapes), "{output}: {error}");
    }
}

#[test]
fn a_routing_of_other_tokens_than_the_results_is_refused() {
    let Made { problem, results, numerics, .. } = made(&case());
    let other = Routing::new(191, 6, []).unwrap();
    let error = kernel::kernels(&problem, &other, &results, &numerics).unwrap_err().to_string();
    assert!(error.contains("`routing` has shape [191, 6], expected [192, 6]"), "{error}");
    // Where the pairs are given, others of the same sizes are others.
    let given = case().with_pairing(Pairing::TopK).problem::<f64>().unwrap();
    let Gating::Given { routing, .. } = given.gating() else { panic!("given pairs") };
    assert!(bound::layer(&given, routing, &numerics).is_ok());
    let fewer = Routing::new(192, 6, [(TokenId(0), ExpertId(0))]).unwrap();
    let error = bound::layer(&given, &fewer, &numerics).unwrap_err().to_string();
    assert!(error.contains("has shape [1], expected [384] (the problem supplies the pairs; pass its own"), "{error}");
}

/// What is asked for by name has the same truths and limits as among all, by both measures.
#[test]
fn some_results_are_bounded_as_all_of_them_are() {
    let Made { problem, routing, numerics, .. } = made(&case());
    let keep = |output: Output| [Output::O, Output::Dw1, Output::DrouterB].contains(&output);
    let all = [bound::layer(&problem, &routing, &numerics), statistic::layer(&problem, &routing, &numerics)];
    let some = [
        bound::layer_of(&problem, &routing, &numerics, &keep),
        statistic::layer_of(&problem, &routing, &numerics, &keep),
    ];
    for (all, some) in all.into_iter().zip(some) {
        let (all, some) = (all.unwrap(), some.unwrap());
        for output in [Output::O, Output::Dw1, Output::DrouterB] {
            assert_eq!((&some[&output].truth, &some[&output].bound), (&all[&output].truth, &all[&output].bound));
        }
    }
}

/// Small scores of every convention are known to as many digits as large ones: to a hundred units.
#[test]
fn the_bound_of_a_score_is_relative_to_it_in_every_convention() {
    for convention in Convention::ALL {
        let case = Case::new("40,1,8,5,3".parse().unwrap());
        let case = case.with_pairing(Pairing::Router { convention, load: Load::Uniform }).with_seed(3);
        let drawn = case.problem::<f32>().unwrap().widen();
        // One product for each logit, up to ±8.
        let Gating::Router(router) = drawn.gating() else { panic!("a router") };
        let mut router = router.map(|value| value);
        router.w.iter_mut().enumerate().for_each(|(expert, w)| *w = [4.0, -2.0, 1.0, -4.0, 0.5][expert]);
        let x = drawn.x().mapv(|value| value.signum() * 1.5 + 0.25 * value);
        let (w1, w2) = (drawn.w1().to_owned(), drawn.w2().to_owned());
        let gating = Gating::Router(router);
        let problem = Problem::new(x, w1, w2, None, gating, drawn.activation(), drawn.dout().to_owned()).unwrap();
        let routing = run(&CpuEngine::<f64>::new(), &problem, Record::Results).unwrap().routing;
        let f32 = numerics(DType::F32, RoundingModel::Fused, RouterRounding::Score);
        let scores = &bound::layer(&problem, &routing, &f32).unwrap()[&Output::Scores];
        let smallest = scores.truth.iter().copied().fold(1.0, f64::min);
        assert!(smallest < 0.01, "{convention}: {smallest}");
        for (score, bound) in scores.truth.iter().zip(&scores.bound) {
            assert!(*bound <= 100.0 * DType::F32.unit_roundoff() * score, "{convention}: {bound:e} for {score:e}");
        }
    }
}

/// Whatever an engine has is bounded, and nothing that it has not.
#[test]
fn the_bounds_are_those_of_the_results_that_a_layer_has() {
    let given = Case::new("12,16,8,3,2".parse().unwrap()).with_pairing(Pairing::TopK);
    for case in [case(), Case::new("12,16,8,3,2".parse().unwrap()), given.clone(), given.with_biases()] {
        let Made { problem, routing, results, numerics } = made(&case);
        let bounds = bound::layer(&problem, &routing, &numerics).unwrap();
        assert!(bounds.keys().eq(results.keys()), "{case}: {:?} for {:?}", bounds.keys(), results.keys());
    }
}

#[test]
fn a_correct_engine_stays_within_six_deviations_on_random_data() {
    for rounding in [RoundingModel::Fused, RoundingModel::Eager] {
        for router in [RouterRounding::Score, RouterRounding::TensorType] {
            for (seed, storage) in [DType::BF16, DType::F16, DType::F32].into_iter().enumerate() {
                let numerics = numerics(storage, rounding, router);
                let case = Case::new("48,48,32,4,2".parse().unwrap()).with_seed(seed as u64);
                let (problem, routing) = problem_of(&case, &numerics, UNIT);
                let results = naive(&problem, &routing, numerics, 2);
                let limits = statistic::layer(&problem, &routing, &numerics).unwrap();
                for (&output, stored) in &results {
                    let judgement = judge(output, stored, &limits[&output]).unwrap();
                    assert!(judgement.passes(), "{storage} {rounding:?} {router:?}: {judgement}");
                }
            }
        }
    }
}

/// With a shared expert beside: the sum is within six deviations, and without it far beyond.
#[test]
fn a_layer_with_a_shared_expert_stays_within_six_deviations_and_without_it_does_not() {
    for rounding in [RoundingModel::Fused, RoundingModel::Eager] {
        let numerics = numerics(DType::BF16, rounding, RouterRounding::Score);
        let (problem, routing) = problem_of(&Case::new("48,48,32,4,2".parse().unwrap()), &numerics, UNIT);
        let (shared, every_token) = shared_expert(&problem, 16, &numerics, 7);
        let [of_layer, of_shared] =
            [(&problem, &routing), (&shared, &every_token)].map(|(layer, routing)| naive(layer, routing, numerics, 7));
        let limits = statistic::layer_beside(&problem, &shared, &routing, &numerics).unwrap();
        let judged =
            |output: Output, values| judge(output, &Stored { dtype: DType::BF16, values }, &limits[&output]).unwrap();
        for output in [Output::O, Output::Dx] {
            let sum = &of_layer[&output].values + &of_shared[&output].values;
            let judgement = judged(output, sum.mapv(|value| DType::BF16.round(value)));
            assert!(judgement.passes(), "{rounding:?}: {judgement}");
            assert!(!judged(output, of_layer[&output].values.clone()).passes(), "{output} without the shared expert");
        }
        let of_expert = |output: Output| of_shared[&output].values.index_axis(Axis(0), 0).to_owned();
        for (output, values) in
            [(Output::DsharedDown, of_expert(Output::Dw2)), (Output::Dw1, of_layer[&Output::Dw1].values.clone())]
        {
            assert!(judged(output, values.clone()).passes(), "{rounding:?}: {}", judged(output, values));
        }
    }
}

#[test]
fn a_router_in_the_tensors_type_leaves_six_deviations_of_one_in_f32() {
    let case = Case::new("96,64,32,4,2".parse().unwrap());
    let fused = numerics(DType::BF16, RoundingModel::Fused, RouterRounding::Score);
    let (problem, routing) = problem_of(&case, &fused, UNIT);
    let limits = statistic::layer(&problem, &routing, &fused).unwrap();
    let results = naive(&problem, &routing, Numerics { router: RouterRounding::TensorType, ..fused }, 3);
    // dlogits inherit the errors of ds, which hide their own rounding at this size.
    for output in [Output::Logits, Output::Scores] {
        let judgement = judge(output, &results[&output], &limits[&output]).unwrap();
        assert!(!judgement.passes(), "{output} of a router in bf16: {judgement}");
    }
}

#[test]
fn under_the_eager_model_zeros_fail_by_deviations_even_where_the_bound_lets_them_pass() {
    // The worst case of a sum over T tokens grows as T, and the sum itself as √T.
    let case = Case::new("2048,64,32,4,2".parse().unwrap());
    let numerics = numerics(DType::BF16, RoundingModel::Eager, RouterRounding::TensorType);
    let (problem, routing) = problem_of(&case, &numerics, UNIT);
    let (bounds, limits) = (
        bound::layer(&problem, &routing, &numerics).unwrap(),
        statistic::layer(&problem, &routing, &numerics).unwrap(),
    );
    let zeros = |output: Output| Stored { dtype: DType::BF16, values: bounds[&output].truth.mapv(|_| 0.0) };
    for &output in limits.keys() {
        assert!(!judge(output, &zeros(output), &limits[&output]).unwrap().passes(), "a {output} of zeros passes");
    }
    assert!(judge(Output::DrouterW, &zeros(Output::DrouterW), &bounds[&Output::DrouterW]).unwrap().passes());
}
