//! Layers of the sizes that are in use: every element of every kernel against the f64 witness on the
//! device, and a sample of tokens, experts and units against the truth of the whole layer on the host.

use std::ops::Range;

use half::bf16;
use ndarray::{Array1, Array2, Array3, ArrayD, Axis, s};

use sonicmoe::case::{Case, Pairing};
use sonicmoe::engine::{Engine, Numerics, Output, Record, Stored, run};
use sonicmoe::oracle::{bound, judge, kernel};
use sonicmoe::routing::Routing;
use sonicmoe::sonic::gpu::device::{Buffer, Guards};
use sonicmoe::sonic::gpu::{
    DeviceRouting, GpuEngine, Layer, Load, Loaded, Plan, Witnessed, Workload, upload, witness_backward, witness_forward,
};
use sonicmoe::{Activation, ExpertId, Gating, Problem, TokenId};

use crate::engine_or_skip;

/// T,d,n,E,K of models in use, and one whose h has more than 2³¹ elements.
const SIZES: [(&str, &str); 9] = [
    ("1.4b", "40960,768,256,128,8"),
    ("7b-n256", "24576,1536,256,128,8"),
    ("olmoe", "32768,2048,1024,64,8"),
    ("qwen3-30b", "32768,2048,768,128,8"),
    ("30b-n256", "32768,4096,256,256,16"),
    ("120b-n512", "32768,4096,512,256,16"),
    ("qwen3-next", "32768,2048,512,512,10"),
    ("sparse", "16384,4096,1024,256,4"),
    ("beyond 2^31", "270336,512,512,128,8"),
];

fn numerics(engine: &GpuEngine) -> Numerics {
    Engine::<bf16>::numerics(engine)
}

/// On small problems both oracles judge: the witness's worst ratios are those of the host.
#[test]
fn the_witness_judges_as_the_oracle_on_the_host_does() {
    engine_or_skip!();
    let engine = GpuEngine::open().unwrap();
    for case in [
        Case::new("0,136,264,6,1".parse().unwrap()).with_counts(&[200, 0, 129, 1, 64, 300]),
        Case::new("300,72,72,5,2".parse().unwrap()).with_pairing(Pairing::TopK).with_seed(2),
        Case::new("65,264,8,3,3".parse().unwrap()).with_pairing(Pairing::TopK).with_seed(3),
    ] {
        let problem = case.problem::<bf16>().unwrap();
        let outcome = run(&engine, &problem, Record::Intermediates).unwrap();
        let truth = problem.widen();
        let of_host = kernel::kernels(&truth, &outcome.routing, &outcome.results, &numerics(&engine)).unwrap();
        let witnessed = witnessed(&engine, &problem);
        assert_eq!(witnessed.len(), 11, "a result was not judged");
        for Witnessed { output, judged, skipped, failing, worst, first } in witnessed {
            let bounded = &of_host.iter().find(|bound| bound.output == output).unwrap().bounded;
            let judgement = judge(output, &outcome.results[&output], bounded).unwrap();
            assert_eq!((judged, skipped, failing, first), (judgement.judged() as u64, 0, 0, None), "{case}: {output}");
            // The same formula of the same numbers. The host sums radii in f32, rounded up by at most 2(m + 2)
            // units of 2⁻²⁴ for m ≤ 300 terms; and two f64 sums of m terms differ by m·2⁻⁵³, which beside a
            // bound of 2⁻²⁴ is m·2⁻²⁹.
            let (host, above) = (judgement.ratio(), 2.0 * 302.0 / f64::from(1 << 24));
            let slack = 300.0 / f64::from(1 << 29);
            assert!(worst >= host - slack, "{case}: {output}: {worst} below {host}");
            assert!(worst <= host * (1.0 + above) + slack, "{case}: {output}: {worst} beyond {host}");
        }
    }
}

