//! The standard layer beside its derivatives: what it keeps, its choice, its edges.

use ndarray::{Array1, Array2, Array3, array, s};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use sonicmoe::engine::{Outcome, Output};
use sonicmoe::reference::{StandardMoe, run_with};
use sonicmoe::routing::Routing;
use sonicmoe::{
    Activation, Convention, Engine, ErrorClass, ExpertId, Gating, Gelu, Problem, Real, Record, Result, Router, Shape,
    run,
};

use super::{D, E, Layer, N, T, U, gatings, given_routing, routing, uniform};

fn all<A: Real>(problem: &Problem<'_, A>) -> Outcome {
    run(&StandardMoe::new(), problem, Record::Intermediates).unwrap()
}

fn values(outcome: &Outcome, output: Output) -> Vec<f64> {
    outcome.results[&output].values.iter().copied().collect()
}

/// The layer on random numbers with a router; E = `shape.e`, no biases.
fn routed<A: Real>(shape: Shape, activation: Activation, convention: Convention) -> Problem<'static, A> {
    let Shape { t, d, n, e, k } = shape;
    let random = &mut ChaCha8Rng::seed_from_u64(11);
    let gating = Gating::Router(Router::new(uniform(random, (e, d)).mapv(A::from_f64), k, convention));
    Problem::new(
        uniform(random, (t, d)).mapv(A::from_f64),
        uniform(random, (e, activation.h_width(n), d)).mapv(A::from_f64),
        uniform(random, (e, d, n)).mapv(A::from_f64),
        None,
        gating,
        activation,
        uniform(random, (t, d)).mapv(A::from_f64),
    )
    .unwrap()
}

/// One-wide tokens x = 1, so that router_w (E, 1) holds the logits of every token.
fn with_logits(logits: &[f64], k: usize, convention: Convention) -> Problem<'static, f64> {
    let e = logits.len();
    let w = Array2::from_shape_vec((e, 1), logits.to_vec()).unwrap();
    let gating = Gating::Router(Router::new(w, k, convention));
    let one = Array2::ones((1, 1));
    Problem::new(one.clone(), Array3::ones((e, 1, 1)), Array3::ones((e, 1, 1)), None, gating, Activation::Silu, one)
        .unwrap()
}

fn chosen(logits: &[f64], k: usize) -> Result<Vec<u32>> {
    let problem = with_logits(logits, k, Convention::SoftmaxOverTopK);
    let engine = StandardMoe::new();
    let pass = engine.forward(&problem, Record::Results)?.pass;
    Ok(pass.routing().pair_expert().iter().map(|expert| expert.0).collect())
}

#[test]
fn the_case_worked_by_hand_comes_out() {
    // h = 2·1 + 0·1 = 2 and relu keeps it: A = [2], W2 = [3, 4]ᵀ, dO = [1, 2].
    let gating = Gating::Given { routing: routing(1, 1, &[(0, 0)]), scores: vec![1.0] };
    let (w1, w2) = (array![[[2.0, 0.0]]], array![[[3.0], [4.0]]]);
    let problem = Problem::new(array![[1.0, 1.0]], w1, w2, None, gating, Activation::Relu, array![[1.0, 2.0]]).unwrap();
    let outcome = all(&problem);
    for (output, expected) in [
        (Output::H, vec![2.0]),
        (Output::A, vec![2.0]),
        (Output::Y, vec![6.0, 8.0]),
        (Output::O, vec![6.0, 8.0]),
        (Output::Ds, vec![22.0]), // ⟨dO, Y⟩ = 6 + 16
        (Output::Dh, vec![11.0]), // G = dO·W2 = 3 + 8
        (Output::APrime, vec![2.0]),
        (Output::Dw2, vec![2.0, 4.0]),
        (Output::Dw1, vec![11.0, 11.0]),
        (Output::DxExpanded, vec![22.0, 0.0]),
        (Output::Dx, vec![22.0, 0.0]),
    ] {
        assert_eq!(values(&outcome, output), expected, "{output}");
    }
}

