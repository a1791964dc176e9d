//! The witness: every element that the eight kernels stored, judged on the device against f64.
//!
//! The oracle of [`crate::oracle::kernel`] multiplies on the host, which ends at a few million
//! elements. At the sizes that a layer has in use the device multiplies: each kernel against an f64
//! product of what it really read, under the same a-priori bounds, over **all** elements. Its code is
//! that of a textbook, and shares no line with the kernels.

use std::sync::Arc;

use cudarc::driver::DeviceRepr;
use half::bf16;

use crate::activation::Activation;
use crate::engine::{Numerics, Output};
use crate::error::{Error, Result};
use crate::oracle::bound::accumulation::Sum;
use crate::oracle::bound::ball::{Arithmetic, Ball, Measure, Rounding};

use super::compile::{KernelName, Variant};
use super::device::{Argument, Buffer, Device, Grid, Guards};
use super::grouped_gemm::{expect_len, to_u32};
use super::layer::Layer;
use super::plan::Plan;
use super::routing::DeviceRouting;

/// What the elements of one result came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Witnessed {
    /// The result.
    pub output: Output,
    /// Elements judged.
    pub judged: u64,
    /// Elements whose truth and bound reach beyond the type's range.
    pub skipped: u64,
    /// Judged elements beyond their bound.
    pub failing: u64,
    /// The largest error over bound.
    pub worst: f64,
    /// The flat index of the first failing element.
    pub first: Option<u64>,
}

/// Judges h, a, y and o of the plan's last forward, kernel by kernel, on the device.
///
/// # Errors
/// A layer with another activation than SwiGLU or with biases, buffers of other sizes, or a device that
/// fails.
pub fn witness_forward(
    plan: &Plan,
    routing: &DeviceRouting,
    x: &Buffer<bf16>,
    numerics: &Numerics,
) -> Result<Vec<Witnessed>> {
    let witness = Witness::new(plan.layer(), routing, numerics)?;
    let (layer, d, n) = (plan.layer(), plan.layer().d(), plan.layer().n());
    let [h, a] = witness.products(Products {
        what: 1,
        a: Operand::rows(x, d, Along::Token),
        b: Operand::weight(layer.w1(), [2 * n, d], false),
        out: plan.h(),
        second: Some(plan.narrow()),
        m: None,
        n: 2 * n,
        k: Some(d),
        kept: None,
    })?;
    let y = witness.plain(Products::by_row(
        Operand::rows(plan.narrow(), n, Along::Row),
        Operand::weight(layer.w2(), [d, n], false),
        plan.wide(),
        [d, n],
    ))?;
    let o = witness.combine(plan.wide(), true, plan.o())?;
    Ok(vec![h.of(Output::H)?, a.of(Output::A)?, y.of(Output::Y)?, o.of(Output::O)?])
}

/// Judges dh, a′, ds, dw2, dx̃, dw1 and dx of the plan's last backward.
///
/// # Errors
/// As [`witness_forward`].
pub fn witness_backward(
    plan: &Plan,
    routing: &DeviceRouting,
    x: &Buffer<bf16>,
    dout: &Buffer<bf16>,
    numerics: &Numerics,
) -> Result<Vec<Witnessed>> {
    let witness = Witness::new(plan.layer(), routing, numerics)?;
    let (layer, d, n) = (plan.layer(), plan.layer().d(), plan.layer().n());
    let device = layer.device();
    let zeros = |name| Buffer::input(device, name, &vec![0.0f64; routing.routed()], Guards::NONE);
    let sums = [zeros("Σ G·A")?, zeros("Σ E")?, zeros("Σ |G·A|")?];
    let [dh, a_prime] = witness.products(Products {
        what: 2,
        a: Operand::rows(dout, d, Along::Token),
        b: Operand::weight(layer.w2(), [d, n], true),
        out: plan.dh(),
        second: Some(plan.narrow()),
        m: None,
        n,
        k: Some(d),
        kept: Some((plan.h(), &sums)),
    })?;
    let ds = witness.score_gradients(&sums, &plan.ds().download()?, n)?;
    let dx_expanded = witness.plain(Products::by_row(
        Operand::rows(plan.dh(), 2 * n, Along::Row),
        Operand::weight(layer.w1(), [2 * n, d], true),
        plan.wide(),
        [d, 2 * n],
    ))?;
    let dw2 = witness.plain(Products::by_expert(
        Operand::contracted(dout, d, Along::Token),
        Operand::contracted(plan.narrow(), n, Along::Row),
        plan.dw2(),
        [d, n],
    ))?;
    let dw1 = witness.plain(Products::by_expert(
        Operand::contracted(plan.dh(), 2 * n, Along::Row),
        Operand::contracted(x, d, Along::Token),
        plan.dw1(),
        [2 * n, d],
    ))?;
    let dx = witness.combine(plan.wide(), false, plan.dx())?;
    Ok(vec![
        dh.of(Output::Dh)?,
        a_prime.of(Output::APrime)?,
        ds,
        dw2.of(Output::Dw2)?,
        dx_expanded.of(Output::DxExpanded)?,
        dw1.of(Output::Dw1)?,
        dx.of(Output::Dx)?,
    ])
}

