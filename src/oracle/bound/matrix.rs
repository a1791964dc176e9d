//! Matrices of balls, and the matrix products of the kernels on them.
//!
//! Every grouped product of the fused model has one exact operand (an input of the layer), so the
//! radius costs one product more: with B exact, and in the same way with A exact,
//! Σ E_a|b| + γ Σ (|a| + E_a)|b| = γ·(|A| + (1 + γ)/γ·E_A)·|B|.
//! γ comes last: γ|a| may underflow in f64 where a·b does not.

use std::borrow::Cow;
use std::ops::Range;

use ndarray::{Array, Array1, Array2, ArrayView1, ArrayView2, Axis, Dimension, Ix1, Ix2, Zip, s};

use super::ball::{Arithmetic, Ball, Measure, Rounding, known};
use super::buffers::Buffers;
use super::product::{Weighed, at_least, product};
use crate::oracle::judge::Bounded;

/// An array of balls.
#[derive(Clone, Debug)]
pub(crate) struct Balls<D: Dimension> {
    pub(crate) mid: Array<f64, D>,
    pub(crate) rad: Array<f64, D>,
}

pub(crate) type Balls1 = Balls<Ix1>;
pub(crate) type Balls2 = Balls<Ix2>;

impl<D: Dimension> Balls<D> {
    /// Numbers that engine and truth share.
    pub(crate) fn exact(mid: Array<f64, D>) -> Self {
        let rad = Array::zeros(mid.raw_dim());
        Self { mid, rad }
    }

    /// Each ball replaced.
    pub(crate) fn map(mut self, f: impl Fn(Ball) -> Ball) -> Self {
        Zip::from(&mut self.mid).and(&mut self.rad).for_each(|mid, rad| {
            let ball = f(Ball { mid: *mid, rad: *rad });
            (*mid, *rad) = (ball.mid, ball.rad);
        });
        self
    }

    /// Each ball rounded.
    pub(crate) fn rounded(mut self, arithmetic: &Arithmetic, rounding: &Rounding) -> Self {
        if self.mid.strides() == self.rad.strides()
            && let (Some(mids), Some(rads)) = (self.mid.as_slice_memory_order(), self.rad.as_slice_memory_order_mut())
        {
            arithmetic.round_all(rounding, mids, rads);
            return self;
        }
        self.map(|ball| arithmetic.round(rounding, ball))
    }

    pub(crate) fn bounded(self) -> Bounded {
        Bounded { truth: self.mid.into_dyn(), bound: self.rad.into_dyn() }
    }
}

impl Balls2 {
    pub(crate) fn zeros(rows: usize, columns: usize) -> Self {
        Self::exact(Array2::zeros((rows, columns)))
    }

    /// Balls computed one by one.
    pub(crate) fn from_fn(rows: usize, columns: usize, mut f: impl FnMut(usize, usize) -> Ball) -> Self {
        let mut balls = Self::zeros(rows, columns);
        for row in 0..rows {
            for column in 0..columns {
                balls.set(row, column, f(row, column));
            }
        }
        balls
    }

    pub(crate) fn at(&self, row: usize, column: usize) -> Ball {
        Ball { mid: self.mid[[row, column]], rad: self.rad[[row, column]] }
    }

    /// Midpoints and radii of every row; none where rows do not lie one after the other.
    pub(super) fn each_row(&self) -> impl Iterator<Item = (&[f64], &[f64])> {
        let columns = self.mid.ncols().max(1);
        let [mids, rads] = [&self.mid, &self.rad].map(|array| array.as_slice().unwrap_or(&[]).chunks_exact(columns));
        mids.zip(rads)
    }

    /// The same, to be written.
    pub(super) fn each_row_mut(&mut self) -> impl Iterator<Item = (&mut [f64], &mut [f64])> {
        let columns = self.mid.ncols().max(1);
        let [mids, rads] = [&mut self.mid, &mut self.rad]
            .map(|array| array.as_slice_mut().unwrap_or(&mut []).chunks_exact_mut(columns));
        mids.zip(rads)
    }

    pub(crate) fn set(&mut self, row: usize, column: usize, ball: Ball) {
        self.mid[[row, column]] = ball.mid;
        self.rad[[row, column]] = ball.rad;
    }

    /// Each ball paired with its place and replaced.
    pub(crate) fn map_indexed(mut self, f: impl Fn(usize, usize, Ball) -> Ball) -> Self {
        Zip::indexed(&mut self.mid).and(&mut self.rad).for_each(|(row, column), mid, rad| {
            let ball = f(row, column, Ball { mid: *mid, rad: *rad });
            (*mid, *rad) = (ball.mid, ball.rad);
        });
        self
    }
}

