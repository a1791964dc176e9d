//! How long the kernels take, by events around replayed graphs.
//!
//! Everything is recorded once and replayed in turn, round after round: the card is limited by power
//! and changes its speed within seconds, so that only times of one round compare. With them in every
//! round run the vendor's product of 8192³, its batched products of the layer's sizes, balanced and
//! ungathered, and a plain copy.

use std::fmt;
use std::sync::Arc;

use half::bf16;

use crate::error::Result;
use crate::shape::Shape;

use super::compile::{KernelName, Variant};
use super::device::{Argument, Blas, Buffer, Device, Entry, Factor, Graph, Grid, Guards, Product, Stopwatch};
use super::grouped_gemm::expect_len;
use super::plan::Plan;
use super::routing::DeviceRouting;
use super::witness::fill_normal;
use super::workload::{Loaded, Workload};

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// One kernel.
    Kernel(KernelName),
    /// Kernels 1 to 3, one graph.
    Forward,
    /// Kernels 4 to 8, one graph.
    Backward,
    /// cuBLAS's batched product in place of a kernel's.
    Vendor(KernelName),
    /// cuBLAS's product of 8192³.
    Square,
    /// A copy from device memory to device memory.
    Copy,
}

/// The six kernels that multiply.
pub const GEMMS: [KernelName; 6] = [
    KernelName::UpForward,
    KernelName::DownForward,
    KernelName::DownBackwardActivation,
    KernelName::DownBackwardWeight,
    KernelName::UpBackwardActivation,
    KernelName::UpBackwardWeight,
];

/// The eight kernels, in the method's order.
pub const KERNELS: [KernelName; 8] = [
    KernelName::UpForward,
    KernelName::DownForward,
    KernelName::CombineOutput,
    KernelName::DownBackwardActivation,
    KernelName::DownBackwardWeight,
    KernelName::UpBackwardActivation,
    KernelName::UpBackwardWeight,
    KernelName::CombineInputGradient,
];

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel(kernel) => f.write_str(kernel.name()),
            Self::Forward => f.write_str("forward"),
            Self::Backward => f.write_str("backward"),
            Self::Vendor(kernel) => write!(f, "cuBLAS for {}", kernel.name()),
            Self::Square => f.write_str("cuBLAS 8192³"),
            Self::Copy => f.write_str("copy"),
        }
    }
}

/// Side of the square product.
const SIDE: usize = 8192;
/// Bytes of the plain copy: many times what L2 holds.
const COPY_BYTES: usize = 1 << 30;
/// The least time that one replay should take, in ms: beside it the start of a graph is nothing.
const LEAST_MS: f64 = 3.0;

impl Subject {
    /// Floating-point operations of the routed pairs; none for what is bound by memory.
    pub fn operations(self, shape: &Shape) -> f64 {
        let product = |columns: usize, k: usize| 2.0 * shape.routed() as f64 * columns as f64 * k as f64;
        match self {
            Self::Kernel(kernel) | Self::Vendor(kernel) => match kernel {
                KernelName::UpForward | KernelName::UpBackwardActivation | KernelName::UpBackwardWeight => {
                    product(2 * shape.n, shape.d)
                }
                KernelName::DownForward | KernelName::DownBackwardActivation | KernelName::DownBackwardWeight => {
                    product(shape.n, shape.d)
                }
                _ => 0.0,
            },
            Self::Forward => 3.0 * product(shape.n, shape.d),
            Self::Backward => 6.0 * product(shape.n, shape.d),
            Self::Square => 2.0 * (SIDE as f64).powi(3),
            Self::Copy => 0.0,
        }
    }

