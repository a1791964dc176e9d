//! Beyond 2³¹ elements, and at the peak of memory.

use half::bf16;
use ndarray::{Array2, s};

use sonicmoe::case::{Case, Pairing};
use sonicmoe::engine::{Backward, Engine, Forward, Record};
use sonicmoe::sonic::gpu::GpuEngine;
use sonicmoe::{ExpertId, Gating, Problem, TokenId, routing::Routing};

use crate::engine_or_skip;

/// Every token to every expert, one score for each pair.
fn dense(t: usize, case: &Case, x: Array2<bf16>, dout: Array2<bf16>) -> Problem<'static, bf16> {
    let layer = case.problem::<bf16>().unwrap();
    let e = layer.e();
    let pairs = (0..t as u32).flat_map(|token| (0..e as u32).map(move |expert| (TokenId(token), ExpertId(expert))));
    let routing = Routing::new(t, e, pairs).unwrap();
    let scores = (0..t * e).map(|pair| 1.0 / (1 + pair % e) as f32).collect();
    let gating = Gating::Given { routing, scores };
    Problem::new(x, layer.w1().to_owned(), layer.w2().to_owned(), None, gating, layer.activation(), dout).unwrap()
}

/// R = 2²³ and h of 2³² elements: a token's results do not depend on where its rows lie, so the last
/// tokens give the same bits alone.
#[test]
fn the_last_tokens_beyond_two_to_the_31_elements_give_the_bits_that_they_give_alone() {
    engine_or_skip!();
    let engine = GpuEngine::open().unwrap();
    let (t, d, few) = (1usize << 20, 8, 129);
    let case = Case::new("1,8,256,8,8".parse().unwrap());
    // Cheap numbers of unit size that differ from token to token.
    let number = |seed: usize| {
        move |(token, column): (usize, usize)| {
            let mixed = (token * d + column + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
            bf16::from_f32(mixed as f32 / (1u32 << 23) as f32 - 1.0)
        }
    };
    let (x, dout) = (Array2::from_shape_fn((t, d), number(1)), Array2::from_shape_fn((t, d), number(2)));
    let last = s![t - few.., ..];
    let alone = dense(few, &case, x.slice(last).to_owned(), dout.slice(last).to_owned());
    let whole = dense(t, &case, x, dout);
    assert!(whole.routed() * whole.h_width() > 1 << 31);

    let results = [&whole, &alone].map(|problem| {
        let Forward { o, pass, .. } = engine.forward(problem, Record::Results).unwrap();
        let Backward { gradients, .. } = pass.backward(problem.dout(), Record::Results).unwrap();
        (o, gradients.dx, gradients.ds)
    });
    let [(o, dx, ds), (o_alone, dx_alone, ds_alone)] = results;
    assert!(
        o_alone.iter().chain(&dx_alone).all(|value| value.to_f32() != 0.0),
        "a comparison with zeros shows nothing"
    );
    assert_eq!(o.slice(last), o_alone);
    assert_eq!(dx.slice(last), dx_alone);
    assert_eq!(ds[ds.len() - ds_alone.len()..], ds_alone);
}

/// The peak is what the tensors of a pass add up to: the only ones of R × d are y and dx̃.
#[test]
fn the_peak_of_memory_is_the_sum_of_the_named_tensors() {
    engine_or_skip!();
    // Its own device, with a pool that no other test allocates from.
    let engine = GpuEngine::open().unwrap();
    let device = engine.device();
    let case = Case::new("512,256,64,16,8".parse().unwrap()).with_pairing(Pairing::TopK);
    let problem = case.problem::<bf16>().unwrap();
    let (t, d, n, r) = (problem.t(), problem.d(), problem.n(), problem.routed());
    let weights = problem.w1().len() + problem.w2().len();
    // The pool hands out multiples of 512 bytes; at most 24 tensors are alive at a time.
    let rounding = 24 * 512;
    device.take_memory_peak().unwrap();

    let Forward { pass, .. } = engine.forward(&problem, Record::Results).unwrap();
    let metadata = pass.kept().metadata();
    let forward = 2 * (weights + t * d + r * 2 * n + r * n + r * d + t * d) + metadata;
    let peak = device.take_memory_peak().unwrap();
    assert!(
        (forward..forward + rounding).contains(&peak),
        "forward: {peak} bytes at the peak, {forward} accounted for"
    );

    drop(pass.backward(problem.dout(), Record::Results).unwrap());
    let kept = 2 * (weights + t * d + r * 2 * n) + metadata;
    // dout, dh, a′, dx̃, dx, dw1 and dw2, and ds.
    let backward = kept + 2 * (t * d + r * 2 * n + r * n + r * d + t * d + weights) + 4 * r;
    let peak = device.take_memory_peak().unwrap();
    assert!(
        (backward..backward + rounding).contains(&peak),
        "backward: {peak} bytes at the peak, {backward} accounted for"
    );
}
