//! Files with the names of a checkpoint: the runs of two architectures pass, wrong copies of them fail.

use ndarray::{Array2, Array3, ArrayD, Axis, Ix2, Ix3};
use sonicmoe::dump::{Dump, Model, Overrides};
use sonicmoe::engine::{Output, Results};
use sonicmoe::oracle::Verdict;
use sonicmoe::problem::Biases;
use sonicmoe::reference::StandardMoe;
use sonicmoe::routing::{GroupedSigmoid, Routing};
use sonicmoe::{Convention, Gating, Problem, Record, Router, run};

use super::edit::{File, data};
use super::{check, outcome};

/// The files, and the rounding model that each needs.
const FILES: [(&str, Model); 4] = [
    ("hf_gptoss_f32", Model::Fused),
    ("hf_gptoss_bf16", Model::Eager),
    ("hf_dsv3_f32", Model::Fused),
    ("hf_dsv3_bf16", Model::Eager),
];

#[test]
fn runs_of_gpt_oss_and_deepseek_v3_pass_and_the_model_that_they_need_is_named() {
    for (name, model) in FILES {
        let checked = check(&data(name)).unwrap();
        assert_eq!(checked.verdict, Verdict::Pass, "{}", checked.report());
        assert_eq!(checked.model(), model, "{}", checked.report());
        assert!(checked.dump.unused.is_empty(), "{:?}", checked.dump.unused);
    }
}

fn dump(name: &str) -> Dump {
    Dump::read(data(name), &Overrides::default()).unwrap()
}

/// The same layer with another gating, its w1 scaled.
fn with(problem: &Problem<'_, f64>, gating: Gating<'static, f64>, scale: f64) -> Problem<'static, f64> {
    let biases = problem.b1().zip(problem.b2());
    Problem::new(
        problem.x().to_owned(),
        problem.w1().mapv(|w| scale * w),
        problem.w2().to_owned(),
        biases.map(|(b1, b2)| Biases { b1: b1.to_owned().into(), b2: b2.to_owned().into() }),
        gating,
        problem.activation(),
        problem.dout().to_owned(),
    )
    .unwrap()
}

fn router(dump: &Dump) -> &Router<'static, f64> {
    let Gating::Router(router) = dump.problem.gating() else { panic!("the layer has a router") };
    router
}

fn results(problem: &Problem<'_, f64>) -> (Results, Routing) {
    let outcome = run(&StandardMoe::new(), problem, Record::Results).unwrap();
    (outcome.results, outcome.routing)
}

fn matrix(results: &Results, output: Output) -> Array2<f64> {
    results[&output].values.clone().into_dimensionality::<Ix2>().unwrap()
}

/// o of a layer with the shared expert of `dump` added.
fn o_beside(dump: &Dump, problem: &Problem<'_, f64>) -> Array2<f64> {
    let shared = results(dump.shared.as_ref().unwrap()).0;
    matrix(&results(problem).0, Output::O) + matrix(&shared, Output::O)
}

/// The exit code of `name` with another o.
fn code_with_o(name: &str, fault: &str, o: &Array2<f64>) -> u8 {
    let path = File::of_data(name).edit("o", |values| *values = o.iter().copied().collect()).save(fault);
    let (code, said) = outcome(&path);
    assert!(code == 0 || said.lines().any(|line| line.trim_start().starts_with("o: ")), "{fault}: {said}");
    code
}

#[test]
fn other_routers_than_deepseeks_fail() {
    for name in ["hf_dsv3_f32", "hf_dsv3_bf16"] {
        let dump = dump(name);
        let Convention::GroupedSigmoid(constants) = router(&dump).convention else { panic!("the router has groups") };
        let o_of = |constants: GroupedSigmoid| {
            let other = Router { convention: Convention::GroupedSigmoid(constants), ..router(&dump).map(|w| w) };
            o_beside(&dump, &with(&dump.problem, Gating::Router(other), 1.0))
        };
        // What has to fail below fails for its fault: the right layer's o passes in its place.
        assert_eq!(code_with_o(name, &format!("{name}_right"), &o_of(constants)), 0);
        let without_factor = GroupedSigmoid { factor: 1.0, ..constants };
        let without_sum = GroupedSigmoid { renormalized: false, ..constants };
        let without_groups = GroupedSigmoid { groups: 1, kept: 1, ..constants };
        for (fault, constants) in
            [("factor left out", without_factor), ("not renormalised", without_sum), ("groups ignored", without_groups)]
        {
            assert_eq!(code_with_o(name, &format!("{name} {fault}"), &o_of(constants)), 1, "{name}: {fault}");
        }
    }
}