impl Balls1 {
    pub(crate) fn from_balls(balls: impl IntoIterator<Item = Ball>) -> Self {
        let (mid, rad): (Vec<_>, Vec<_>) = balls.into_iter().map(|ball| (ball.mid, ball.rad)).unzip();
        Self { mid: Array1::from(mid), rad: Array1::from(rad) }
    }
}

/// An operand of a product: numbers, with their radii where they are not exact.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'b> {
    mid: ArrayView2<'b, f64>,
    rad: Option<ArrayView2<'b, f64>>,
}

impl<'b> Operand<'b> {
    /// Numbers that engine and truth share.
    pub(crate) fn exact(mid: ArrayView2<'b, f64>) -> Self {
        Self { mid, rad: None }
    }

    pub(super) fn dim(self) -> (usize, usize) {
        self.mid.dim()
    }

    pub(super) fn at(self, row: usize, column: usize) -> Ball {
        Ball { mid: self.mid[[row, column]], rad: self.rad.map_or(0.0, |rad| rad[[row, column]]) }
    }

    /// One row: midpoints, and radii where they are not 0; copied only where it lies in several pieces.
    pub(super) fn row(self, row: usize) -> (Cow<'b, [f64]>, Option<Cow<'b, [f64]>>) {
        let row = |array: ArrayView2<'b, f64>| {
            let row = array.index_axis_move(Axis(0), row);
            row.to_slice().map_or_else(|| Cow::Owned(row.to_vec()), Cow::Borrowed)
        };
        (row(self.mid), self.rad.map(row))
    }

    /// Some rows.
    pub(crate) fn rows(self, range: Range<usize>) -> Self {
        let rows = |array: ArrayView2<'b, f64>| array.slice_move(s![range.clone(), ..]);
        Self { mid: rows(self.mid), rad: self.rad.map(rows) }
    }

    /// The transpose.
    pub(crate) fn t(self) -> Self {
        Self { mid: self.mid.reversed_axes(), rad: self.rad.map(ArrayView2::reversed_axes) }
    }
}

impl Balls2 {
    pub(crate) fn operand(&self) -> Operand<'_> {
        Operand { mid: self.mid.view(), rad: Some(self.rad.view()) }
    }
}

/// A·B (+ one row of addends).
pub(super) fn midpoint(
    buffers: &Buffers,
    a: Operand<'_>,
    b: Operand<'_>,
    addend: Option<ArrayView1<'_, f64>>,
) -> Array2<f64> {
    let mut mid = product(&buffers.wide, a.mid, b.mid);
    if let Some(addend) = addend {
        mid += &addend;
    }
    mid
}

impl Arithmetic {
    /// A·B (+ one row of addends), summed in any order in the accumulator.
    pub(crate) fn matrix_product(&self, a: Operand<'_>, b: Operand<'_>, addend: Option<ArrayView1<'_, f64>>) -> Balls2 {
        let buffers = Buffers::default();
        self.matrix_product_about(&buffers, midpoint(&buffers, a, b, addend), a, b, addend)
    }

    /// The same where its midpoint is known. With both operands inexact it takes one product more, for
    /// (|A| + E_A)·E_B.
    pub(super) fn matrix_product_about(
        &self,
        buffers: &Buffers,
        mid: Array2<f64>,
        a: Operand<'_>,
        b: Operand<'_>,
        addend: Option<ArrayView1<'_, f64>>,
    ) -> Balls2 {
        let terms = a.mid.ncols() + usize::from(addend.is_some());
        let (gamma, scale) = (self.accumulate.gamma(terms), self.deviation_of_sum(terms));
        let lift = (1.0 + gamma) / gamma;
        let radius = self.radius_of_sum(terms);
        let rad = match self.measure {
            Measure::Midpoint => return Balls { rad: buffers.zeros(mid.dim()), mid },
            Measure::Worst => at_least_weighed(
                buffers,
                a,
                b,
                |mid: f64, rad: f64| mid.abs() + lift * rad,
                |mid: f64, _: f64| mid.abs(),
                #[inline(always)]
                |line| {
                    add_to(line, addend, f64::abs);
                    radius(line);
                },
            ),
            Measure::Deviation => at_least_weighed(
                buffers,
                a,
                b,
                |mid: f64, rad: f64| scale * mid * mid + rad * rad,
                |mid: f64, _: f64| mid * mid,
                #[inline(always)]
                |line| {
                    add_to(line, addend, |addend| scale * addend * addend);
                    radius(line);
                },
            ),
        };
        let product = Balls { mid, rad };
        match (a.rad, b.rad) {
            (Some(_), Some(of_b)) => self.with_errors_of_both(buffers, product, a, of_b, terms),
            _ => product,
        }
    }

