//! Two results of the same thing against each other, without a truth.

use ndarray::{ArrayD, Zip};

use crate::element::{DType, Element};
use crate::engine::Stored;
use crate::oracle::cluster::coordinates;

/// How two tensors of one shape differ.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// All elements.
    pub elements: usize,
    /// Elements with other bits; zeros of either sign differ, and so do NaNs of another payload.
    pub differing: usize,
    /// Elements of which exactly one, or both, are not finite and which are not the same bits.
    pub not_finite: usize,
    /// The element with the largest |a − b|; none where no finite elements differ.
    pub largest: Option<Largest>,
    /// The most places apart, counted in the coarser of both types.
    pub ulps: u64,
    /// ‖a − b‖ over the larger of ‖a‖ and ‖b‖; 0 where both are 0.
    pub relative_l2: f64,
}

/// The element that differs most.
#[derive(Clone, Debug, PartialEq)]
pub struct Largest {
    /// Its coordinates.
    pub at: Vec<usize>,
    /// What the first has there.
    pub a: f64,
    /// What the second has there.
    pub b: f64,
}

impl Difference {
    /// Compares two tensors of one shape; `None` for two shapes.
    ///
    /// ```
    /// use ndarray::arr1;
    /// use sonicmoe::{engine::Stored, oracle::Difference};
    /// let (a, b) = (Stored::of(&arr1(&[1.0f32, 2.0])), Stored::of(&arr1(&[1.0f32, 2.0000002])));
    /// let difference = Difference::between(&a, &b).unwrap();
    /// assert_eq!((difference.differing, difference.ulps), (1, 1));
    /// ```
    pub fn between(a: &Stored, b: &Stored) -> Option<Self> {
        if a.values.shape() != b.values.shape() {
            return None;
        }
        let coarser = if a.dtype.unit_roundoff() >= b.dtype.unit_roundoff() { a.dtype } else { b.dtype };
        let (mut differing, mut not_finite, mut ulps) = (0, 0, 0);
        let (mut squares_a, mut squares_b, mut squares) = (0.0, 0.0, 0.0);
        let mut largest: Option<(f64, usize)> = None;
        for (place, (&a, &b)) in a.values.iter().zip(&b.values).enumerate() {
            squares_a += a * a;
            squares_b += b * b;
            if a.to_bits() == b.to_bits() {
                continue;
            }
            differing += 1;
            if !(a.is_finite() && b.is_finite()) {
                not_finite += 1;
                continue;
            }
            let error = (a - b).abs();
            squares += error * error;
            ulps = ulps.max(place_of(coarser, a).abs_diff(place_of(coarser, b)));
            if largest.is_none_or(|(most, _)| error > most) {
                largest = Some((error, place));
            }
        }
        let norm = f64::max(squares_a, squares_b).sqrt();
        let largest = largest.map(|(_, place)| {
            let at = coordinates(place, a.values.shape());
            Largest { a: a.values[&at[..]], b: b.values[&at[..]], at }
        });
        let relative_l2 = if squares == 0.0 { 0.0 } else { squares.sqrt() / norm };
        Some(Self { elements: a.values.len(), differing, not_finite, largest, ulps, relative_l2 })
    }

    /// Whether every element has the same bits.
    pub fn is_bitwise_equal(&self) -> bool {
        self.differing == 0
    }
}

/// The largest |a − b| over `bounds`, which holds the sum of what both may err; 0 for equal
/// elements, ∞ for different ones where one is not finite. Elements with an unknown bound are left out.
pub fn largest_ratio(a: &ArrayD<f64>, b: &ArrayD<f64>, bounds: &ArrayD<f64>) -> f64 {
    let mut largest = 0.0f64;
    Zip::from(a).and(b).and(bounds).for_each(|&a, &b, &bound| {
        let same = a == b || (a.is_nan() && b.is_nan());
        if same || !bound.is_finite() {
            return;
        }
        let error = (a - b).abs();
        largest = largest.max(if error.is_nan() { f64::INFINITY } else { error / bound });
    });
    largest
}

