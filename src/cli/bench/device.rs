//! `sonicmoe bench --device cuda`: the eight kernels beside cuBLAS, the card's own floors, and SonicMoE.

use serde_json::json;

use crate::error::{Error, Result};
use crate::report::roofline::{Point, roofline};
use crate::report::{Align, Table, number};
use crate::shape::Shape;
use crate::sonic::gpu::compile::KernelName;
use crate::sonic::gpu::{Device, KERNELS, Load, Measurement, Subject, Times, Workload};

/// A layer in use, and what SonicMoE 0.1.2 takes for it: sums of kernel times on one H200, random data,
/// in ms, of runs whose floors were computed with [`PUBLISHED_TFLOPS`].
#[derive(Clone, Copy, Debug)]
pub struct Configuration {
    /// Its name on the command line.
    pub name: &'static str,
    /// T,d,n,E,K.
    pub shape: Shape,
    /// Forward and backward.
    totals: Option<[f64; 2]>,
    /// up, down, combine O, dH, the three products of the backward together, combine dX.
    kernels: Option<[f64; 6]>,
}

/// What SonicMoE's times are scaled with: the card gives more or less from run to run.
const PUBLISHED_TFLOPS: f64 = 790.0;

const fn configuration(name: &'static str, [t, d, n, e, k]: [usize; 5]) -> Configuration {
    Configuration { name, shape: Shape { t, d, n, e, k }, totals: None, kernels: None }
}

/// The layers that are measured.
pub const CONFIGURATIONS: [Configuration; 8] = [
    configuration("1.4b", [40960, 768, 256, 128, 8]),
    Configuration {
        totals: Some([1.010, 1.793]),
        kernels: Some([0.536, 0.270, 0.162, 0.394, 1.208, 0.158]),
        ..configuration("7b-n256", [24576, 1536, 256, 128, 8])
    },
    Configuration {
        totals: Some([5.452, 11.674]),
        kernels: Some([3.488, 1.639, 0.277, 2.567, 8.783, 0.281]),
        ..configuration("olmoe", [32768, 2048, 1024, 64, 8])
    },
    Configuration {
        totals: Some([4.293, 8.510]),
        kernels: Some([2.673, 1.299, 0.275, 1.733, 6.469, 0.272]),
        ..configuration("qwen3-30b", [32768, 2048, 768, 128, 8])
    },
    Configuration {
        totals: Some([6.972, 12.097]),
        kernels: Some([3.743, 2.113, 1.043, 2.178, 8.838, 1.035]),
        ..configuration("30b-n256", [32768, 4096, 256, 256, 16])
    },
    Configuration {
        totals: Some([11.643, 23.355]),
        kernels: Some([7.136, 3.396, 1.040, 4.358, 17.914, 1.032]),
        ..configuration("120b-n512", [32768, 4096, 512, 256, 16])
    },
    Configuration { totals: Some([4.581, 8.341]), ..configuration("qwen3-next", [32768, 2048, 512, 512, 10]) },
    Configuration {
        totals: Some([3.819, 7.616]),
        kernels: Some([2.459, 1.173, 0.154, 1.477, 5.952, 0.159]),
        ..configuration("sparse", [16384, 4096, 1024, 256, 4])
    },
];

impl Configuration {
    /// SonicMoE's time for a subject, where it is known.
    fn published(&self, subject: Subject) -> Option<f64> {
        let kernel = |place: usize| self.kernels.map(|kernels| kernels[place]);
        match subject {
            Subject::Forward => self.totals.map(|[forward, _]| forward),
            Subject::Backward => self.totals.map(|[_, backward]| backward),
            Subject::Kernel(KernelName::UpForward) => kernel(0),
            Subject::Kernel(KernelName::DownForward) => kernel(1),
            Subject::Kernel(KernelName::CombineOutput) => kernel(2),
            Subject::Kernel(KernelName::DownBackwardActivation) => kernel(3),
            Subject::Kernel(KernelName::CombineInputGradient) => kernel(5),
            _ => None,
        }
    }
}

/// The configurations of these names; all of them for none.
///
/// # Errors
/// A name that is none of them, with all that are.
pub fn named(names: &[String]) -> Result<Vec<Configuration>> {
    if names.is_empty() {
        return Ok(CONFIGURATIONS.to_vec());
    }
    let find = |name: &String| {
        let known = CONFIGURATIONS.iter().find(|configuration| configuration.name == name);
        known.copied().ok_or_else(|| Error::unknown("configuration", name, CONFIGURATIONS.map(|known| known.name)))
    };
    names.iter().map(find).collect()
}

