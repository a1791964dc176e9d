//! What memory can get wrong: stale results, strays, inputs overwritten, faults that spread, bytes
//! that nobody accounts for. Red zones and inputs are compared in every run of this binary.

use half::bf16;
use ndarray::{Array2, Axis};

use sonicmoe::case::{Case, Pairing};
use sonicmoe::engine::{Engine, Forward, Output, Record, run};
use sonicmoe::sonic::gpu::GpuEngine;
use sonicmoe::sonic::gpu::device::{Buffer, Guards};
use sonicmoe::{Gating, Problem, TokenId};

use crate::repetition::every_gemm;
use crate::{engine_or_skip, first_difference, given};

fn cases() -> Vec<Case> {
    let base = Case::new("0,72,136,5,1".parse().unwrap());
    vec![
        base.clone().with_counts(&[0, 129, 1, 0, 64]),
        base.clone().with_counts(&[130, 0, 17, 128, 0]).with_biases(),
        Case::new("0,8,8,4,2".parse().unwrap()).with_biases(),
        Case::new("65,264,264,3,2".parse().unwrap()).with_pairing(Pairing::TopK),
    ]
}

#[test]
fn what_lay_in_a_result_before_does_not_show_in_it() {
    let engine = engine_or_skip!();
    for case in cases() {
        let problem = case.problem::<bf16>().unwrap();
        let plain = run(&engine.guarded(Guards::NONE), &problem, Record::Intermediates).unwrap();
        for guards in [Guards::NAN, Guards::FINITE] {
            let poisoned = run(&engine.guarded(guards), &problem, Record::Intermediates).unwrap();
            assert_eq!(first_difference(&plain, &poisoned), None, "{case} under {guards:?}");
        }
    }
}

