//! Forward and backward together at T, d, n, E, K = 2048, 1024, 256, 32, 4 with SwiGLU, beside what
//! plain products of the `gemm` crate reach on the same 18·R·n·d floating-point operations, with as
//! many threads. Throughput counts these operations: "Gelem/s" reads GFLOP/s, and the layer's over
//! the products' is its share of what the machine gives.

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use gemm::Parallelism;
use half::bf16;
use rayon::ThreadPoolBuilder;
use sonicmoe::case::Case;
use sonicmoe::sonic::cpu::CpuEngine;
use sonicmoe::{Element, Engine, Problem, Record, Shape};

const SHAPE: Shape = Shape { t: 2048, d: 1024, n: 256, e: 32, k: 4 };

/// o and all gradients; dropping them counts too.
fn layer<S: Element>(problem: &Problem<'_, S>) {
    let engine = CpuEngine::<f32>::new();
    let forward = engine.forward(problem, Record::Results).expect("the case has finite logits");
    forward.pass.backward(problem.dout(), Record::Results).expect("dout has the shape of o");
}

/// The six products of a dense layer with R rows, one call each, into memory that is already there:
/// x W1ᵀ, a W2ᵀ, dout W2, doutᵀ a′, dh W1, dhᵀ x. 18·R·n·d operations.
struct PlainProducts {
    left: Vec<f32>,
    right: Vec<f32>,
    product: Vec<f32>,
}

/// Rows × columns, and whether the matrix is stored transposed.
#[derive(Clone, Copy)]
struct Stored {
    rows: usize,
    columns: usize,
    transposed: bool,
}

impl Stored {
    fn len(self) -> usize {
        self.rows * self.columns
    }

    /// (columns' stride, rows' stride).
    fn strides(self) -> (isize, isize) {
        if self.transposed { (self.rows as isize, 1) } else { (1, self.columns as isize) }
    }
}

impl PlainProducts {
    fn new() -> Self {
        let largest = SHAPE.routed() * SHAPE.d;
        let values = |step: usize| (0..largest).map(|at| ((at * step) % 1001) as f32 / 500.0 - 1.0).collect();
        Self { left: values(7), right: values(13), product: vec![1.0; largest] }
    }

    fn run(&mut self, parallelism: Parallelism) {
        let Shape { d, n, .. } = SHAPE;
        let r = SHAPE.routed();
        let plain = |rows, columns| Stored { rows, columns, transposed: false };
        let transposed = |rows, columns| Stored { rows, columns, transposed: true };
        for (left, right) in [
            (plain(r, d), transposed(d, 2 * n)),
            (plain(r, n), transposed(n, d)),
            (plain(r, d), plain(d, n)),
            (transposed(d, r), plain(r, n)),
            (plain(r, 2 * n), plain(2 * n, d)),
            (transposed(2 * n, r), plain(r, d)),
        ] {
            self.multiply(left, right, parallelism);
        }
    }

    fn multiply(&mut self, left: Stored, right: Stored, parallelism: Parallelism) {
        let product = Stored { rows: left.rows, columns: right.columns, transposed: false };
        assert_eq!(left.columns, right.rows);
        assert!(left.len() <= self.left.len() && right.len() <= self.right.len());
        assert!(product.len() <= self.product.len());
        let ((to_column, to_row), (left_column, left_row), (right_column, right_row)) =
            (product.strides(), left.strides(), right.strides());
        // SAFETY: the sizes fit together and every matrix lies dense within its buffer, as asserted;
        // the product is borrowed mutably and is no operand.
        unsafe {
            gemm::gemm(
                product.rows,
                product.columns,
                left.columns,
                self.product.as_mut_ptr(),
                to_column,
                to_row,
                false,
                self.left.as_ptr(),
                left_column,
                left_row,
                self.right.as_ptr(),
                right_column,
                right_row,
                0.0,
                1.0,
                false,
                false,
                false,
                parallelism,
            );
        }
    }
}

fn forward_and_backward(criterion: &mut Criterion) {
    let case = Case::new(SHAPE);
    let f32_problem = case.problem::<f32>().expect("the shape is valid");
    let bf16_problem = case.problem::<bf16>().expect("the shape is valid");
    let mut products = PlainProducts::new();
    for threads in [1, 2] {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build().expect("the machine has threads to give");
        let parallelism = if threads == 1 { Parallelism::None } else { Parallelism::Rayon(threads) };
        let mut group = criterion.benchmark_group(format!("forward and backward, {threads} threads"));
        group.sampling_mode(SamplingMode::Flat).sample_size(10);
        group.warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(5));
        group.throughput(Throughput::Elements(18 * (SHAPE.routed() * SHAPE.n * SHAPE.d) as u64));
        group.bench_function(BenchmarkId::new("plain gemm", "f32"), |bencher| {
            bencher.iter(|| pool.install(|| products.run(parallelism)));
        });
        group.bench_function(BenchmarkId::new("SonicMoE", "f32"), |bencher| {
            bencher.iter(|| pool.install(|| layer(&f32_problem)));
        });
        group.bench_function(BenchmarkId::new("SonicMoE", "bf16"), |bencher| {
            bencher.iter(|| pool.install(|| layer(&bf16_problem)));
        });
        group.finish();
    }
}

criterion_group!(benches, forward_and_backward);
criterion_main!(benches);