/// One row: a subject of a configuration.
#[derive(Clone, Debug)]
struct Row {
    subject: Subject,
    ms: f64,
    spread: f64,
    tflops: f64,
    gbs: f64,
    /// The floor's time over ours: operations at the product's rate, bytes at the copy's, in this run.
    share: Option<f64>,
    /// cuBLAS's time over ours.
    vendor: Option<f64>,
    /// SonicMoE's published time over ours.
    published: Option<f64>,
    /// The same, scaled to this run's product.
    scaled: Option<f64>,
}

/// One configuration's measurement.
#[derive(Clone, Debug)]
pub struct Measured {
    configuration: Configuration,
    load: Load,
    rounds: usize,
    saved_bytes: usize,
    /// TFLOP/s of cuBLAS's product of 8192³, if cuBLAS is there.
    product: Option<f64>,
    /// GB/s of a copy, reads and writes.
    copy: f64,
    rows: Vec<Row>,
}

/// Measures each configuration in a context of its own.
///
/// # Errors
/// No Hopper device, not enough of its memory, or one that fails.
pub fn measure(configurations: &[Configuration], load: Load, rounds: usize) -> Result<Vec<Measured>> {
    configurations
        .iter()
        .map(|&configuration| {
            let device = Device::open().map_err(|absence| Error::device(absence.to_string()))?;
            let workload = Workload { shape: configuration.shape, load, rounding: None, seed: 1 };
            let mut measurement = Measurement::prepare(&device, &workload)?;
            let times = measurement.run(rounds)?;
            Ok(Measured::of(configuration, load, rounds, measurement.saved_bytes(), &times))
        })
        .collect()
}

impl Measured {
    fn of(configuration: Configuration, load: Load, rounds: usize, saved_bytes: usize, times: &[Times]) -> Self {
        let shape = configuration.shape;
        let find = |subject| times.iter().find(|times| times.subject == subject).map(Times::median);
        // 1e9 operations a ms are 1 TFLOP/s, 1e6 bytes a ms 1 GB/s.
        let rate = |subject: Subject| find(subject).map(|ms| subject.operations(&shape) / ms / 1e9);
        let product = rate(Subject::Square);
        let copy = find(Subject::Copy).map_or(f64::NAN, |ms| Subject::Copy.bytes(&shape) / ms / 1e6);
        let shown = KERNELS.map(Subject::Kernel).into_iter().chain([Subject::Forward, Subject::Backward]);
        let floor = |subject: Subject| -> Option<f64> {
            let sum = |kernels: &[KernelName]| {
                let floors = kernels.iter().map(|&kernel| floor_of(Subject::Kernel(kernel), &shape, product, copy));
                floors.sum::<Option<f64>>()
            };
            match subject {
                Subject::Forward => sum(&KERNELS[..3]),
                Subject::Backward => sum(&KERNELS[3..]),
                subject => floor_of(subject, &shape, product, copy),
            }
        };
        let rows = shown.filter_map(|subject| {
            let measured = times.iter().find(|times| times.subject == subject)?;
            let ms = measured.median();
            let vendor = match subject {
                Subject::Kernel(kernel) => find(Subject::Vendor(kernel)).map(|vendor| vendor / ms),
                _ => None,
            };
            let published = configuration.published(subject).map(|theirs| theirs / ms);
            Some(Row {
                subject,
                ms,
                spread: measured.spread(),
                tflops: subject.operations(&shape) / ms / 1e9,
                gbs: subject.bytes(&shape) / ms / 1e6,
                share: floor(subject).map(|floor| floor / ms),
                vendor,
                published,
                scaled: published.zip(product).map(|(ratio, product)| ratio * PUBLISHED_TFLOPS / product),
            })
        });
        Self { configuration, load, rounds, saved_bytes, product, copy, rows: rows.collect() }
    }

