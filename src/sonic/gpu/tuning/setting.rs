//! The ways in which one of the six GEMMs can cut its work.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::sonic::gpu::compile::KernelName;

/// How one GEMM cuts its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setting {
    /// Columns of an output tile; its rows are 128.
    pub columns: u32,
    /// Stages of 64 contraction elements that a block holds.
    pub stages: u32,
    /// Blocks that share one operand, 1 or 2.
    pub cluster: u32,
    /// Column tiles that are computed before the next rows (kernels 1, 2, 4, 6); 0 for the others.
    pub band: u32,
}

/// Shared memory of a block, bytes; and what barriers and the ring of tiles take of it at most.
const SHARED_BYTES: u32 = 232_448;
const BARRIER_BYTES: u32 = 2048;
/// 64 elements of bf16.
const LINE_BYTES: u32 = 128;
const TILE_ROWS: u32 = 128;

impl Setting {
    /// What the kernel's source says without constants; nothing for a kernel that is none of the six.
    pub fn own(kernel: KernelName) -> Option<Self> {
        let (stages, cluster, band) = match kernel {
            KernelName::UpForward | KernelName::DownBackwardActivation => (4, 1, 16),
            KernelName::DownForward | KernelName::UpBackwardActivation => (3, 1, 16),
            KernelName::DownBackwardWeight | KernelName::UpBackwardWeight => (4, 2, 0),
            _ => return None,
        };
        Some(Self { columns: 256, stages, cluster, band })
    }

    /// Half as many columns, and as many stages as then fit; nothing where a tile has one width.
    pub fn narrow(kernel: KernelName) -> Option<Self> {
        let own = Self::own(kernel)?;
        let narrow = (2..=6).rev().map(|stages| Self { columns: 128, stages, ..own });
        narrow.into_iter().find(|setting| setting.fits(kernel))
    }

    /// The `-D` constants of the kernel; none where the setting is its own.
    pub fn constants(&self, kernel: KernelName) -> BTreeMap<&'static str, u32> {
        if Self::own(kernel) == Some(*self) {
            return BTreeMap::new();
        }
        let Self { columns, stages, cluster, band } = *self;
        let mut constants = BTreeMap::from([("SONIC_STAGES", stages), ("SONIC_CLUSTER", cluster)]);
        if !contracts_over_tokens(kernel) {
            constants.extend([("SONIC_TILE_N", columns), ("SONIC_BAND", band)]);
        }
        constants
    }

    /// Whether the kernel compiles so, with any activation.
    pub fn fits(&self, kernel: KernelName) -> bool {
        let Self { columns, stages, cluster, band } = *self;
        let known = match kernel {
            KernelName::DownBackwardWeight | KernelName::UpBackwardWeight => columns == 256 && band == 0,
            // Its epilogue spills at 64 columns.
            KernelName::DownBackwardActivation => [128, 192, 256].contains(&columns) && band > 0,
            KernelName::UpForward | KernelName::DownForward | KernelName::UpBackwardActivation => {
                [64, 128, 192, 256].contains(&columns) && band > 0
            }
            _ => false,
        };
        let divides = matches!(cluster, 1 | 2) && columns.is_multiple_of(64 * cluster);
        let staged = (TILE_ROWS + columns).saturating_mul(LINE_BYTES).saturating_mul(stages);
        let bytes = staged.saturating_add(self.epilogue_bytes(kernel) + BARRIER_BYTES);
        known && divides && stages >= 2 && bytes <= SHARED_BYTES
    }

    /// Shared memory of both consumers' epilogues.
    fn epilogue_bytes(&self, kernel: KernelName) -> u32 {
        const BOX: u32 = 64 * LINE_BYTES;
        match kernel {
            // h, and a twice half as wide; or H twice.
            KernelName::UpForward | KernelName::DownBackwardActivation => 2 * 2 * BOX,
            KernelName::DownForward | KernelName::UpBackwardActivation => 2 * self.columns / 64 * BOX,
            // Half of the tile, or with fewer stages all of it.
            _ => 2 * BOX * if self.stages <= 3 { 4 } else { 2 },
        }
    }

    /// What differs from a setting along one axis, axis after axis, as far as it fits.
    pub const AXES: [fn(Self, KernelName) -> Vec<Self>; 3] = [Self::widths, Self::clusters, Self::bands];

    /// Columns, with as many stages as fit and with one less.
    fn widths(self, kernel: KernelName) -> Vec<Self> {
        let widths = if contracts_over_tokens(kernel) { vec![256] } else { vec![256, 192, 128] };
        let of_width = |columns| {
            let fitting = (2..=6).map(move |stages| Self { columns, stages, ..self });
            let mut fitting: Vec<Self> = fitting.filter(|setting| setting.fits(kernel)).collect();
            fitting.reverse();
            fitting.truncate(2);
            fitting
        };
        widths.into_iter().flat_map(of_width).collect()
    }

    fn clusters(self, kernel: KernelName) -> Vec<Self> {
        [1, 2].map(|cluster| Self { cluster, ..self }).into_iter().filter(|setting| setting.fits(kernel)).collect()
    }

    fn bands(self, kernel: KernelName) -> Vec<Self> {
        let bands = [1, 2, 4, 8, 16, 64].map(|band| Self { band, ..self });
        bands.into_iter().filter(|setting| setting.fits(kernel)).collect()
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { columns, stages, cluster, band } = self;
        write!(f, "{columns} columns, {stages} stages, cluster {cluster}")?;
        if *band > 0 { write!(f, ", band {band}") } else { Ok(()) }
    }
}

/// Kernels 5 and 7.
pub(super) fn contracts_over_tokens(kernel: KernelName) -> bool {
    matches!(kernel, KernelName::DownBackwardWeight | KernelName::UpBackwardWeight)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sonic::gpu::measure::{GEMMS, KERNELS};

    #[test]
    fn the_kernels_own_settings_fit_and_need_no_constant() {
        for kernel in KERNELS {
            match Setting::own(kernel) {
                Some(own) => {
                    assert!(GEMMS.contains(&kernel) && own.fits(kernel) && own.constants(kernel).is_empty());
                    let other = Setting { stages: own.stages - 1, ..own };
                    assert_eq!(other.constants(kernel)["SONIC_STAGES"], other.stages);
                }
                None => assert!(!GEMMS.contains(&kernel), "{} multiplies and has no setting", kernel.name()),
            }
        }
    }

    #[test]
    fn every_axis_offers_settings_that_fit_and_the_one_it_starts_from() {
        for kernel in GEMMS {
            let own = Setting::own(kernel).unwrap();
            for axis in Setting::AXES {
                let offered = axis(own, kernel);
                assert!(offered.iter().all(|setting| setting.fits(kernel)), "{}: {offered:?}", kernel.name());
                assert!(offered.contains(&own) || contracts_over_tokens(kernel), "{}: {offered:?}", kernel.name());
            }
        }
    }

    #[test]
    fn a_setting_beyond_shared_memory_or_of_no_tile_is_refused() {
        let own = Setting::own(KernelName::UpForward).unwrap();
        for wrong in [
            Setting { stages: 5, ..own },
            Setting { stages: u32::MAX, ..own },
            Setting { stages: 1, ..own },
            Setting { columns: 96, ..own },
            Setting { columns: 192, cluster: 2, ..own },
            Setting { cluster: 3, ..own },
            Setting { band: 0, ..own },
        ] {
            assert!(!wrong.fits(KernelName::UpForward), "{wrong}");
        }
        assert!(!own.fits(KernelName::CombineOutput) && !own.fits(KernelName::UpBackwardWeight));
    }
}
