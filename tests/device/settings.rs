//! Every tile setting computes the same layer: a setting that corrupts a stripe of columns passes
//! tests that run another one.

use std::collections::BTreeMap;

use half::bf16;
use rayon::prelude::*;

use sonicmoe::case::Case;
use sonicmoe::sonic::gpu::Tuning;
use sonicmoe::sonic::gpu::compile::KernelName;

use crate::{engine_or_skip, run_and_judge};

pub const GROUPED_GEMMS: [KernelName; 4] = [
    KernelName::UpForward,
    KernelName::DownForward,
    KernelName::DownBackwardActivation,
    KernelName::UpBackwardActivation,
];
pub const WEIGHT_GEMMS: [KernelName; 2] = [KernelName::DownBackwardWeight, KernelName::UpBackwardWeight];

/// Columns of a tile, blocks of a cluster, column tiles of a band; and of the weight gradients, blocks
/// of a cluster.
const SETTINGS: [(u32, u32, u32, u32); 6] =
    [(256, 1, 16, 2), (256, 2, 16, 1), (192, 1, 2, 2), (128, 2, 1, 1), (128, 1, 16, 2), (64, 1, 3, 1)];

fn tuning((columns, cluster, band, weight_cluster): (u32, u32, u32, u32)) -> Tuning {
    let gemm = BTreeMap::from([("SONIC_TILE_N", columns), ("SONIC_CLUSTER", cluster), ("SONIC_BAND", band)]);
    let weight = BTreeMap::from([("SONIC_CLUSTER", weight_cluster)]);
    let gemms = GROUPED_GEMMS.into_iter().map(|kernel| {
        let mut constants = gemm.clone();
        if kernel == KernelName::DownBackwardActivation {
            // Its epilogue spills at 64 columns, so that it has no such setting.
            constants.insert("SONIC_TILE_N", columns.max(128));
        }
        (kernel, constants)
    });
    gemms.chain(WEIGHT_GEMMS.map(|kernel| (kernel, weight.clone()))).collect()
}

/// d and n just above one tile, and R_e at the edges of one and of a cluster of two.
#[test]
fn every_tile_setting_is_within_its_bounds_just_above_one_tile() {
    let engine = engine_or_skip!();
    let failures: Vec<String> = SETTINGS
        .into_par_iter()
        .flat_map(|setting| {
            let engine = engine.tuned(tuning(setting));
            let over = setting.0 as usize + 8;
            let cases = [(over, over), (8, 264), (264, 72)].map(|(d, n)| {
                let case = Case::new(sonicmoe::Shape { t: 0, d, n, e: 6, k: 1 });
                Case { biases: d == over, ..case }.with_counts(&[129, 0, 255, 257, 1, 128]).with_seed(setting.0.into())
            });
            cases.into_par_iter().filter_map(move |case| {
                let problem = case.problem::<bf16>().unwrap();
                run_and_judge(&engine, &problem).err().map(|failure| format!("{setting:?}, {case}: {failure}"))
            })
        })
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
