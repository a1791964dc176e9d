//! The numbers that the kernels compute, against paper, loops over pairs and whole numbers.

use ndarray::{Array2, Array3, ArrayD, array};
use sonicmoe::engine::Output;
use sonicmoe::routing::Routing;
use sonicmoe::{Activation, Biases, ExpertId, Gating, Gelu, Problem, TokenId};

use super::{case, results};

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
        // Numbers here are far from the clamps of gpt-oss.
        let lift = if problem.activation() == Activation::GptOss { 1.0 } else { 0.0 };
        let unit = |j: usize| if gated { (act(h[2 * j]), h[2 * j + 1] + lift) } else { (act(h[j]), 1.0) };
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
        Activation::GptOss => {
            let sigma = 1.0 / (1.0 + (-1.702 * z).exp());
            (z * sigma, sigma + 1.702 * z * sigma * (1.0 - sigma))
        }
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
