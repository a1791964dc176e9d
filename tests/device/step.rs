//! A plan allocates once, and its step replays as two graphs: the bits of the engine, for every input.

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode, CUstreamCaptureStatus};
use half::bf16;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use sonicmoe::case::{Case, Pairing};
use sonicmoe::engine::{Outcome, Output, Record, run};
use sonicmoe::sonic::gpu::device::{Buffer, Guards, Scalar};
use sonicmoe::sonic::gpu::{DeviceRouting, GpuEngine, Layer, Plan, Step, upload};
use sonicmoe::{Activation, Gating, Problem};

use crate::buffers::with_tokens;
use crate::{engine_or_skip, first_difference};

fn cases() -> Vec<Case> {
    let base = Case::new("0,136,264,6,1".parse().unwrap());
    let mut cases = vec![
        base.clone().with_counts(&[200, 0, 129, 1, 64, 300]),
        base.with_counts(&[0, 130, 65, 0, 64, 0]).with_biases(),
        Case::new("300,72,520,5,2".parse().unwrap()).with_pairing(Pairing::TopK).with_biases(),
        Case::new("1,8,8,2,1".parse().unwrap()).with_pairing(Pairing::TopK),
        Case::new("0,8,8,4,2".parse().unwrap()).with_pairing(Pairing::TopK).with_biases(),
    ];
    let one = Case::new("129,64,72,3,2".parse().unwrap()).with_pairing(Pairing::TopK);
    cases.extend(Activation::WITH_KERNELS.map(|activation| one.clone().with_activation(activation)));
    cases
}

/// The same layer and routing with tokens of another seed.
fn other_tokens(problem: &Problem<'_, bf16>, seed: u64) -> Problem<'static, bf16> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut number = || bf16::from_f32(random.next_u32() as f32 / 2.0f32.powi(31) - 1.0);
    let x = problem.x().mapv(|_| number());
    let dout = problem.dout().mapv(|_| number());
    with_tokens(problem, x, dout)
}

/// A plan of the layer, with its routing and x.
fn loaded(engine: &GpuEngine, problem: &Problem<'_, bf16>, guards: Guards) -> (Plan, DeviceRouting, Buffer<bf16>) {
    let Gating::Given { routing, scores } = problem.gating() else { panic!("this test gives its pairs") };
    let device = engine.device();
    let routing = DeviceRouting::upload(device, routing, scores, guards).unwrap();
    let plan = Plan::allocate(Layer::upload(device, problem, guards).unwrap(), &routing).unwrap();
    let x = upload(device, "x", problem.x(), guards).unwrap();
    (plan, routing, x)
}

fn record(engine: &GpuEngine, problem: &Problem<'_, bf16>, guards: Guards) -> Step {
    let (plan, routing, x) = loaded(engine, problem, guards);
    let dout = upload(engine.device(), "dout", problem.dout(), guards).unwrap();
    Step::record(plan, routing, x, dout).unwrap()
}

/// Replays `step` on the tokens of `problem`; what differs from `expected`, if anything does.
fn replay(step: &mut Step, problem: &Problem<'_, bf16>, expected: &Outcome) -> Option<String> {
    step.set_x(problem.x().as_slice().unwrap()).unwrap();
    step.set_dout(problem.dout().as_slice().unwrap()).unwrap();
    step.forward().unwrap();
    let (a, y) = (step.plan().narrow().download().unwrap(), step.plan().wide().download().unwrap());
    step.backward().unwrap();
    step.check_untouched().unwrap();
    let plan = step.plan();
    let mut differences = vec![
        differs(expected, Output::A, &a),
        differs(expected, Output::Y, &y),
        differs(expected, Output::H, &plan.h().download().unwrap()),
        differs(expected, Output::O, &plan.o().download().unwrap()),
        differs(expected, Output::Dh, &plan.dh().download().unwrap()),
        differs(expected, Output::APrime, &plan.narrow().download().unwrap()),
        differs(expected, Output::DxExpanded, &plan.wide().download().unwrap()),
        differs(expected, Output::Ds, &expected.routing.to_pairs(&plan.ds().download().unwrap())),
        differs(expected, Output::Dx, &plan.dx().download().unwrap()),
        differs(expected, Output::Dw1, &plan.dw1().download().unwrap()),
        differs(expected, Output::Dw2, &plan.dw2().download().unwrap()),
    ];
    if let Some((db1, db2)) = plan.biases() {
        differences.push(differs(expected, Output::Db1, &db1.download().unwrap()));
        differences.push(differs(expected, Output::Db2, &db2.download().unwrap()));
    }
    differences.into_iter().flatten().next()
}

