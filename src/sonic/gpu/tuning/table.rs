//! Settings that were measured and judged, by layer.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::shape::Shape;
use crate::sonic::gpu::compile::KernelName;
use crate::sonic::gpu::measure::GEMMS;

use super::Tuning;
use super::setting::Setting;

/// The settings of one layer's kernels; those that it does not name keep their own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// `T,d,n,E,K` of the layer that was measured.
    pub shape: String,
    /// By the kernel's name.
    pub kernels: BTreeMap<String, Setting>,
}

/// Measured layers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// On which device.
    pub device: String,
    /// One entry a layer.
    pub layers: Vec<Measured>,
}

impl Table {
    /// The table that this crate carries, `kernels/settings.json`.
    ///
    /// # Errors
    /// None, unless the crate was built with a broken one.
    pub fn carried() -> Result<Self> {
        Self::parse(CARRIED, "kernels/settings.json")
    }

    /// Every setting of a kernel in the table.
    pub fn settings(&self, kernel: KernelName) -> impl Iterator<Item = Setting> {
        self.layers.iter().filter_map(move |measured| measured.kernels.get(kernel.name()).copied())
    }

    /// The table that this crate carries, `kernels/settings.json`; or the one that `SONICMOE_SETTINGS` names.
    ///
    /// # Errors
    /// A file that cannot be read, or that is no table.
    pub fn of_process() -> Result<&'static Self> {
        static TABLE: OnceLock<std::result::Result<Table, String>> = OnceLock::new();
        let table = TABLE.get_or_init(|| {
            let named = std::env::var_os("SONICMOE_SETTINGS").filter(|name| !name.is_empty());
            let read = match named {
                Some(path) => Table::read(Path::new(&path)),
                None => Table::carried(),
            };
            read.map_err(|error| error.to_string())
        });
        table.as_ref().map_err(|error| Error::missing("a table of settings", error.clone()))
    }

    /// From a file.
    ///
    /// # Errors
    /// As [`Table::of_process`].
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|error| Error::io(path, error))?;
        Self::parse(&text, &path.display().to_string())
    }

    fn parse(text: &str, name: &str) -> Result<Self> {
        let broken = |what: String| Error::missing(format!("a table of settings in {name}"), what);
        let table: Self = serde_json::from_str(text).map_err(|error| broken(error.to_string()))?;
        for Measured { shape, kernels } in &table.layers {
            shape.parse::<Shape>()?;
            for (name, setting) in kernels {
                let kernel = GEMMS.into_iter().find(|kernel| kernel.name() == name);
                if !kernel.is_some_and(|kernel| setting.fits(kernel)) {
                    return Err(broken(format!("{shape}: `{name}` does not compile with {setting}")));
                }
            }
        }
        Ok(table)
    }

    /// The settings for a layer of d, n and E with so many pairs: those of the measured layer that has its d and n
    /// and, of those, the nearest rows an expert, if these are within a factor of 2.
    pub fn tuning(&self, [d, n, e]: [usize; 3], routed: usize) -> Option<Tuning> {
        let rows = routed as f64 / e.max(1) as f64;
        let distance = |measured: &Measured| {
            let other = measured.shape.parse::<Shape>().ok()?;
            let distance = (other.routed() as f64 / other.e as f64 / rows).log2().abs();
            (other.d == d && other.n == n && distance <= 1.0).then_some(distance)
        };
        let near = self.layers.iter().filter_map(|measured| Some((distance(measured)?, measured)));
        let (_, nearest) = near.min_by(|(a, _), (b, _)| a.total_cmp(b))?;
        let constants = GEMMS.into_iter().filter_map(|kernel| {
            let constants = nearest.kernels.get(kernel.name())?.constants(kernel);
            (!constants.is_empty()).then_some((kernel, constants))
        });
        Some(constants.collect())
    }
}

const CARRIED: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/settings.json"));

#[cfg(test)]
mod tests {
    use super::*;

    fn table(layers: &str) -> Result<Table> {
        Table::parse(&format!(r#"{{ "device": "a card", "layers": [{layers}] }}"#), "a test")
    }

    const OF_512_ROWS: &str = r#"{ "shape": "4096,64,32,64,8", "kernels":
        { "down_forward": { "columns": 128, "stages": 5, "cluster": 1, "band": 16 } } }"#;

    #[test]
    fn the_carried_table_holds_settings_that_compile() {
        let table = Table::carried().unwrap();
        assert!(table.device.contains("H200"));
    }

    #[test]
    fn a_layer_takes_the_nearest_measured_one_with_its_widths() {
        let of_2048 = OF_512_ROWS.replace("4096,", "16384,").replace("\"stages\": 5", "\"stages\": 4");
        let table = table(&format!("{OF_512_ROWS}, {of_2048}")).unwrap();
        let stages = |rows: usize| {
            let tuning = table.tuning([64, 32, 4], 4 * rows);
            tuning.map(|tuning| tuning[&KernelName::DownForward]["SONIC_STAGES"])
        };
        assert_eq!([255, 256, 1000, 1050, 4096, 4100].map(stages), [None, Some(5), Some(5), Some(4), Some(4), None]);
        assert!(table.tuning([64, 40, 4], 2048).is_none() && table.tuning([72, 32, 4], 2048).is_none());
        assert!(table.tuning([64, 32, 4], 0).is_none(), "no rows are near none");
    }

    #[test]
    fn a_table_that_would_not_compile_is_refused_by_name() {
        for (wrong, named) in [
            (OF_512_ROWS.replace("\"stages\": 5", "\"stages\": 9"), "down_forward"),
            (OF_512_ROWS.replace("down_forward", "down_sideways"), "down_sideways"),
            (OF_512_ROWS.replace("4096,64", "64"), "64"),
            (OF_512_ROWS.replace("band", "bend"), "bend"),
        ] {
            let error = table(&wrong).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
