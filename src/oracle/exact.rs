//! The exact regime: the one value that each number of a layer has, whatever the order of sums.
//!
//! Where every sum of |terms| stays below 2²³ of its units (the unit of a sum is the power of two
//! that divides all its terms), every partial sum in every order is a number that f32 has: no sum
//! rounds. σ is exactly 1 or 0 by the sign of the gate, and a stored tensor is one rounding of an
//! exact number. So all engines with the rounding points of the method have the same values, and a
//! difference of one bit in one element is a fault: no bound, no tolerance.
//!
//! [`expected`] computes these values from problems drawn at [`Scale::Exact`](crate::case::Scale), and
//! checks its own ground on every problem: all sums are exact; the storage type has h and a, and
//! wherever the score is a power of two dh and a′; gates lie where σ is flat; no row that an engine
//! has to write is 0, because a row that was never written would look the same.

#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;

use ndarray::{
    Array, Array1, Array2, Array3, ArrayD, ArrayView1, ArrayView2, Axis, Dimension, IntoDimension, ShapeError, s,
};

use crate::activation::Activation;
use crate::element::DType;
use crate::engine::{Output, Results, Stored};
use crate::error::{Error, Result};
use crate::problem::{Gating, Problem};
use crate::routing::Routing;
use crate::shape::{ExpertId, TokenId};

/// Σ|terms| below this many units: f32 has all integers up to 2²⁴; one bit is left for adders that
/// align before they add.
const UNITS: f64 = (1u32 << 23) as f64;

/// From here on σ and f′ are exactly 1 in f32, and so is silu′ = 1 + g·e^−g: 21·e^−21 < 2⁻²⁵.
const ON: f64 = 21.0;

/// Up to here σ and f′ are exactly 0 in f32: e^−104 < 2⁻¹⁵⁰.
const OFF: f64 = -104.0;

/// The values of every result and intermediate of `problem`, stored in `storage`, ds in f32.
///
/// `problem` holds the numbers as stored, widened ([`Problem::widen`]).
///
/// ```
/// use half::bf16;
/// use sonicmoe::case::{Case, Pairing, Scale};
/// use sonicmoe::engine::Output;
/// use sonicmoe::oracle::exact;
/// use sonicmoe::sonic::cpu::CpuEngine;
/// use sonicmoe::{DType, Record, run};
///
/// let case = Case::new("33,16,24,5,2".parse()?).with_pairing(Pairing::TopK).with_scale(Scale::Exact);
/// let problem = case.problem::<bf16>()?;
/// let outcome = run(&CpuEngine::<f32>::new(), &problem, Record::Intermediates)?;
/// let expected = exact::expected(&problem.widen(), DType::BF16)?;
/// assert!(exact::differences(&outcome.results, &expected)?.is_empty());
/// # Ok::<(), sonicmoe::Error>(())
/// ```
///
/// # Errors
/// A router, f64 storage (where σ(−150) is not 0), or a number for which the regime does not hold.
pub fn expected(problem: &Problem<'_, f64>, storage: DType) -> Result<Results> {
    let Gating::Given { routing, scores } = problem.gating() else {
        return Err(Error::not_exact("scores", &[], "a router's scores are rounded"));
    };
    if storage == DType::F64 {
        return Err(Error::unknown("storage type of the exact regime", "f64", ["bf16", "f16", "f32"]));
    }
    let layer = Layer { problem, routing, scores: routing.to_rows(scores), storage };
    let results = layer.results()?;
    layer.no_row_is_zero(&results)?;
    Ok(results)
}

/// Where one result differs from the only values that it can have.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Which result.
    pub output: Output,
    /// How many elements differ.
    pub elements: usize,
    /// The first of them.
    pub at: Vec<usize>,
    /// What the engine has there.
    pub value: f64,
    /// What it has to have.
    pub expected: f64,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { output, elements, at, value, expected } = self;
        write!(
            f,
            "{output}: {elements} elements are not the exact ones; the first at {at:?}: {value:e}, exactly {expected:e}"
        )
    }
}

/// Compares results value by value; −0 equals +0, NaN equals nothing. Results that `expected` does
/// not have are passed over.
///
/// # Errors
/// A result of another shape.
pub fn differences(results: &Results, expected: &Results) -> Result<Vec<Difference>> {
    let mut found = Vec::new();
    for (&output, stored) in results {
        let Some(exact) = expected.get(&output) else { continue };
        if stored.values.shape() != exact.values.shape() {
            let (expected, found) = (exact.values.shape(), stored.values.shape());
            return Err(Error::shape(output.name(), expected, found, "the shape of the exact result"));
        }
        let mut differing =
            stored.values.indexed_iter().zip(&exact.values).filter(|((_, value), expected)| *value != *expected);
        if let Some(((at, &value), &expected)) = differing.next() {
            let at = at.slice().to_vec();
            found.push(Difference { output, elements: 1 + differing.count(), at, value, expected });
        }
    }
    Ok(found)
}

