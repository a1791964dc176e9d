//! The products of matrices behind midpoints and radii.
//!
//! A midpoint is a product in f64. A radius is a sum of magnitudes, of which only an upper bound is
//! needed: large ones are summed in f32, at twice the speed, and enlarged by what that may have lost.
//!
//! Both go through the `gemm` crate, as the products of the SonicMoE path do. The other derivation of the
//! truth, [`reference`](crate::reference), does not: what the two agree on stands on two products.

use faer::{Accum, MatMut, MatRef};
use ndarray::{Array2, ArrayView2, Zip};
use rayon::prelude::*;

use super::buffers::{Buffers, Pool};
use super::line::vectorized;
use crate::element::Real;

/// Rows of a result that one task computes: experts are tasks themselves, so that only large ones are split.
const ROWS: usize = 1024;

/// Multiplications from which on f32 pays.
const LARGE: usize = 1 << 20;

/// A·B.
pub(super) fn product<A: Real>(pool: &Pool<A>, a: ArrayView2<'_, A>, b: ArrayView2<'_, A>) -> Array2<A> {
    let (terms, columns) = b.dim();
    let mut product = pool.matrix((a.nrows(), columns));
    let (a, b) = (InOrder::new(a), InOrder::new(b));
    let (a, b) = (a.matrix(), b.matrix());
    match product.as_slice_mut() {
        Some(into) if terms > 0 && columns > 0 => {
            into.par_chunks_mut(ROWS * columns).enumerate().for_each(|(block, into)| {
                let rows = into.len() / columns;
                let into = MatMut::from_row_major_slice_mut(into, rows, columns);
                A::multiply(into, Accum::Replace, a.subrows(block * ROWS, rows), b);
            });
        }
        // Nothing to sum, or nowhere to put it.
        _ => product.fill(A::zero()),
    }
    product
}

/// A matrix of numbers ≥ 0: a function of a midpoint and its radius, which is 0 where there is none.
#[derive(Clone, Copy)]
pub(super) struct Weighed<'w, F> {
    pub(super) mid: ArrayView2<'w, f64>,
    pub(super) rad: Option<ArrayView2<'w, f64>>,
    pub(super) weigh: F,
}

impl<F: Fn(f64, f64) -> f64 + Copy> Weighed<'_, F> {
    /// Midpoints and radii as they lie in memory, row after row or column after column: none where they lie in
    /// several pieces, backwards, or differently.
    fn in_memory(&self) -> Option<(&[f64], Option<&[f64]>)> {
        if !self.mid.is_standard_layout() && !self.mid.t().is_standard_layout() {
            return None;
        }
        let mids = self.mid.as_slice_memory_order()?;
        match &self.rad {
            Some(rad) if rad.strides() == self.mid.strides() => Some((mids, Some(rad.as_slice_memory_order()?))),
            Some(_) => None,
            None => Some((mids, None)),
        }
    }

    fn numbers(&self, pool: &Pool<f64>) -> Array2<f64> {
        let Self { mid, rad, weigh } = *self;
        if let Some((mids, rads)) = self.in_memory() {
            let mut numbers = pool.take(mids.len());
            let into = numbers.as_mut_slice();
            vectorized(
                #[inline(always)]
                move || match rads {
                    Some(rads) => {
                        for ((number, &mid), &rad) in into.iter_mut().zip(mids).zip(rads) {
                            *number = weigh(mid, rad);
                        }
                    }
                    None => {
                        for (number, &mid) in into.iter_mut().zip(mids) {
                            *number = weigh(mid, 0.0);
                        }
                    }
                },
            );
            if let Some(numbers) = in_layout_of(mid, numbers) {
                return numbers;
            }
        }
        match rad {
            Some(rad) => Zip::from(mid).and(rad).map_collect(|&mid, &rad| weigh(mid, rad)),
            None => mid.mapv(|mid| weigh(mid, 0.0)),
        }
    }
}

/// Numbers of a matrix that lie as those of `matrix` do.
fn in_layout_of<A>(matrix: ArrayView2<'_, f64>, values: Vec<A>) -> Option<Array2<A>> {
    let (rows, columns) = matrix.dim();
    match matrix.is_standard_layout() {
        true => Array2::from_shape_vec((rows, columns), values).ok(),
        false => Some(Array2::from_shape_vec((columns, rows), values).ok()?.reversed_axes()),
    }
}

