//! The layer with its router on the device, through the suite that every engine runs; token rounding
//! through the layer; all of it in one CUDA graph.

use std::sync::OnceLock;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use half::bf16;
use ndarray::{Array1, Array2, s};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use sonicmoe::case::campaign::{self, Fixed};
use sonicmoe::case::museum::EXHIBITS;
use sonicmoe::case::strategy::Limits;
use sonicmoe::case::table::edge_cases;
use sonicmoe::case::{Case, Load, Pairing};
use sonicmoe::engine::{Output, Record, run};
use sonicmoe::routing::Convention;
use sonicmoe::routing::rounding::scores::{self as kept_scores, KeptScores};
use sonicmoe::routing::rounding::{Rule, TokenRounding};
use sonicmoe::sonic::gpu::device::{Buffer, Device, Guards};
use sonicmoe::sonic::gpu::{
    BackwardTensors, ChoicePlan, DeviceRouter, DeviceRouting, ForwardTensors, GpuEngine, Layer, RoutedEngine, upload,
};
use sonicmoe::verify::show;
use sonicmoe::{Activation, Gating, Problem};

use crate::routing::{agrees, expected};
use crate::{engine, engine_or_skip, first_difference, run_and_judge};

fn routed() -> Result<&'static RoutedEngine, String> {
    static ENGINE: OnceLock<Result<RoutedEngine, String>> = OnceLock::new();
    let open = || engine().map_err(ToString::to_string)?.routed_on_device().map_err(|error| error.to_string());
    ENGINE.get_or_init(open).as_ref().map_err(Clone::clone)
}

macro_rules! routed_or_skip {
    () => {
        match routed() {
            Ok(engine) => engine,
            Err(absence) => {
                eprintln!("skipped: {absence}");
                return;
            }
        }
    };
}

