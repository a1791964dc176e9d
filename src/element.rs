//! Number types: what tensors are stored in, and what sums are kept in.

use std::fmt;
use std::iter::Sum;
use std::ops::{AddAssign, MulAssign};
use std::str::FromStr;

use faer::{Accum, MatMut, MatRef, Par};
use half::slice::HalfFloatSliceExt;
use half::vec::HalfBitsVecExt;
use half::{bf16, f16};
use pulp::Arch;

use crate::error::{Error, Result};
use crate::routing::softmax::exponential;

/// The storage types, as values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE double precision, 53 bits.
    F64,
    /// IEEE single precision, 24 bits.
    F32,
    /// bfloat16, 8 bits.
    BF16,
    /// IEEE half precision, 11 bits.
    F16,
}

impl DType {
    /// Every type, widest first.
    pub const ALL: [Self; 4] = [Self::F64, Self::F32, Self::BF16, Self::F16];

    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::BF16 | Self::F16 => 2,
        }
    }

    /// The unit roundoff u: rounding a normal number to nearest errs by at most u relative to it.
    pub fn unit_roundoff(self) -> f64 {
        match self {
            Self::F64 => f64::EPSILON / 2.0,
            Self::F32 => f64::from(f32::EPSILON) / 2.0,
            Self::BF16 => 1.0 / 256.0,
            Self::F16 => 1.0 / 2048.0,
        }
    }

    /// Half the smallest subnormal, η: rounding a number below the normal range errs by at most η.
    ///
    /// For f64 half the smallest subnormal is no f64; the smallest subnormal itself stands in.
    pub fn underflow(self) -> f64 {
        match self {
            Self::F64 => f64::from_bits(1),
            Self::F32 => libm::exp2(-150.0),
            Self::BF16 => libm::exp2(-134.0),
            Self::F16 => libm::exp2(-25.0),
        }
    }

    /// The smallest positive normal number; an engine that flushes denormals errs by up to it.
    pub fn smallest_normal(self) -> f64 {
        match self {
            Self::F64 => f64::MIN_POSITIVE,
            Self::F32 | Self::BF16 => f64::from(f32::MIN_POSITIVE),
            Self::F16 => libm::exp2(-14.0),
        }
    }

    /// The largest finite number.
    pub fn largest(self) -> f64 {
        match self {
            Self::F64 => f64::MAX,
            Self::F32 => f64::from(f32::MAX),
            Self::BF16 => bf16::MAX.to_f64(),
            Self::F16 => f16::MAX.to_f64(),
        }
    }

    /// The name used on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::BF16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// `value` rounded once to this type (nearest, ties to even), as f64.
    pub fn round(self, value: f64) -> f64 {
        match self {
            Self::F64 => value,
            Self::F32 => f64::from(value as f32),
            Self::BF16 => <bf16 as Element>::from_f64(value).to_f64(),
            Self::F16 => <f16 as Element>::from_f64(value).to_f64(),
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|dtype| dtype.name() == text)
            .ok_or_else(|| Error::unknown("dtype", text, Self::ALL.map(Self::name)))
    }
}

/// A type that tensors are stored in: f64, f32, bf16 or f16.
///
/// Conversions round once, to nearest with ties to even; widening is exact.
pub trait Element: Copy + Default + PartialEq + PartialOrd + fmt::Debug + Send + Sync + 'static {
    /// The type as a value.
    const DTYPE: DType;

    /// The type of scores, logits and ds, and of accumulation where nothing else is asked for:
    /// f64 beside f64 storage, f32 beside every other.
    type Score: Real;

    /// This number as f64, exactly.
    fn to_f64(self) -> f64;

    /// `value` rounded once.
    fn from_f64(value: f64) -> Self;

    /// This number as f32: exact but for f64, which is rounded once.
    fn to_f32(self) -> f32;

    /// `value` rounded once.
    fn from_f32(value: f32) -> Self;

    /// [`Element::to_f32`] of every number; the shorter slice decides how many.
    fn slice_to_f32(values: &[Self], into: &mut [f32]) {
        Arch::new().dispatch(|| into.iter_mut().zip(values).for_each(|(into, &value)| *into = value.to_f32()));
    }

    /// [`Element::from_f32`] of every number; the shorter slice decides how many.
    fn slice_from_f32(values: &[f32], into: &mut [Self]) {
        Arch::new().dispatch(|| into.iter_mut().zip(values).for_each(|(into, &value)| *into = Self::from_f32(value)));
    }

    /// The same slice, if these are f32.
    fn as_f32(values: &[Self]) -> Option<&[f32]> {
        let _ = values;
        None
    }

    /// The same slice, if these are f64.
    fn as_f64(values: &[Self]) -> Option<&[f64]> {
        let _ = values;
        None
    }

    /// [`Element::as_f32`], to write to.
    fn as_f32_mut(values: &mut [Self]) -> Option<&mut [f32]> {
        let _ = values;
        None
    }

    /// [`Element::as_f64`], to write to.
    fn as_f64_mut(values: &mut [Self]) -> Option<&mut [f64]> {
        let _ = values;
        None
    }

    /// +0, `length` times, from the allocator's zeroed memory where it has such: pages are then
    /// first touched by whoever writes them.
    fn zeros(length: usize) -> Vec<Self>;
}