/// One ulp more in the last element of each result: the witness names it.
#[test]
fn the_witness_sees_one_wrong_element_in_each_result() {
    engine_or_skip!();
    let engine = GpuEngine::open().unwrap();
    let workload = Workload { shape: "300,136,72,5,2".parse().unwrap(), load: Load::Uniform, rounding: None, seed: 9 };
    let Loaded { layer, x, dout, on_device, .. } = workload.load(engine.device(), Guards::NONE).unwrap();
    let mut plan = Plan::allocate(layer, &on_device).unwrap();
    plan.forward(&on_device, &x).unwrap();
    for output in [Output::H, Output::A, Output::Y, Output::O] {
        let place = spoil(&plan, output);
        let found = witness_forward(&plan, &on_device, &x, &numerics(&engine)).unwrap();
        assert!(found.iter().any(|w| w.output == output && w.first == Some(place)), "{output}: {found:?}");
        plan.forward(&on_device, &x).unwrap();
    }
    plan.backward(&on_device, &x, &dout).unwrap();
    for output in [Output::Dh, Output::APrime, Output::DxExpanded, Output::Dx, Output::Dw1, Output::Dw2] {
        let place = spoil(&plan, output);
        let found = witness_backward(&plan, &on_device, &x, &dout, &numerics(&engine)).unwrap();
        assert!(found.iter().any(|w| w.output == output && w.first == Some(place)), "{output}: {found:?}");
        plan.backward(&on_device, &x, &dout).unwrap();
    }
    let found = witness_backward(&plan, &on_device, &x, &dout, &numerics(&engine)).unwrap();
    assert!(found.iter().all(|w| w.failing == 0 && w.judged > 0), "{found:?}");
}

/// Flips the sign bit of the last element of a result on the device; its index.
fn spoil(plan: &Plan, output: Output) -> u64 {
    let buffer: &Buffer<bf16> = match output {
        Output::H => plan.h(),
        Output::A | Output::APrime => plan.narrow(),
        Output::Y | Output::DxExpanded => plan.wide(),
        Output::O => plan.o(),
        Output::Dh => plan.dh(),
        Output::Dx => plan.dx(),
        Output::Dw1 => plan.dw1(),
        Output::Dw2 => plan.dw2(),
        other => panic!("{other} is no tensor of bf16"),
    };
    let last = buffer.len() - 1;
    let [value] = buffer.download_range(last..last + 1).unwrap()[..] else { panic!("one element") };
    // SAFETY: the byte lies inside the buffer, and nothing is queued: the download has waited.
    unsafe {
        let address = buffer.address() + 2 * last as u64 + 1;
        cudarc::driver::result::memset_d8_sync(address, value.to_le_bytes()[1] ^ 0x80, 1).unwrap();
    }
    last as u64
}

fn witnessed(engine: &GpuEngine, problem: &Problem<'_, bf16>) -> Vec<Witnessed> {
    let Gating::Given { routing, scores } = problem.gating() else { panic!("this test gives its pairs") };
    let device = engine.device();
    let on_device = DeviceRouting::upload(device, routing, scores, Guards::NAN).unwrap();
    let mut plan = Plan::allocate(Layer::upload(device, problem, Guards::NAN).unwrap(), &on_device).unwrap();
    let x = upload(device, "x", problem.x(), Guards::NAN).unwrap();
    let dout = upload(device, "dout", problem.dout(), Guards::NAN).unwrap();
    plan.forward(&on_device, &x).unwrap();
    let mut found = witness_forward(&plan, &on_device, &x, &numerics(engine)).unwrap();
    plan.backward(&on_device, &x, &dout).unwrap();
    found.extend(witness_backward(&plan, &on_device, &x, &dout, &numerics(engine)).unwrap());
    plan.check_untouched().unwrap();
    found
}

/// `SONICMOE_SIZES` names some of them, with commas between; all without it.
#[test]
#[ignore = "minutes, and 80 GiB of device memory"]
fn at_full_size_every_element_of_every_kernel_is_within_its_bound() {
    engine_or_skip!();
    let wanted = std::env::var("SONICMOE_SIZES").ok();
    let wanted = |name: &str| wanted.as_ref().is_none_or(|list| list.split(',').any(|other| other == name));
    for (name, shape) in SIZES.into_iter().filter(|(name, _)| wanted(name)) {
        for load in Load::ALL {
            let start = std::time::Instant::now();
            let engine = GpuEngine::open().unwrap();
            let workload = Workload { shape: shape.parse().unwrap(), load, rounding: None, seed: 20_260_301 };
            let loaded = workload.load(engine.device(), Guards::NONE).unwrap();
            let (elements, worst) = full_size(&engine, loaded, &format!("{name} ({load})"));
            let seconds = start.elapsed().as_secs_f64();
            eprintln!("{name} ({load}): {elements} elements, worst error over bound {worst:.3}, {seconds:.1} s");
        }
    }
}

