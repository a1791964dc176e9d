//! How the six GEMMs cut their work, and which way is fastest for a layer.
//!
//! ```text
//! Setting ─ axes ─▶ Search (times, then the witness) ─▶ Table ─▶ Tuning of a Layer
//!                       cost ─ for layers that no table holds ─▶
//! ```
//!
//! No setting changes what is stored: every element is the same sum in the same order. Only ds of a
//! layer whose n exceeds a tile is added up from other parts.

mod cost;
mod search;
mod setting;
mod table;

use std::collections::BTreeMap;

use crate::shape::Shape;

use super::compile::KernelName;

pub use cost::predicted_cycles;
pub use search::{Candidate, Search, Tuned};
pub use setting::Setting;
pub use table::{Measured, Table};

/// Constants that a kernel is compiled with beyond its own: settings, or a debug build's. They change
/// how a kernel runs and never what it computes, except for the order of sums.
pub type Tuning = BTreeMap<KernelName, BTreeMap<&'static str, u32>>;

/// What the model must promise before a layer that nobody measured leaves the kernels' own settings: where it was
/// wrong, it was wrong by less in favour of narrow tiles, but for kernel 4, which it does not choose for.
const LEAST_PROMISE: f64 = 0.15;

/// The kernels that the model chooses for.
pub(super) const MODELLED: [KernelName; 3] =
    [KernelName::UpForward, KernelName::DownForward, KernelName::UpBackwardActivation];

/// The settings of a layer of d, n and E with so many pairs: as measured, or as the model says.
///
/// # Errors
/// A table in `SONICMOE_SETTINGS` that cannot be read.
pub(super) fn for_layer([d, n, e]: [usize; 3], routed: usize, multiprocessors: u32) -> crate::Result<Tuning> {
    let measured = Table::of_process()?.tuning([d, n, e], routed);
    Ok(measured.unwrap_or_else(|| modelled([d, n, e], routed, multiprocessors)))
}

fn modelled([d, n, e]: [usize; 3], routed: usize, multiprocessors: u32) -> Tuning {
    let shape = Shape { t: routed, d, n, e, k: 1 };
    let better = |kernel: KernelName| {
        let (own, narrow) = (Setting::own(kernel)?, Setting::narrow(kernel)?);
        let [own, narrow_cycles] =
            [own, narrow].map(|setting| predicted_cycles(kernel, &shape, &setting, multiprocessors));
        (narrow_cycles <= (1.0 - LEAST_PROMISE) * own).then(|| (kernel, narrow.constants(kernel)))
    };
    MODELLED.into_iter().filter_map(better).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_layers_and_few_rows_get_narrow_tiles_and_wide_ones_their_own() {
        let columns = |widths, routed| -> Vec<u32> {
            let tuning = modelled(widths, routed, 132);
            MODELLED.iter().map(|kernel| tuning.get(kernel).map_or(256, |one| one["SONIC_TILE_N"])).collect()
        };
        assert_eq!(columns([2048, 1024, 64], 262_144), [256; 3]);
        assert_eq!(columns([4096, 512, 128], 65_536), [256; 3]);
        // 32 tiles of up_forward for 132 multiprocessors: halves are done sooner. (Measured: 0.69, 0.70, 0.69.)
        assert_eq!(columns([264, 128, 16], 2200), [128; 3]);
        assert_eq!(columns([128, 64, 8], 65_536), [128; 3]);
    }
}
