//! What `sonicmoe tune` would choose has been judged, whatever was timed.

use sonicmoe::sonic::gpu::device::Device;
use sonicmoe::sonic::gpu::tuning::{Search, predicted_cycles};
use sonicmoe::sonic::gpu::{GEMMS, Load, Workload};

use crate::engine_or_skip;

/// n of half a tile, so that narrow tiles may win, and experts of a few rows beyond a tile.
#[test]
fn the_search_tries_every_axis_and_chooses_what_the_witness_accepts() {
    engine_or_skip!();
    let device = Device::open().unwrap();
    let workload =
        Workload { shape: "1100,264,128,16,2".parse().unwrap(), load: Load::Uniform, rounding: None, seed: 4 };
    let found = Search::load(&device, &workload, 3).unwrap().run().unwrap();
    assert_eq!(found.iter().map(|tuned| tuned.kernel).collect::<Vec<_>>(), GEMMS);
    for tuned in found {
        let name = tuned.kernel.name();
        assert!(tuned.rejected.is_empty(), "{name}: {:?}", tuned.rejected);
        assert!(tuned.candidates.len() >= 3 && tuned.own_ms > 0.0, "{name}: {:?}", tuned.candidates);
        assert!(tuned.candidates.iter().all(|one| one.setting.fits(tuned.kernel) && one.ratio > 0.0), "{name}");
        assert!(tuned.chosen.setting == tuned.own || tuned.chosen.ratio < 1.0, "{name}: {:?}", tuned.chosen);
        let cycles = |setting| predicted_cycles(tuned.kernel, &workload.shape, setting, 132);
        let chosen = cycles(&tuned.chosen.setting) / cycles(&tuned.own);
        eprintln!("{name}: {} at {:.3}, the model says {chosen:.3}", tuned.chosen.setting, tuned.chosen.ratio);
    }
}