fn full_size(engine: &GpuEngine, loaded: Loaded, name: &str) -> (u64, f64) {
    let Loaded { layer, x, dout, on_device, routing, scores } = loaded;
    let mut plan = Plan::allocate(layer, &on_device).unwrap();
    plan.forward(&on_device, &x).unwrap();
    let mut found = witness_forward(&plan, &on_device, &x, &numerics(engine)).unwrap();
    plan.backward(&on_device, &x, &dout).unwrap();
    found.extend(witness_backward(&plan, &on_device, &x, &dout, &numerics(engine)).unwrap());
    let (t, d, n, e, r) = (routing.tokens(), plan.layer().d(), plan.layer().n(), routing.experts(), routing.routed());
    let expected =
        2 * r * n + r * n + r * d + t * d + 2 * r * n + r * n + r + e * d * n + r * d + e * 2 * n * d + t * d;
    assert_eq!(found.iter().map(|w| w.judged).sum::<u64>(), expected as u64, "{name}: elements were not judged");
    for witnessed in &found {
        assert_eq!(witnessed.failing, 0, "{name}: {witnessed:?}");
    }
    let sample = Sample { plan: &plan, x: &x, dout: &dout, routing: &routing, scores: &scores, name };
    let numerics = numerics(engine);
    // One thread of the host multiplies for an expert: the largest are left to the witness.
    let rows_of = |expert: &usize| routing.rows_of_expert(ExpertId(*expert as u32)).len();
    let most = (0..e).filter(|expert| rows_of(expert) * d <= 1 << 24).max_by_key(rows_of);
    let mut worst = found.iter().fold(0.0f64, |worst, witnessed| worst.max(witnessed.worst));
    worst = worst.max(sample.tokens(&[0, t / 3, t / 2 + 1, t - 1], &numerics));
    for (expert, units) in [(most.unwrap_or(e - 1), n - 4..n), (e / 2, n / 2..n / 2 + 4), (e - 1, 0..4)] {
        worst = worst.max(sample.units(ExpertId(expert as u32), units, &numerics));
    }
    (expected as u64, worst)
}

/// Parts of a layer that are a layer of their own, with the same results.
struct Sample<'a> {
    plan: &'a Plan,
    x: &'a Buffer<bf16>,
    dout: &'a Buffer<bf16>,
    routing: &'a Routing,
    scores: &'a [f32],
    name: &'a str,
}