    fn with_errors_of_both(
        &self,
        buffers: &Buffers,
        mut product: Balls2,
        a: Operand<'_>,
        of_b: ArrayView2<'_, f64>,
        terms: usize,
    ) -> Balls2 {
        let b = Operand::exact(of_b);
        let more = match self.measure {
            Measure::Midpoint => return product,
            Measure::Worst => {
                let gamma = self.accumulate.gamma(terms);
                let lift = (1.0 + gamma) / gamma;
                let weigh = |mid: f64, rad: f64| lift * (mid.abs() + rad);
                at_least_weighed(
                    buffers,
                    a,
                    b,
                    weigh,
                    |rad: f64, _: f64| rad,
                    |line| {
                        line.iter_mut().for_each(|sum| *sum *= gamma);
                    },
                )
            }
            Measure::Deviation => {
                let weigh = |mid: f64, rad: f64| mid * mid + rad * rad;
                at_least_weighed(
                    buffers,
                    a,
                    b,
                    weigh,
                    |rad: f64, _: f64| rad * rad,
                    |line| {
                        line.iter_mut().for_each(|sum| *sum = sum.sqrt());
                    },
                )
            }
        };
        product.rad.zip_mut_with(&more, |rad, more| *rad = known(self.join(*rad, *more)));
        buffers.give(more);
        product
    }

    /// Squared deviation that the roundings of a sum of m terms add, over Σ terms².
    fn deviation_of_sum(&self, terms: usize) -> f64 {
        terms as f64 * self.accumulate.unit * self.accumulate.unit / 3.0
    }

    /// The radii of sums of m products, in place: terms may underflow, sums overflow, unknown terms be
    /// times 0. They are functions of Σ|a||b| with the operands' errors, or of what the deviations' squares add
    /// up to.
    fn radius_of_sum(&self, terms: usize) -> impl Fn(&mut [f64]) {
        // By each product of the engine and of the truth, and by γ times the sum.
        let underflow = (2 * terms + 1) as f64 * self.accumulate.underflow;
        let (gamma, scale) = (self.accumulate.gamma(terms), self.deviation_of_sum(terms).sqrt());
        let (measure, largest) = (self.measure, self.accumulate.largest);
        #[inline(always)]
        move |line| {
            let (gamma, underflow, scale, largest) = (gamma, underflow, scale, largest);
            match measure {
                Measure::Midpoint => line.fill(0.0),
                Measure::Worst => {
                    for sum in line {
                        let radius = gamma * *sum + underflow.min(*sum);
                        *sum = if *sum > largest { f64::INFINITY } else { known(radius) };
                    }
                }
                Measure::Deviation => {
                    for sum in line {
                        let root = sum.sqrt();
                        *sum = known(root + underflow.min(root / scale));
                    }
                }
            }
        }
    }
}

/// Adds a function of each addend to its sum.
#[inline(always)]
fn add_to(line: &mut [f64], addend: Option<ArrayView1<'_, f64>>, of_addend: impl Fn(f64) -> f64) {
    if let Some(addend) = addend {
        line.iter_mut().zip(addend).for_each(|(sum, &addend)| *sum += of_addend(addend));
    }
}

