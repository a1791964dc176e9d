//! A store whose argument is nearly known: what it rounds to is known better than half a unit in the last place.

use super::ball::{Arithmetic, Measure, Rounding};
use super::line::vectorized;
use crate::element::DType;

/// What a radius may have lost beside itself, as a sum of up to 2²⁰ terms in f64.
const LOST_OF_RADII: f64 = f64::EPSILON * (1 << 20) as f64;

impl Arithmetic {
    /// One store of numbers that all lie in balls of radii `between`, where `rounded` are the radii that
    /// [`round_all`](Self::round_all) makes of them. Rounding to nearest is monotone, so what an engine stores lies
    /// between what the two ends are rounded to:
    ///
    /// ```text
    /// |stored − v|  ≤  max(|RN(v − E) − v|, |RN(v + E) − v|)  ≤  E + half a unit in the last place
    /// ```
    ///
    /// Where E is far below that unit it is |RN(v) − v|, on average half of what one rounding allows. Where no type
    /// is known, beyond its range, and among deviations the radius is that of `rounded`.
    pub(super) fn round_between(&self, rounding: &Rounding, (mids, rounded): (&[f64], &[f64]), between: &mut [f64]) {
        let nearest = rounding.dtype.filter(|_| self.measure == Measure::Worst).and_then(Nearest::of);
        let Some(nearest) = nearest else { return between.copy_from_slice(rounded) };
        vectorized(
            #[inline(always)]
            move || {
                for ((rad, &mid), &rounded) in between.iter_mut().zip(mids).zip(rounded) {
                    let reach = *rad * (1.0 + LOST_OF_RADII);
                    let low = nearest.round((mid - reach).next_down());
                    let high = nearest.round((mid + reach).next_up());
                    let farthest = (low - mid).abs().max((high - mid).abs());
                    *rad = if rounded.is_finite() { rounded.min(farthest) } else { rounded };
                }
            },
        );
    }
}

/// [`DType::round`] up to a type's largest number, to the last bit and without a branch.
#[derive(Clone, Copy)]
struct Nearest {
    /// How many bits of f64's fraction the type's normal numbers do not have.
    dropped: u32,
    /// Its smallest normal number.
    normal: f64,
    /// 1.5·2⁵² of its smallest numbers: a sum with it has nothing below them.
    shift: f64,
}

impl Nearest {
    /// None for f64, to which nothing is rounded.
    fn of(dtype: DType) -> Option<Self> {
        let kept = match dtype {
            DType::F64 => return None,
            DType::F32 => 23,
            DType::BF16 => 7,
            DType::F16 => 10,
        };
        let shift = 1.5 * libm::exp2(52.0) * 2.0 * dtype.underflow();
        Some(Self { dropped: 52 - kept, normal: dtype.smallest_normal(), shift })
    }