fn all_within_bounds(engine: &RoutedEngine, cases: Vec<(String, Case)>) {
    let total = cases.len();
    let failures: Vec<String> = cases
        .into_par_iter()
        .filter(|(_, case)| Activation::WITH_KERNELS.contains(&case.activation))
        .filter_map(|(claim, case)| {
            let problem = case.problem::<bf16>().unwrap();
            run_and_judge(engine, &problem).err().map(|failure| format!("{claim} ({case}): {failure}"))
        })
        .collect();
    assert!(failures.is_empty(), "{} of {total} fail:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn every_edge_case_is_within_its_bounds() {
    let engine = routed_or_skip!();
    all_within_bounds(engine, edge_cases().into_iter().map(|edge| (edge.claim.into(), edge.case)).collect());
}

/// `SONICMOE_DEVICE_ROUTERS` problems behind a router, 300 unless set; the message names the case.
#[test]
fn random_problems_behind_a_router_are_within_their_bounds() {
    let engine = routed_or_skip!();
    let cases = std::env::var("SONICMOE_DEVICE_ROUTERS").ok().and_then(|count| count.parse().ok()).unwrap_or(300u64);
    let limits = Limits { tokens: 200, width: 136, experts: 17, ..Limits::DEVICE };
    let loads = [Load::Uniform, Load::Zipf, Load::Biased];
    let drawn = (0..cases).map(|index| {
        let case = campaign::case(20_261_130, index, limits, Fixed::default());
        // Whatever the pairing that was drawn: a router in its place.
        let pairing = match case.pairing {
            Pairing::Router { convention, ref load } if Convention::ALL.contains(&convention) => {
                Pairing::Router { convention, load: load.clone() }
            }
            _ => Pairing::Router {
                convention: Convention::ALL[index as usize % 3],
                load: loads[index as usize / 3 % 3].clone(),
            },
        };
        let mut shape = case.shape;
        shape.k = shape.k.clamp(1, shape.e);
        (format!("case {index}"), Case { shape, ..case }.with_pairing(pairing))
    });
    all_within_bounds(engine, drawn.collect());
}

#[test]
fn more_experts_than_one_warp_holds_and_odd_numbers_of_them() {
    let engine = routed_or_skip!();
    let cases =
        [("40,16,8,257,3", 1), ("33,8,8,520,5", 2), ("70,24,8,129,64", 3), ("9,8,8,1,1", 4), ("300,72,8,12,12", 5)];
    let cases = cases.into_iter().flat_map(|(shape, seed)| {
        Convention::ALL.map(|convention| {
            let pairing = Pairing::Router { convention, load: Load::Biased };
            (shape.to_string(), Case::new(shape.parse().unwrap()).with_pairing(pairing).with_seed(seed))
        })
    });
    all_within_bounds(engine, cases.collect());
}

#[test]
fn every_exhibit_of_the_museum_holds() {
    let engine = routed_or_skip!();
    for exhibit in EXHIBITS {
        match show::<bf16>(engine, exhibit).unwrap() {
            Ok(finding) => assert_eq!(finding.failing, 0, "{}: {}", exhibit.name, finding.explanation),
            Err(skipped) => eprintln!("skipped: {}: {}", exhibit.name, skipped.reason),
        }
    }
}

/// The choice has the CPU path's bits on the logits that the device computed, and a repeated run has
/// the bits of the first.
#[test]
fn the_choice_is_that_of_the_cpu_path_on_the_same_logits_and_repeats() {
    let engine = routed_or_skip!();
    for convention in Convention::ALL {
        let pairing = Pairing::Router { convention, load: Load::Biased };
        let case = Case::new("300,64,40,24,4".parse().unwrap()).with_pairing(pairing).with_biases();
        let problem = case.problem::<bf16>().unwrap();
        let first = run(engine, &problem, Record::Intermediates).unwrap();
        let logits = first.results[&Output::Logits].values.mapv(|logit| logit as f32);
        let logits = logits.into_dimensionality().unwrap();
        let plan = ChoicePlan { tokens: 300, experts: 24, k: 4, convention, rounding: None };
        let expected = expected(&plan, &logits).unwrap();
        assert_eq!(first.routing, expected.routing, "{convention}");
        let scores = &first.results[&Output::Scores].values;
        let found: Vec<u32> = scores.iter().map(|&score| (score as f32).to_bits()).collect();
        assert_eq!(found, expected.scores.iter().map(|score| score.to_bits()).collect::<Vec<_>>(), "{convention}");
        let again = run(engine, &problem, Record::Intermediates).unwrap();
        assert_eq!(first_difference(&first, &again), None, "{convention}");
    }
}

/// A layer with rounded tokens on the device.
struct Rounded {
    layer: Layer,
    x: Buffer<bf16>,
    dout: Buffer<bf16>,
    router: DeviceRouter,
    forward: ForwardTensors,
    backward: BackwardTensors,
}

impl Rounded {
    fn new(engine: &RoutedEngine, problem: &Problem<'_, bf16>, rounding: Option<(TokenRounding, KeptScores)>) -> Self {
        let Gating::Router(of_layer) = problem.gating() else { panic!("this test draws routers") };
        let (device, guards) = (engine.engine().device(), Guards::NAN);
        let layer = Layer::upload(device, problem, guards).unwrap();
        let plan = ChoicePlan {
            tokens: problem.t(),
            experts: problem.e(),
            k: of_layer.k,
            convention: of_layer.convention,
            rounding,
        };
        let b = of_layer.b.as_ref().map(|b| b.view());
        let router = DeviceRouter::new(engine.blas(), plan, of_layer.w.view(), b, guards).unwrap();
        let forward = ForwardTensors::allocate(&layer, router.routing()).unwrap();
        let backward = BackwardTensors::allocate(&layer, router.routing()).unwrap();
        for variants in [layer.forward_variants(), layer.backward_variants(), router.variants()] {
            device.prepare(&variants).unwrap();
        }
        let x = upload(device, "x", problem.x(), guards).unwrap();
        let dout = upload(device, "dout", problem.dout(), guards).unwrap();
        Self { layer, x, dout, router, forward, backward }
    }

    /// Forward and backward, all queued: the host looks at nothing.
    fn queue(&mut self) -> sonicmoe::Result<()> {
        let Self { layer, x, dout, router, forward, backward } = self;
        router.route(x)?;
        forward.run(layer, router.routing(), x)?;
        backward.run(layer, router.routing(), x, &forward.h, dout)?;
        router.backward(x, &backward.ds, &mut backward.dx)
    }

    fn results(&self) -> Vec<(&'static str, Vec<u32>)> {
        let narrow = |buffer: &Buffer<bf16>, rows: usize| {
            let values = buffer.download().unwrap();
            let of_rows = |rows| values.len() / self.router.routing().routed().max(1) * rows;
            values[..if rows == usize::MAX { values.len() } else { of_rows(rows) }]
                .iter()
                .map(|v| v.to_bits().into())
                .collect()
        };
        let wide = |buffer: &Buffer<f32>, used: usize| {
            buffer.download().unwrap()[..used].iter().map(|value| value.to_bits()).collect()
        };
        let (whole, used) = (usize::MAX, self.router.routing().used().unwrap());
        let gradients = self.router.gradients();
        vec![
            ("o", narrow(&self.forward.o, whole)),
            ("h", narrow(&self.forward.h, used)),
            ("a_prime", narrow(&self.backward.a_prime, used)),
            ("dx_expanded", narrow(&self.backward.dx_expanded, used)),
            ("dx", narrow(&self.backward.dx, whole)),
            ("dw1", narrow(&self.backward.dw1, whole)),
            ("dw2", narrow(&self.backward.dw2, whole)),
            ("ds", wide(&self.backward.ds, used)),
            ("dlogits", wide(&gradients.dlogits, gradients.dlogits.len())),
            ("drouter_w", narrow(&gradients.drouter_w, whole)),
        ]
    }

    fn check(&self) {
        self.router.check().unwrap();
        self.router.check_untouched().unwrap();
        self.layer.check_untouched().unwrap();
        self.forward.check_red_zones().unwrap();
        self.backward.check_red_zones().unwrap();
    }
}

fn with_router(shape: &str, convention: Convention, seed: u64) -> Case {
    let pairing = Pairing::Router { convention, load: Load::Zipf };
    Case::new(shape.parse().unwrap()).with_pairing(pairing).with_seed(seed)
}

/// R is the device's secret: rows up to R are those of the same routing given by the host, rows beyond
/// keep their poison, and dlogits are those of f64 within what their roundings allow.
#[test]
fn rounded_tokens_pass_through_the_layer_with_r_unknown_to_the_host() {
    let engine = routed_or_skip!();
    let device = engine.engine().device();
    let cases = Rule::ALL
        .into_iter()
        .enumerate()
        .flat_map(|(index, rule)| KeptScores::ALL.map(|semantics| (index, rule, semantics)));
    for (index, rule, semantics) in cases {
        for (shape, tile, biases) in [("150,40,24,6,2", 16, false), ("40,16,264,9,3", 64, true)] {
            let case = with_router(shape, Convention::TopKOverSoftmax, index as u64);
            let case = if biases { case.with_biases() } else { case };
            let what = format!("{case}, M {tile}, {rule}, {semantics}");
            let problem = case.problem::<bf16>().unwrap();
            let rounding = TokenRounding { rule, seed: 5, ..TokenRounding::new(tile) };
            let mut rounded = Rounded::new(engine, &problem, Some((rounding, semantics)));
            rounded.queue().unwrap();
            rounded.check();
            let (tokens, experts) = (problem.t(), problem.e());
            let logits = rounded.router.choice().logits().download().unwrap();
            let logits = Array2::from_shape_vec((tokens, experts), logits).unwrap();
            agrees(rounded.router.choice(), &logits).unwrap_or_else(|failure| panic!("{what}: {failure}"));

            // The same routing, known to the host.
            let plan = *rounded.router.choice().plan();
            let host = expected(&plan, &logits).unwrap();
            let r = host.routing.routed();
            let given = DeviceRouting::upload(device, &host.routing, &host.scores, Guards::NAN).unwrap();
            let mut forward = ForwardTensors::allocate(&rounded.layer, &given).unwrap();
            forward.run(&rounded.layer, &given, &rounded.x).unwrap();
            let mut backward = BackwardTensors::allocate(&rounded.layer, &given).unwrap();
            backward.run(&rounded.layer, &given, &rounded.x, &forward.h, &rounded.dout).unwrap();
            let rows = |name: &str, found: &Buffer<bf16>, host: &Buffer<bf16>| {
                let (found, host) = (found.download().unwrap(), host.download().unwrap());
                for (at, (found, host)) in found.iter().zip(&host).enumerate() {
                    assert_eq!(found.to_bits(), host.to_bits(), "{what}: {name} at {at} of R = {r} rows");
                }
                let written = found[host.len()..].iter().position(|value| value.to_bits() != 0xffff);
                assert_eq!(written, None, "{what}: {name} was written beyond R = {r}");
            };
            rows("o", &rounded.forward.o, &forward.o);
            rows("h", &rounded.forward.h, &forward.h);
            rows("y", &rounded.forward.y, &forward.y);
            rows("dh", &rounded.backward.dh, &backward.dh);
            rows("a_prime", &rounded.backward.a_prime, &backward.a_prime);
            rows("dx_expanded", &rounded.backward.dx_expanded, &backward.dx_expanded);
            rows("dw1", &rounded.backward.dw1, &backward.dw1);
            rows("dw2", &rounded.backward.dw2, &backward.dw2);
            let (ds, ds_host) = (rounded.backward.ds.download().unwrap(), backward.ds.download().unwrap());
            let bits = |ds: &[f32]| ds.iter().map(|ds| ds.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&ds[..r]), bits(&ds_host), "{what}: ds");
            assert!(ds[r..].iter().all(|ds| ds.to_bits() == u32::MAX), "{what}: ds was written beyond R");

            let ds = host.routing.to_pairs(&ds[..r]);
            gradients_of_rounding(&what, &rounded, &problem, &host.routing, &logits, &ds, &backward.dx, semantics);
        }
    }
}