#[test]
fn plain_autograd_keeps_x_gathered_x_h_a_and_y_and_nothing_else() {
    fn check<A: Real>(shape: Shape, activation: Activation) {
        for convention in Convention::ALL {
            let Shape { t, d, n, .. } = shape;
            let elements = t * d + shape.routed() * (d + activation.h_width(n) + n + d);
            let outcome = all(&routed::<A>(shape, activation, convention));
            assert_eq!(outcome.ledger.activations(), elements * A::DTYPE.bytes(), "{shape} {activation} {convention}");
        }
    }
    for shape in ["5,8,4,3,2", "17,16,24,3,1", "0,8,8,4,2", "4,8,8,4,4", "1,2,3,9,2"] {
        for activation in Activation::ALL {
            check::<f32>(shape.parse().unwrap(), activation);
            check::<f64>(shape.parse().unwrap(), activation);
        }
    }
    // For a gate that is Td + 3Rn + 2Rd elements: 2Td + 6TKn + 4TKd bytes in a 2-byte type.
    let ledger =
        all(&routed::<f32>("5,8,4,3,2".parse().unwrap(), Activation::SwiGlu, Convention::SoftmaxOverTopK)).ledger;
    assert_eq!(ledger.activations(), 2 * (2 * 5 * 8 + 6 * 10 * 4 + 4 * 10 * 8));
}

#[test]
fn biases_and_given_routing_keep_no_more() {
    for activation in Activation::ALL {
        let kept = |biases| all(&Layer::random(0, activation, None, biases).problem()).ledger.activations();
        let elements = T * D + given_routing().routed() * (D + activation.h_width(N) + N + D);
        assert_eq!((kept(false), kept(true)), (8 * elements, 8 * elements), "{activation}");
    }
}

#[test]
fn no_tokens_make_empty_results_and_zero_weight_gradients() {
    for convention in Convention::ALL {
        let outcome = all(&routed::<f64>("0,8,8,4,2".parse().unwrap(), Activation::SwiGlu, convention));
        assert_eq!(outcome.results[&Output::O].values.shape(), [0, 8]);
        for output in [Output::Dw1, Output::Dw2, Output::DrouterW] {
            let gradient = values(&outcome, output);
            assert!(!gradient.is_empty() && gradient.iter().all(|g| g.to_bits() == 0), "{output}");
        }
    }
}

#[test]
fn an_expert_without_tokens_gets_zero_gradients_and_a_token_without_pairs_a_zero_row() {
    let mut layer = Layer::random(3, Activation::SwiGlu, None, true);
    let pairs = routing(T, E, &[(0, 2), (2, 0), (0, 0), (2, 2)]); // expert 1 and token 1 have none
    let Gating::Given { scores, .. } = layer.problem().gating().clone() else { unreachable!() };
    layer.dout.fill(-1.0);
    let problem = |layer: &Layer| {
        let of = layer.problem();
        let biases =
            sonicmoe::Biases { b1: of.b1().unwrap().to_owned().into(), b2: of.b2().unwrap().to_owned().into() };
        let gating = Gating::Given { routing: pairs.clone(), scores };
        let (x, w1, w2) = (of.x().to_owned(), of.w1().to_owned(), of.w2().to_owned());
        Problem::new(x, w1, w2, Some(biases), gating, of.activation(), of.dout().to_owned()).unwrap()
    };
    let outcome = all(&problem(&layer));
    for (output, index) in
        [(Output::Dw1, 1), (Output::Dw2, 1), (Output::Db1, 1), (Output::Db2, 1), (Output::O, 1), (Output::Dx, 1)]
    {
        let values = &outcome.results[&output].values;
        let (row, other) = (values.index_axis(ndarray::Axis(0), index), values.index_axis(ndarray::Axis(0), 0));
        assert!(row.iter().all(|value| value.to_bits() == 0), "{output}");
        assert!(other.iter().all(|value| *value != 0.0), "{output}");
    }
}

#[test]
fn one_expert_with_a_normalised_score_gives_its_router_no_gradient_at_all() {
    for convention in [Convention::SoftmaxOverTopK, Convention::TopKOverSoftmaxRenormalized] {
        let outcome = all(&routed::<f64>("9,8,4,5,1".parse().unwrap(), Activation::SwiGlu, convention));
        assert!(values(&outcome, Output::Ds).iter().all(|ds| *ds != 0.0));
        assert!(values(&outcome, Output::Scores).iter().all(|score| *score == 1.0), "{convention}");
        assert!(values(&outcome, Output::Dlogits).iter().all(|dlogit| *dlogit == 0.0), "{convention}");
        assert!(values(&outcome, Output::DrouterW).iter().all(|g| *g == 0.0), "{convention}");
    }
}