struct Layer<'a, 'p> {
    problem: &'a Problem<'p, f64>,
    routing: &'a Routing,
    /// By row.
    scores: Vec<f64>,
    storage: DType,
}

/// dh, a′ and ds by row.
struct DownBackward {
    dh: Array2<f64>,
    a_prime: Array2<f64>,
    ds: Vec<f64>,
}

impl Layer<'_, '_> {
    fn results(&self) -> Result<Results> {
        let p = self.problem;
        let [h, a] = self.up_forward()?;
        let y = self.stored(
            "y",
            self.of_experts(p.d(), |expert, rows| {
                let b2 = p.b2().map(|b2| b2.index_axis_move(Axis(0), expert));
                product("y", a.slice(s![rows, ..]), self.w2(expert).t(), b2)
            })?,
        )?;
        let o = self.combine("o", &y, &self.scores)?;
        let DownBackward { dh, a_prime, ds } = self.down_backward_activation(&h, &a)?;
        let dx_expanded = self.stored(
            "dx_expanded",
            self.of_experts(p.d(), |expert, rows| {
                product("dx_expanded", dh.slice(s![rows, ..]), self.w1(expert), None)
            })?,
        )?;
        let dx = self.combine("dx", &dx_expanded, &vec![1.0; self.scores.len()])?;

        let (mut dw1, mut dw2) = (Array3::zeros(p.w1().raw_dim()), Array3::zeros(p.w2().raw_dim()));
        let (mut db1, mut db2) = (Array2::zeros((p.e(), p.h_width())), Array2::zeros((p.e(), p.d())));
        for expert in 0..p.e() {
            let rows = self.rows(expert);
            let (x, dout) = (self.gather(p.x(), &rows), self.gather(p.dout(), &rows));
            let (dh, a_prime) = (dh.slice(s![rows.clone(), ..]), a_prime.slice(s![rows.clone(), ..]));
            dw1.index_axis_mut(Axis(0), expert).assign(&product("dw1", dh.t(), x.view(), None)?);
            dw2.index_axis_mut(Axis(0), expert).assign(&product("dw2", dout.t(), a_prime, None)?);
            if p.b1().is_some() {
                let (ones, scores) = (Array2::ones((1, rows.len())), Array1::from(self.scores[rows].to_vec()));
                db1.row_mut(expert).assign(&product("db1", ones.view(), dh, None)?.row(0));
                let scores = scores.insert_axis(Axis(0));
                db2.row_mut(expert).assign(&product("db2", scores.view(), dout.view(), None)?.row(0));
            }
        }

        let of_storage = |values: ArrayD<f64>| Stored { dtype: self.storage, values };
        let mut results = Results::from([
            (Output::O, of_storage(o.into_dyn())),
            (Output::Dx, of_storage(dx.into_dyn())),
            (Output::Dw1, of_storage(self.stored("dw1", dw1)?.into_dyn())),
            (Output::Dw2, of_storage(self.stored("dw2", dw2)?.into_dyn())),
            (Output::H, of_storage(h.into_dyn())),
            (Output::A, of_storage(a.into_dyn())),
            (Output::Y, of_storage(y.into_dyn())),
            (Output::Dh, of_storage(dh.into_dyn())),
            (Output::APrime, of_storage(a_prime.into_dyn())),
            (Output::DxExpanded, of_storage(dx_expanded.into_dyn())),
        ]);
        let ds = Array1::from(self.routing.to_pairs(&ds)).into_dyn();
        results.insert(Output::Ds, Stored { dtype: DType::F32, values: ds });
        if p.b1().is_some() {
            results.insert(Output::Db1, of_storage(self.stored("db1", db1)?.into_dyn()));
            results.insert(Output::Db2, of_storage(self.stored("db2", db2)?.into_dyn()));
        }
        Ok(results)
    }

    /// h and a, which the storage type has as they are.
    fn up_forward(&self) -> Result<[Array2<f64>; 2]> {
        let p = self.problem;
        let h = self.of_experts(p.h_width(), |expert, rows| {
            let b1 = p.b1().map(|b1| b1.index_axis_move(Axis(0), expert));
            product("h", self.gather(p.x(), &rows).view(), self.w1(expert).t(), b1)
        })?;
        let mut a = Array2::zeros((h.nrows(), p.n()));
        for ((row, unit), a) in a.indexed_iter_mut() {
            *a = self.activate(h.row(row), row, unit)?.value;
        }
        for row in 0..h.nrows() {
            self.representable("h", row, h.row(row))?;
            self.representable("a", row, a.row(row))?;
        }
        Ok([h, a])
    }