/// Numbers of a type in their order: neighbours are 1 apart, zeros of both signs are one place.
fn place_of(dtype: DType, value: f64) -> i64 {
    let magnitude = match dtype {
        DType::F64 => value.abs().to_bits() as i64,
        DType::F32 => i64::from((value.abs() as f32).to_bits()),
        DType::BF16 => i64::from(<half::bf16 as Element>::from_f64(value.abs()).to_bits()),
        DType::F16 => i64::from(<half::f16 as Element>::from_f64(value.abs()).to_bits()),
    };
    if value.is_sign_negative() { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use ndarray::arr1;

    #[test]
    fn places_are_counted_in_the_stored_type_and_across_zero() {
        let stored = |values: &[f32]| Stored::of(&arr1(values).mapv(bf16::from_f32));
        let one_up = f32::from(bf16::from_bits(bf16::ONE.to_bits() + 1));
        let ulps = |a: f32, b: f32| Difference::between(&stored(&[a]), &stored(&[b])).unwrap().ulps;
        assert_eq!((ulps(1.0, one_up), ulps(1.0, 2.0), ulps(0.0, -0.0)), (1, 128, 0));
        // Of two types the coarser counts, on whichever side.
        let fine = Stored::of(&arr1(&[one_up]));
        for found in [Difference::between(&fine, &stored(&[1.0])), Difference::between(&stored(&[1.0]), &fine)] {
            assert_eq!(found.unwrap().ulps, 1);
        }
        for dtype in [DType::BF16, DType::F16, DType::F32, DType::F64] {
            let of = |value| Stored { dtype, values: arr1(&[value]).into_dyn() };
            let ulps = |a, b| Difference::between(&of(a), &of(b)).unwrap().ulps;
            // Half of it is no f64.
            let tiny = dtype.underflow() * if dtype == DType::F64 { 1.0 } else { 2.0 };
            let found = (ulps(tiny, -tiny), ulps(-1.0, -1.0 - 2.0 * dtype.unit_roundoff()));
            assert_eq!(found, (2, 1), "{dtype}");
        }
    }

    #[test]
    fn zeros_of_two_signs_and_two_nans_are_not_the_same_bits() {
        let of = |values: &[f32]| Stored::of(&arr1(values));
        let signs = Difference::between(&of(&[0.0]), &of(&[-0.0])).unwrap();
        assert_eq!((signs.differing, signs.relative_l2, signs.is_bitwise_equal()), (1, 0.0, false));
        assert!(Difference::between(&of(&[-0.0, 2.0]), &of(&[-0.0, 2.0])).unwrap().is_bitwise_equal());
        let nan = Difference::between(&of(&[f32::NAN, 1.0]), &of(&[f32::NAN, f32::NAN])).unwrap();
        assert_eq!((nan.differing, nan.not_finite), (1, 1));
        for (a, b) in [(f32::INFINITY, 1.0), (1.0, f32::INFINITY), (f32::NAN, 1.0), (f32::NEG_INFINITY, f32::INFINITY)]
        {
            let found = Difference::between(&of(&[a, 2.0]), &of(&[b, 2.0])).unwrap();
            assert_eq!((found.differing, found.not_finite, found.ulps, found.largest), (1, 1, 0, None), "{a}, {b}");
        }
        assert!(Difference::between(&of(&[1.0]), &of(&[1.0, 2.0])).is_none());
    }

    #[test]
    fn the_norm_of_the_difference_is_over_the_larger_norm_of_both() {
        let of = |values: &[f32]| Stored::of(&arr1(values));
        for (a, b) in [([3.0, 4.0], [3.0, 0.0]), ([3.0, 0.0], [3.0, 4.0])] {
            let found = Difference::between(&of(&a), &of(&b)).unwrap();
            assert_eq!((found.relative_l2, found.differing), (0.8, 1));
            assert_eq!(found.largest.unwrap(), Largest { a: f64::from(a[1]), b: f64::from(b[1]), at: vec![1] });
        }
    }

    #[test]
    fn the_largest_difference_is_named_wherever_it_stands_and_the_first_of_equals() {
        let of = |values: &[f32]| Stored::of(&arr1(values));
        let zeros = of(&[0.0; 4]);
        for (b, at) in [([1.0, 3.0, 2.0, 0.0], 1), ([3.0, 1.0, 2.0, 1.0], 0), ([1.0, 2.0, 2.0, 1.0], 1)] {
            assert_eq!(Difference::between(&zeros, &of(&b)).unwrap().largest.unwrap().at, [at], "{b:?}");
        }
        // By what they differ, not by their size.
        let found = Difference::between(&of(&[3.0, 100.0]), &of(&[-4.0, 101.0])).unwrap();
        assert_eq!(found.largest.unwrap().at, [0]);
        assert!((found.relative_l2 - (50.0f64 / (16.0 + 10201.0)).sqrt()).abs() < 1e-15, "{}", found.relative_l2);
    }

    #[test]
    fn a_difference_within_both_bounds_has_a_ratio_of_at_most_one() {
        let of = |values: &[f64]| arr1(values).into_dyn();
        assert_eq!(largest_ratio(&of(&[1.0, 2.0]), &of(&[1.5, 2.0]), &of(&[0.5, 0.0])), 1.0);
        for (a, b) in [(f64::NAN, 1.0), (1.0, f64::NAN), (f64::INFINITY, 1.0), (f64::INFINITY, f64::NEG_INFINITY)] {
            assert_eq!(largest_ratio(&of(&[a]), &of(&[b]), &of(&[1.0])), f64::INFINITY, "{a}, {b}");
        }
        assert_eq!(largest_ratio(&of(&[f64::INFINITY]), &of(&[f64::INFINITY]), &of(&[1.0])), 0.0);
        assert_eq!(largest_ratio(&of(&[3.0]), &of(&[1.0]), &of(&[f64::INFINITY])), 0.0);
        assert_eq!(largest_ratio(&of(&[f64::NAN]), &of(&[1.0]), &of(&[f64::INFINITY])), 0.0);
        assert_eq!(largest_ratio(&of(&[f64::NAN]), &of(&[f64::NAN]), &of(&[1.0])), 0.0);
    }
}
