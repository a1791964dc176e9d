//! What the machine offers, and what the engine says where it cannot run.

use half::bf16;

use sonicmoe::case::Case;
use sonicmoe::sonic::gpu::compile::{CubinCache, Variant};
use sonicmoe::sonic::gpu::{Arithmetic, GpuEngine, Layer};
use sonicmoe::{Activation, Engine, ErrorClass};

use crate::engine_or_skip;

#[test]
fn without_a_hopper_gpu_there_is_a_reason() {
    match GpuEngine::open() {
        Ok(engine) => assert_eq!(engine.device().properties().compute_capability, (9, 0)),
        Err(absence) => assert!(!absence.to_string().is_empty()),
    }
}

#[test]
fn widths_that_are_no_multiple_of_8_are_refused_before_anything_runs() {
    for (shape, width) in [("4,12,8,2,1", "d is 12"), ("4,8,12,2,1", "n is 12"), ("1,1,2,1,1", "d is 1")] {
        let problem = Case::new(shape.parse().unwrap()).problem::<bf16>().unwrap();
        let error = Layer::accepts(&problem).unwrap_err();
        assert_eq!(error.class(), ErrorClass::Contract);
        assert!(error.to_string().contains(width), "{error}");
    }
}

#[test]
fn an_activation_without_a_kernel_is_refused_by_name_before_anything_runs() {
    let case = Case::new("4,8,8,2,1".parse().unwrap()).with_activation(Activation::GptOss);
    let error = Layer::accepts(&case.problem::<bf16>().unwrap()).unwrap_err();
    assert_eq!(error.class(), ErrorClass::Contract);
    assert!(error.to_string().contains("gpt_oss"), "{error}");
}

/// Needs NVRTC and no GPU: what it leaves in `SONICMOE_CACHE_DIR` can be carried to a machine with a
/// GPU and without a compiler.
#[test]
fn every_variant_of_every_kernel_compiles_here_or_lies_ready() {
    let cache = CubinCache::find();
    let variants = Variant::all();
    let ready = variants.iter().filter(|variant| cache.holds(variant).is_some()).count();
    match cache.compiler() {
        Err(absence) if ready < variants.len() => {
            eprintln!("skipped: {ready} of {} lie ready, and {absence}", variants.len())
        }
        _ => assert_eq!(cache.get_all(&variants).unwrap().len(), variants.len()),
    }
}

#[test]
fn every_variant_of_every_kernel_loads_and_uses_no_local_memory() {
    let engine = engine_or_skip!();
    let start = std::time::Instant::now();
    let variants = Variant::all();
    engine.device().prepare(&variants).unwrap();
    eprintln!("{} variants ready after {:.1} s on {}", variants.len(), start.elapsed().as_secs_f64(), engine.name());
}

/// Sums on tensor cores err by less than γ_m, σ by less than the engine declares, at every length and gate.
#[test]
fn the_arithmetic_of_the_device_is_what_the_bounds_assume() {
    let engine = engine_or_skip!();
    let arithmetic = Arithmetic::measure(engine.device(), &Engine::<bf16>::numerics(engine)).unwrap();
    eprintln!("{arithmetic}");
    assert!(arithmetic.as_declared(), "{arithmetic}");
    // What is measured is no rounding of zeros: long positive sums are cut off, and σ saturates.
    assert!(arithmetic.sums.iter().any(|sum| sum.mean < -1.0), "{arithmetic}");
    assert!((10.0..20.0).contains(&arithmetic.sigmoid.one_from), "{arithmetic}");
    assert!((-104.0..-80.0).contains(&arithmetic.sigmoid.zero_from), "{arithmetic}");
}
