//! The same bits again: on repeat, with other work in between, beside another stream, from a second
//! backward, and with the pipelines' timing disturbed.

use std::collections::BTreeMap;

use half::bf16;

use sonicmoe::Problem;
use sonicmoe::case::{Case, Pairing};
use sonicmoe::engine::{Engine, Forward, Outcome, Record, run};
use sonicmoe::sonic::gpu::device::Guards;
use sonicmoe::sonic::gpu::{GpuEngine, Tuning};

use crate::settings::{GROUPED_GEMMS, WEIGHT_GEMMS};
use crate::{engine_or_skip, first_difference, run_and_judge};

fn case(seed: u64) -> Case {
    Case::new("0,136,264,6,1".parse().unwrap()).with_counts(&[200, 0, 129, 1, 64, 300]).with_biases().with_seed(seed)
}

fn outcome(engine: &GpuEngine, problem: &Problem<'_, bf16>) -> Outcome {
    run(engine, problem, Record::Intermediates).unwrap()
}

#[test]
fn a_repeated_run_gives_the_same_bits_with_another_case_in_between() {
    let engine = engine_or_skip!();
    let (problem, other) = (case(1).problem::<bf16>().unwrap(), case(2).problem::<bf16>().unwrap());
    let first = outcome(engine, &problem);
    assert_eq!(first_difference(&first, &outcome(engine, &problem)), None);
    let between = outcome(engine, &other);
    assert!(first_difference(&first, &between).is_some(), "two cases give one result");
    assert_eq!(first_difference(&first, &outcome(engine, &problem)), None);
}

#[test]
fn two_layers_on_two_streams_share_nothing() {
    let engine = engine_or_skip!();
    let problems = [case(3), case(4)].map(|case| case.problem::<bf16>().unwrap());
    let alone = problems.each_ref().map(|problem| outcome(engine, problem));
    let streams = [(); 2].map(|()| GpuEngine::open().unwrap().guarded(Guards::FINITE));
    std::thread::scope(|scope| {
        for ((stream, problem), alone) in streams.iter().zip(&problems).zip(&alone) {
            scope.spawn(move || {
                for _ in 0..8 {
                    assert_eq!(first_difference(alone, &outcome(stream, problem)), None);
                }
            });
        }
    });
}

#[test]
fn backward_twice_on_one_forward_gives_the_same_gradients() {
    let engine = engine_or_skip!();
    let problem = case(5).problem::<bf16>().unwrap();
    let Forward { pass, .. } = engine.forward(&problem, Record::Results).unwrap();
    let [first, second] = [(); 2].map(|()| pass.backward(problem.dout(), Record::Results).unwrap().gradients);
    let bits = |values: &[bf16]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    for (one, two) in [
        (first.dx.as_slice(), second.dx.as_slice()),
        (first.dw1.as_slice(), second.dw1.as_slice()),
        (first.dw2.as_slice(), second.dw2.as_slice()),
    ] {
        assert_eq!(bits(one.unwrap()), bits(two.unwrap()));
    }
    assert_eq!(first.ds, second.ds);
}

/// Random sleeps at the joints of every pipeline: a barrier that is missing shows as another bit.
#[test]
fn disturbed_timing_changes_no_bit() {
    let engine = engine_or_skip!();
    let disturbed = engine.tuned(every_gemm("SONIC_JITTER", 1));
    for case in [case(6), Case::new("300,264,136,4,2".parse().unwrap()).with_pairing(Pairing::TopK)] {
        let problem = case.problem::<bf16>().unwrap();
        let (undisturbed, _) = run_and_judge(engine, &problem).unwrap();
        for _ in 0..4 {
            assert_eq!(first_difference(&undisturbed, &outcome(&disturbed, &problem)), None, "{case}");
        }
    }
}

/// A kernel that waits beyond its bound ends its CUDA context, so it runs in a process of its own.
#[test]
fn a_kernel_that_waits_beyond_its_bound_is_named() {
    let _ = engine_or_skip!();
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "repetition::stalls_in_a_process_of_its_own", "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success() && said.contains("stalled as expected"), "{said}");
}

#[test]
#[ignore = "ends the CUDA context of its process; run by the test above"]
fn stalls_in_a_process_of_its_own() {
    let engine = GpuEngine::open().unwrap();
    let problem = case(7).problem::<bf16>().unwrap();
    let error = engine.device().stall().unwrap_err().to_string();
    assert!(error.contains("kernel stall stalled: the epilogue, for its operand"), "{error}");
    assert!(error.contains("slot 3, parity 0, block 0"), "{error}");
    let later = run(&engine, &problem, Record::Results).unwrap_err().to_string();
    assert_eq!(later, error, "a lost device says why, again");
    eprintln!("stalled as expected: {error}");
}

pub fn every_gemm(constant: &'static str, value: u32) -> Tuning {
    let kernels = GROUPED_GEMMS.into_iter().chain(WEIGHT_GEMMS);
    kernels.map(|kernel| (kernel, BTreeMap::from([(constant, value)]))).collect()
}
