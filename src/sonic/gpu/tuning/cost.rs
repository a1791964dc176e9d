//! A cost model of tiles, halves and waves: for layers that nobody has measured.

use crate::shape::Shape;
use crate::sonic::gpu::compile::KernelName;

use super::setting::{Setting, contracts_over_tokens};

/// Bytes that a multiprocessor takes from L2 in a cycle: a box of 128-byte lines takes 2.25 cycles a line.
const FROM_L2: f64 = 128.0 / 2.25;
/// Bytes that its shared memory gives or takes in a cycle.
const SHARED: f64 = 128.0;
/// Multiplications of bf16 with additions in a cycle.
const TENSOR: f64 = 2048.0;
/// What 16 bytes of a gathering copy take beyond their bandwidth: 85 cycles were measured for 8 KiB, not 64.
const GATHERED_CHUNK: f64 = (85.0 - 64.0) / 512.0;
/// Elements of a stage's contraction, rows of a tile and of one consumer.
const DEPTH: f64 = 64.0;
const ROWS: f64 = 128.0;
const HALF: f64 = 64.0;
const BF16: f64 = 2.0;
/// Quantiles of an expert's rows that are counted.
const QUANTILES: usize = 16;

/// Cycles that a kernel should take with a setting on so many multiprocessors, routing uniform.
///
/// A tile takes its steps, each the slowest of tensor cores, shared memory and L2, and the part of its epilogue
/// that nothing hides. Rows that are dead in a consumer's half cost nothing but the weights that the other half
/// needs. Blocks claim tiles one by one, so that at the end each has half a tile to wait.
pub fn predicted_cycles(kernel: KernelName, shape: &Shape, setting: &Setting, multiprocessors: u32) -> f64 {
    let Shape { d, n, e, .. } = *shape;
    let blocks = f64::from(multiprocessors);
    let (d, n, width) = (d as f64, n as f64, 2.0 * n as f64);
    let columns = f64::from(setting.columns);
    let (mut total, mut longest) = (0.0, 0.0f64);
    for rows in rows_of_experts(shape) {
        let (tiles, work) = if contracts_over_tokens(kernel) {
            let out = if kernel == KernelName::DownBackwardWeight { n } else { width };
            let cluster = f64::from(setting.cluster);
            let tiles = (d / (ROWS * cluster)).ceil() * cluster * (out / columns).ceil();
            let whole = (rows / DEPTH).ceil();
            (tiles, whole * step(kernel, setting, ROWS) + exposed(kernel, setting))
        } else {
            let (out, k) = match kernel {
                KernelName::UpForward => (width, d),
                KernelName::DownForward => (d, n),
                KernelName::DownBackwardActivation => (n, d),
                _ => (d, width),
            };
            let steps = (k / DEPTH).ceil();
            let rows_of_cluster = ROWS * f64::from(setting.cluster);
            let whole = (rows / rows_of_cluster).floor() * f64::from(setting.cluster);
            let rest = rows - whole * ROWS;
            // What is left over: whole tiles of the cluster, a part, and blocks that wait for their neighbour.
            let mut work = whole * (steps * step(kernel, setting, ROWS) + exposed(kernel, setting));
            if rest > 0.0 {
                let of_last = if rest > HALF { ROWS } else { HALF };
                work +=
                    f64::from(setting.cluster) * (steps * step(kernel, setting, of_last) + exposed(kernel, setting));
            }
            let row_tiles = whole + if rest > 0.0 { f64::from(setting.cluster) } else { 0.0 };
            if row_tiles == 0.0 {
                continue;
            }
            (row_tiles * (out / columns).ceil(), work / row_tiles)
        };
        total += tiles * work * e as f64 / QUANTILES as f64;
        longest = longest.max(work);
    }
    total / blocks + longest / 2.0
}

/// Rows of an expert at the middles of equal parts of a normal distribution with the binomial's deviation.
fn rows_of_experts(shape: &Shape) -> impl Iterator<Item = f64> {
    // The standard normal's quantiles at (2i + 1)/32, its upper half.
    const UPPER: [f64; QUANTILES / 2] = [0.0784, 0.2372, 0.4023, 0.5791, 0.7764, 1.0100, 1.3180, 1.8627];
    let share = shape.k as f64 / shape.e as f64;
    let mean = shape.t as f64 * share;
    let deviation = (mean * (1.0 - share)).max(0.0).sqrt();
    UPPER.into_iter().flat_map(move |z| [mean - z * deviation, mean + z * deviation]).map(|rows| rows.max(0.0).round())
}