/// dlogits, dW_r, db_r and dx against f64.
///
/// p has the errors of its exponent's argument (u·|l − max|), of e^x (2u), of a sum of E terms and a
/// quotient; a gradient adds the sum over its pairs and three operations.
#[allow(clippy::too_many_arguments)]
fn gradients_of_rounding(
    what: &str,
    rounded: &Rounded,
    problem: &Problem<'_, bf16>,
    routing: &sonicmoe::routing::Routing,
    logits: &Array2<f32>,
    ds: &[f32],
    expert_dx: &Buffer<bf16>,
    semantics: KeptScores,
) {
    let (tokens, experts) = logits.dim();
    let choice = rounded.router.choice().host_choice().unwrap();
    let wide = logits.mapv(f64::from);
    let wide_ds: Vec<f64> = ds.iter().map(|&ds| ds.into()).collect();
    let truth = kept_scores::backward(wide.view(), &choice, routing, semantics, &wide_ds).unwrap();
    let found = rounded.router.gradients().dlogits.download().unwrap();
    let found = Array2::from_shape_vec((tokens, experts), found).unwrap();
    let largest = ds.iter().fold(0.0f64, |largest, ds| largest.max(ds.abs().into()));
    let u = 2f64.powi(-24);
    for ((token, expert), &truth) in truth.indexed_iter() {
        let row = wide.row(token);
        let top = row.fold(f64::NEG_INFINITY, |top, &logit| top.max(logit));
        let distance = row.fold(0.0f64, |most, &logit| if logit.is_finite() { most.max(top - logit) } else { most });
        // |p(ĝ − Σĝp)| and |q(g − Σgq)| are at most 2·max|g| each.
        let allowed = u * (2.0 * distance + 2.0 * experts as f64 + 20.0) * 4.0 * largest + 2f64.powi(-126);
        let error = (f64::from(found[[token, expert]]) - truth).abs();
        assert!(
            error <= allowed,
            "{what}: dlogit of token {token}, expert {expert}: {} and not {truth}",
            found[[token, expert]]
        );
    }

    let Gating::Router(of_layer) = problem.gating() else { panic!("this test draws routers") };
    let dlogits = found.mapv(f64::from);
    let (x, w) = (problem.x().mapv(f64::from), of_layer.w.mapv(f64::from));
    let store = |value: f64| 2f64.powi(-8) * value.abs() + 2f64.powi(-126);
    let close = |name: &str, found: &Buffer<bf16>, truth: &Array2<f64>, magnitude: &Array2<f64>, terms: usize| {
        let found = found.download().unwrap();
        for (at, (&found, (&truth, &magnitude))) in found.iter().zip(truth.iter().zip(magnitude)).enumerate() {
            let error = (f64::from(found) - truth).abs();
            let summed = (terms + 4) as f64 * u * magnitude;
            assert!(error <= store(truth) + 1.01 * summed, "{what}: {name}[{at}] is {found} and not {truth}");
        }
    };
    let of_router = dlogits.dot(&w);
    let of_experts = Array2::from_shape_vec(x.raw_dim(), expert_dx.download().unwrap()).unwrap().mapv(f64::from);
    let magnitude = dlogits.mapv(f64::abs).dot(&w.mapv(f64::abs)) + of_experts.mapv(f64::abs);
    close("dx", &rounded.backward.dx, &(&of_router + &of_experts), &magnitude, experts);
    let drouter_w = dlogits.t().dot(&x);
    let magnitude = dlogits.t().mapv(f64::abs).dot(&x.mapv(f64::abs));
    close("drouter_w", &rounded.router.gradients().drouter_w, &drouter_w, &magnitude, tokens);
    if let Some(drouter_b) = &rounded.router.gradients().drouter_b {
        let truth = dlogits.sum_axis(ndarray::Axis(0)).insert_axis(ndarray::Axis(1));
        let magnitude = dlogits.mapv(f64::abs).sum_axis(ndarray::Axis(0)).insert_axis(ndarray::Axis(1));
        close("drouter_b", drouter_b, &truth, &magnitude, tokens);
    }
}