#[test]
fn a_byte_written_beside_a_tensor_is_found() {
    let engine = engine_or_skip!();
    let device = engine.device();
    let values: Vec<f32> = (0..1000).map(|value| value as f32).collect();
    let mut whole = Buffer::input(device, "whole", &values, Guards::NAN).unwrap();
    whole.check_untouched().unwrap();
    whole.upload(&values[..]).unwrap();
    whole.check_untouched().unwrap();
    assert_eq!(whole.download().unwrap(), values);
    for (offset, expected) in [(-4, "4 bytes before the start"), (4 * 1000 + 8, "8 bytes behind the end")] {
        let strayed = Buffer::input(device, "strayed", &values, Guards::NAN).unwrap();
        overwrite(&strayed, offset, 0);
        let error = strayed.check_red_zones().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let overwritten = Buffer::input(device, "overwritten", &values, Guards::NAN).unwrap();
    overwrite(&overwritten, 400, 0xff);
    overwritten.check_red_zones().unwrap();
    assert!(overwritten.check_unchanged().unwrap_err().to_string().contains("`overwritten`"));
}

/// What a kernel that strays would do: one byte, so far from the first element.
fn overwrite(buffer: &Buffer<f32>, offset: i64, byte: u8) {
    let address = buffer.address().wrapping_add_signed(offset);
    // SAFETY: the buffers of this test have red zones of 16 KiB, so the address lies in the
    // allocation; nothing else uses it.
    unsafe { cudarc::driver::result::memset_d8_sync(address, byte, 1) }.unwrap();
}

/// Token 0 is infinite (then NaN); everything that it cannot reach keeps its bits.
#[test]
fn a_fault_in_one_token_stays_in_its_rows_and_in_its_experts_gradients() {
    let engine = engine_or_skip!();
    let case = Case::new("0,72,136,4,1".parse().unwrap()).with_counts(&[40, 129, 0, 65]).with_biases();
    let problem = case.problem::<bf16>().unwrap();
    let routing = given(&problem);
    let alone = |&token: &usize| routing.rows_of_token(TokenId(token as u32)).len() == 1;
    let token = (0..problem.t()).find(alone).expect("a token with one expert");
    let pair = routing.pair_token().iter().position(|of| of.index() == token).unwrap();
    let expert = routing.pair_expert()[pair].index();
    let clean = run(engine, &problem, Record::Intermediates).unwrap();
    for fault in [bf16::INFINITY, bf16::NAN] {
        for (in_x, in_dout) in [(true, false), (false, true)] {
            let (mut x, mut dout) = (problem.x().to_owned(), problem.dout().to_owned());
            if in_x {
                x[[token, 3]] = fault;
            }
            if in_dout {
                dout[[token, 3]] = fault;
            }
            let faulty = with_tokens(&problem, x, dout);
            let struck = run(engine, &faulty, Record::Intermediates).unwrap();
            let mut finite = true;
            for (output, stored) in &clean.results {
                let now = &struck.results[output].values;
                for at in 0..stored.values.len_of(Axis(0)) {
                    let reached = match output {
                        Output::O | Output::Dx => at == token,
                        Output::Dw1 | Output::Dw2 | Output::Db1 | Output::Db2 => at == expert,
                        Output::Ds => routing.pair_token()[at].index() == token,
                        _ => routing.row_token()[at].index() == token,
                    };
                    let (before, now) = (stored.values.index_axis(Axis(0), at), now.index_axis(Axis(0), at));
                    let same = before.iter().zip(&now).all(|(before, now)| before.to_bits() == now.to_bits());
                    assert!(reached || same, "{output}: {fault} in token {token} reached row {at}");
                    finite &= now.iter().all(|value| value.is_finite());
                }
            }
            assert!(!finite, "the fault shows nowhere");
        }
    }
}

#[test]
fn what_stays_for_backward_is_x_and_h_and_the_routing() {
    engine_or_skip!();
    // Its own device, with a pool that no other test allocates from.
    let engine = GpuEngine::open().unwrap();
    let device = engine.device();
    for (shape, halved) in [("300,72,64,8,4", false), ("300,72,32,8,8", true)] {
        let case = Case::new(shape.parse().unwrap()).with_pairing(Pairing::TopK);
        let problem = case.problem::<bf16>().unwrap();
        let (t, d, n, r) = (problem.t(), problem.d(), problem.n(), problem.routed());
        let warm = run(&engine, &problem, Record::Results).unwrap();
        let formula = 2 * t * d + 4 * r * n;
        assert_eq!(warm.ledger.activations(), formula, "halved: {halved}");
        assert_eq!(formula, 2 * 300 * 72 + 4 * 300 * 256, "n halved and K doubled keeps as many bytes");

        let before = device.memory_in_use().unwrap();
        let Forward { pass, .. } = engine.forward(&problem, Record::Results).unwrap();
        let kept = device.memory_in_use().unwrap() - before;
        let weights = 2 * (problem.w1().len() + problem.w2().len());
        let ledger = pass.kept();
        let accounted = weights + ledger.activations() + ledger.metadata();
        // The pool hands out multiples of 512 bytes; ten tensors stay.
        assert!((accounted..accounted + 10 * 512).contains(&kept), "{kept} bytes live, {accounted} accounted for");
        drop(pass);
        assert_eq!(device.memory_in_use().unwrap(), before, "bytes stay after the pass is gone");
    }
}

/// The same layer and routing with other tokens.
pub fn with_tokens(problem: &Problem<'_, bf16>, x: Array2<bf16>, dout: Array2<bf16>) -> Problem<'static, bf16> {
    let Gating::Given { routing, scores } = problem.gating() else { panic!("this test gives its pairs") };
    let gating = Gating::Given { routing: routing.clone(), scores: scores.clone() };
    let biases = problem
        .b1()
        .zip(problem.b2())
        .map(|(b1, b2)| sonicmoe::Biases { b1: b1.to_owned().into(), b2: b2.to_owned().into() });
    let (w1, w2) = (problem.w1().to_owned(), problem.w2().to_owned());
    Problem::new(x, w1, w2, biases, gating, problem.activation(), dout).unwrap()
}

/// Every kernel in a few small launches, for a sanitizer, under which nothing larger ends:
/// `compute-sanitizer --tool racecheck device --ignored --exact buffers::every_kernel_on_a_small_case`.
/// Kernels wait longer here than they do otherwise: a sanitizer slows them by orders of magnitude.
#[test]
#[ignore = "for compute-sanitizer; the kernels are judged elsewhere"]
fn every_kernel_on_a_small_case() {
    engine_or_skip!();
    let engine = GpuEngine::open().unwrap().tuned(every_gemm("SONIC_WAIT_LIMIT_NS", u32::MAX));
    let case = Case::new("0,72,136,3,1".parse().unwrap()).with_counts(&[65, 0, 17]);
    let wanted = std::env::var("SONICMOE_ACTIVATION").ok();
    for activation in sonicmoe::Activation::WITH_KERNELS {
        if wanted.as_ref().is_some_and(|wanted| wanted != activation.name()) {
            continue;
        }
        for case in [case.clone().with_biases(), case.clone()] {
            let case = case.with_activation(activation);
            eprintln!("{case}");
            run(&engine, &case.problem::<bf16>().unwrap(), Record::Intermediates).unwrap();
            eprintln!("done");
        }
    }
    // Racecheck ends the process when a context is given back.
    std::mem::forget(engine);
}