/// Cycles of 64 contraction elements with so many rows at work.
fn step(kernel: KernelName, setting: &Setting, rows: f64) -> f64 {
    let columns = f64::from(setting.columns);
    let consumers = rows / HALF;
    let gathers = !matches!(kernel, KernelName::DownForward | KernelName::UpBackwardActivation);
    // A gathered line that nobody needs is not brought; a box comes whole.
    let brought = if gathers { rows } else { ROWS };
    let tensor = rows * columns * DEPTH / TENSOR;
    let filled = (brought + columns) * DEPTH * BF16;
    let read = consumers * (HALF + columns) * DEPTH * BF16;
    let chunks = if gathers { brought * DEPTH * BF16 / 16.0 } else { 0.0 };
    let shared = (filled + read) / SHARED + chunks * GATHERED_CHUNK;
    let from_l2 = (brought + columns / f64::from(setting.cluster)) * DEPTH * BF16 / FROM_L2;
    tensor.max(shared).max(from_l2)
}

/// Cycles of a tile's epilogue, during which no tensor core works.
fn exposed(kernel: KernelName, setting: &Setting) -> f64 {
    // Measured at 256 columns.
    let epilogue = match kernel {
        KernelName::UpForward => 4412.0,
        KernelName::DownBackwardActivation => 12294.0,
        KernelName::DownForward | KernelName::UpBackwardActivation => 754.0,
        _ => 3000.0,
    };
    epilogue * f64::from(setting.columns) / 256.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sonic::gpu::measure::GEMMS;

    const CARD: u32 = 132;

    fn cycles(kernel: KernelName, shape: &str) -> f64 {
        predicted_cycles(kernel, &shape.parse().unwrap(), &Setting::own(kernel).unwrap(), CARD)
    }

    #[test]
    fn twice_the_tokens_take_twice_as_long() {
        for kernel in GEMMS {
            let [once, twice] = ["32768,2048,1024,64,8", "65536,2048,1024,64,8"].map(|shape| cycles(kernel, shape));
            assert!((twice / once - 2.0).abs() < 0.1, "{}: {once} and {twice}", kernel.name());
        }
    }

    /// 2·R·2n·d operations at 4096 a cycle and multiprocessor are what tensor cores need.
    #[test]
    fn no_kernel_is_predicted_faster_than_its_products() {
        for shape in ["32768,2048,1024,64,8", "24576,1536,256,128,8", "16384,4096,1024,256,4", "512,256,64,8,2"] {
            let Shape { t, d, n, k, .. } = shape.parse().unwrap();
            let narrow = (2 * t * k * n * d) as f64 / 4096.0 / f64::from(CARD);
            for kernel in GEMMS {
                let wide = matches!(
                    kernel,
                    KernelName::UpForward | KernelName::UpBackwardActivation | KernelName::UpBackwardWeight
                );
                let least = if wide { 2.0 * narrow } else { narrow };
                assert!(cycles(kernel, shape) > least, "{} at {shape}", kernel.name());
            }
        }
    }

    /// 256 rows an expert with a deviation of 16: every second expert has a tile of few rows. They cost less than
    /// whole tiles and more than their rows.
    #[test]
    fn rows_beyond_a_tile_cost_what_their_weights_cost_to_bring() {
        let few = cycles(KernelName::UpForward, "16384,4096,1024,256,4");
        // 65,536 rows · 2048 columns · 4096 deep, without padding and epilogues.
        let products = 2.0 * 65_536.0 * 2048.0 * 4096.0 / 4096.0 / f64::from(CARD);
        assert!(few > 1.1 * products && few < 1.5 * products, "{few} of {products}");
    }

    #[test]
    fn narrow_outputs_are_predicted_faster_with_narrow_tiles() {
        let kernel = KernelName::DownBackwardActivation;
        let own = Setting::own(kernel).unwrap();
        let narrow = Setting { columns: 128, ..own };
        let of = |shape: &str, setting| predicted_cycles(kernel, &shape.parse().unwrap(), setting, CARD);
        assert!(of("32768,1024,128,64,8", &narrow) < of("32768,1024,128,64,8", &own));
        assert!(of("32768,1024,256,64,8", &narrow) > of("32768,1024,256,64,8", &own));
    }
}