/// With K = 1 a normalised score does not depend on its logit.
#[test]
fn one_expert_with_a_normalised_score_gives_no_gradient_at_all() {
    let engine = routed_or_skip!();
    for convention in [Convention::SoftmaxOverTopK, Convention::TopKOverSoftmaxRenormalized] {
        let problem = with_router("60,16,8,5,1", convention, 3).problem::<bf16>().unwrap();
        let outcome = run(engine, &problem, Record::Results).unwrap();
        for output in [Output::Dlogits, Output::DrouterW] {
            assert!(outcome.results[&output].values.iter().all(|&value| value == 0.0), "{output} under {convention}");
        }
    }
}

fn drawn(random: &mut ChaCha8Rng, len: usize) -> Vec<bf16> {
    (0..len).map(|_| bf16::from_f32(random.random::<f32>() * 2.0 - 1.0)).collect()
}

/// From x to every gradient in one graph: two replays with other inputs have the bits of runs without
/// a graph, although R differs between them, and take no memory.
#[test]
fn the_layer_with_its_router_runs_under_one_graph_twice_with_other_inputs() {
    let _ = routed_or_skip!();
    // Its own device: whatever is queued on a stream while it is captured becomes part of the graph.
    let engine = GpuEngine::open().unwrap().routed_on_device().unwrap();
    let device = engine.engine().device();
    let nearest = (TokenRounding::new(32), KeptScores::Raw);
    for rounding in [None, Some(nearest)] {
        for convention in [Convention::SoftmaxOverTopK, Convention::TopKOverSoftmax] {
            let case = with_router("333,72,40,12,3", convention, 9).with_biases();
            let problem = case.problem::<bf16>().unwrap();
            let mut captured = Rounded::new(&engine, &problem, rounding);
            let mut direct = Rounded::new(&engine, &problem, rounding);
            // Once without a graph: whatever the library sets up at its first call is there then.
            captured.queue().unwrap();
            device.wait().unwrap();
            let stream = device.stream();
            stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
            let queued = captured.queue();
            let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            let graph = stream.end_capture(flags).unwrap().expect("work was captured");
            queued.unwrap();
            let before = device.memory_in_use().unwrap();
            let mut random = ChaCha8Rng::seed_from_u64(17);
            let mut rows = Vec::new();
            for replay in 0..2 {
                let x = drawn(&mut random, problem.x().len());
                let dout = drawn(&mut random, problem.dout().len());
                for layer in [&mut captured, &mut direct] {
                    layer.x.upload(&x).unwrap();
                    layer.dout.upload(&dout).unwrap();
                }
                graph.launch().unwrap();
                direct.queue().unwrap();
                captured.check();
                direct.check();
                for ((name, captured), (_, direct)) in captured.results().into_iter().zip(direct.results()) {
                    let at = captured.iter().zip(&direct).position(|(one, other)| one != other);
                    assert_eq!(at, None, "{convention}, {rounding:?}, replay {replay}: {name} differs");
                    assert_eq!(captured.len(), direct.len(), "{name}");
                    assert!(captured.iter().any(|&bits| bits != 0), "{name} is all zeros");
                }
                rows.push(captured.router.routing().expert_offsets().download().unwrap());
            }
            assert_ne!(rows[0], rows[1], "both inputs were routed alike");
            assert_eq!(device.memory_in_use().unwrap(), before, "{convention}, {rounding:?}: a replay took memory");
        }
    }
}