/// A type that sums are kept in: f32 or f64.
pub trait Real:
    Element<Score = Self> + num_traits::Float + ndarray::LinalgScalar + ndarray::ScalarOperand + AddAssign + MulAssign + Sum
{
    /// Widens a stored number (exact wherever the accumulator is at least as wide).
    fn widen<S: Element>(value: S) -> Self;

    /// Rounds to a storage type, once.
    fn store<S: Element>(self) -> S;

    /// [`Real::widen`] of every number; the shorter slice decides how many.
    fn widen_slice<S: Element>(values: &[S], into: &mut [Self]);

    /// [`Real::store`] of every number; the shorter slice decides how many.
    fn store_slice<S: Element>(values: &[Self], into: &mut [S]);

    /// The same slice, if the storage type is this type: widening would change nothing.
    fn of_stored<S: Element>(values: &[S]) -> Option<&[Self]>;

    /// [`Real::of_stored`], to write to.
    fn of_stored_mut<S: Element>(values: &mut [S]) -> Option<&mut [Self]>;

    /// e^self for a number ≤ 0: in f32 by operations that give the same bits on every machine, and on
    /// a device.
    fn exponential(self) -> Self;

    /// `product` = `left` · `right`, or += with [`Accum::Add`], by one thread, with sums kept in
    /// this type.
    ///
    /// # Panics
    /// If the shapes do not fit.
    fn multiply(product: MatMut<'_, Self>, accumulate: Accum, left: MatRef<'_, Self>, right: MatRef<'_, Self>);
}

impl Element for f64 {
    const DTYPE: DType = DType::F64;
    type Score = f64;

    fn to_f64(self) -> f64 {
        self
    }

    fn from_f64(value: f64) -> Self {
        value
    }

    fn to_f32(self) -> f32 {
        self as f32
    }

    fn from_f32(value: f32) -> Self {
        f64::from(value)
    }

    fn as_f64(values: &[Self]) -> Option<&[f64]> {
        Some(values)
    }

    fn as_f64_mut(values: &mut [Self]) -> Option<&mut [f64]> {
        Some(values)
    }

    fn zeros(length: usize) -> Vec<Self> {
        vec![0.0; length]
    }
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    type Score = f32;

    fn to_f64(self) -> f64 {
        f64::from(self)
    }

    fn from_f64(value: f64) -> Self {
        value as f32
    }

    fn to_f32(self) -> f32 {
        self
    }

    fn from_f32(value: f32) -> Self {
        value
    }

    fn as_f32(values: &[Self]) -> Option<&[f32]> {
        Some(values)
    }

    fn as_f32_mut(values: &mut [Self]) -> Option<&mut [f32]> {
        Some(values)
    }

    fn zeros(length: usize) -> Vec<Self> {
        vec![0.0; length]
    }
}

macro_rules! half_element {
    ($half:ident, $dtype:expr, { $($slices:item)* }) => {
        impl Element for $half {
            const DTYPE: DType = $dtype;
            type Score = f32;

            fn to_f64(self) -> f64 {
                f64::from(self.to_f32())
            }

            // `half`'s own conversion from f64 drops the low 32 bits before it rounds, and so
            // takes numbers just above a midpoint for ties.
            fn from_f64(value: f64) -> Self {
                $half::from_f32(round_to_odd(value))
            }

            fn to_f32(self) -> f32 {
                $half::to_f32(self)
            }

            fn from_f32(value: f32) -> Self {
                $half::from_f32(value)
            }

            fn zeros(length: usize) -> Vec<Self> {
                vec![0u16; length].reinterpret_into()
            }

            $($slices)*
        }
    };
}

half_element!(bf16, DType::BF16, {});
// `half` looks for the machine's conversion instruction at every call: once per slice is enough.
half_element!(f16, DType::F16, {
    fn slice_to_f32(values: &[Self], into: &mut [f32]) {
        let length = values.len().min(into.len());
        values[..length].convert_to_f32_slice(&mut into[..length]);
    }

    fn slice_from_f32(values: &[f32], into: &mut [Self]) {
        let length = values.len().min(into.len());
        into[..length].convert_from_f32_slice(&values[..length]);
    }
});

impl Real for f64 {
    fn widen<S: Element>(value: S) -> Self {
        value.to_f64()
    }

    fn store<S: Element>(self) -> S {
        S::from_f64(self)
    }

    fn widen_slice<S: Element>(values: &[S], into: &mut [Self]) {
        Arch::new().dispatch(|| into.iter_mut().zip(values).for_each(|(into, &value)| *into = value.to_f64()));
    }

    fn store_slice<S: Element>(values: &[Self], into: &mut [S]) {
        Arch::new().dispatch(|| into.iter_mut().zip(values).for_each(|(into, &value)| *into = S::from_f64(value)));
    }

    fn of_stored<S: Element>(values: &[S]) -> Option<&[Self]> {
        S::as_f64(values)
    }

    fn of_stored_mut<S: Element>(values: &mut [S]) -> Option<&mut [Self]> {
        S::as_f64_mut(values)
    }

    fn exponential(self) -> Self {
        self.exp()
    }

    fn multiply(product: MatMut<'_, Self>, accumulate: Accum, left: MatRef<'_, Self>, right: MatRef<'_, Self>) {
        faer::linalg::matmul::matmul(product, accumulate, left, right, 1.0, Par::Seq);
    }
}

impl Real for f32 {
    fn widen<S: Element>(value: S) -> Self {
        value.to_f32()
    }

    fn store<S: Element>(self) -> S {
        S::from_f32(self)
    }

    fn widen_slice<S: Element>(values: &[S], into: &mut [Self]) {
        S::slice_to_f32(values, into);
    }

    fn store_slice<S: Element>(values: &[Self], into: &mut [S]) {
        S::slice_from_f32(values, into);
    }

    fn of_stored<S: Element>(values: &[S]) -> Option<&[Self]> {
        S::as_f32(values)
    }

    fn of_stored_mut<S: Element>(values: &mut [S]) -> Option<&mut [Self]> {
        S::as_f32_mut(values)
    }

    fn exponential(self) -> Self {
        exponential(self)
    }

    fn multiply(product: MatMut<'_, Self>, accumulate: Accum, left: MatRef<'_, Self>, right: MatRef<'_, Self>) {
        faer::linalg::matmul::matmul(product, accumulate, left, right, 1.0, Par::Seq);
    }
}

/// f64 to f32 so that a second rounding to a type of at most 22 bits is as if it were the only one:
/// an inexact result keeps an odd last bit, so it can never lie on a midpoint of the narrower type.
fn round_to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    let back = f64::from(nearest);
    if back == value || value.is_nan() || nearest.to_bits() & 1 == 1 {
        return nearest;
    }
    // The nearest f32 is even and inexact: the odd one is its neighbour on the side of `value`.
    if (back < value) == (value > 0.0) {
        f32::from_bits(nearest.to_bits() + 1)
    } else {
        f32::from_bits(nearest.to_bits() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_just_above_a_midpoint_rounds_up_and_a_tie_to_even() {
        let tie = 1.0 + 1.0 / 256.0;
        assert_eq!(<bf16 as Element>::from_f64(tie).to_f64(), 1.0);
        assert_eq!(<bf16 as Element>::from_f64(tie + 1e-15).to_f64(), 1.0 + 1.0 / 128.0);
        assert_eq!(<bf16 as Element>::from_f64(-tie - 1e-15).to_f64(), -1.0 - 1.0 / 128.0);
        let tie = 1.0 + 1.0 / 2048.0;
        assert_eq!(<f16 as Element>::from_f64(tie).to_f64(), 1.0);
        assert_eq!(<f16 as Element>::from_f64(tie + 1e-15).to_f64(), 1.0 + 1.0 / 1024.0);
    }

    #[test]
    fn rounding_to_a_half_type_is_nearest_over_all_exponents() {
        let mut bits = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..200_000 {
            bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let exponent = (bits % 300) as i32 - 150;
            let value = libm::ldexp(1.0 + (bits >> 12) as f64 / (1u64 << 52) as f64, exponent);
            for dtype in [DType::BF16, DType::F16] {
                let rounded = dtype.round(value);
                if rounded.is_finite() {
                    let allowed = (dtype.unit_roundoff() * value).max(dtype.underflow());
                    assert!((rounded - value).abs() <= allowed, "{dtype} {value:e} became {rounded:e}");
                } else {
                    assert!(value > dtype.largest());
                }
            }
        }
    }
}