impl Sample<'_> {
    /// A token's o, dx and ds depend on no other token.
    fn tokens(&self, tokens: &[usize], numerics: &Numerics) -> f64 {
        let (layer, routing) = (self.plan.layer(), self.routing);
        let (d, n) = (layer.d(), layer.n());
        let pairs: Vec<usize> =
            (0..routing.routed()).filter(|&pair| tokens.contains(&routing.pair_token()[pair].index())).collect();
        let mut experts: Vec<usize> = pairs.iter().map(|&pair| routing.pair_expert()[pair].index()).collect();
        experts.sort_unstable();
        experts.dedup();
        let new_pairs = pairs.iter().map(|&pair| {
            let token = tokens.iter().position(|&token| token == routing.pair_token()[pair].index()).unwrap();
            let expert = experts.binary_search(&routing.pair_expert()[pair].index()).unwrap();
            (TokenId(token as u32), ExpertId(expert as u32))
        });
        let routing_of_sample = Routing::new(tokens.len(), experts.len(), new_pairs).unwrap();
        let scores: Vec<f32> = pairs.iter().map(|&pair| self.scores[pair]).collect();
        let weights = |buffer, rows, columns| slices(buffer, &experts, rows * columns, (experts.len(), rows, columns));
        let problem = Problem::new(
            rows(self.x, tokens, d),
            weights(layer.w1(), 2 * n, d),
            weights(layer.w2(), d, n),
            None,
            Gating::Given { routing: routing_of_sample, scores },
            Activation::SwiGlu,
            rows(self.dout, tokens, d),
        )
        .unwrap();
        let by_row = self.plan.ds().download().unwrap();
        let by_pair = routing.to_pairs(&by_row);
        let ds: Array1<f32> = pairs.iter().map(|&pair| by_pair[pair]).collect();
        let o = rows(self.plan.o(), tokens, d);
        let dx = rows(self.plan.dx(), tokens, d);
        let stored = [(Output::O, Stored::of(&o)), (Output::Dx, Stored::of(&dx)), (Output::Ds, Stored::of(&ds))];
        self.judge(&problem, &stored, numerics)
    }

    /// Rows of dw1 and columns of dw2 that belong to a unit depend on no other unit and expert.
    fn units(&self, expert: ExpertId, units: Range<usize>, numerics: &Numerics) -> f64 {
        let (layer, routing) = (self.plan.layer(), self.routing);
        let (d, n, e) = (layer.d(), layer.n(), expert.index());
        let of_expert = routing.rows_of_expert(expert);
        let tokens: Vec<usize> = routing.row_token()[of_expert.clone()].iter().map(|token| token.index()).collect();
        let scores: Vec<f32> = routing.row_pair()[of_expert].iter().map(|&pair| self.scores[pair as usize]).collect();
        let all = |count: usize| (0..count as u32).map(|token| (TokenId(token), ExpertId(0)));
        let gating = Gating::Given { routing: Routing::new(tokens.len(), 1, all(tokens.len())).unwrap(), scores };
        let w1_rows = |buffer: &Buffer<bf16>| {
            let first = e * 2 * n * d;
            let values = buffer.download_range(first + 2 * units.start * d..first + 2 * units.end * d).unwrap();
            Array3::from_shape_vec((1, 2 * units.len(), d), values).unwrap()
        };
        let w2_columns = |buffer: &Buffer<bf16>| {
            let whole = slices(buffer, &[e], d * n, (1, d, n));
            whole.slice(s![.., .., units.clone()]).to_owned()
        };
        let (x, dout) = (rows(self.x, &tokens, d), rows(self.dout, &tokens, d));
        let (w1, w2) = (w1_rows(layer.w1()), w2_columns(layer.w2()));
        let problem = Problem::new(x, w1, w2, None, gating, Activation::SwiGlu, dout).unwrap();
        let stored = [
            (Output::Dw1, Stored::of(&w1_rows(self.plan.dw1()))),
            (Output::Dw2, Stored::of(&w2_columns(self.plan.dw2()))),
        ];
        self.judge(&problem, &stored, numerics)
    }

    fn judge(&self, problem: &Problem<'_, bf16>, stored: &[(Output, Stored)], numerics: &Numerics) -> f64 {
        let Gating::Given { routing, .. } = problem.gating() else { unreachable!("a sample gives its pairs") };
        let bounds = bound::layer(&problem.widen(), routing, numerics).unwrap();
        let mut worst = 0.0f64;
        for (output, stored) in stored {
            let judgement = judge(*output, stored, &bounds[output]).unwrap();
            assert!(judgement.passes(), "{}: {judgement}", self.name);
            assert_eq!(judgement.skipped, 0, "{}: {output}", self.name);
            worst = worst.max(judgement.ratio());
        }
        worst
    }
}

/// Rows of a (T, d) tensor.
fn rows(buffer: &Buffer<bf16>, of: &[usize], d: usize) -> Array2<bf16> {
    if of.len() > 64 {
        let whole = Array2::from_shape_vec((buffer.len() / d, d), buffer.download().unwrap()).unwrap();
        return whole.select(Axis(0), of);
    }
    let values = of.iter().flat_map(|&row| buffer.download_range(row * d..(row + 1) * d).unwrap());
    Array2::from_shape_vec((of.len(), d), values.collect()).unwrap()
}

/// Matrices of some experts.
fn slices(buffer: &Buffer<bf16>, experts: &[usize], len: usize, shape: (usize, usize, usize)) -> Array3<bf16> {
    let values = experts.iter().flat_map(|&e| buffer.download_range(e * len..(e + 1) * len).unwrap());
    Array3::from_shape_vec(shape, values.collect()).unwrap()
}

/// Also without pairs and with one expert that has every token.
#[test]
fn the_witness_takes_an_empty_layer_and_a_lopsided_one() {
    engine_or_skip!();
    let engine = GpuEngine::open().unwrap();
    for counts in [vec![0, 0, 0], vec![0, 513, 0]] {
        let case = Case::new("0,72,72,3,1".parse().unwrap()).with_counts(&counts);
        let found = witnessed(&engine, &case.problem::<bf16>().unwrap());
        assert!(found.iter().all(|witnessed| witnessed.failing == 0), "{found:?}");
        let weights: ArrayD<u64> = found.iter().map(|w| w.judged).collect::<Array1<_>>().into_dyn();
        assert!(weights.sum() >= (3 * 3 * 72 * 72) as u64, "empty experts are judged too: {found:?}");
    }
}