    /// The fewest bytes that have to move: each row once, each result once.
    pub fn bytes(self, shape: &Shape) -> f64 {
        let Shape { t, d, n, e, .. } = *shape;
        let r = shape.routed();
        let (tokens, wide, narrow, weight) = (2 * t * d, 2 * r * d, 2 * r * n, 2 * e * n * d);
        let bytes = match self {
            Self::Kernel(kernel) => match kernel {
                KernelName::UpForward => tokens + 2 * weight + 3 * narrow,
                KernelName::DownForward => narrow + weight + wide,
                KernelName::CombineOutput | KernelName::CombineInputGradient => wide + tokens,
                KernelName::DownBackwardActivation => tokens + weight + 5 * narrow,
                KernelName::DownBackwardWeight => tokens + narrow + weight,
                KernelName::UpBackwardActivation => 2 * narrow + 2 * weight + wide,
                KernelName::UpBackwardWeight => tokens + 2 * narrow + 2 * weight,
                _ => 0,
            },
            Self::Forward => {
                return [KERNELS[0], KERNELS[1], KERNELS[2]].map(|k| Self::Kernel(k).bytes(shape)).iter().sum();
            }
            Self::Backward => return KERNELS[3..].iter().map(|&k| Self::Kernel(k).bytes(shape)).sum(),
            Self::Vendor(_) => 0,
            Self::Square => 3 * 2 * SIDE * SIDE,
            Self::Copy => 2 * COPY_BYTES,
        };
        bytes as f64
    }
}

/// A subject's times over the rounds, in ms.
#[derive(Clone, Debug)]
pub struct Times {
    /// What was timed.
    pub subject: Subject,
    /// One of each round, sorted.
    pub ms: Vec<f64>,
}

impl Times {
    /// Of one subject, in any order.
    pub(super) fn of(subject: Subject, mut ms: Vec<f64>) -> Self {
        ms.sort_by(f64::total_cmp);
        Self { subject, ms }
    }

    /// The middle one.
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// From the first to the third quartile, over the median.
    pub fn spread(&self) -> f64 {
        (self.quantile(0.75) - self.quantile(0.25)) / self.median()
    }

    fn quantile(&self, at: f64) -> f64 {
        let last = self.ms.len().saturating_sub(1);
        self.ms.get((at * last as f64).round() as usize).copied().unwrap_or(f64::NAN)
    }
}

/// A graph of as many runs of `once` as take a measurable time, and how many they are. What `once` queues is loaded
/// before it is recorded.
pub(super) fn recorded(device: &Arc<Device>, mut once: impl FnMut() -> Result<()>) -> Result<(Graph, usize)> {
    once()?;
    let watch = Stopwatch::start(device)?;
    once()?;
    let launches = (LEAST_MS / watch.stop()?.max(1e-3)).ceil().clamp(1.0, 64.0) as usize;
    Ok((Graph::record(device, || (0..launches).try_for_each(|_| once()))?, launches))
}

/// A workload with all that is timed on it, recorded.
pub struct Measurement {
    /// Graph, launches in it.
    items: Vec<(Subject, Graph, usize)>,
    device: Arc<Device>,
    saved_bytes: usize,
    /// What the graphs name.
    owned: Owned,
}

struct Owned {
    plan: Plan,
    routing: DeviceRouting,
    tokens_per_expert: Vec<usize>,
    x: Buffer<bf16>,
    dout: Buffer<bf16>,
    baselines: Option<Baselines>,
}

struct Baselines {
    square: [Buffer<bf16>; 3],
    /// Where products write.
    scratch: Buffer<bf16>,
    copies: [Buffer<bf16>; 2],
    blas: Option<Arc<Blas>>,
}

impl Measurement {
    /// Loads the workload, runs it once and records everything. Without cuBLAS its rows are left out.
    ///
    /// # Errors
    /// Not enough device memory, or a device that fails.
    pub fn prepare(device: &Arc<Device>, workload: &Workload) -> Result<Self> {
        let mut owned = Owned::load(device, workload)?;
        let Shape { d, n, .. } = workload.shape;
        let scratch = (workload.shape.routed() * d.max(2 * n)).max(owned.plan.dw1().len());
        let normal = |name, len, seed| -> Result<Buffer<bf16>> {
            let mut buffer = Buffer::output(device, name, len, Guards::NONE)?;
            fill_normal(device, &mut buffer, seed, 1.0)?;
            Ok(buffer)
        };
        let baselines = Baselines {
            square: [normal("A", SIDE * SIDE, 11)?, normal("B", SIDE * SIDE, 12)?, normal("C", SIDE * SIDE, 13)?],
            scratch: normal("a baseline's result", scratch, 14)?,
            copies: [normal("copied", COPY_BYTES / 2, 15)?, normal("copy", COPY_BYTES / 2, 16)?],
            blas: Blas::on(device).ok(),
        };
        let mut subjects: Vec<Subject> = KERNELS.map(Subject::Kernel).to_vec();
        subjects.extend([Subject::Forward, Subject::Backward, Subject::Copy]);
        if baselines.blas.is_some() {
            subjects.extend(GEMMS.map(Subject::Vendor));
            subjects.push(Subject::Square);
        }
        owned.baselines = Some(baselines);
        Self::record(device, workload, owned, &subjects)
    }