    #[inline(always)]
    fn round(&self, x: f64) -> f64 {
        let (bits, below) = (x.to_bits(), (1 << self.dropped) - 1);
        // Half a unit, ties to even: less where the last bit that is kept is 0. What carries over is the exponent's.
        let half = (below >> 1) + ((bits >> self.dropped) & 1);
        let normal = f64::from_bits(bits.wrapping_add(half) & !below);
        if x.abs() < self.normal { (x + self.shift) - self.shift } else { normal }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ball::Ball;
    use super::*;
    use crate::element::DType;
    use crate::engine::{Numerics, RoundingModel};
    use crate::oracle::bound::numerics_of;

    fn arithmetic(storage: DType, measure: Measure) -> Arithmetic {
        Arithmetic::new(&numerics_of(storage, RoundingModel::Fused), measure)
    }

    /// Numbers of every binade of a type, its subnormal range and half of that included: its own numbers, halves
    /// between two of them, and what lies anywhere.
    fn numbers(storage: DType) -> impl Iterator<Item = f64> {
        let ulp = 2.0 * storage.unit_roundoff();
        let binades = (1..300).map(move |step| storage.largest() * libm::exp2(-f64::from(step)));
        let within = move |step: i32| 1.0 + ulp * f64::from(step) / 6.0;
        let all = binades.flat_map(move |binade| (0..13).map(move |step| binade * within(step)));
        all.flat_map(|value| [value, -value]).filter(move |value| value.abs() > storage.underflow())
    }

    /// Balls stored, once by one rounding and once between their ends.
    fn stored(arithmetic: &Arithmetic, balls: &[Ball]) -> Vec<[f64; 2]> {
        let mids: Vec<f64> = balls.iter().map(|ball| ball.mid).collect();
        let mut between: Vec<f64> = balls.iter().map(|ball| ball.rad).collect();
        let mut rounded = between.clone();
        arithmetic.round_all(&arithmetic.storage, &mids, &mut rounded);
        arithmetic.round_between(&arithmetic.storage, (&mids, &rounded), &mut between);
        rounded.into_iter().zip(between).map(|(rounded, between)| [rounded, between]).collect()
    }

    #[test]
    fn whatever_lies_in_a_ball_is_stored_within_the_ball_rounded_and_an_end_attains_it() {
        for storage in [DType::BF16, DType::F16, DType::F32] {
            let arithmetic = arithmetic(storage, Measure::Worst);
            let ulp = 2.0 * storage.unit_roundoff();
            let shares = [0.0, 1e-6, 0.1, 0.5, 0.9, 3.7, 1e3];
            let ball = |mid: f64, share: f64| Ball { mid, rad: share * ulp * mid.abs() };
            let balls: Vec<Ball> = numbers(storage).flat_map(|mid| shares.map(|share| ball(mid, share))).collect();
            for (&Ball { mid, rad }, [once, between]) in balls.iter().zip(stored(&arithmetic, &balls)) {
                let what = format!("{storage} {mid:e} ± {rad:e}");
                assert!(between <= once, "{what}: {between} beyond {once}");
                let off = |value: f64| (storage.round(value) - mid).abs();
                let within = (-8..=8).map(|place| off(mid + f64::from(place) / 8.0 * rad));
                let farthest = within.fold(0.0, f64::max);
                assert!(farthest <= between, "{what}: {farthest} beyond {between}");
                // An end may lie half way between two numbers: a little farther out it does not.
                let out = rad * (1.0 + 1e-9) + 1e-15 * mid.abs();
                assert!(between <= off(mid - out).max(off(mid + out)), "{what}: {between} is more than its ends'");
            }
        }
    }

    #[test]
    fn the_nearest_number_is_that_of_the_type_to_the_last_bit() {
        for storage in [DType::BF16, DType::F16, DType::F32] {
            let nearest = Nearest::of(storage).expect("a type that is rounded to");
            let mut checked = 0;
            let mut check = |value: f64| {
                if value.abs() <= storage.largest() {
                    checked += 1;
                    let (found, expected) = (nearest.round(value), storage.round(value));
                    assert!(found == expected, "{storage} {value:e}: {found:e} for {expected:e}");
                }
            };
            let halves = (0..300).map(|step| storage.underflow() * f64::from(step));
            for value in numbers(storage).chain(halves.flat_map(|half| [half, -half])) {
                for off in [value.next_down(), value, value.next_up()] {
                    check(off);
                    check(storage.round(off));
                    // Half way to the next number, where ties go to the even one.
                    let number = storage.round(off);
                    check(number + (storage.unit_roundoff() * number).max(storage.underflow()));
                }
            }
            check(storage.largest());
            assert!(checked > 10_000, "{checked}");
        }
        assert!(Nearest::of(DType::F64).is_none());
    }

    /// The error of a number that is known exactly is known exactly: on average it is half of the worst.
    #[test]
    fn a_store_of_what_is_known_errs_by_what_it_rounds_off() {
        let arithmetic = arithmetic(DType::BF16, Measure::Worst);
        let balls: Vec<Ball> =
            (0..10_000).map(|step| Ball { mid: 1.0 + f64::from(step) / 10_000.0, rad: 1e-9 }).collect();
        let (mut of_once, mut of_between) = (0.0, 0.0);
        for (ball, [once, between]) in balls.iter().zip(stored(&arithmetic, &balls)) {
            let rounded_off = (DType::BF16.round(ball.mid) - ball.mid).abs();
            assert!(between >= rounded_off, "{ball:?}: {between} < {rounded_off}");
            of_once += once;
            of_between += between;
        }
        assert!((0.49..0.51).contains(&(of_between / of_once)), "{}", of_between / of_once);
    }

    #[test]
    fn where_no_ends_are_known_a_store_between_them_is_one_rounding() {
        let flushing = Numerics { flushes_denormals: true, ..numerics_of(DType::BF16, RoundingModel::Fused) };
        let flushing = Arithmetic::new(&flushing, Measure::Worst);
        let balls = [(1.0 + 1e-3, 1e-6), (-3e-39, 1e-45), (0.0, 1e-3)].map(|(mid, rad)| Ball { mid, rad });
        for arithmetic in [flushing, arithmetic(DType::BF16, Measure::Deviation)] {
            for [once, between] in stored(&arithmetic, &balls) {
                assert_eq!(between, once);
            }
        }
        let arithmetic = arithmetic(DType::F16, Measure::Worst);
        let largest = Ball { mid: 65488.0, rad: 16.0 };
        assert!(stored(&arithmetic, &[largest])[0].iter().all(|rad| rad.is_finite()), "the largest number is one");
        let beyond = [(65504.0, 20.0), (f64::NAN, 0.1), (1.0, f64::INFINITY)].map(|(mid, rad)| Ball { mid, rad });
        for [once, between] in stored(&arithmetic, &beyond) {
            assert_eq!([once, between], [f64::INFINITY; 2]);
        }
    }
}
