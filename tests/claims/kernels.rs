//! The eight kernels on the CPU: rounding points, threads, memory, empty experts.

use std::collections::BTreeSet;

use half::{bf16, f16};
use ndarray::{Array2, Array3, ArrayD, array, s};
use sonicmoe::case::{Case, Load, Pairing};
use sonicmoe::engine::{Output, Results};
use sonicmoe::routing::Routing;
use sonicmoe::sonic::cpu::{CpuEngine, RoundingPoint, Roundings};
use sonicmoe::{
    Activation, Biases, Convention, Element, Engine, ExpertId, Gating, Gelu, Problem, Real, Record, Router, TokenId,
    run,
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

/// One token, one expert: every result computed by hand.
///
/// x = [1, 2], gate row [1, 0], up row [0, 1] and b1 = 0 give h = [1, 2] and a = relu(1)·2 = 2;
/// w2 = [3, 4]ᵀ and b2 = [10, 20] give y = [16, 28]. With dout = [1, 2]: G = 11, so
/// ds = 11·2 + (10 + 40) = 72, which is ⟨dout, y⟩; dA = 11/2, dh = [5.5·2, 5.5·1].
#[test]
fn a_layer_small_enough_for_paper_gives_the_numbers_on_paper() {
    let routing = Routing::new(1, 1, [(TokenId(0), ExpertId(0))]).unwrap();
    let problem = Problem::<f64>::new(
        array![[1.0, 2.0]],
        array![[[1.0, 0.0], [0.0, 1.0]]],
        array![[[3.0], [4.0]]],
        Some(Biases { b1: array![[0.0, 0.0]].into(), b2: array![[10.0, 20.0]].into() }),
        Gating::Given { routing, scores: vec![0.5] },
        Activation::ReGlu,
        array![[1.0, 2.0]],
    )
    .unwrap();
    let expected = [
        (Output::H, array![[1.0, 2.0]].into_dyn()),
        (Output::A, array![[2.0]].into_dyn()),
        (Output::Y, array![[16.0, 28.0]].into_dyn()),
        (Output::O, array![[8.0, 14.0]].into_dyn()),
        (Output::Ds, array![72.0].into_dyn()),
        (Output::Dh, array![[11.0, 5.5]].into_dyn()),
        (Output::APrime, array![[1.0]].into_dyn()),
        (Output::Dw2, array![[[1.0], [2.0]]].into_dyn()),
        (Output::Dw1, array![[[11.0, 22.0], [5.5, 11.0]]].into_dyn()),
        (Output::DxExpanded, array![[11.0, 5.5]].into_dyn()),
        (Output::Dx, array![[11.0, 5.5]].into_dyn()),
        (Output::Db1, array![[11.0, 5.5]].into_dyn()),
        (Output::Db2, array![[0.5, 1.0]].into_dyn()),
    ];
    let found = results::<f64, f64>(&problem);
    assert_eq!(found.len(), expected.len());
    for (output, values) in expected {
        assert_eq!(found[&output].values, values, "{output}");
    }
}

/// The layer as loops over pairs: f(gate), f′(gate) from `act`, results by name.
fn loops(problem: &Problem<'_, f64>, act: &dyn Fn(f64) -> (f64, f64)) -> Vec<(Output, ArrayD<f64>)> {
    let Gating::Given { routing, scores } = problem.gating() else { panic!("loops take given routing") };
    let (x, w1, w2, dout) = (problem.x(), problem.w1(), problem.w2(), problem.dout());
    let (t, d, n, e) = (problem.t(), problem.d(), problem.n(), problem.e());
    let gated = problem.activation().gated();
    let width = problem.h_width();
    let (mut o, mut dx) = (Array2::zeros((t, d)), Array2::zeros((t, d)));
    let (mut dw1, mut dw2) = (Array3::zeros((e, width, d)), Array3::zeros((e, d, n)));
    let (mut db1, mut db2) = (Array2::zeros((e, width)), Array2::zeros((e, d)));
    let mut ds = vec![0.0; scores.len()];
    for (pair, (token, expert)) in routing.pair_token().iter().zip(routing.pair_expert()).enumerate() {
        let (token, expert, score) = (token.index(), expert.index(), scores[pair]);
        let bias = |b: Option<ndarray::ArrayView2<f64>>, at: usize| b.map_or(0.0, |b| b[[expert, at]]);
        let pre =
            |row: usize| (0..d).map(|i| x[[token, i]] * w1[[expert, row, i]]).sum::<f64>() + bias(problem.b1(), row);
        let h: Vec<f64> = (0..width).map(pre).collect();
        let unit = |j: usize| if gated { (act(h[2 * j]), h[2 * j + 1]) } else { (act(h[j]), 1.0) };
        let a: Vec<f64> = (0..n).map(|j| unit(j).0.0 * unit(j).1).collect();
        for i in 0..d {
            let y = (0..n).map(|j| a[j] * w2[[expert, i, j]]).sum::<f64>() + bias(problem.b2(), i);
            o[[token, i]] += score * y;
            ds[pair] += dout[[token, i]] * y;
            db2[[expert, i]] += score * dout[[token, i]];
        }
        for j in 0..n {
            let da = score * (0..d).map(|i| dout[[token, i]] * w2[[expert, i, j]]).sum::<f64>();
            let ((value, slope), up) = unit(j);
            let dh =
                if gated { vec![(2 * j, da * up * slope), (2 * j + 1, da * value)] } else { vec![(j, da * slope)] };
            for i in 0..d {
                dw2[[expert, i, j]] += dout[[token, i]] * score * a[j];
            }
            for (row, dh) in dh {
                db1[[expert, row]] += dh;
                for i in 0..d {
                    dw1[[expert, row, i]] += dh * x[[token, i]];
                    dx[[token, i]] += dh * w1[[expert, row, i]];
                }
            }
        }
    }
    vec![
        (Output::O, o.into_dyn()),
        (Output::Dx, dx.into_dyn()),
        (Output::Dw1, dw1.into_dyn()),
        (Output::Dw2, dw2.into_dyn()),
        (Output::Ds, ndarray::Array1::from(ds).into_dyn()),
        (Output::Db1, db1.into_dyn()),
        (Output::Db2, db2.into_dyn()),
    ]
}

/// f and f′, in the form that a textbook has.
fn textbook(activation: Activation, z: f64) -> (f64, f64) {
    let sigma = 1.0 / (1.0 + (-z).exp());
    let root = (2.0 / std::f64::consts::PI).sqrt();
    match activation {
        Activation::SwiGlu | Activation::Silu => (z * sigma, sigma + z * sigma * (1.0 - sigma)),
        Activation::GeGlu(Gelu::Exact) | Activation::Gelu(Gelu::Exact) => {
            let cumulative = 0.5 * (1.0 + libm::erf(z / 2f64.sqrt()));
            (z * cumulative, cumulative + z * (-z * z / 2.0).exp() * root / 2.0)
        }
        Activation::GeGlu(Gelu::Tanh) | Activation::Gelu(Gelu::Tanh) => {
            let tanh = (root * (z + 0.044715 * z.powi(3))).tanh();
            let bend = (1.0 - tanh * tanh) * root * (1.0 + 3.0 * 0.044715 * z * z);
            (0.5 * z * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * z * bend)
        }
        Activation::ReGlu | Activation::Relu => (z.max(0.0), if z > 0.0 { 1.0 } else { 0.0 }),
        Activation::ReluSquared => (z.max(0.0).powi(2), 2.0 * z.max(0.0)),
    }
}

/// The same layer with every number replaced by its size: Σ|terms| of every sum.
fn sizes(problem: &Problem<'_, f64>) -> Problem<'static, f64> {
    let Gating::Given { routing, scores } = problem.gating() else { panic!("loops take given routing") };
    Problem::new(
        problem.x().mapv(f64::abs),
        problem.w1().mapv(f64::abs),
        problem.w2().mapv(f64::abs),
        problem
            .b1()
            .zip(problem.b2())
            .map(|(b1, b2)| Biases { b1: b1.mapv(f64::abs).into(), b2: b2.mapv(f64::abs).into() }),
        Gating::Given { routing: routing.clone(), scores: scores.iter().map(|score| score.abs()).collect() },
        problem.activation(),
        problem.dout().mapv(f64::abs),
    )
    .unwrap()
}

/// Every rounding on the way to a result is at most u times what the same formulas give for the
/// sizes of all numbers, with |f| ≤ 2|z| + z² and |f′| + |f″||z| ≤ 2 + 2|z| for every activation.
/// On no way are there more than R + 2d + 2n + 64 of them, each counted for both sides.
#[test]
fn in_f64_the_kernels_agree_with_loops_over_pairs() {
    let counts = [7, 0, 1, 19, 3];
    for activation in Activation::ALL {
        for biases in [false, true] {
            let mut case = case("9,11,6,5,1").with_counts(&counts).with_activation(activation).with_seed(3);
            case.biases = biases;
            let problem = case.problem::<f64>().unwrap();
            let roundings = 2 * (problem.routed() + 2 * problem.d() + 2 * problem.n() + 64);
            let allowed = loops(&sizes(&problem), &|z| (2.0 * z + z * z, 2.0 + 2.0 * z));
            let found = results::<f64, f64>(&problem);
            for ((output, exact), (_, size)) in loops(&problem, &|z| textbook(activation, z)).iter().zip(allowed) {
                let Some(found) = found.get(output) else {
                    assert!(!biases, "{output} is missing");
                    continue;
                };
                assert_eq!(found.values.shape(), exact.shape());
                for ((at, &exact), &size) in exact.indexed_iter().zip(&size) {
                    let allowed = roundings as f64 * f64::EPSILON / 2.0 * size;
                    let error = (found.values[&at] - exact).abs();
                    assert!(error <= allowed, "{case}: {output} at {at:?}: {} for {exact}", found.values[&at]);
                }
            }
        }
    }
}

/// Sparse whole numbers: every sum is exact in f32, in any order, so nothing may differ at all.
/// Sizes lie just beyond one block in rows, columns and depth of every product.
#[test]
fn whole_numbers_come_out_exactly_across_blocks_and_tails() {
    let (d, n) = (530, 270);
    let counts = [513, 0, 17];
    let base = case("1,1,1,3,1").with_counts(&counts).problem::<f64>().unwrap();
    let Gating::Given { routing, .. } = base.gating() else { panic!("counts make given routing") };
    let mut state = 1u64;
    // −1, 0 or 1, one of `every` not 0.
    let mut digit = |every: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let draw = state >> 33;
        if draw.is_multiple_of(every) { [1.0, -1.0][(draw / every) as usize % 2] } else { 0.0 }
    };
    let x = Array2::from_shape_simple_fn((routing.tokens(), d), || digit(8));
    let w1 = Array3::from_shape_simple_fn((3, 2 * n, d), || digit(8));
    let w2 = Array3::from_shape_simple_fn((3, d, n), || digit(8));
    let dout = Array2::from_shape_simple_fn((routing.tokens(), d), || digit(1));
    let b1 = Array2::from_shape_simple_fn((3, 2 * n), || digit(2));
    let b2 = Array2::from_shape_simple_fn((3, d), || digit(2));
    let scores: Vec<f32> = (0..routing.routed()).map(|pair| [0.5, 1.0, -1.0][pair % 3]).collect();
    let narrow2 = |tensor: &Array2<f64>| tensor.mapv(|value| value as f32);
    let narrow3 = |tensor: &Array3<f64>| tensor.mapv(|value| value as f32);
    let problem = Problem::new(
        narrow2(&x),
        narrow3(&w1),
        narrow3(&w2),
        Some(Biases { b1: narrow2(&b1).into(), b2: narrow2(&b2).into() }),
        Gating::Given { routing: routing.clone(), scores },
        Activation::ReGlu,
        narrow2(&dout),
    )
    .unwrap();
    let wide = problem.widen();
    for (output, size) in loops(&sizes(&wide), &|z| (z, 1.0)) {
        // Halves are the unit: scores are multiples of 1/2.
        assert!(size.iter().all(|&size| size < f64::from(1 << 22)), "{output} could round");
    }
    let found = results::<f32, f32>(&problem);
    for (output, exact) in loops(&wide, &|z| textbook(Activation::ReGlu, z)) {
        assert!(exact.iter().filter(|&&value| value != 0.0).count() > exact.len() / 2, "{output} is mostly 0");
        assert!(found[&output].values == exact, "{output} differs");
    }
}

/// Which results see it if a rounding point is left out, or one is added.
///
/// Recorded intermediates have the storage type either way, so a tensor that is no longer rounded
/// shows in what was computed from it.
#[test]
fn every_rounding_point_changes_the_results_behind_it_and_no_other() {
    use Output::*;
    let router = Pairing::Router { convention: Convention::TopKOverSoftmax, load: Load::Biased };
    let case = case("96,40,48,5,2").with_biases().with_pairing(router).with_seed(11);
    let problem = case.problem::<bf16>().unwrap();
    let fused = results::<bf16, f32>(&problem);
    let behind_dlogits = vec![Dlogits, DrouterW, DrouterB, Dx];
    let behind_ds = [vec![Ds], behind_dlogits.clone()].concat();
    let behind_dh = vec![DxExpanded, Dx, Dw1, Db1];
    for point in RoundingPoint::ALL {
        let expected: Vec<Output> = match point {
            RoundingPoint::PreActivation => vec![A, Y, O],
            RoundingPoint::H => [vec![Dh, APrime, Dw2], behind_dh.clone(), behind_ds.clone()].concat(),
            RoundingPoint::A => vec![Y, O],
            RoundingPoint::Y | RoundingPoint::ScoredY => vec![O],
            RoundingPoint::G => [vec![Dh], behind_dh.clone(), behind_ds.clone()].concat(),
            RoundingPoint::RecomputedA => [vec![APrime, Dw2], behind_ds.clone()].concat(),
            RoundingPoint::DA => [vec![Dh], behind_dh.clone()].concat(),
            RoundingPoint::Dh => behind_dh.clone(),
            RoundingPoint::APrime => vec![Dw2],
            RoundingPoint::Ds => behind_ds.clone(),
            RoundingPoint::DxExpanded | RoundingPoint::ExpertDx | RoundingPoint::RouterDx => vec![Dx],
            // This convention takes the whole softmax from the logits again: dlogits do not read s.
            RoundingPoint::Scores => [vec![Scores, O, Dh, APrime, Dw2, Db2], behind_dh.clone()].concat(),
            RoundingPoint::Dlogits => behind_dlogits.clone(),
            RoundingPoint::Logits => {
                [vec![Logits, Scores, O, Dh, APrime, Dw2, Db2], behind_dh.clone(), behind_dlogits.clone()].concat()
            }
        };
        let engine = CpuEngine::<f32>::with_roundings(Roundings::FUSED.flipped(point));
        let outcome = run(&engine, &problem, Record::Intermediates).unwrap();
        let found = changed(&fused, &outcome.results);
        if point == RoundingPoint::Logits {
            // Rounded logits may also choose other experts, which changes the rest.
            assert!(expected.iter().all(|output| found.contains(output)), "{point:?} changed only {found:?}");
            continue;
        }
        assert_eq!(found, expected.into_iter().collect(), "{point:?}");
    }
}

#[test]
fn storage_as_wide_as_the_accumulator_has_no_rounding_points() {
    let problem = case("20,24,16,4,2").with_biases().problem::<f32>().unwrap();
    let fused = results::<f32, f32>(&problem);
    for point in RoundingPoint::ALL {
        let engine = CpuEngine::<f32>::with_roundings(Roundings::FUSED.flipped(point));
        let outcome = run(&engine, &problem, Record::Intermediates).unwrap();
        assert_same_bits(&fused, &outcome.results, &format!("{point:?}"));
    }
}

fn same_bits_for_any_number_of_threads<S: Element, A: Real>(case: &Case) {
    let problem = case.problem::<S>().unwrap();
    let with_threads = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| results::<S, A>(&problem))
    };
    let one = with_threads(1);
    for threads in [2, 3, 7] {
        assert_same_bits(&one, &with_threads(threads), &format!("{case} in {}, {threads} threads", S::DTYPE));
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let router = Pairing::Router { convention: Convention::SoftmaxOverTopK, load: Load::Zipf };
    let case = case("300,530,280,3,2").with_biases().with_pairing(router);
    same_bits_for_any_number_of_threads::<f32, f32>(&case);
    same_bits_for_any_number_of_threads::<bf16, f32>(&case);
    same_bits_for_any_number_of_threads::<f16, f64>(&case);
}