#[test]
fn the_larger_logit_is_chosen_then_the_smaller_id_and_the_zeros_are_equal() -> Result<()> {
    assert_eq!(chosen(&[0.0, 2.0, -1.0, 3.0], 2)?, [3, 1]);
    assert_eq!(chosen(&[1.0, 1.0, 1.0, 1.0], 3)?, [0, 1, 2]);
    assert_eq!(chosen(&[-0.0, 0.0, -0.0], 2)?, [0, 1]);
    assert_eq!(chosen(&[0.0, -0.0, 0.0], 2)?, [0, 1]);
    assert_eq!(chosen(&[f64::NEG_INFINITY, -1e300, 5.0], 2)?, [2, 1]);
    Ok(())
}

#[test]
fn logits_that_allow_no_choice_are_refused_by_row() {
    for (logits, message) in [
        ([0.0, f64::NAN, 1.0], "logit of token 0, expert 1 is NaN"),
        ([0.0, 1.0, f64::INFINITY], "logit of token 0, expert 2 is inf"),
        ([f64::NEG_INFINITY, 1.0, f64::NEG_INFINITY], "token 0 has only 1 logits above −∞, but K = 2"),
    ] {
        let error = chosen(&logits, 2).unwrap_err();
        assert_eq!(error.class(), ErrorClass::Contract);
        assert!(error.to_string().starts_with(message), "{error}");
    }
}

#[test]
fn a_masked_expert_has_no_probability_and_no_gradient() {
    for convention in Convention::ALL {
        let outcome = all(&with_logits(&[0.5, f64::NEG_INFINITY, 0.25], 2, convention));
        assert!(values(&outcome, Output::Scores).iter().all(|score| *score > 0.0));
        let dlogits = values(&outcome, Output::Dlogits);
        assert!(dlogits[1] == 0.0 && dlogits.iter().all(|dlogit| dlogit.is_finite()), "{convention}: {dlogits:?}");
    }
}

#[test]
fn three_conventions_are_two_functions() {
    let shape: Shape = "9,8,4,6,3".parse().unwrap();
    let [over_top_k, over_softmax, renormalised] =
        Convention::ALL.map(|convention| all(&routed::<f64>(shape, Activation::SwiGlu, convention)));
    let scores = |outcome: &Outcome| Array1::from(values(outcome, Output::Scores));
    // Either way a score is a handful of exponentials (2u each), sums (u per term) and quotients.
    let difference = (scores(&over_top_k) - scores(&renormalised)).mapv(f64::abs);
    assert!(difference.iter().all(|difference| *difference < 32.0 * U), "{difference}");
    assert!((scores(&over_top_k) - scores(&over_softmax)).iter().any(|difference| difference.abs() > 0.1));
    // Logits (0, 1, 2), the two largest: e²/(e² + e) and e²/(1 + e + e²).
    let score = |convention| values(&all(&with_logits(&[0.0, 1.0, 2.0], 2, convention)), Output::Scores)[0];
    approx::assert_relative_eq!(score(Convention::SoftmaxOverTopK), 0.731_058_578_630_004_9, max_relative = 32.0 * U);
    approx::assert_relative_eq!(score(Convention::TopKOverSoftmax), 0.665_240_955_774_821_8, max_relative = 32.0 * U);
}

#[test]
fn a_choice_made_elsewhere_is_followed_and_its_own_choice_changes_nothing() {
    for router in gatings() {
        let problem = Layer::random(5, Activation::SwiGlu, router, true).problem();
        let own = all(&problem);
        let followed = run_with(&problem, &own.routing).unwrap();
        assert_eq!((&followed.results, &followed.ledger), (&own.results, &own.ledger));
    }
    // Any number of pairs per token: normalised scores of a token sum to 1, a pairless one gets 0.
    let other = routing(T, E, &[(2, 1), (0, 2), (0, 0), (0, 1)]);
    for convention in [Convention::SoftmaxOverTopK, Convention::TopKOverSoftmaxRenormalized] {
        let problem = Layer::random(5, Activation::SwiGlu, Some((2, convention)), true).problem();
        let outcome = run_with(&problem, &other).unwrap();
        let scores = values(&outcome, Output::Scores);
        assert_eq!((outcome.routing, scores[0]), (other.clone(), 1.0));
        assert!((scores[1..].iter().sum::<f64>() - 1.0).abs() < 4.0 * U);
        assert!(outcome.results[&Output::O].values.slice(s![1, ..]).iter().all(|o| o.to_bits() == 0));
    }
}