fn differs<T: Scalar + Into<f64>>(expected: &Outcome, output: Output, found: &[T]) -> Option<String> {
    let expected = &expected.results[&output].values;
    assert_eq!(expected.len(), found.len(), "{output}");
    let pairs = expected.iter().zip(found).enumerate();
    pairs.into_iter().find_map(|(at, (expected, &found))| {
        let found: f64 = found.into();
        (expected.to_bits() != found.to_bits()).then(|| format!("{output} at {at}: {found:e}, not {expected:e}"))
    })
}

#[test]
fn replayed_graphs_give_the_bits_of_the_engine_for_every_input_without_an_allocation() {
    engine_or_skip!();
    // Recording wants a device of its own: a thread that queues beside it is refused.
    let engine = GpuEngine::open().unwrap();
    for guards in [Guards::NAN, Guards::FINITE] {
        for case in cases() {
            let problem = case.problem::<bf16>().unwrap();
            let problems = [other_tokens(&problem, 1), other_tokens(&problem, 2)];
            let expected = problems.each_ref().map(|problem| run(&engine, problem, Record::Intermediates).unwrap());
            let mut step = record(&engine, &problem, guards);
            let held = engine.device().memory_in_use().unwrap();
            for which in [0, 1, 0] {
                let difference = replay(&mut step, &problems[which], &expected[which]);
                assert_eq!(difference, None, "{case}, tokens {which}, under {guards:?}");
            }
            assert_eq!(engine.device().memory_in_use().unwrap(), held, "{case}: a replay changed what is allocated");
        }
    }
}

/// Two layers on one stream, replayed in turn, and two on two streams at a time.
#[test]
fn two_steps_share_nothing() {
    engine_or_skip!();
    let engine = GpuEngine::open().unwrap();
    let problems =
        [cases()[0].clone().with_seed(3), cases()[1].clone().with_seed(4)].map(|case| case.problem::<bf16>().unwrap());
    let expected = problems.each_ref().map(|problem| run(&engine, problem, Record::Intermediates).unwrap());
    let mut steps = problems.each_ref().map(|problem| record(&engine, problem, Guards::NAN));
    for _ in 0..3 {
        for ((step, problem), expected) in steps.iter_mut().zip(&problems).zip(&expected) {
            assert_eq!(replay(step, problem, expected), None);
        }
    }
    std::thread::scope(|scope| {
        for (problem, expected) in problems.iter().zip(&expected) {
            scope.spawn(move || {
                let mut step = record(&GpuEngine::open().unwrap(), problem, Guards::NAN);
                for _ in 0..8 {
                    assert_eq!(replay(&mut step, problem, expected), None);
                }
            });
        }
    });
}

