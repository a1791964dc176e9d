//! What comes before the products: top-K, the metadata of a choice, and token rounding, for 2048
//! tokens, 32 experts and K = 4. Throughput counts tokens.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use sonicmoe::case::Case;
use sonicmoe::routing::rounding::TokenRounding;
use sonicmoe::routing::scores::softmax;
use sonicmoe::routing::{Routing, top_k};
use sonicmoe::sonic::cpu::CpuEngine;
use sonicmoe::{Engine, Record, Shape};

/// d and n only as large as random logits need.
const SHAPE: Shape = Shape { t: 2048, d: 64, n: 16, e: 32, k: 4 };

/// The tile of a grouped GEMM.
const TILE: usize = 128;

fn routing(criterion: &mut Criterion) {
    let problem = Case::new(SHAPE).problem::<f32>().expect("the shape is valid");
    let engine = CpuEngine::<f32>::new();
    let forward = engine.forward(&problem, Record::Intermediates).expect("the case has finite logits");
    let logits = forward.pass.logits().expect("the case has a router").to_owned();
    let choice = top_k(logits.view(), SHAPE.k).expect("the logits are finite");
    let pairs: Vec<_> = {
        let routing = choice.routing();
        routing.pair_token().iter().copied().zip(routing.pair_expert().iter().copied()).collect()
    };
    let p = softmax(logits.view()).expect("the logits are finite");
    let rounding = TokenRounding::new(TILE);

    let mut group = criterion.benchmark_group("routing");
    group.throughput(Throughput::Elements(SHAPE.t as u64));
    group.bench_function("top-K", |bencher| bencher.iter(|| top_k(logits.view(), SHAPE.k)));
    group.bench_function("metadata", |bencher| {
        bencher.iter(|| Routing::new(SHAPE.t, SHAPE.e, pairs.iter().copied()));
    });
    group.bench_function("token rounding", |bencher| bencher.iter(|| rounding.round(p.view(), &choice)));
    group.finish();
}

criterion_group!(benches, routing);
criterion_main!(benches);