#[test]
fn other_weights_are_taken_and_wrong_ones_refused() {
    let engine = routed_or_skip!();
    let problem = with_router("50,16,8,5,2", Convention::SoftmaxOverTopK, 1).problem::<bf16>().unwrap();
    let mut layer = Rounded::new(engine, &problem, None);
    let w = Array2::from_shape_fn((5, 16), |(e, c)| bf16::from_f32(((e * 7 + c * 3) % 11) as f32 / 8.0 - 0.5));
    let b = layer.router.gradients().drouter_b.as_ref().map(|_| Array1::from_elem(5, bf16::ONE));
    layer.router.set_weights(w.view(), b.as_ref().map(|b| b.view())).unwrap();
    layer.router.route(&layer.x).unwrap();
    layer.router.check().unwrap();
    let logits = layer.router.choice().logits().download().unwrap();
    let truth = problem.x().mapv(f64::from).dot(&w.t().mapv(f64::from)) + if b.is_some() { 1.0 } else { 0.0 };
    for (at, (found, truth)) in logits.iter().zip(&truth).enumerate() {
        assert!(
            (f64::from(*found) - truth).abs() <= 32.0 * 17.0 * 2f64.powi(-24),
            "logit {at}: {found} and not {truth}"
        );
    }
    assert!(layer.router.set_weights(w.slice(s![..4, ..]), b.as_ref().map(|b| b.view())).is_err());
    let error = layer.router.set_weights(w.view(), if b.is_some() { None } else { Some(w.slice(s![.., 0])) });
    assert!(error.unwrap_err().to_string().contains("router_b"));
}