    fn down_backward_activation(&self, h: &Array2<f64>, a: &Array2<f64>) -> Result<DownBackward> {
        let p = self.problem;
        let g = self.of_experts(p.n(), |expert, rows| {
            product("dout w2", self.gather(p.dout(), &rows).view(), self.w2(expert), None)
        })?;
        let (mut dh, mut a_prime) = (Array2::zeros(h.raw_dim()), Array2::zeros(a.raw_dim()));
        let mut ds = vec![0.0; self.scores.len()];
        for (row, &score) in self.scores.iter().enumerate() {
            for unit in 0..p.n() {
                let Unit { value, slopes } = self.activate(h.row(row), row, unit)?;
                a_prime[[row, unit]] = score * value;
                for (column, slope) in slopes {
                    dh[[row, column]] = score * g[[row, unit]] * slope;
                }
            }
            if score.abs() == lowest_bit(score) {
                self.representable("dh", row, dh.row(row))?;
                self.representable("a_prime", row, a_prime.row(row))?;
            }
            let mut factors: Vec<f64> = g.row(row).to_vec();
            let mut others: Vec<f64> = a.row(row).to_vec();
            if let Some(b2) = p.b2() {
                let expert = self.routing.pair_expert()[self.routing.row_pair()[row] as usize].index();
                factors.extend(p.dout().row(self.routing.row_token()[row].index()));
                others.extend(b2.row(expert));
            }
            let factors = ArrayView2::from_shape((1, factors.len()), &factors).map_err(shapes)?;
            let others = ArrayView2::from_shape((others.len(), 1), &others).map_err(shapes)?;
            ds[row] = product("ds", factors, others, None)?[[0, 0]];
        }
        Ok(DownBackward { dh: self.stored("dh", dh)?, a_prime: self.stored("a_prime", a_prime)?, ds })
    }

    /// f and its slopes by the sign of the gate, which has to lie where they are flat.
    fn activate(&self, h: ArrayView1<'_, f64>, row: usize, unit: usize) -> Result<Unit> {
        let activation = self.problem.activation();
        let column = if activation.gated() { 2 * unit } else { unit };
        let gate = h[column];
        let flat = gate >= ON || gate <= OFF;
        let kinked = matches!(activation, Activation::ReGlu | Activation::Relu | Activation::ReluSquared);
        if !flat && !kinked {
            let reason = format!("σ({gate}) is neither 0 nor 1 in f32: gates have to be ≥ {ON} or ≤ {OFF}");
            return Err(Error::not_exact("h", &[row, column], reason));
        }
        let positive = gate.max(0.0);
        let on = f64::from(u8::from(gate > 0.0));
        Ok(if activation.gated() {
            let up = h[column + 1];
            Unit { value: positive * up, slopes: vec![(column, on * up), (column + 1, positive)] }
        } else if activation == Activation::ReluSquared {
            Unit { value: positive * positive, slopes: vec![(column, 2.0 * positive)] }
        } else {
            Unit { value: positive, slopes: vec![(column, on)] }
        })
    }

    /// Σ over a token's pairs of weight · `rows`, stored.
    fn combine(&self, name: &str, rows: &Array2<f64>, weights: &[f64]) -> Result<Array2<f64>> {
        let mut sums = Array2::zeros((self.problem.t(), rows.ncols()));
        for token in 0..self.problem.t() {
            let own: Vec<usize> =
                self.routing.rows_of_token(TokenId(token as u32)).iter().map(|&row| row as usize).collect();
            let weights: Vec<f64> = own.iter().map(|&row| weights[row]).collect();
            let weights = ArrayView2::from_shape((1, own.len()), &weights).map_err(shapes)?;
            let sum = product(name, weights, rows.select(Axis(0), &own).view(), None)?;
            sums.row_mut(token).assign(&sum.row(0));
        }
        self.stored(name, sums)
    }

    fn of_experts(
        &self,
        columns: usize,
        of_expert: impl Fn(usize, Range<usize>) -> Result<Array2<f64>>,
    ) -> Result<Array2<f64>> {
        let mut all = Array2::zeros((self.routing.routed(), columns));
        for expert in 0..self.problem.e() {
            let rows = self.rows(expert);
            all.slice_mut(s![rows.clone(), ..]).assign(&of_expert(expert, rows)?);
        }
        Ok(all)
    }

    fn rows(&self, expert: usize) -> Range<usize> {
        self.routing.rows_of_expert(ExpertId(expert as u32))
    }