    /// [`Measurement::prepare`] of the two passes alone, whatever the routing.
    ///
    /// # Errors
    /// As [`Measurement::prepare`].
    pub fn of_passes(device: &Arc<Device>, workload: &Workload) -> Result<Self> {
        let owned = Owned::load(device, workload)?;
        Self::record(device, workload, owned, &[Subject::Forward, Subject::Backward])
    }

    fn record(device: &Arc<Device>, workload: &Workload, mut owned: Owned, subjects: &[Subject]) -> Result<Self> {
        let saved_bytes = owned.plan.kept(&owned.routing, &owned.x).activations();
        // Once in the method's order, so that every kernel reads what it reads in a step.
        owned.queue(Subject::Forward, workload.shape)?;
        owned.queue(Subject::Backward, workload.shape)?;
        let mut items = Vec::new();
        for &subject in subjects {
            let (graph, launches) = recorded(device, || owned.queue(subject, workload.shape))?;
            items.push((subject, graph, launches));
        }
        Ok(Self { items, device: Arc::clone(device), saved_bytes, owned })
    }

    /// Bytes kept from forward to backward, metadata apart.
    pub fn saved_bytes(&self) -> usize {
        self.saved_bytes
    }

    /// What is timed, in order.
    pub fn subjects(&self) -> impl Iterator<Item = Subject> + use<'_> {
        self.items.iter().map(|(subject, ..)| *subject)
    }

    /// The time of one run of a subject in ms, over `replays` replays; none if it is not recorded.
    ///
    /// # Errors
    /// A device that fails.
    pub fn time(&mut self, subject: Subject, replays: usize) -> Result<Option<f64>> {
        let Some((_, graph, launches)) = self.items.iter().find(|(other, ..)| *other == subject) else {
            return Ok(None);
        };
        let watch = Stopwatch::start(&self.device)?;
        for _ in 0..replays {
            // SAFETY: every buffer that was recorded belongs to `self`, which lends none of them.
            unsafe { graph.launch() }?;
        }
        Ok(Some(watch.stop()? / (replays * launches) as f64))
    }

    /// (E) the rows of each expert.
    pub fn tokens_per_expert(&self) -> &[usize] {
        &self.owned.tokens_per_expert
    }

    /// Two rounds to warm up, then `rounds` rounds, every subject in each.
    ///
    /// # Errors
    /// A device that fails.
    pub fn run(&mut self, rounds: usize) -> Result<Vec<Times>> {
        let [times] = Self::run_in_turn([self], rounds)?;
        Ok(times)
    }

    /// [`Measurement::run`] of several, all of them in each round.
    ///
    /// # Errors
    /// A device that fails.
    pub fn run_in_turn<const N: usize>(mut measurements: [&mut Self; N], rounds: usize) -> Result<[Vec<Times>; N]> {
        let mut times = measurements.each_ref().map(|measurement| -> Vec<Times> {
            measurement.subjects().map(|subject| Times { subject, ms: Vec::with_capacity(rounds) }).collect()
        });
        for round in 0..rounds + 2 {
            for (measurement, times) in measurements.iter_mut().zip(&mut times) {
                for Times { subject, ms } in times {
                    if let Some(time) = measurement.time(*subject, 1)?
                        && round >= 2
                    {
                        ms.push(time);
                    }
                }
            }
        }
        times.iter_mut().flatten().for_each(|times| times.ms.sort_by(f64::total_cmp));
        Ok(times)
    }
}

/// Copies all elements, by a kernel: a copy engine gives less than the memory does.
fn plain_copy(device: &Device, from: &Buffer<bf16>, to: &mut Buffer<bf16>) -> Result<()> {
    expect_len(to, from.len())?;
    let (from_address, to_address, chunks) = (from.address(), to.address(), from.len() as u64 / 8);
    let arguments = [Argument::of(&from_address), Argument::of(&to_address), Argument::of(&chunks)];
    let grid = Grid { blocks: device.properties().multiprocessors * 4, threads: 512, shared_bytes: 0, cluster: 1 };
    let kernel = device.kernel(&Variant::of(KernelName::PlainCopy))?;
    // SAFETY: two live buffers of so many chunks, the second borrowed exclusively.
    unsafe { kernel.launch(device, grid, &arguments) }
}