#[test]
fn a_choice_that_does_not_fit_is_refused() {
    let given = Layer::random(5, Activation::SwiGlu, None, false).problem();
    let message = |routing: &Routing| run_with(&given, routing).unwrap_err().to_string();
    assert_eq!(
        message(&routing(T, E, &[(0, 2), (1, 1), (0, 0), (0, 1)])),
        "expert of pair 1 is 1, but the given scores belong to expert 0 there; pass the problem's own routing"
    );
    assert!(message(&routing(T, E, &[(0, 2)])).contains("expected [3, 3, 4]"));
    let with_router = with_logits(&[0.0, -800.0], 1, Convention::TopKOverSoftmaxRenormalized);
    assert!(run_with(&with_router, &routing(2, 2, &[])).unwrap_err().to_string().contains("`routing`"));
    // p of the expert forced here underflows to 0, and 0/0 is no score.
    let error = run_with(&with_router, &routing(1, 2, &[(0, 1)])).unwrap_err();
    assert!(error.to_string().starts_with("tensor `scores` holds NaN at [0]"), "{error}");
}

#[test]
fn a_gradient_of_the_wrong_shape_is_refused_and_backward_can_be_repeated() {
    let problem = Layer::random(6, Activation::SwiGlu, Some((2, Convention::TopKOverSoftmax)), true).problem();
    let engine = StandardMoe::new();
    let pass = engine.forward(&problem, Record::Results).unwrap().pass;
    let error = pass.backward(Array2::zeros((T, D + 1)).view(), Record::Results).err().unwrap();
    assert_eq!(error.class(), ErrorClass::Contract);
    let [first, second] = [(); 2].map(|()| pass.backward(problem.dout(), Record::Results).unwrap().gradients);
    assert_eq!((first.dx, first.dw1, first.ds), (second.dx, second.dw1, second.ds));
}

#[test]
fn gates_of_ten_thousand_open_or_close_and_never_become_nan() {
    fn check<A: Real>(activation: Activation) {
        for gate in [-1e4, -100.0, 100.0, 1e4] {
            // x = 1, w1 = (gate, 3) or (gate): a is gate·3, gate or gate², or nothing.
            let rows = if activation.gated() { vec![gate, 3.0] } else { vec![gate] };
            let w1 = Array3::from_shape_vec((1, rows.len(), 1), rows).unwrap().mapv(A::from_f64);
            let gating = Gating::Given { routing: routing(1, 1, &[(0, 0)]), scores: vec![A::one()] };
            let one = Array2::<A>::ones((1, 1));
            let problem =
                Problem::new(one.clone(), w1, Array3::ones((1, 1, 1)), None, gating, activation, one).unwrap();
            let outcome = all(&problem);
            let open = match activation {
                Activation::ReluSquared => gate * gate,
                // 7·σ(11.9) opens for up + 1.
                Activation::GptOss => 4.0 * 7.0 / (1.0 + (-1.702 * 7.0f64).exp()),
                _ if activation.gated() => gate * 3.0,
                _ => gate,
            };
            let expected = if gate > 0.0 { open } else { 0.0 };
            // σ(−100) = 4e-44 is all that is left of a closed gate.
            let allowed = if activation == Activation::GptOss {
                28.0 * 8.0 * sonicmoe::Element::to_f64(A::epsilon())
            } else {
                1e-40
            };
            assert!((values(&outcome, Output::A)[0] - expected).abs() < allowed, "{activation} at {gate}");
            assert!(
                outcome.results.values().all(|stored| stored.values.iter().all(|value| value.is_finite())),
                "{activation} at {gate}"
            );
        }
    }
    for activation in Activation::ALL {
        check::<f32>(activation);
        check::<f64>(activation);
    }
}