#[test]
fn a_selection_bias_in_the_weights_fails() {
    for name in ["hf_dsv3_f32", "hf_dsv3_bf16"] {
        let dump = dump(name);
        let (right, routing) = results(&dump.problem);
        let logits = matrix(&right, Output::Logits);
        let bias = router(&dump).selection_bias.as_ref().unwrap();
        let weight = |token: usize, expert: usize| 1.0 / (1.0 + (-logits[[token, expert]]).exp()) + bias[expert];
        let mut sums = vec![0.0; routing.tokens()];
        let pairs: Vec<(usize, usize)> = (0..routing.routed())
            .map(|pair| (routing.pair_token()[pair].index(), routing.pair_expert()[pair].index()))
            .collect();
        pairs.iter().for_each(|&(token, expert)| sums[token] += weight(token, expert));
        let scores = pairs.iter().map(|&(token, expert)| 2.5 * weight(token, expert) / sums[token]).collect();
        let wrong = with(&dump.problem, Gating::Given { routing, scores }, 1.0);
        assert_eq!(code_with_o(name, &format!("{name}_bias"), &o_beside(&dump, &wrong)), 1, "{name}");
    }
}

#[test]
fn a_lost_shared_expert_fails_and_one_without_tensors_is_incomplete() {
    let dump = dump("hf_dsv3_f32");
    let o = matrix(&results(&dump.problem).0, Output::O);
    assert_eq!(code_with_o("hf_dsv3_f32", "without_shared", &o), 1);
    let grad = "grad.shared_experts.up_proj.weight";
    let wrong = File::of_data("hf_dsv3_bf16").edit(grad, |values| values.iter_mut().for_each(|value| *value *= 1.1));
    let (code, said) = outcome(&wrong.save("shared_gradient"));
    assert!(code == 1 && said.contains("dshared_up: "), "{said}");
    let mut without = File::of_data("hf_dsv3_f32");
    without.tensors.retain(|tensor| !tensor.name.starts_with("param.shared"));
    let (code, said) = outcome(&without.save("no_shared_tensors"));
    assert!(code == 4 && said.contains("shared expert"), "{said}");
}

#[test]
fn gate_and_up_of_gpt_oss_exchanged_fail() {
    for name in ["hf_gptoss_f32", "hf_gptoss_bf16"] {
        let exchanged = |file: File, tensor: &str| {
            file.edit(tensor, |values| values.as_chunks_mut::<2>().0.iter_mut().for_each(|pair| pair.swap(0, 1)))
        };
        let file = exchanged(File::of_data(name), "param.experts.gate_up_proj");
        let file = exchanged(file, "param.experts.gate_up_proj_bias");
        let (code, said) = outcome(&file.save(&format!("{name}_exchanged")));
        assert_eq!(code, 1, "{said}");
    }
}

/// A gpt-oss run whose gate and up are clamped in many places: the real one with w1 six times as large,
/// and the results of the f64 reference.
fn clamping() -> (File, Problem<'static, f64>, Results, Routing) {
    let dump = dump("hf_gptoss_f32");
    let problem = with(&dump.problem, Gating::Router(router(&dump).map(|w| w)), 6.0);
    let (results, routing) = results(&problem);
    let transposed = |values: &ArrayD<f64>| -> Vec<f64> {
        let values: Array3<f64> = values.clone().into_dimensionality::<Ix3>().unwrap();
        values.permuted_axes([0, 2, 1]).iter().copied().collect()
    };
    let mut file = File::of_data("hf_gptoss_f32")
        .edit("param.experts.gate_up_proj", |values| values.iter_mut().for_each(|value| *value *= 6.0));
    for (name, output, turned) in [
        ("o", Output::O, false),
        ("dx", Output::Dx, false),
        ("grad.experts.gate_up_proj", Output::Dw1, true),
        ("grad.experts.down_proj", Output::Dw2, true),
        ("grad.experts.gate_up_proj_bias", Output::Db1, false),
        ("grad.experts.down_proj_bias", Output::Db2, false),
        ("grad.router.weight", Output::DrouterW, false),
        ("grad.router.bias", Output::DrouterB, false),
    ] {
        let values = &results[&output].values;
        let values = if turned { transposed(values) } else { values.iter().copied().collect() };
        file = file.edit(name, |into| *into = values);
    }
    (file, problem, results, routing)
}