/// Fills a buffer with normally distributed numbers, a pure function of the seed.
///
/// # Errors
/// A device that fails.
pub fn fill_normal(device: &Arc<Device>, buffer: &mut Buffer<bf16>, seed: u64, deviation: f32) -> Result<()> {
    let kernel = device.kernel(&Variant::of(KernelName::RandomNormal))?;
    let (address, elements) = (buffer.address(), buffer.len() as u64);
    let arguments = [Argument::of(&address), Argument::of(&elements), Argument::of(&seed), Argument::of(&deviation)];
    let grid = Grid { blocks: device.properties().multiprocessors * 8, threads: 256, shared_bytes: 0, cluster: 1 };
    // SAFETY: the kernel writes `elements` elements of a live buffer that is borrowed exclusively.
    unsafe { kernel.launch(device, grid, &arguments) }
}

/// `Rounding` of kernels/witness/ball.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
struct DeviceRounding {
    unit: f64,
    underflow: f64,
    largest: f64,
}

impl From<Rounding> for DeviceRounding {
    fn from(Rounding { unit, underflow, largest, .. }: Rounding) -> Self {
        Self { unit, underflow, largest }
    }
}

/// `WitnessNumerics` of kernels/witness/ball.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
struct DeviceNumerics {
    accumulate: DeviceRounding,
    storage: DeviceRounding,
    function_ulps: f64,
    function_underflow: f64,
}

// SAFETY: plain numbers in C layout, taken by value; the same fields in the same order as in CUDA.
unsafe impl DeviceRepr for DeviceNumerics {}

/// What an index of an operand counts.
#[derive(Clone, Copy)]
#[repr(u32)]
enum Along {
    Plain = 0,
    /// The expert's rows.
    Row = 1,
    /// The tokens of the expert's rows.
    Token = 2,
}

/// `WitnessOperand` of kernels/witness_product.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct DeviceOperand {
    base: u64,
    by_expert: i64,
    by_outer: i64,
    by_k: i64,
    outer: Along,
    k: Along,
}

/// `WitnessParams` of kernels/witness_product.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    a: DeviceOperand,
    b: DeviceOperand,
    row_token: u64,
    expert_offsets: u64,
    out: u64,
    second: u64,
    h: u64,
    scores: u64,
    ds_sum: u64,
    ds_rad: u64,
    ds_size: u64,
    tally: u64,
    m: u32,
    n: u32,
    k: u32,
    reserved: u32,
    numerics: DeviceNumerics,
}

// SAFETY: as above.
unsafe impl DeviceRepr for Params {}

/// A tensor as the product's A or B.
struct Operand<'a> {
    buffer: &'a Buffer<bf16>,
    by_expert: usize,
    by_outer: usize,
    by_k: usize,
    outer: Along,
    k: Along,
}

impl<'a> Operand<'a> {
    /// (rows, width), its rows counted along `outer`, contracted over its columns.
    fn rows(buffer: &'a Buffer<bf16>, width: usize, outer: Along) -> Self {
        Self { buffer, by_expert: 0, by_outer: width, by_k: 1, outer, k: Along::Plain }
    }

    /// (rows, width), contracted over its rows.
    fn contracted(buffer: &'a Buffer<bf16>, width: usize, k: Along) -> Self {
        Self { buffer, by_expert: 0, by_outer: 1, by_k: width, outer: Along::Plain, k }
    }

    /// (E, rows, columns), contracted over its columns, or `transposed` over its rows.
    fn weight(buffer: &'a Buffer<bf16>, [rows, columns]: [usize; 2], transposed: bool) -> Self {
        let [by_outer, by_k] = if transposed { [1, columns] } else { [columns, 1] };
        Self { buffer, by_expert: rows * columns, by_outer, by_k, outer: Along::Plain, k: Along::Plain }
    }