/// da/dgate and da/dup of one gpt-oss unit, by the tape.
fn gpt_oss_slopes(gate: f64, up: f64) -> [f64; 2] {
    // x = w2 = dout = s = 1: dw1 is the gradient of a in h = w1.
    let w1 = Array3::from_shape_vec((1, 2, 1), vec![gate, up]).unwrap();
    let gating = Gating::Given { routing: routing(1, 1, &[(0, 0)]), scores: vec![1.0] };
    let one = Array2::ones((1, 1));
    let problem =
        Problem::new(one.clone(), w1, Array3::ones((1, 1, 1)), None, gating, Activation::GptOss, one).unwrap();
    values(&all(&problem), Output::Dw1).try_into().unwrap()
}

/// a of one gpt-oss unit, as the definition has it.
fn gpt_oss_by_definition(gate: f64, up: f64) -> f64 {
    let gate = gate.min(7.0);
    (up.clamp(-7.0, 7.0) + 1.0) * gate / (1.0 + (-1.702 * gate).exp())
}

#[test]
fn a_gradient_passes_inside_the_clamps_of_gpt_oss_and_at_them_and_not_beyond() {
    // A difference quotient errs by δ/2·|a″| (one-sided) with |a″| < 8, and by 2⁻⁵³·57/δ.
    let (delta, allowed) = (1e-6, 1e-5);
    let quotient = |gate: [f64; 2], up: [f64; 2]| {
        (gpt_oss_by_definition(gate[1], up[1]) - gpt_oss_by_definition(gate[0], up[0]))
            / (gate[1] - gate[0] + up[1] - up[0])
    };
    for gate in [-9.0, -7.0, -0.5, 0.5, 6.9, 7.1, 30.0] {
        for up in [-30.0, -7.1, -6.9, 0.0, 2.0, 6.9, 7.1] {
            let [dgate, dup] = gpt_oss_slopes(gate, up);
            let both = |x: f64| [x - delta, x + delta];
            assert!((dgate - quotient(both(gate), [up; 2])).abs() < allowed, "gate {gate}, up {up}: {dgate}");
            assert!((dup - quotient([gate; 2], both(up))).abs() < allowed, "gate {gate}, up {up}: {dup}");
            assert!((dgate == 0.0) == (gate > 7.0) && (dup == 0.0) == (up.abs() > 7.0), "gate {gate}, up {up}");
        }
    }
    // At a clamp the gradient is the quotient of the inner side; the outer one is 0.
    for (gate, up, inner) in [(7.0, 7.0, -1.0), (7.0, -7.0, 1.0)] {
        let [dgate, dup] = gpt_oss_slopes(gate, up);
        assert!((dgate - quotient([7.0 - delta, 7.0], [up; 2])).abs() < allowed && dgate.abs() > 5.9);
        assert_eq!(quotient([7.0, 7.0 + delta], [up; 2]), 0.0);
        assert!((dup - quotient([gate; 2], [up, up + inner * delta])).abs() < allowed && dup > 6.9);
        assert_eq!(quotient([gate; 2], [up, up - inner * delta]), 0.0);
    }
}

#[test]
fn activations_are_the_functions_of_their_definition() {
    let gates: Vec<f64> = (-40..=40).map(|step| f64::from(step) / 8.0).collect();
    for activation in Activation::ALL {
        let up = if activation.gated() { -1.5 } else { 1.0 };
        let mut rows: Vec<f64> = Vec::new();
        for &gate in &gates {
            rows.push(gate);
            if activation.gated() {
                rows.push(up);
            }
        }
        let w1 = Array3::from_shape_vec((1, rows.len(), 1), rows).unwrap();
        let gating = Gating::Given { routing: routing(1, 1, &[(0, 0)]), scores: vec![1.0] };
        let one = Array2::ones((1, 1));
        let w2 = Array3::ones((1, 1, gates.len()));
        let problem = Problem::new(one.clone(), w1, w2, None, gating, activation, one).unwrap();
        for (&x, a) in gates.iter().zip(values(&all(&problem), Output::A)) {
            let expected = up
                * match activation {
                    Activation::SwiGlu | Activation::Silu => x / (1.0 + (-x).exp()),
                    Activation::GeGlu(Gelu::Exact) | Activation::Gelu(Gelu::Exact) => {
                        x / 2.0 * (1.0 + libm::erf(x / std::f64::consts::SQRT_2))
                    }
                    Activation::GeGlu(Gelu::Tanh) | Activation::Gelu(Gelu::Tanh) => {
                        let z = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                        x / 2.0 * (1.0 + z.tanh())
                    }
                    Activation::ReGlu | Activation::Relu => x.max(0.0),
                    Activation::ReluSquared => x.max(0.0).powi(2),
                    Activation::GptOss => (up + 1.0) / up * x / (1.0 + (-1.702 * x).exp()),
                };
            // The definitions lose up to 3u|x| where 1 + erf and 1 + tanh cancel; the argument of
            // tanh, 4u of at most 8.5, moves x·σ(2z) by less than 34u|x| where σ′ is largest.
            assert!((a - expected).abs() <= 64.0 * U * x.abs() * up.abs(), "{activation} at {x}: {a}, not {expected}");
        }
    }
}

