//! Matrices of balls, and the matrix products of the kernels on them.
//!
//! Every grouped product of the fused model has one exact operand (an input of the layer), so the
//! radius costs one product more: with B exact, and in the same way with A exact,
//! Σ E_a|b| + γ Σ (|a| + E_a)|b| = γ·(|A| + (1 + γ)/γ·E_A)·|B|.
//! γ comes last: γ|a| may underflow in f64 where a·b does not.

use ndarray::{
    Array, Array1, Array2, Array3, ArrayView1, ArrayView2, ArrayViewMut2, Axis, Dimension, Ix1, Ix2, Ix3, Zip,
};
use rayon::prelude::*;

use super::ball::{Arithmetic, Ball, Measure, Rounding, known};
use super::product::{Weighed, at_least, product};
use crate::oracle::judge::Bounded;
use crate::routing::Routing;
use crate::shape::{ExpertId, TokenId};

/// An array of balls.
#[derive(Clone, Debug)]
pub(crate) struct Balls<D: Dimension> {
    pub(crate) mid: Array<f64, D>,
    pub(crate) rad: Array<f64, D>,
}

pub(crate) type Balls1 = Balls<Ix1>;
pub(crate) type Balls2 = Balls<Ix2>;
pub(crate) type Balls3 = Balls<Ix3>;

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

    /// The rows `range`, copied.
    pub(crate) fn rows(&self, range: std::ops::Range<usize>) -> Self {
        let rows = ndarray::s![range, ..];
        Self { mid: self.mid.slice(rows).to_owned(), rad: self.rad.slice(rows).to_owned() }
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
pub(super) fn midpoint(a: Operand<'_>, b: Operand<'_>, addend: Option<ArrayView1<'_, f64>>) -> Array2<f64> {
    let mut mid = product(a.mid, b.mid);
    if let Some(addend) = addend {
        mid += &addend;
    }
    mid
}

impl Arithmetic {
    /// A·B (+ one row of addends), summed in any order in the accumulator.
    pub(crate) fn matrix_product(&self, a: Operand<'_>, b: Operand<'_>, addend: Option<ArrayView1<'_, f64>>) -> Balls2 {
        self.matrix_product_about(midpoint(a, b, addend), a, b, addend)
    }

    /// The same where its midpoint is known. With both operands inexact it takes one product more, for
    /// (|A| + E_A)·E_B.
    pub(super) fn matrix_product_about(
        &self,
        mid: Array2<f64>,
        a: Operand<'_>,
        b: Operand<'_>,
        addend: Option<ArrayView1<'_, f64>>,
    ) -> Balls2 {
        let terms = a.mid.ncols() + usize::from(addend.is_some());
        let (gamma, scale) = (self.accumulate.gamma(terms), self.deviation_of_sum(terms));
        let lift = (1.0 + gamma) / gamma;
        let radius = self.radius_of_sum(terms);
        let added = |line: &mut [f64], of_addend: &dyn Fn(f64) -> f64| {
            if let Some(addend) = addend {
                line.iter_mut().zip(addend).for_each(|(sum, &addend)| *sum += of_addend(addend));
            }
        };
        let rad = match self.measure {
            Measure::Midpoint => return Balls::exact(mid),
            Measure::Worst => at_least_weighed(
                a,
                b,
                |mid: f64, rad: f64| mid.abs() + lift * rad,
                |mid: f64, _: f64| mid.abs(),
                |line| {
                    added(line, &f64::abs);
                    radius(line);
                },
            ),
            Measure::Deviation => at_least_weighed(
                a,
                b,
                |mid: f64, rad: f64| scale * mid * mid + rad * rad,
                |mid: f64, _: f64| mid * mid,
                |line| {
                    added(line, &|addend| scale * addend * addend);
                    radius(line);
                },
            ),
        };
        let product = Balls { mid, rad };
        match (a.rad, b.rad) {
            (Some(_), Some(of_b)) => self.with_errors_of_both(product, a, of_b, terms),
            _ => product,
        }
    }

    fn with_errors_of_both(
        &self,
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
        move |line| match measure {
            Measure::Midpoint => line.fill(0.0),
            Measure::Worst => line.iter_mut().for_each(|sum| {
                let radius = gamma * *sum + underflow.min(*sum);
                *sum = if *sum > largest { f64::INFINITY } else { known(radius) };
            }),
            Measure::Deviation => line.iter_mut().for_each(|sum| {
                let root = sum.sqrt();
                *sum = known(root + underflow.min(root / scale));
            }),
        }
    }

    /// Σ over each token's rows of weight · row in the accumulator; a token without rows gets an
    /// exact 0. Without weights a sum of m rows takes m − 1 roundings.
    pub(crate) fn combine(&self, rows: &Balls2, weights: Option<&[Ball]>, routing: &Routing) -> Balls2 {
        self.each_token(routing, rows.mid.ncols(), |token, column| {
            let of_token = routing.rows_of_token(token);
            let terms = of_token.iter().map(|&row| {
                let value = rows.at(row as usize, column);
                weights.map_or(value, |weights| self.product(weights[row as usize], value))
            });
            let roundings = if weights.is_some() { of_token.len() } else { of_token.len().saturating_sub(1) };
            self.sum(&self.accumulate, terms, roundings)
        })
    }

    /// A (T, columns) array, computed token by token in parallel.
    pub(crate) fn each_token(
        &self,
        routing: &Routing,
        columns: usize,
        ball: impl Fn(TokenId, usize) -> Ball + Sync,
    ) -> Balls2 {
        let mut balls = Balls2::zeros(routing.tokens(), columns);
        Zip::indexed(balls.mid.rows_mut()).and(balls.rad.rows_mut()).par_for_each(|token, mut mid, mut rad| {
            for column in 0..columns {
                let ball = ball(TokenId(token as u32), column);
                (mid[column], rad[column]) = (ball.mid, ball.rad);
            }
        });
        balls
    }
}

/// At least A·B of numbers ≥ 0. An inexact operand, of two the left, is weighed with its radius as `lifted`,
/// the other as `plain`.
fn at_least_weighed(
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
        at_least(&weighed(a, plain), &weighed(b, lifted), finish)
    } else {
        at_least(&weighed(a, lifted), &weighed(Operand { rad: None, ..b }, plain), finish)
    }
}