    fn on_device(&self) -> DeviceOperand {
        let Self { buffer, by_expert, by_outer, by_k, outer, k } = *self;
        let [by_expert, by_outer, by_k] = [by_expert, by_outer, by_k].map(|stride| stride as i64);
        DeviceOperand { base: buffer.address(), by_expert, by_outer, by_k, outer, k }
    }
}

/// One grouped product and what was stored of it.
struct Products<'a> {
    /// The constant that the kernel is compiled with.
    what: u32,
    a: Operand<'a>,
    b: Operand<'a>,
    out: &'a Buffer<bf16>,
    second: Option<&'a Buffer<bf16>>,
    /// None where it counts the rows of an expert.
    m: Option<usize>,
    n: usize,
    k: Option<usize>,
    /// Of kernel 4: h, and where ds is summed.
    kept: Option<(&'a Buffer<bf16>, &'a [Buffer<f64>; 3])>,
}

impl<'a> Products<'a> {
    fn by_row(a: Operand<'a>, b: Operand<'a>, out: &'a Buffer<bf16>, [n, k]: [usize; 2]) -> Self {
        Self { what: 0, a, b, out, second: None, m: None, n, k: Some(k), kept: None }
    }

    fn by_expert(a: Operand<'a>, b: Operand<'a>, out: &'a Buffer<bf16>, [m, n]: [usize; 2]) -> Self {
        Self { what: 0, a, b, out, second: None, m: Some(m), n, k: None, kept: None }
    }
}

/// Five words of the device: worst, judged, skipped, failing, first.
struct Tally([u64; 5]);

impl Tally {
    const EMPTY: [u64; 5] = [0, 0, 0, 0, u64::MAX];

    fn of(self, output: Output) -> Result<Witnessed> {
        let Self([worst, judged, skipped, failing, first]) = self;
        let worst = f64::from_bits(worst);
        if worst.is_nan() {
            return Err(Error::internal(format!("the witness of `{output}` gave no number")));
        }
        Ok(Witnessed { output, judged, skipped, failing, worst, first: (failing > 0).then_some(first) })
    }
}

struct Witness<'a> {
    layer: &'a Layer,
    routing: &'a DeviceRouting,
    arithmetic: Arithmetic,
    numerics: DeviceNumerics,
    /// The most rows of an expert.
    most_rows: usize,
}

impl<'a> Witness<'a> {
    fn new(layer: &'a Layer, routing: &'a DeviceRouting, numerics: &Numerics) -> Result<Self> {
        if layer.activation() != Activation::SwiGlu || layer.b1().is_some() {
            let found = if layer.b1().is_some() { "biases" } else { layer.activation().name() };
            return Err(Error::unknown("layer of the witness", found, ["swiglu without biases"]));
        }
        let arithmetic = Arithmetic::new(numerics, Measure::Worst);
        let offsets = routing.expert_offsets().download()?;
        let most_rows = offsets.windows(2).map(|pair| (pair[1] - pair[0]) as usize).max().unwrap_or(0);
        let numerics = DeviceNumerics {
            accumulate: arithmetic.accumulate.into(),
            storage: arithmetic.storage.into(),
            function_ulps: arithmetic.function_ulps,
            function_underflow: arithmetic.function_underflow,
        };
        Ok(Self { layer, routing, arithmetic, numerics, most_rows })
    }

    fn plain(&self, products: Products<'_>) -> Result<Tally> {
        let [tally, _] = self.products(products)?;
        Ok(tally)
    }