/// At least A·B of numbers ≥ 0. An inexact operand, of two the left, is weighed with its radius as `lifted`,
/// the other as `plain`.
fn at_least_weighed(
    buffers: &Buffers,
    a: Operand<'_>,
    b: Operand<'_>,
    lifted: impl Fn(f64, f64) -> f64 + Copy,
    plain: impl Fn(f64, f64) -> f64 + Copy,
    finish: impl Fn(&mut [f64]),
) -> Array2<f64> {
    fn weighed<F>(Operand { mid, rad }: Operand<'_>, weigh: F) -> Weighed<'_, F> {
        Weighed { mid, rad, weigh }
    }
    let exact = |operand: Operand<'_>| operand.rad.is_none();
    if exact(a) && !exact(b) {
        at_least(buffers, &weighed(a, plain), &weighed(b, lifted), finish)
    } else {
        at_least(buffers, &weighed(a, lifted), &weighed(Operand { rad: None, ..b }, plain), finish)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;
    use crate::engine::RoundingModel;
    use crate::oracle::bound::numerics_of;

    /// Midpoints by row and radii by column meet in their places.
    #[test]
    fn balls_are_rounded_however_midpoints_and_radii_lie_in_memory() {
        let mid = Array2::from_shape_fn((3, 5), |(i, j)| (i * 5 + j) as f64 + 0.3);
        let rad = Array2::from_shape_fn((3, 5), |(i, j)| ((i + 2 * j) as f64 + 1.0) * 1e-3);
        let by_column = rad.t().as_standard_layout().into_owned().reversed_axes();
        for measure in MEASURES {
            let arithmetic = arithmetic(measure);
            let rounded = Balls2 { mid: mid.clone(), rad: rad.clone() }.rounded(&arithmetic, &arithmetic.storage);
            let other = Balls2 { mid: mid.clone(), rad: by_column.clone() };
            assert_ne!(other.mid.strides(), other.rad.strides());
            let other = other.rounded(&arithmetic, &arithmetic.storage);
            assert_eq!((other.mid, other.rad), (rounded.mid, rounded.rad));
        }
    }

    const MEASURES: [Measure; 2] = [Measure::Worst, Measure::Deviation];

    fn arithmetic(measure: Measure) -> Arithmetic {
        let numerics = numerics_of(DType::BF16, RoundingModel::Fused);
        Arithmetic::new(&numerics, measure)
    }

    fn balls(rows: usize, columns: usize, spread: f64) -> Balls2 {
        Balls2::from_fn(rows, columns, |row, column| {
            let mid = f64::from((7 * row + 3 * column) as u32 % 11) - 4.5;
            Ball { mid, rad: spread * f64::from((row + 5 * column) as u32 % 3) }
        })
    }

    /// Worst: γ_m Σ(|a| + E_a)(|b| + E_b) + Σ(E_a|b| + |a|E_b + E_aE_b). Deviations: the squares of each source,
    /// and m roundings of sums of deviation √Σ(ab)², each u/√3 of that.
    fn radius_by_definition(arithmetic: &Arithmetic, terms: &[(Ball, Ball)]) -> f64 {
        let (m, u) = (terms.len(), arithmetic.accumulate.unit);
        let sum = |f: &dyn Fn(Ball, Ball) -> f64| terms.iter().map(|&(a, b)| f(a, b)).sum::<f64>();
        match arithmetic.measure {
            Measure::Midpoint => 0.0,
            Measure::Worst => {
                let gamma = m as f64 * u / (1.0 - m as f64 * u);
                gamma * sum(&|a, b| a.magnitude() * b.magnitude())
                    + sum(&|a, b| a.rad * b.mid.abs() + a.mid.abs() * b.rad + a.rad * b.rad)
            }
            Measure::Deviation => {
                let passed_on =
                    sum(&|a, b| (a.rad * b.mid).powi(2) + (a.mid * b.rad).powi(2) + (a.rad * b.rad).powi(2));
                (m as f64 * u * u / 3.0 * sum(&|a, b| (a.mid * b.mid).powi(2)) + passed_on).sqrt()
            }
        }
    }

    #[test]
    fn a_product_of_matrices_has_the_radii_of_its_sums() {
        for measure in MEASURES {
            let arithmetic = arithmetic(measure);
            for spread in [0.0, 1e-6, 0.3] {
                let (a, b) = (balls(3, 5, spread), balls(5, 4, 2.0 * spread));
                let exact = Balls::exact(b.mid.clone());
                let both = arithmetic.matrix_product(a.operand(), b.operand(), None);
                let one = arithmetic.matrix_product(a.operand(), Operand::exact(b.mid.view()), None);
                for (row, column) in (0..3).flat_map(|row| (0..4).map(move |column| (row, column))) {
                    for (product, b) in [(&both, &b), (&one, &exact)] {
                        let terms: Vec<_> = (0..5).map(|term| (a.at(row, term), b.at(term, column))).collect();
                        let mid: f64 = terms.iter().map(|(a, b)| a.mid * b.mid).sum();
                        let (found, rad) = (product.at(row, column), radius_by_definition(&arithmetic, &terms));
                        assert!((found.mid - mid).abs() < 1e-12, "{measure:?}: {found:?} for {mid}");
                        assert!((found.rad - rad).abs() <= 1e-6 * rad, "{measure:?}, {spread}: {found:?} for {rad}");
                    }
                }
            }
        }
    }

    /// An addend is one term more, exact.
    #[test]
    fn an_addend_is_one_more_term() {
        for measure in MEASURES {
            let arithmetic = arithmetic(measure);
            let (a, b) = (balls(2, 3, 1e-3), balls(3, 2, 0.0));
            let addend = Array1::from(vec![40.0, -0.5]);
            let product = arithmetic.matrix_product(a.operand(), Operand::exact(b.mid.view()), Some(addend.view()));
            for (row, column) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let mut terms: Vec<_> = (0..3).map(|term| (a.at(row, term), b.at(term, column))).collect();
                terms.push((Ball::exact(addend[column]), Ball::exact(1.0)));
                let rad = radius_by_definition(&arithmetic, &terms);
                let found = product.at(row, column);
                assert!((found.rad - rad).abs() <= 1e-6 * rad, "{measure:?}: {found:?} for {rad}");
            }
        }
    }
}