#[test]
fn f32_stays_within_its_own_roundoff_of_f64() {
    let shape: Shape = "9,8,4,6,3".parse().unwrap();
    for activation in Activation::ALL {
        let narrow = routed::<f32>(shape, activation, Convention::TopKOverSoftmax);
        let wide = run_with(&narrow.widen(), &all(&narrow).routing).unwrap();
        let (o, truth) = (values(&all(&narrow), Output::O), values(&wide, Output::O));
        // As for the loss of the small layers: |y| ≤ n(d + 1)², Σs ≤ 1, and (d + 1)² for the logits,
        // nearly redoubled by softmax twice, is the largest of fewer than 512 roundings.
        let allowed = 512.0 * f64::from(f32::EPSILON) / 2.0 * (4 * 9 * 9) as f64;
        assert!(o.iter().zip(&truth).all(|(o, truth)| (o - truth).abs() <= allowed), "{activation}");
        assert!(truth.iter().any(|o| o.abs() > 10.0 * allowed), "{activation}");
    }
}

#[test]
fn strided_and_borrowed_tensors_are_read_as_they_stand() {
    let convention = Convention::SoftmaxOverTopK;
    let contiguous = routed::<f64>("5,8,4,3,2".parse().unwrap(), Activation::SwiGlu, convention);
    let router = Router::new(contiguous.router_w().unwrap(), 2, convention);
    let x = contiguous.x().reversed_axes().as_standard_layout().into_owned();
    let mut padded = Array3::zeros((3, 8, 16));
    padded.slice_mut(s![.., .., ..;2]).assign(&contiguous.w1());
    let strided = Problem::new(
        x.t(),
        padded.slice(s![.., .., ..;2]),
        contiguous.w2(),
        None,
        Gating::Router(router),
        contiguous.activation(),
        contiguous.dout(),
    )
    .unwrap();
    assert_eq!(all(&strided).routing, all(&contiguous).routing);
    for (output, stored) in all(&contiguous).results {
        let difference = &all(&strided).results[&output].values - &stored.values;
        // Products of strided matrices may sum in another order; nothing here exceeds 10⁴.
        assert!(difference.iter().all(|difference| difference.abs() < 64.0 * U * 1e4), "{output}");
    }
}

#[test]
fn an_infinity_in_one_token_stays_with_it_and_its_experts() {
    let mut layer = Layer::random(8, Activation::SwiGlu, None, true);
    layer.inputs.get_mut(&Output::Dx).unwrap()[[1, 0]] = f64::INFINITY; // token 1 goes to expert 0
    let outcome = all(&layer.problem());
    let finite = |output, index| {
        outcome.results[&output].values.index_axis(ndarray::Axis(0), index).iter().all(|value: &f64| value.is_finite())
    };
    assert!(finite(Output::O, 0) && finite(Output::O, 2) && finite(Output::Dx, 0));
    assert!([1, 2].into_iter().all(|expert| finite(Output::Dw1, expert) && finite(Output::Dw2, expert)));
    assert!(!finite(Output::O, 1) && !finite(Output::Dw1, 0));
    let expert = given_routing().pair_expert()[1];
    assert_eq!(expert, ExpertId(0));
}