    fn products(&self, products: Products<'_>) -> Result<[Tally; 2]> {
        let Products { what, a, b, out, second, m, n, k, kept } = products;
        let (layer, routing, device) = (self.layer, self.routing, self.layer.device());
        let (routed, experts) = (routing.routed(), layer.e());
        let rows = |along: Along| match along {
            Along::Plain => None,
            Along::Row => Some(routed),
            Along::Token => Some(routing.tokens()),
        };
        for operand in [&a, &b] {
            // Rows times width, or all experts' matrices.
            let expected = match rows(operand.outer).or(rows(operand.k)) {
                Some(rows) => rows * operand.by_outer.max(operand.by_k),
                None => experts * operand.by_expert,
            };
            expect_len(operand.buffer, expected)?;
        }
        let stored = m.map_or(routed, |m| experts * m) * n;
        expect_len(out, if what == 2 { 2 * stored } else { stored })?;
        if let Some(second) = second {
            expect_len(second, if what == 1 { stored / 2 } else { stored })?;
        }
        if let Some((h, _)) = kept {
            expect_len(h, 2 * stored)?;
        }
        let tally = Buffer::input(device, "tally", &[Tally::EMPTY, Tally::EMPTY].concat(), Guards::NONE)?;
        let [ds_sum, ds_rad, ds_size] = kept.map_or([0; 3], |(_, sums)| sums.each_ref().map(Buffer::address));
        let params = Params {
            a: a.on_device(),
            b: b.on_device(),
            row_token: routing.row_token().address(),
            expert_offsets: routing.expert_offsets().address(),
            out: out.address(),
            second: second.map_or(0, Buffer::address),
            h: kept.map_or(0, |(h, _)| h.address()),
            scores: routing.scores().address(),
            ds_sum,
            ds_rad,
            ds_size,
            tally: tally.address(),
            m: to_u32("m", m.unwrap_or(0))?,
            n: to_u32("n", n)?,
            k: to_u32("k", k.unwrap_or(0))?,
            reserved: 0,
            numerics: self.numerics,
        };
        let tiles = |size: usize| to_u32("tiles", size.div_ceil(64));
        let blocks = [tiles(n)?, tiles(m.unwrap_or(self.most_rows))?, to_u32("E", experts)?];
        if !blocks.contains(&0) {
            let kernel = device.kernel(&Variant::witness_product(what))?;
            // SAFETY: live buffers of the sizes checked above; a checked routing's indices; the tally
            // and the sums belong to this call.
            unsafe { kernel.launch_3d(device, blocks, 256, &[Argument::of(&params)]) }?;
        }
        let words = tally.download()?;
        let tally = |first: usize| Tally(std::array::from_fn(|word| words[first + word]));
        Ok([tally(0), tally(5)])
    }

    fn combine(&self, rows: &Buffer<bf16>, weighted: bool, out: &Buffer<bf16>) -> Result<Tally> {
        let (routing, device, d) = (self.routing, self.layer.device(), self.layer.d());
        expect_len(rows, routing.routed() * d)?;
        expect_len(out, routing.tokens() * d)?;
        let tally = Buffer::input(device, "tally", &Tally::EMPTY, Guards::NONE)?;
        let (rows, out) = (rows.address(), out.address());
        let scores = if weighted { routing.scores().address() } else { 0 };
        let (token_offsets, token_rows) = (routing.token_offsets().address(), routing.token_rows().address());
        let (into, tokens, width) = (tally.address(), to_u32("T", routing.tokens())?, to_u32("d", d)?);
        let arguments = [
            Argument::of(&rows),
            Argument::of(&scores),
            Argument::of(&token_offsets),
            Argument::of(&token_rows),
            Argument::of(&out),
            Argument::of(&into),
            Argument::of(&tokens),
            Argument::of(&width),
            Argument::of(&self.numerics),
        ];
        let grid = Grid { blocks: tokens.min(1 << 16), threads: 256, shared_bytes: 0, cluster: 1 };
        let kernel = device.kernel(&Variant::of(KernelName::WitnessCombine))?;
        // SAFETY: live buffers of the sizes checked above; a checked routing's indices.
        unsafe { kernel.launch(device, grid, &arguments) }?;
        let words = tally.download()?;
        Ok(Tally(std::array::from_fn(|word| words[word])))
    }

    /// ds (R) by row against its sums.
    fn score_gradients(&self, sums: &[Buffer<f64>; 3], stored: &[f32], n: usize) -> Result<Witnessed> {
        let [sum, rad, size] = [sums[0].download()?, sums[1].download()?, sums[2].download()?];
        let arithmetic = &self.arithmetic;
        let mut witnessed =
            Witnessed { output: Output::Ds, judged: 0, skipped: 0, failing: 0, worst: 0.0, first: None };
        for (row, &stored) in stored.iter().enumerate() {
            let ball = Ball { mid: sum[row], rad: rad[row] };
            let parts = Sum { ball, magnitude: size[row], square: 0.0 };
            let truth = arithmetic.summed(&arithmetic.accumulate, parts, n);
            let Ball { mid, rad } = arithmetic.round(&arithmetic.score, truth);
            let Some((error, ratio)) = crate::oracle::judge::compare(stored.into(), mid, rad, f32::MAX.into()) else {
                witnessed.skipped += 1;
                continue;
            };
            witnessed.judged += 1;
            witnessed.worst = witnessed.worst.max(ratio);
            if error > rad {
                witnessed.failing += 1;
                witnessed.first = witnessed.first.or(Some(row as u64));
            }
        }
        Ok(witnessed)
    }
}