#[test]
fn backward_twice_on_one_forward_and_forward_again_give_the_same_bits() {
    let problem = case("40,24,20,4,2").with_biases().problem::<bf16>().unwrap();
    let engine = CpuEngine::<f32>::new();
    let forward = engine.forward(&problem, Record::Results).unwrap();
    let backward = || {
        let gradients = forward.pass.backward(problem.dout(), Record::Results).unwrap().gradients;
        (gradients.dx, gradients.dw1, gradients.dw2, gradients.db1, gradients.db2, gradients.ds)
    };
    assert_eq!(backward(), backward());
    assert_same_bits(&results::<bf16, f32>(&problem), &results::<bf16, f32>(&problem), "the same problem again");
}

/// Every tensor as a view that is not contiguous: every other column of a wider one, reversed, or
/// with its axes exchanged.
#[test]
fn strided_tensors_give_the_bits_of_contiguous_ones() {
    fn check<S: Element, A: Real>() {
        let router = Pairing::Router { convention: Convention::SoftmaxOverTopK, load: Load::Biased };
        let problem = case("33,16,16,8,2").with_biases().with_pairing(router).problem::<S>().unwrap();
        let Gating::Router(layer) = problem.gating() else { panic!("the case has a router") };

        let spread = |tensor: ndarray::ArrayView2<S>| {
            let mut wide = Array2::from_elem((tensor.nrows(), 2 * tensor.ncols() + 3), S::from_f64(f64::NAN));
            wide.slice_mut(s![.., 1..=2 * tensor.ncols() - 1; 2]).assign(&tensor);
            wide
        };
        let (x, b1, b2, w_r) =
            (spread(problem.x()), spread(problem.b1().unwrap()), spread(problem.b2().unwrap()), spread(layer.w.view()));
        let every_other = |columns: usize| s![.., 1..=2 * columns - 1; 2];
        let exchange = |w: ndarray::ArrayView3<S>| w.permuted_axes([0, 2, 1]).as_standard_layout().into_owned();
        let (w1, w2) = (exchange(problem.w1()), exchange(problem.w2()));
        let mut dout = problem.dout().to_owned();
        dout.invert_axis(ndarray::Axis(0));
        dout.invert_axis(ndarray::Axis(1));
        let dout = dout.as_standard_layout().into_owned();
        let strided = Problem::new(
            x.slice(every_other(16)),
            w1.view().permuted_axes([0, 2, 1]),
            w2.view().permuted_axes([0, 2, 1]),
            Some(Biases { b1: b1.slice(every_other(32)).into(), b2: b2.slice(every_other(16)).into() }),
            Gating::Router(Router {
                w: w_r.slice(every_other(16)).into(),
                b: layer.b.as_ref().map(|b| b.view().into()),
                k: layer.k,
                convention: layer.convention,
            }),
            problem.activation(),
            dout.slice(s![..;-1, ..;-1]),
        )
        .unwrap();
        assert_eq!(strided.dout(), problem.dout());
        assert!(!strided.x().is_standard_layout() && !strided.w1().is_standard_layout());
        assert_same_bits(&results::<S, A>(&problem), &results::<S, A>(&strided), S::DTYPE.name());
    }
    check::<f64, f64>();
    check::<f32, f32>();
    check::<bf16, f32>();
    check::<f16, f32>();
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