/// How an operand of (outer, k) lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Major {
    /// (outer, k): k is contiguous.
    K,
    /// (k, outer).
    Outer,
}

/// `batch` products C (m, n) = A (m, k)·B (n, k)ᵀ, all matrices one after the other.
fn batched(
    blas: Option<&Arc<Blas>>,
    batch: usize,
    [m, n, k]: [usize; 3],
    (a, a_major): (&Buffer<bf16>, Major),
    (b, b_major): (&Buffer<bf16>, Major),
    c: &mut Buffer<bf16>,
) -> Result<()> {
    let Some(blas) = blas else { return Ok(()) };
    for (buffer, elements) in [(a, m * k), (b, n * k), (&*c, m * n)] {
        if buffer.len() < batch * elements {
            expect_len(buffer, batch * elements)?;
        }
    }
    let left = match a_major {
        Major::K => Factor { address: a.address(), stride: k, transposed: false },
        Major::Outer => Factor { address: a.address(), stride: m, transposed: true },
    };
    let right = match b_major {
        Major::K => Factor { address: b.address(), stride: k, transposed: true },
        Major::Outer => Factor { address: b.address(), stride: n, transposed: false },
    };
    let (product, entry, accumulate) = (c.address(), Entry::Bf16, false);
    let product = Product { left, right, product, entry, accumulate, rows: m, columns: n, inner: k, batch };
    // SAFETY: live buffers of this device that hold the matrices (checked above); `c` is borrowed
    // exclusively.
    unsafe { blas.multiply(product) }
}

impl Owned {
    fn load(device: &Arc<Device>, workload: &Workload) -> Result<Self> {
        let Loaded { layer, x, dout, on_device, routing, .. } = workload.load(device, Guards::NONE)?;
        Ok(Self {
            plan: Plan::allocate(layer, &on_device)?,
            routing: on_device,
            tokens_per_expert: routing.tokens_per_expert(),
            x,
            dout,
            baselines: None,
        })
    }

    fn queue(&mut self, subject: Subject, shape: Shape) -> Result<()> {
        let Self { plan, routing, tokens_per_expert: _, x, dout, baselines } = self;
        match subject {
            Subject::Kernel(kernel) => return plan.kernel(kernel, routing, x, dout),
            Subject::Forward => return plan.forward(routing, x),
            Subject::Backward => return plan.backward(routing, x, dout),
            _ => {}
        }
        let Some(Baselines { square, scratch, copies, blas }) = baselines else { return Ok(()) };
        match subject {
            Subject::Copy => {
                let [from, to] = copies;
                plain_copy(plan.layer().device(), from, to)
            }
            Subject::Square => {
                let [a, b, c] = square;
                batched(blas.as_ref(), 1, [SIDE; 3], (a, Major::K), (b, Major::K), c)
            }
            Subject::Vendor(kernel) => {
                let Shape { d, n, e, .. } = shape;
                let rows = shape.routed() / e;
                let (wide, narrow, h, layer) = (plan.wide(), plan.narrow(), plan.h(), plan.layer());
                let (w1, w2) = (layer.w1(), layer.w2());
                let (size, a, b) = match kernel {
                    KernelName::UpForward => ([rows, 2 * n, d], (wide, Major::K), (w1, Major::K)),
                    KernelName::DownForward => ([rows, d, n], (narrow, Major::K), (w2, Major::K)),
                    KernelName::DownBackwardActivation => ([rows, n, d], (wide, Major::K), (w2, Major::Outer)),
                    KernelName::DownBackwardWeight => ([d, n, rows], (wide, Major::Outer), (narrow, Major::Outer)),
                    KernelName::UpBackwardActivation => ([rows, d, 2 * n], (h, Major::K), (w1, Major::Outer)),
                    _ => ([2 * n, d, rows], (h, Major::Outer), (wide, Major::Outer)),
                };
                batched(blas.as_ref(), e, size, a, b, scratch)
            }
            _ => Ok(()),
        }
    }
}