/// At least A·B, and hardly more, with `finish` for each row of sums. 0 where every term is.
///
/// With the operands rounded up to f32, a sum of m products in any order is computed as at least
/// (1 − u)^(m+1) of itself, u = 2⁻²⁴, if nothing leaves f32's normal range. 1 + 2(m + 2)u makes up for
/// it, for (m + 2)u ≤ 1/4.
pub(super) fn at_least(
    buffers: &Buffers,
    a: &Weighed<'_, impl Fn(f64, f64) -> f64 + Copy>,
    b: &Weighed<'_, impl Fn(f64, f64) -> f64 + Copy>,
    finish: impl Fn(&mut [f64]),
) -> Array2<f64> {
    let Buffers { wide, narrow, .. } = buffers;
    let terms = b.mid.nrows();
    let large = a.mid.len() * b.mid.ncols() >= LARGE && terms < 1 << 21;
    if let Some((a, b)) = large.then(|| Some((Upward::of(narrow, a)?, Upward::of(narrow, b)?))).flatten() {
        let lost = 1.0 + 2.0 * (terms + 2) as f64 * (f64::from(f32::EPSILON) / 2.0);
        let unit = a.unit * b.unit;
        let sums = product(narrow, a.values.view(), b.values.view());
        let mut finished = wide.matrix(sums.dim());
        let columns = sums.ncols().max(1);
        if let (Some(into), Some(sums)) = (finished.as_slice_mut(), sums.as_slice()) {
            let finish = &finish;
            vectorized(
                #[inline(always)]
                move || {
                    for (line, sums) in into.chunks_exact_mut(columns).zip(sums.chunks_exact(columns)) {
                        for (into, &sum) in line.iter_mut().zip(sums) {
                            *into = lost * (f64::from(sum) * unit);
                        }
                        finish(line);
                    }
                },
            );
        }
        [a.values, b.values, sums].into_iter().for_each(|values| narrow.give(values));
        return finished;
    }
    let (a, b) = (a.numbers(wide), b.numbers(wide));
    let mut sums = product(wide, a.view(), b.view());
    let columns = sums.ncols().max(1);
    if let Some(sums) = sums.as_slice_mut() {
        vectorized(
            #[inline(always)]
            || {
                // `for_each` is a function of its own, which is not compiled for these vectors.
                for line in sums.chunks_exact_mut(columns) {
                    finish(line);
                }
            },
        );
    }
    wide.give(a);
    wide.give(b);
    sums
}

/// Numbers ≥ 0 in units of a power of two, rounded up to f32.
struct Upward {
    values: Array2<f32>,
    unit: f64,
}

impl Upward {
    /// None where the numbers are spread too far for f32, or do not lie in one piece.
    fn of(pool: &Pool<f32>, matrix: &Weighed<'_, impl Fn(f64, f64) -> f64 + Copy>) -> Option<Self> {
        let ((mids, rads), weigh) = (matrix.in_memory()?, matrix.weigh);
        let of_place = |at: usize| weigh(mids[at], rads.map_or(0.0, |rads| rads[at]));
        let (unit, units) = unit((0..mids.len()).step_by(SAMPLE).map(of_place))?;
        let mut values = pool.take(mids.len());
        let all = vectorized(
            #[inline(always)]
            || {
                let (weigh, units) = (weigh, units);
                let mut misfits = 0;
                match rads {
                    Some(rads) => {
                        for ((value, &mid), &rad) in values.iter_mut().zip(mids).zip(rads) {
                            let (rounded, fits) = upward(weigh(mid, rad) * units);
                            (*value, misfits) = (rounded, misfits | u32::from(!fits));
                        }
                    }
                    None => {
                        for (value, &mid) in values.iter_mut().zip(mids) {
                            let (rounded, fits) = upward(weigh(mid, 0.0) * units);
                            (*value, misfits) = (rounded, misfits | u32::from(!fits));
                        }
                    }
                }
                misfits == 0
            },
        );
        in_layout_of(matrix.mid, values).filter(|_| all).map(|values| Self { values, unit })
    }
}

