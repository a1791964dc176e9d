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

use crate::element::Real;

/// Rows of a result that one task computes: experts are tasks themselves, so that only large ones are split.
const ROWS: usize = 1024;

/// Multiplications from which on f32 pays.
const LARGE: usize = 1 << 20;

/// A·B.
pub(super) fn product<A: Real>(a: ArrayView2<'_, A>, b: ArrayView2<'_, A>) -> Array2<A> {
    let mut product = Array2::zeros((a.nrows(), b.ncols()));
    let (terms, columns) = b.dim();
    let (a, b) = (InOrder::new(a), InOrder::new(b));
    let (a, b) = (a.matrix(), b.matrix());
    // Nothing to sum, or nowhere to put it: zeros.
    if let (Some(into), true) = (product.as_slice_mut(), terms > 0 && columns > 0) {
        into.par_chunks_mut(ROWS * columns).enumerate().for_each(|(block, into)| {
            let rows = into.len() / columns;
            let into = MatMut::from_row_major_slice_mut(into, rows, columns);
            A::multiply(into, Accum::Replace, a.subrows(block * ROWS, rows), b);
        });
    }
    product
}

/// At least A·B, and hardly more, each sum ended by `finish` with its column. A ≥ 0 is a function of two
/// matrices, B ≥ 0 of one. 0 where every term is.
///
/// With the operands rounded up to f32, a sum of m products in any order is computed as at least
/// (1 − u)^(m+1) of itself, u = 2⁻²⁴, if nothing leaves f32's normal range. 1 + 2(m + 2)u makes up for
/// it, for (m + 2)u ≤ 1/4.
pub(super) fn at_least(
    a: (&Array2<f64>, &Array2<f64>, impl Fn(f64, f64) -> f64 + Copy),
    b: (ArrayView2<'_, f64>, impl Fn(f64) -> f64 + Copy),
    finish: impl Fn(usize, f64) -> f64,
) -> Array2<f64> {
    let ((mid, rad, weigh_a), (values, weigh_b)) = (a, b);
    let terms = values.nrows();
    let large = mid.len() * values.ncols() >= LARGE && terms < 1 << 21;
    let upward = large.then(|| Some((Upward::of_two(mid, rad, weigh_a)?, Upward::of_one(values, weigh_b)?))).flatten();
    if let Some((a, b)) = upward {
        let lost = 1.0 + 2.0 * (terms + 2) as f64 * (f64::from(f32::EPSILON) / 2.0);
        let unit = a.unit * b.unit;
        return finished(&product(a.values.view(), b.values.view()), |column, sum: f32| {
            finish(column, lost * (f64::from(sum) * unit))
        });
    }
    let weight = Zip::from(mid).and(rad).map_collect(|&mid, &rad| weigh_a(mid, rad));
    finished(&product(weight.view(), values.mapv(weigh_b).view()), finish)
}

fn finished<A: Copy>(sums: &Array2<A>, finish: impl Fn(usize, A) -> f64) -> Array2<f64> {
    let mut finished = Array2::zeros(sums.dim());
    for (mut into, row) in finished.rows_mut().into_iter().zip(sums.rows()) {
        for ((column, into), &sum) in into.iter_mut().enumerate().zip(row) {
            *into = finish(column, sum);
        }
    }
    finished
}

/// Numbers ≥ 0 in units of a power of two, rounded up to f32.
struct Upward {
    values: Array2<f32>,
    unit: f64,
}

impl Upward {
    /// `weigh` of two matrices of one layout. None where the numbers are spread too far for f32.
    fn of_two(mid: &Array2<f64>, rad: &Array2<f64>, weigh: impl Fn(f64, f64) -> f64 + Copy) -> Option<Self> {
        if mid.strides() != rad.strides() {
            return None;
        }
        let (mids, rads) = (mid.as_slice_memory_order()?, rad.as_slice_memory_order()?);
        let (unit, units) = unit(mids.iter().zip(rads).step_by(SAMPLE).map(|(&mid, &rad)| weigh(mid, rad)))?;
        let mut values = vec![0.0f32; mids.len()];
        let mut all = true;
        pulp::Arch::new().dispatch(|| {
            for ((value, &mid), &rad) in values.iter_mut().zip(mids).zip(rads) {
                let (rounded, fits) = upward(weigh(mid, rad) * units);
                *value = rounded;
                all &= fits;
            }
        });
        Self::in_layout_of(mid.view(), values, unit).filter(|_| all)
    }

    /// `weigh` of one matrix.
    fn of_one(matrix: ArrayView2<'_, f64>, weigh: impl Fn(f64) -> f64 + Copy) -> Option<Self> {
        // Views of either order have their numbers in one piece.
        let numbers = matrix.as_slice_memory_order()?;
        let (unit, units) = unit(numbers.iter().step_by(SAMPLE).map(|&value| weigh(value)))?;
        let mut values = vec![0.0f32; numbers.len()];
        let mut all = true;
        pulp::Arch::new().dispatch(|| {
            for (value, &number) in values.iter_mut().zip(numbers) {
                let (rounded, fits) = upward(weigh(number) * units);
                *value = rounded;
                all &= fits;
            }
        });
        Self::in_layout_of(matrix, values, unit).filter(|_| all)
    }

    fn in_layout_of(matrix: ArrayView2<'_, f64>, values: Vec<f32>, unit: f64) -> Option<Self> {
        let (rows, columns) = matrix.dim();
        let values = match matrix.is_standard_layout() {
            true => Array2::from_shape_vec((rows, columns), values).ok()?,
            false => Array2::from_shape_vec((columns, rows), values).ok()?.reversed_axes(),
        };
        Some(Self { values, unit })
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

    fn above(a: &Array2<f64>, b: &Array2<f64>) -> Array2<f64> {
        let zeros = Array2::zeros(a.dim());
        at_least((a, &zeros, |a: f64, rad: f64| a + rad), (b.view(), |b: f64| b), |_, sum| sum)
    }

    #[test]
    fn products_of_any_layout_are_those_of_ndarray() {
        let (a, b) = (drawn(300, 70), drawn(70, 33));
        let expected = a.dot(&b);
        let near = |found: Array2<f64>| assert!((&found - &expected).iter().all(|off| off.abs() < 1e-12));
        near(product(a.view(), b.view()));
        near(product(a.t().to_owned().t(), b.t().to_owned().t()));
        let mut wide = Array2::zeros((300, 140));
        wide.slice_mut(s![.., ..;2]).assign(&a);
        near(product(wide.slice(s![.., ..;2]), b.view()));
        assert_eq!(product(a.slice(s![..0, ..]), b.view()).dim(), (0, 33));
        assert_eq!(product(a.slice(s![.., ..0]), b.slice(s![..0, ..])), Array2::<f64>::zeros((300, 33)));
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