/// N arrays by row of the given widths, computed expert by expert in parallel.
pub(crate) fn by_expert<const N: usize>(
    routing: &Routing,
    widths: [usize; N],
    compute: impl Fn(ExpertId) -> [Balls2; N] + Sync,
) -> [Balls2; N] {
    let mut arrays = widths.map(|width| Balls2::zeros(routing.routed(), width));
    {
        let mut experts: Vec<(ExpertId, Vec<[ArrayViewMut2<'_, f64>; 2]>)> =
            (0..routing.experts()).map(|expert| (ExpertId(expert as u32), Vec::with_capacity(N))).collect();
        for array in &mut arrays {
            let (mut mid, mut rad) = (array.mid.view_mut(), array.rad.view_mut());
            for (expert, places) in &mut experts {
                let rows = routing.rows_of_expert(*expert).len();
                let (mid_here, mid_rest) = mid.split_at(Axis(0), rows);
                let (rad_here, rad_rest) = rad.split_at(Axis(0), rows);
                places.push([mid_here, rad_here]);
                (mid, rad) = (mid_rest, rad_rest);
            }
        }
        experts.into_par_iter().for_each(|(expert, places)| {
            if !routing.rows_of_expert(expert).is_empty() {
                for ([mut mid, mut rad], balls) in places.into_iter().zip(compute(expert)) {
                    mid.assign(&balls.mid);
                    rad.assign(&balls.rad);
                }
            }
        });
    }
    arrays
}

/// An (E, rows, columns) array of weight gradients, computed expert by expert in parallel; an
/// expert without tokens gets exact zeros.
pub(crate) fn of_experts(
    routing: &Routing,
    (rows, columns): (usize, usize),
    compute: impl Fn(ExpertId) -> Balls2 + Sync,
) -> Balls3 {
    let mut balls = Balls::exact(Array3::zeros((routing.experts(), rows, columns)));
    Zip::indexed(balls.mid.outer_iter_mut()).and(balls.rad.outer_iter_mut()).par_for_each(
        |expert, mut mid, mut rad| {
            let expert = ExpertId(expert as u32);
            if !routing.rows_of_expert(expert).is_empty() {
                let gradient = compute(expert);
                mid.assign(&gradient.mid);
                rad.assign(&gradient.rad);
            }
        },
    );
    balls
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;
    use crate::engine::RoundingModel;
    use crate::oracle::bound::numerics_of;

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

    /// dx of a token with one pair is its dx̃, its o one product; more pairs take a rounding each.
    #[test]
    fn the_sum_of_one_row_is_that_row_and_each_weight_costs_one_rounding() {
        let pairs = [(1, 0), (2, 0), (2, 1), (2, 2)].map(|(token, expert)| (TokenId(token), ExpertId(expert)));
        let routing = Routing::new(3, 3, pairs).unwrap();
        let (rows, weights) = (balls(4, 6, 1e-7), [0.5, 0.75, 0.25, 1.5].map(Ball::exact));
        for measure in MEASURES {
            let arithmetic = arithmetic(measure);
            let plain = arithmetic.combine(&rows, None, &routing);
            let weighted = arithmetic.combine(&rows, Some(&weights), &routing);
            for column in 0..6 {
                assert_eq!(plain.at(0, column), Ball::default());
                assert_eq!(plain.at(1, column), rows.at(routing.rows_of_token(TokenId(1))[0] as usize, column));
                for (token, sum, roundings) in [(1, &weighted, 1), (2, &plain, 2), (2, &weighted, 3)] {
                    let of_token = routing.rows_of_token(TokenId(token));
                    let unit = Ball::exact(1.0);
                    let weight = |row: u32| if roundings == 2 { unit } else { weights[row as usize] };
                    let terms =
                        of_token.iter().map(|&row| arithmetic.product(weight(row), rows.at(row as usize, column)));
                    let terms: Vec<Ball> = terms.collect();
                    let u = arithmetic.accumulate.unit;
                    let rad = match measure {
                        Measure::Deviation => {
                            let squares = |f: fn(&Ball) -> f64| terms.iter().map(f).sum::<f64>();
                            let of_terms = squares(|term| term.rad * term.rad);
                            (of_terms + f64::from(roundings) * u * u / 3.0 * squares(|term| term.mid * term.mid)).sqrt()
                        }
                        _ => {
                            let gamma = f64::from(roundings) * u / (1.0 - f64::from(roundings) * u);
                            terms.iter().map(|term| term.rad + gamma * term.magnitude()).sum()
                        }
                    };
                    let found = sum.at(token as usize, column).rad;
                    assert!((found - rad).abs() <= 1e-9 * rad, "{measure:?}, token {token}: {found} for {rad}");
                }
            }
        }
    }
}