    fn w1(&self, expert: usize) -> ArrayView2<'_, f64> {
        self.problem.w1().index_axis_move(Axis(0), expert)
    }

    fn w2(&self, expert: usize) -> ArrayView2<'_, f64> {
        self.problem.w2().index_axis_move(Axis(0), expert)
    }

    fn gather(&self, source: ArrayView2<'_, f64>, rows: &Range<usize>) -> Array2<f64> {
        let tokens: Vec<usize> = self.routing.row_token()[rows.clone()].iter().map(|token| token.index()).collect();
        source.select(Axis(0), &tokens)
    }

    /// One rounding of each number; none may leave the range of the type.
    fn stored<D: Dimension>(&self, name: &str, values: Array<f64, D>) -> Result<Array<f64, D>> {
        let rounded = values.mapv(|value| self.storage.round(value));
        match values.indexed_iter().find(|(_, value)| value.abs() > self.storage.largest()) {
            Some((at, value)) => {
                let reason = format!("{value:e} is beyond the range of {}", self.storage);
                Err(Error::not_exact(name, at.into_dimension().slice(), reason))
            }
            None => Ok(rounded),
        }
    }

    fn representable(&self, name: &str, row: usize, values: ArrayView1<'_, f64>) -> Result<()> {
        match values.iter().position(|&value| self.storage.round(value) != value) {
            Some(column) => {
                let reason = format!("{} does not have {:e}", self.storage, values[column]);
                Err(Error::not_exact(name, &[row, column], reason))
            }
            None => Ok(()),
        }
    }

    /// Rows of tokens with pairs and of experts with tokens have a number other than 0 each.
    fn no_row_is_zero(&self, results: &Results) -> Result<()> {
        let token_has_pairs = |token: usize| !self.routing.rows_of_token(TokenId(token as u32)).is_empty();
        for (output, Stored { values, .. }) in results {
            for (at, row) in values.rows().into_iter().enumerate() {
                let rows_of_first = values.shape()[1..values.ndim().max(2) - 1].iter().product::<usize>().max(1);
                let first = at / rows_of_first;
                let written = match output {
                    Output::O | Output::Dx => token_has_pairs(first),
                    Output::Dw1 | Output::Dw2 | Output::Db1 | Output::Db2 => !self.rows(first).is_empty(),
                    _ => true,
                };
                if written && row.iter().all(|&value| value == 0.0) && !row.is_empty() {
                    let at = [first, at % rows_of_first];
                    return Err(Error::not_exact(output.name(), &at, "this row is 0, as if it had never been written"));
                }
            }
        }
        Ok(())
    }
}

/// One unit of the activation.
struct Unit {
    value: f64,
    /// ∂a/∂h by column of h.
    slopes: Vec<(usize, f64)>,
}

/// `left` · `right` (+ `bias` in every row), if every partial sum in every order is exact.
fn product(
    name: &str,
    left: ArrayView2<'_, f64>,
    right: ArrayView2<'_, f64>,
    bias: Option<ArrayView1<'_, f64>>,
) -> Result<Array2<f64>> {
    let (mut sums, mut sizes) = (left.dot(&right), left.mapv(f64::abs).dot(&right.mapv(f64::abs)));
    if let Some(bias) = bias {
        sums += &bias;
        sizes += &bias.mapv(f64::abs);
    }
    let units = |lane: ArrayView1<'_, f64>| lane.iter().copied().map(lowest_bit).fold(f64::INFINITY, f64::min);
    let of_row: Vec<f64> = left.outer_iter().map(units).collect();
    let of_column: Vec<f64> = right.axis_iter(Axis(1)).map(units).collect();
    for ((row, column), &size) in sizes.indexed_iter() {
        let unit = (of_row[row] * of_column[column]).min(bias.map_or(f64::INFINITY, |bias| lowest_bit(bias[column])));
        if size > 0.0 && size / unit >= UNITS {
            let reason =
                format!("its terms add up to {size:e}, 2^{:.1} of their units of {unit:e}", (size / unit).log2());
            return Err(Error::not_exact(name, &[row, column], reason));
        }
    }
    Ok(sums)
}

/// The largest power of two that divides `value`; ∞ of 0.
fn lowest_bit(value: f64) -> f64 {
    if value == 0.0 {
        return f64::INFINITY;
    }
    let (mantissa, exponent) = libm::frexp(value);
    // 53 bits as an integer.
    let integer = libm::ldexp(mantissa.abs(), 53) as u64;
    libm::ldexp((1u64 << integer.trailing_zeros()) as f64, exponent - 53)
}

fn shapes(error: ShapeError) -> Error {
    Error::internal(format!("the exact layer: {error}"))
}