    fn title(&self) -> String {
        let Self { configuration: Configuration { name, shape, .. }, load, rounds, saved_bytes, product, copy, .. } =
            self;
        let product = product.map_or("no cuBLAS".to_owned(), |product| format!("8192³ at {product:.0} TFLOP/s"));
        let saved = *saved_bytes as f64 / f64::from(1 << 20);
        format!(
            "{name} ({shape}), {load} load, median of {rounds}; {product}, copy at {copy:.0} GB/s; x and h: {saved:.0} MiB"
        )
    }
}

fn floor_of(subject: Subject, shape: &Shape, product: Option<f64>, copy: f64) -> Option<f64> {
    let compute = subject.operations(shape) / (product? * 1e9);
    Some(compute.max(subject.bytes(shape) / (copy * 1e6)))
}

const LEGEND: &str = "\
share      the floor's time over ours: the operations at the rate of 8192³, or the fewest bytes at the copy's
cuBLAS     its batched product's time over ours: balanced, nothing gathered, nothing fused
SonicMoE   its published time over ours: above 1 we are ahead
scaled     the same, had its card given what this one gives: times 790 TFLOP/s over the 8192³ of this run
";

const COLUMNS: [&str; 9] = ["kernel", "ms", "spread", "TFLOP/s", "GB/s", "share", "cuBLAS", "SonicMoE", "scaled"];

fn cells(row: &Row) -> [String; 9] {
    let ratio = |value: Option<f64>| value.map(|value| format!("{value:.2}")).unwrap_or_default();
    let rate = |value: f64| if value > 0.0 { format!("{value:.0}") } else { String::new() };
    [
        row.subject.to_string(),
        number(row.ms),
        format!("{:.1}%", row.spread * 100.0),
        rate(row.tflops),
        rate(row.gbs),
        ratio(row.share),
        ratio(row.vendor),
        ratio(row.published),
        ratio(row.scaled),
    ]
}

/// Tables for a terminal.
pub fn text(measured: &[Measured]) -> String {
    let mut text = String::new();
    for one in measured {
        let mut table =
            Table::new(COLUMNS.map(|column| (column, if column == "kernel" { Align::Left } else { Align::Right })));
        one.rows.iter().for_each(|row| table.row(cells(row)));
        text += &format!("{}\n\n{table}\n", one.title());
    }
    text + LEGEND
}

/// Tables for a README.
pub fn markdown(measured: &[Measured]) -> String {
    let mut text = String::new();
    for one in measured {
        text += &format!("{}\n\n| {} |\n|{}\n", one.title(), COLUMNS.join(" | "), " --- |".repeat(COLUMNS.len()));
        one.rows.iter().for_each(|row| text += &format!("| {} |\n", cells(row).join(" | ")));
        text.push('\n');
    }
    text
}

/// The kernels that multiply, of every layer, as an SVG file; of those without cuBLAS nothing.
pub fn picture(measured: &[Measured]) -> String {
    let points = measured.iter().flat_map(|one| {
        let shape = one.configuration.shape;
        one.rows.iter().filter_map(move |row| {
            let product = one.product?;
            let multiplies = matches!(row.subject, Subject::Kernel(_)) && row.tflops > 0.0;
            // FLOP/byte · GB/s is a thousandth of a TFLOP/s.
            let of_copy = row.subject.operations(&shape) / row.subject.bytes(&shape) * one.copy / 1e3;
            multiplies.then(|| Point {
                layer: one.configuration.name.to_owned(),
                kernel: row.subject.to_string(),
                intensity: of_copy / product,
                rate: row.tflops / product,
            })
        })
    });
    roofline(&points.collect::<Vec<_>>())
}

/// One line a row.
pub fn csv(measured: &[Measured]) -> String {
    let mut text =
        "config,load,kernel,ms,spread,tflops,gbs,share,cublas,sonicmoe,scaled,product_tflops,copy_gbs\n".to_owned();
    for one in measured {
        for row in &one.rows {
            let optional = |value: Option<f64>| value.map(|value| value.to_string()).unwrap_or_default();
            let Row { subject, ms, spread, tflops, gbs, .. } = row;
            let [share, vendor, published, scaled, product] =
                [row.share, row.vendor, row.published, row.scaled, one.product].map(optional);
            let (name, load, copy) = (one.configuration.name, one.load, one.copy);
            text += &format!(
                "{name},{load},{subject},{ms},{spread},{tflops},{gbs},{share},{vendor},{published},{scaled},{product},{copy}\n"
            );
        }
    }
    text
}

