//! The eight kernels and both passes on a Hopper GPU, by events around replayed graphs; without a device
//! one line says so. `sonicmoe bench --device cuda` measures the same beside cuBLAS and the card's floors.

use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use sonicmoe::sonic::gpu::{Device, KERNELS, Load, Measurement, Subject, Workload};

/// T, d, n, E, K of a layer with 7 billion parameters.
const SHAPE: &str = "24576,1536,256,128,8";

fn kernels(criterion: &mut Criterion) {
    let device = match Device::open() {
        Ok(device) => device,
        Err(absence) => return eprintln!("skipped: {absence}"),
    };
    let workload =
        Workload { shape: SHAPE.parse().expect("five numbers"), load: Load::Uniform, rounding: None, seed: 1 };
    let mut measurement = Measurement::prepare(&device, &workload).expect("the device holds the layer");
    let mut group = criterion.benchmark_group(SHAPE);
    group.sample_size(20).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500));
    for subject in
        KERNELS.map(Subject::Kernel).into_iter().chain([Subject::Forward, Subject::Backward, Subject::Square])
    {
        group.bench_function(subject.to_string(), |bencher| {
            bencher.iter_custom(|replays| {
                let ms = measurement.time(subject, replays as usize).expect("the device works");
                Duration::from_secs_f64(ms.map_or(0.0, |ms| ms * replays as f64 / 1e3))
            });
        });
    }
    group.finish();
}

criterion_group!(benches, kernels);
criterion_main!(benches);