/// Every so manieth number tells of what size they are.
const SAMPLE: usize = 61;

/// A power of two and its inverse: in units of it the largest of some numbers is near 2³⁰.
fn unit(sample: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let largest = sample.fold(0.0, f64::max);
    let exponent = libm::frexp(largest).1 - 30;
    let usual = largest.is_finite() && exponent.abs() < 400;
    usual.then(|| (libm::ldexp(1.0, exponent), libm::ldexp(1.0, -exponent)))
}

/// The nearest f32 that is not below a number ≥ 0, and whether it may be a factor: 0, or within 2⁻⁶³ and
/// 2⁴⁰, so that no product of two is below the normal range and no sum of 2²¹ of them above.
#[inline(always)]
fn upward(value: f64) -> (f32, bool) {
    const LEAST: f64 = 1.0 / (1u64 << 63) as f64;
    const MOST: f64 = (1u64 << 40) as f64;
    let nearest = value as f32;
    let below = f64::from(nearest) < value;
    (f32::from_bits(nearest.to_bits() + u32::from(below)), (value == 0.0) | (LEAST..=MOST).contains(&value))
}

/// A matrix whose rows or columns lie one after the other: where it was neither, a copy.
enum InOrder<'a, A> {
    Rows(ArrayView2<'a, A>),
    Columns(ArrayView2<'a, A>),
    Copy(Array2<A>),
}

impl<'a, A: Real> InOrder<'a, A> {
    fn new(values: ArrayView2<'a, A>) -> Self {
        if values.is_standard_layout() {
            Self::Rows(values)
        } else if values.t().is_standard_layout() {
            Self::Columns(values)
        } else {
            Self::Copy(values.as_standard_layout().into_owned())
        }
    }

    fn matrix(&self) -> MatRef<'_, A> {
        let (rows, columns) = match self {
            Self::Rows(values) | Self::Columns(values) => values.dim(),
            Self::Copy(values) => values.dim(),
        };
        match self {
            Self::Rows(values) => MatRef::from_row_major_slice(values.as_slice().unwrap_or(&[]), rows, columns),
            Self::Copy(values) => MatRef::from_row_major_slice(values.as_slice().unwrap_or(&[]), rows, columns),
            Self::Columns(values) => {
                MatRef::from_column_major_slice(values.as_slice_memory_order().unwrap_or(&[]), rows, columns)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array, s};

    fn drawn(rows: usize, columns: usize) -> Array2<f64> {
        Array::from_shape_fn((rows, columns), |(i, j)| libm::sin((i * columns + j) as f64 * 0.7310585) * 3.0)
    }

    /// The same matrix, column after column in memory.
    fn by_column(matrix: &Array2<f64>) -> Array2<f64> {
        matrix.t().as_standard_layout().into_owned().reversed_axes()
    }

    #[test]
    fn a_number_is_rounded_up_to_the_next_f32_and_no_farther() {
        for place in 0..10_000 {
            let number = (1.0 + libm::sin(f64::from(place)).abs()) * libm::exp2(f64::from(place % 90) - 55.0);
            let (up, fits) = upward(number);
            assert!(fits && f64::from(up) >= number && f64::from(up.next_down()) < number, "{number}: {up}");
        }
        assert_eq!((upward(0.0), upward(1.0)), ((0.0, true), (1.0, true)));
        assert!(!upward(1e-25).1 && !upward(1e20).1 && !upward(f64::INFINITY).1 && !upward(f64::NAN).1);
    }

    fn product(a: ArrayView2<'_, f64>, b: ArrayView2<'_, f64>) -> Array2<f64> {
        super::product(&Pool::default(), a, b)
    }

    fn above(a: &Array2<f64>, b: &Array2<f64>) -> Array2<f64> {
        let zeros = Array2::zeros(a.dim());
        let a = Weighed { mid: a.view(), rad: Some(zeros.view()), weigh: |a: f64, rad: f64| a + rad };
        at_least(&Buffers::default(), &a, &Weighed { mid: b.view(), rad: None, weigh: |b: f64, _| b }, |_| {})
    }

    #[test]
    fn products_of_any_layout_are_those_of_ndarray() {
        let (a, b) = (drawn(300, 70), drawn(70, 33));
        let expected = a.dot(&b);
        let near = |found: Array2<f64>| assert!((&found - &expected).iter().all(|off| off.abs() < 1e-12));
        near(product(a.view(), b.view()));
        let (by_column_a, by_column_b) = (by_column(&a), by_column(&b));
        assert!(!by_column_a.is_standard_layout() && !by_column_b.is_standard_layout());
        near(product(by_column_a.view(), by_column_b.view()));
        let mut wide = Array2::zeros((300, 140));
        wide.slice_mut(s![.., ..;2]).assign(&a);
        near(product(wide.slice(s![.., ..;2]), b.view()));
        assert_eq!(product(a.slice(s![..0, ..]), b.view()).dim(), (0, 33));
        assert_eq!(product(a.slice(s![.., ..0]), b.slice(s![..0, ..])), Array2::<f64>::zeros((300, 33)));
        assert_eq!(product(a.view(), b.slice(s![.., ..0])).dim(), (300, 0));
        // Of more rows than one task takes.
        let tall = drawn(2 * ROWS + 77, 70);
        let off = product(tall.view(), b.view()) - tall.dot(&b);
        assert!(off.iter().all(|off| off.abs() < 1e-12));
    }

    #[test]
    fn weighed_numbers_stand_where_they_stood_however_they_lie_in_memory() {
        let (mids, rads) = (drawn(6, 9), drawn(6, 9).mapv(f64::abs));
        let (turned, other_rads) = (by_column(&mids), by_column(&rads));
        let expected = &mids + &(2.0 * &rads);
        let weigh = |mid: f64, rad: f64| mid + 2.0 * rad;
        let numbers = |mid, rad| Weighed { mid, rad: Some(rad), weigh }.numbers(&Pool::default());
        assert_eq!(numbers(mids.view(), rads.view()), expected);
        assert_eq!(numbers(turned.view(), other_rads.view()), expected);
        assert_eq!(numbers(mids.view(), other_rads.view()), expected);
        assert_eq!(numbers(turned.view(), rads.view()), expected);
        for (rows, columns) in [(-1, 1), (1, -1), (-1, -1), (2, 1), (1, 2)] {
            let view = |array: &Array2<f64>| array.slice(s![..;rows, ..;columns]).to_owned();
            let [mid, rad] = [&mids, &rads].map(|array| array.slice(s![..;rows, ..;columns]));
            assert_eq!(numbers(mid, rad), view(&expected), "{rows}, {columns}");
        }
    }

    #[test]
    fn a_large_sum_of_magnitudes_is_never_below_the_exact_one_and_at_most_a_thousandth_above() {
        let (mut a, b) = (drawn(128, 2048).mapv(f64::abs), drawn(2048, 64).mapv(|value| 1e-20 * value.abs()));
        a.row_mut(5).fill(0.0);
        // Operands of which the f32 below is the nearest.
        a[[3, 7]] = 1.0 + 1e-9;
        let exact = product(a.view(), b.view());
        let above = above(&a, &b);
        for (&above, &exact) in above.iter().zip(&exact) {
            assert!(exact <= above && above <= 1.001 * exact, "{above} for {exact}");
        }
        assert!(above.row(5).iter().all(|&sum| sum == 0.0));
        assert_ne!(above, exact);
    }

    #[test]
    fn numbers_that_f32_hardly_has_are_summed_in_f64() {
        let (mut a, b) = (drawn(128, 2048).mapv(f64::abs), drawn(2048, 64).mapv(f64::abs));
        for odd in [1e-40, 1e40, f64::INFINITY] {
            a[[0, 0]] = odd;
            // ∞ times an exact 0 is NaN in both; a radius makes ∞ of it.
            let (above, exact) = (above(&a, &b), product(a.view(), b.view()));
            let same = |(above, exact): (&f64, &f64)| above == exact || (above.is_nan() && exact.is_nan());
            assert!(above.iter().zip(&exact).all(same), "{odd}");
        }
    }
}