/// All of it for a program.
pub fn as_json(measured: &[Measured]) -> String {
    let rows = |one: &Measured| -> Vec<serde_json::Value> {
        one.rows
            .iter()
            .map(|row| {
                json!({
                    "kernel": row.subject.to_string(), "ms": row.ms, "spread": row.spread, "tflops": row.tflops,
                    "gbs": row.gbs, "share_of_floor": row.share, "cublas": row.vendor, "sonicmoe": row.published,
                    "sonicmoe_scaled": row.scaled,
                })
            })
            .collect()
    };
    let configurations: Vec<_> = measured
        .iter()
        .map(|one| {
            let Shape { t, d, n, e, k } = one.configuration.shape;
            json!({
                "name": one.configuration.name, "shape": { "t": t, "d": d, "n": n, "e": e, "k": k },
                "load": one.load.to_string(), "rounds": one.rounds, "saved_bytes": one.saved_bytes,
                "product_tflops": one.product, "copy_gbs": one.copy, "rows": rows(one),
            })
        })
        .collect();
    format!("{:#}\n", json!({ "device": "cuda", "configurations": configurations }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A product at 500 TFLOP/s and a copy at 4,000 GB/s; every kernel at half of its floor's speed.
    fn measured() -> Measured {
        let configuration = CONFIGURATIONS[1];
        let shape = configuration.shape;
        let floor = |subject: Subject| floor_of(subject, &shape, Some(500.0), 4000.0).unwrap();
        let mut times = vec![
            (Subject::Square, Subject::Square.operations(&shape) / 500e9),
            (Subject::Copy, Subject::Copy.bytes(&shape) / 4e9),
            (Subject::Vendor(KernelName::UpForward), floor(Subject::Kernel(KernelName::UpForward))),
            (Subject::Forward, 1.010 * 790.0 / 500.0 / 1.25),
        ];
        times.extend(KERNELS.map(|kernel| (Subject::Kernel(kernel), 2.0 * floor(Subject::Kernel(kernel)))));
        let times: Vec<Times> = times.into_iter().map(|(subject, ms)| Times { subject, ms: vec![ms; 3] }).collect();
        Measured::of(configuration, Load::Uniform, 3, 1 << 20, &times)
    }

    #[test]
    fn shares_and_ratios_follow_from_the_times_of_the_same_run() {
        let measured = measured();
        assert!((measured.product.unwrap() - 500.0).abs() < 1e-9 && (measured.copy - 4000.0).abs() < 1e-9);
        let row = |subject| measured.rows.iter().find(|row| row.subject == subject).unwrap();
        for kernel in KERNELS {
            assert!((row(Subject::Kernel(kernel)).share.unwrap() - 0.5).abs() < 1e-9);
        }
        assert!((row(Subject::Kernel(KernelName::UpForward)).vendor.unwrap() - 0.5).abs() < 1e-9);
        assert!((row(Subject::Forward).scaled.unwrap() - 1.25).abs() < 1e-9);
        assert!((row(Subject::Forward).published.unwrap() - 1.25 * 500.0 / 790.0).abs() < 1e-9);
        // 9 products of R × n × d operations twice, 3 in the forward.
        assert_eq!(Subject::Backward.operations(&measured.configuration.shape), 12.0 * 196_608.0 * 256.0 * 1536.0);
    }

    #[test]
    fn every_format_holds_every_row() {
        let measured = [measured()];
        for report in [text(&measured), markdown(&measured), csv(&measured), as_json(&measured)] {
            for kernel in KERNELS {
                assert!(report.contains(kernel.name()), "{report}");
            }
            assert!(report.contains("7b-n256"), "{report}");
        }
        assert_eq!(csv(&measured).lines().count(), 1 + 9);
    }

    /// Half of the roof, whichever side of the ridge.
    #[test]
    fn the_picture_has_a_point_for_each_kernel_that_multiplies() {
        let svg = picture(&[measured()]);
        assert_eq!(svg.matches("<title>").count(), 6, "{svg}");
        assert!(svg.contains("7b-n256: down_backward_weight, 0.50 of the product"), "{svg}");
    }

    #[test]
    fn an_unknown_configuration_is_refused_with_the_known_ones() {
        let error = named(&["olmo".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("olmo") && error.contains("qwen3-30b"), "{error}");
        assert_eq!(named(&[]).unwrap().len(), CONFIGURATIONS.len());
    }
}