/// a of one unit without clamps.
fn unclamped(gate: f64, up: f64) -> f64 {
    (up + 1.0) * gate / (1.0 + (-1.702 * gate).exp())
}

#[test]
fn a_clamping_run_of_gpt_oss_passes_and_without_a_clamp_it_fails() {
    let (file, problem, results, routing) = clamping();
    let (code, said) = outcome(&file.save("clamping"));
    assert_eq!(code, 0, "{said}");

    let scores = matrix_of_scores(&results);
    type Clamp = fn(f64, f64) -> (f64, f64);
    let clamps: [Clamp; 3] =
        [|gate, up| (gate, up), |gate, up| (gate, up.clamp(-7.0, 7.0)), |gate, up| (gate.min(7.0), up)];
    let mut clamped = 0;
    for (which, clamp) in clamps.into_iter().enumerate() {
        let mut o = Array2::<f64>::zeros(problem.x().raw_dim());
        for (pair, &score) in scores.iter().enumerate() {
            let (token, expert) = (routing.pair_token()[pair].index(), routing.pair_expert()[pair].index());
            let (w1, w2) = (problem.w1(), problem.w2());
            let (w1, w2) = (w1.index_axis(Axis(0), expert), w2.index_axis(Axis(0), expert));
            let (b1, b2) = (problem.b1().unwrap(), problem.b2().unwrap());
            let h = w1.dot(&problem.x().row(token)) + b1.row(expert);
            clamped += h.iter().filter(|h| h.abs() > 7.0).count();
            let a = ndarray::Array1::from_shape_fn(problem.n(), |unit| {
                let (gate, up) = clamp(h[2 * unit], h[2 * unit + 1]);
                unclamped(gate, up)
            });
            let y = w2.dot(&a) + b2.row(expert);
            o.row_mut(token).scaled_add(score, &y);
        }
        let wrong = file.clone().edit("o", |values| *values = o.iter().copied().collect());
        let (code, said) = outcome(&wrong.save(&format!("clamp_missing_{which}")));
        assert_eq!(code, 1, "{said}");
    }
    assert!(clamped > 1000, "{clamped} numbers of h beyond a clamp");
}

fn matrix_of_scores(results: &Results) -> Vec<f64> {
    results[&Output::Scores].values.iter().copied().collect()
}

#[test]
fn a_config_that_does_not_fit_is_refused_and_none_is_incomplete() {
    let file = File::of_data("hf_gptoss_f32");
    let config = file.strings["config"].as_str().unwrap().to_string();
    for (name, config, code, word) in [
        ("no_json", "{".to_string(), 2, "config"),
        ("no_k", config.replace("num_experts_per_tok", "k"), 2, "num_experts_per_tok"),
        ("other_n", config.replace("\"intermediate_size\": 64", "\"intermediate_size\": 63"), 2, "63"),
        ("other_clamp", config.replace('{', "{\"swiglu_limit\": 6.0, "), 2, "swiglu_limit"),
        ("deep", "[".repeat(100_000), 2, "config"),
    ] {
        let found = outcome(&file.clone().with_string("config", &config).save(&format!("config_{name}")));
        assert!(found.0 == code && found.1.contains(word), "{name}: {found:?}");
    }
    let found = outcome(&file.clone().without_string("config").save("config_missing"));
    assert!(found.0 == 4 && found.1.contains("config"), "{found:?}");
    let mut unknown = file;
    unknown.tensor("param.router.weight").name = "param.wg.weight".into();
    let found = outcome(&unknown.save("unknown_architecture"));
    assert!(found.0 == 4 && found.1.contains("gpt-oss"), "{found:?}");
}