/// µs by graph replay, ten launches a graph: `--ignored --nocapture`.
#[test]
#[ignore = "prints times; run alone on an idle device"]
fn times_of_the_router() {
    let _ = engine_or_skip!();
    let engine = GpuEngine::open().unwrap().routed_on_device().unwrap();
    let device = engine.engine().device();
    let (tokens, d) = (32768usize, 2048usize);
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let bytes = 1usize << 28;
    let source = Buffer::<u32>::output(device, "source", bytes / 4, Guards::NONE).unwrap();
    let target = Buffer::<u32>::output(device, "target", bytes / 4, Guards::NONE).unwrap();
    let stream = device.stream().cu_stream();
    let copy = microseconds(device, || {
        // SAFETY: two live buffers of that many bytes, on their stream.
        unsafe { cudarc::driver::result::memcpy_dtod_async(target.address(), source.address(), bytes, stream) }
            .unwrap();
    });
    let bandwidth = 2.0 * bytes as f64 / copy;
    eprintln!("copy of {bytes} bytes: {copy:.1} µs, {:.2} TB/s", bandwidth / 1e6);
    let x = Buffer::input(device, "x", &drawn(&mut random, tokens * d), Guards::NONE).unwrap();
    for (experts, k) in [(128usize, 8usize), (128, 10), (512, 8), (512, 10)] {
        let w = Array2::from_shape_vec((experts, d), drawn(&mut random, experts * d)).unwrap();
        let logits: Vec<f32> = (0..tokens * experts).map(|_| random.random::<f32>() * 8.0 - 4.0).collect();
        let nearest = TokenRounding::new(128);
        for (name, convention, rounding) in [
            ("softmax over top-K", Convention::SoftmaxOverTopK, None),
            ("top-K over softmax", Convention::TopKOverSoftmax, None),
            ("rounded, nearest", Convention::TopKOverSoftmax, Some((nearest, KeptScores::Raw))),
        ] {
            let plan = ChoicePlan { tokens, experts, k, convention, rounding };
            let mut router = DeviceRouter::new(engine.blas(), plan, w.view(), None, Guards::NONE).unwrap();
            device.prepare(&router.variants()).unwrap();
            let ds: Vec<f32> = (0..plan.rows()).map(|_| random.random::<f32>() - 0.5).collect();
            let ds = Buffer::input(device, "ds", &ds, Guards::NONE).unwrap();
            let mut dx = Buffer::input(device, "dx", &vec![bf16::ZERO; tokens * d], Guards::NONE).unwrap();
            router.choice_mut().logits_mut().upload(&logits).unwrap();
            let top_k = microseconds(device, || router.choice_mut().choose_experts(None).unwrap());
            let choose = microseconds(device, || router.choice_mut().choose(None).unwrap());
            let route = microseconds(device, || router.route(&x).unwrap());
            let backward = microseconds(device, || router.backward(&x, &ds, &mut dx).unwrap());
            let read = (4 * tokens * experts) as f64 / bandwidth;
            eprintln!(
                "T {tokens}, E {experts}, K {k}, {name}: top-k {top_k:.1} µs (logits read once at copy bandwidth {read:.1}), \
                 metadata {} {:.1}, product {:.1}, backward {backward:.1}",
                if rounding.is_some() { "and rounding" } else { "alone" },
                choose - top_k,
                route - choose,
            );
        }
    }
}

/// Median of nine replays of a graph of ten launches, per launch.
fn microseconds(device: &std::sync::Arc<Device>, mut queue: impl FnMut()) -> f64 {
    const LAUNCHES: usize = 10;
    use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
    queue();
    device.wait().unwrap();
    let stream = device.stream();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    (0..LAUNCHES).for_each(|_| queue());
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).unwrap().expect("work was captured");
    let mut times: Vec<f64> = (0..11)
        .map(|_| {
            let start = stream.record_event(Some(CU_EVENT_DEFAULT)).unwrap();
            graph.launch().unwrap();
            let end = stream.record_event(Some(CU_EVENT_DEFAULT)).unwrap();
            device.wait().unwrap();
            f64::from(start.elapsed_ms(&end).unwrap()) * 1000.0 / LAUNCHES as f64
        })
        .skip(2)
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
