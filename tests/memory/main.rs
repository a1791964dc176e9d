//! What is live between forward and backward, by the allocator's own count: 4Rn bytes of h and the
//! stated metadata, exactly. x is borrowed (2Td), so 2Td + 4Rn in all.
//!
//! A binary of its own, with one test: the counter sees the whole process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, Ordering};

use half::bf16;
use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence, TestRunner};
use sonicmoe::case::strategy::{Limits, any_case};
use sonicmoe::case::{Case, Pairing};
use sonicmoe::engine::Keeping;
use sonicmoe::sonic::cpu::CpuEngine;
use sonicmoe::{Element, Engine, Record};

/// Counts bytes that are live, and the most that ever were.
struct Counting;

static LIVE: AtomicIsize = AtomicIsize::new(0);
static PEAK: AtomicIsize = AtomicIsize::new(0);

fn count(bytes: isize) {
    let live = LIVE.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(live, Ordering::Relaxed);
}

// SAFETY: every call is handed to the system allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Live bytes between forward and backward beyond those before, the ledger's words on them, and the
/// peak of the whole pass.
fn between<S: Element>(case: &Case) -> (isize, isize, isize) {
    let problem = case.problem::<S>().unwrap();
    let engine = CpuEngine::<f32>::new();
    let engine: &dyn Engine<S> = &engine;
    // Once before, so that thread-local scratch of the libraries exists already.
    drop(engine.forward(&problem, Record::Results).unwrap().pass.backward(problem.dout(), Record::Results).unwrap());

    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let forward = engine.forward(&problem, Record::Results).unwrap();
    let (o, pass) = (forward.o, forward.pass);
    drop(o);
    let live = LIVE.load(Ordering::Relaxed) - before;
    let ledger = pass.kept();
    let given = !matches!(case.pairing, Pairing::Router { .. });
    let stated: usize = ledger
        .0
        .iter()
        // x is borrowed, and so are given routing and scores.
        .filter(|kept| kept.tensor != "x" && !(given && matches!(&*kept.tensor, "routing" | "scores")))
        .map(|kept| kept.bytes)
        .sum();
    let h = 2 * size_of::<S>() * problem.routed() * problem.n();
    let h = if case.activation.gated() { h } else { h / 2 };
    let activations: usize =
        ledger.0.iter().filter(|kept| kept.keeping == Keeping::Activation).map(|kept| kept.bytes).sum();
    assert_eq!(activations, h + size_of::<S>() * problem.t() * problem.d(), "{case}");
    drop(ledger);
    drop(pass.backward(problem.dout(), Record::Results).unwrap());
    (live, stated as isize, PEAK.load(Ordering::Relaxed) - before)
}

fn check(case: &Case) -> Result<(), TestCaseError> {
    let (live, stated, _) = between::<bf16>(case);
    prop_assert_eq!(live, stated, "bf16: {}", case);
    let (live, stated, _) = between::<f32>(case);
    prop_assert_eq!(live, stated, "f32: {}", case);
    Ok(())
}

#[test]
fn what_lives_between_forward_and_backward_is_h_and_the_stated_metadata() {
    // On the calling thread alone: workers' own allocations would be counted too.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build().unwrap();
    pool.install(|| {
        let persistence = FileFailurePersistence::Direct("proptest-regressions/memory.txt");
        let config = Config { cases: 64, failure_persistence: Some(Box::new(persistence)), ..Config::default() };
        TestRunner::new(config).run(&any_case(Limits::SMALL), |case| check(&case)).unwrap();

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
        let (live, _, peak) = between::<bf16>(&coarse);
        println!("kept {live} bytes beyond x; peak {peak} bytes, weight gradients among them");
        assert!(peak > live);
    });
}