/// Threads with devices of their own stand in nobody's way: what one of them does while another records is
/// neither refused nor recorded.
#[test]
fn a_device_that_opens_runs_and_closes_leaves_what_another_records_whole() {
    engine_or_skip!();
    let engine = GpuEngine::open().unwrap();
    let device = engine.device();
    let problem = cases()[0].problem::<bf16>().unwrap();
    let routed = Case::new("129,64,72,3,2".parse().unwrap()).problem::<bf16>().unwrap();
    let replayed = other_tokens(&problem, 1);
    let expected = [&problem, &replayed].map(|problem| run(&engine, problem, Record::Results).unwrap());
    let (mut plan, routing, mut x) = loaded(&engine, &problem, Guards::NAN);
    plan.forward(&routing, &x).unwrap();
    device.wait().unwrap();

    device.stream().begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    plan.forward(&routing, &x).unwrap();
    let (elsewhere, ended_by) = std::thread::scope(|scope| {
        let another = scope.spawn(|| {
            let mut ended_by = Vec::new();
            let mut after = |what: &'static str| {
                if device.stream().capture_status() != Ok(CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE) {
                    ended_by.push(what);
                }
            };
            let another = GpuEngine::open().unwrap();
            after("opening");
            let given = run(&another, &problem, Record::Results).unwrap();
            after("a run");
            drop(another);
            after("closing");
            // The second time with what the first one left.
            for _ in 0..2 {
                let another = GpuEngine::open().unwrap().routed_on_device().unwrap();
                after("opening with a router");
                run(&another, &routed, Record::Results).unwrap();
                after("a run with a router");
                drop(another);
                after("closing with a router");
            }
            (given, ended_by)
        });
        another.join().unwrap()
    });
    assert_eq!(ended_by, [""; 0], "what ended the recording, and what came behind it");
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = device.stream().end_capture(flags).expect("the recording is whole").expect("kernels were recorded");
    x.upload(replayed.x().as_slice().unwrap()).unwrap();
    graph.launch().unwrap();
    device.wait().unwrap();
    assert_eq!(differs(&expected[1], Output::O, &plan.o().download().unwrap()), None);
    assert_eq!(first_difference(&expected[0], &elsewhere), None);
}

/// 2Td + 4Rn bytes stay; the plan, the weights, the routing and the two inputs are all that is ever
/// allocated, and the only buffer of R × d holds y and then dx̃.
#[test]
fn the_memory_of_a_step_is_the_sum_of_its_named_tensors() {
    engine_or_skip!();
    let engine = GpuEngine::open().unwrap();
    let device = engine.device();
    let problem = Case::new("512,256,64,16,8".parse().unwrap()).with_pairing(Pairing::TopK).problem::<bf16>().unwrap();
    let (t, d, n, e, r) = (problem.t(), problem.d(), problem.n(), problem.e(), problem.routed());
    device.take_memory_peak().unwrap();
    let mut step = record(&engine, &problem, Guards::NONE);
    step.forward().unwrap();
    step.backward().unwrap();
    let peak = device.take_memory_peak().unwrap();

    let x = upload(device, "x", problem.x(), Guards::NONE).unwrap();
    let kept = step.plan().kept(step.routing(), &x);
    assert_eq!(kept.activations(), 2 * t * d + 4 * r * n);
    let weights = 2 * 3 * e * n * d;
    let plan = 2 * (r * 2 * n + t * d) + 2 * (r * n) + 2 * (r * d) + 2 * (r * 2 * n) + 4 * r + 2 * t * d + weights;
    assert_eq!(step.plan().bytes(), plan);
    let named = plan + weights + 2 * 2 * t * d + step.routing().bytes();
    // The pool hands out multiples of 512 bytes, to at most 24 tensors.
    assert!((named..named + 24 * 512).contains(&peak), "{peak} bytes at the peak, {named} accounted for");
}

#[test]
fn a_plan_refuses_a_routing_of_other_sizes() {
    engine_or_skip!();
    let engine = GpuEngine::open().unwrap();
    let device = engine.device();
    let [small, large] = [3, 0].map(|at: usize| cases()[at].problem::<bf16>().unwrap());
    let step = record(&engine, &small, Guards::NONE);
    let Gating::Given { routing, scores } = large.gating() else { panic!("this test gives its pairs") };
    let routing = DeviceRouting::upload(device, routing, scores, Guards::NONE).unwrap();
    let x = upload(device, "x", large.x(), Guards::NONE).unwrap();
    let mut plan = Plan::allocate(Layer::upload(device, &small, Guards::NONE).unwrap(), step.routing()).unwrap();
    let error = plan.forward(&routing, &x).unwrap_err().to_string();
    assert!(error.contains("allocate one for this routing"), "{error}");
}
