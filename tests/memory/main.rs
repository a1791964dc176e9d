//! What is live between forward and backward, by the allocator's own count: 4Rn bytes of h and the
//! stated metadata, exactly. x is borrowed (2Td), so 2Td + 4Rn in all.
//!
//! A binary of its own, with one test: the counter sees the whole process.

mod counting;

use std::cell::Cell;
use std::sync::atomic::Ordering;

use counting::{LIVE, PEAK};
use half::bf16;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, FileFailurePersistence, TestRunner};
use sonicmoe::case::strategy::{Limits, any_case};
use sonicmoe::case::{Case, Pairing};
use sonicmoe::engine::Keeping;
use sonicmoe::routing::rounding::scores::{self, KeptScores};
use sonicmoe::routing::rounding::{Rounded, Rule, TokenRounding};
use sonicmoe::sonic::cpu::CpuEngine;
use sonicmoe::{Element, Engine, Gating, Problem, Record};

/// Live bytes between forward and backward beyond those before, the ledger's words on them, and the
/// peak of the whole pass.
fn between<S: Element>(problem: &Problem<'_, S>) -> (isize, isize, isize) {
    let engine = CpuEngine::<f32>::new();
    let engine: &dyn Engine<S> = &engine;
    // Once before, so that thread-local scratch of the libraries exists already.
    drop(engine.forward(problem, Record::Results).unwrap().pass.backward(problem.dout(), Record::Results).unwrap());

    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let forward = engine.forward(problem, Record::Results).unwrap();
    let (o, pass) = (forward.o, forward.pass);
    drop(o);
    let live = LIVE.load(Ordering::Relaxed) - before;
    let ledger = pass.kept();
    let given = matches!(problem.gating(), Gating::Given { .. });
    let stated: usize = ledger
        .0
        .iter()
        // x is borrowed, and so are given routing and scores.
        .filter(|kept| kept.tensor != "x" && !(given && matches!(&*kept.tensor, "routing" | "scores")))
        .map(|kept| kept.bytes)
        .sum();
    let h = size_of::<S>() * problem.routed() * problem.h_width();
    let activations: usize =
        ledger.0.iter().filter(|kept| kept.keeping == Keeping::Activation).map(|kept| kept.bytes).sum();
    assert_eq!(activations, h + size_of::<S>() * problem.t() * problem.d());
    drop(ledger);
    drop(pass.backward(problem.dout(), Record::Results).unwrap());
    (live, stated as isize, PEAK.load(Ordering::Relaxed) - before)
}

/// The same layer behind a router whose choice is rounded to multiples of `tile`; none where the
/// case has no router.
fn rounded<S: Element>(case: &Case, tile: usize, rule: Rule) -> Option<Problem<'static, S>> {
    let problem = case.problem::<S>().unwrap();
    let Gating::Router(router) = problem.gating() else { return None };
    let logits = problem.x().mapv(S::to_f64).dot(&router.w.mapv(S::to_f64).t());
    let rounding = TokenRounding { rule, seed: case.seed, ..TokenRounding::new(tile) };
    let (choice, Rounded { routing, .. }) = rounding.route(logits.view(), router.k).unwrap();
    let scores = scores::forward(logits.view(), &choice, &routing, KeptScores::Raw).unwrap();
    let scores = scores.into_iter().map(<S::Score as Element>::from_f64).collect();
    let gating = Gating::Given { routing, scores };
    let [x, dout] = [problem.x(), problem.dout()].map(|tensor| tensor.to_owned());
    let [w1, w2] = [problem.w1(), problem.w2()].map(|tensor| tensor.to_owned());
    Some(Problem::new(x, w1, w2, None, gating, problem.activation(), dout).unwrap())
}

fn check<S: Element>(problem: &Problem<'_, S>) -> Result<(), TestCaseError> {
    let (live, stated, _) = between(problem);
    prop_assert_eq!(
        live,
        stated,
        "{}: T, d, n, R = {} {} {} {}",
        S::DTYPE,
        problem.t(),
        problem.d(),
        problem.n(),
        problem.routed()
    );
    Ok(())
}

fn check_type<S: Element>(case: &Case, tile: usize, rule: Rule) -> Result<(), TestCaseError> {
    check(&case.problem::<S>().unwrap())?;
    rounded::<S>(case, tile, rule).map_or(Ok(()), |problem| check(&problem))
}

#[test]
fn what_lives_between_forward_and_backward_is_h_and_the_stated_metadata() {
    // On the calling thread alone: workers' own allocations would be counted too.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build().unwrap();
    pool.install(|| {
        let persistence = FileFailurePersistence::Direct("proptest-regressions/memory.txt");
        let config = Config { cases: 64, failure_persistence: Some(Box::new(persistence)), ..Config::default() };
        let rounded_cases = Cell::new(0);
        let drawn = (any_case(Limits::SMALL), 1usize..=32, select(Rule::ALL.to_vec()));
        TestRunner::new(config)
            .run(&drawn, |(case, tile, rule)| {
                rounded_cases.set(rounded_cases.get() + usize::from(matches!(case.pairing, Pairing::Router { .. })));
                check_type::<bf16>(&case, tile, rule)?;
                check_type::<f32>(&case, tile, rule)
            })
            .unwrap();
        assert!(rounded_cases.get() >= 16, "only {} roundings among the drawn cases", rounded_cases.get());

        // Independent of granularity: n halves, K doubles, E doubles.
        let routed = |shape: &str| Case::new(shape.parse().unwrap()).with_pairing(Pairing::TopK);
        let (coarse, fine) = (routed("64,96,64,8,2"), routed("64,96,32,16,4"));
        let h = 4 * 64 * 2 * 64;
        let kept = |case: &Case| {
            let problem = case.problem::<bf16>().unwrap();
            let engine = CpuEngine::<f32>::new();
            let forward = Engine::<bf16>::forward(&engine, &problem, Record::Results).unwrap();
            forward.pass.kept().activations()
        };
        assert_eq!((kept(&coarse), kept(&fine)), (h + 2 * 64 * 96, h + 2 * 64 * 96));

        // The peak is larger: a, y and o in forward, dh, a′, dx̃ and dx in backward.
        let (live, _, peak) = between(&coarse.problem::<bf16>().unwrap());
        println!("kept {live} bytes beyond x; peak {peak} bytes, weight gradients among them");
        assert!(peak > live);
    });
}
