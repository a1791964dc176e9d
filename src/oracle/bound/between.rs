//! A store whose argument is nearly known: what it rounds to is known better than half a unit in the last place.

use super::ball::{Arithmetic, Ball, Measure, Rounding};

/// What a radius may have lost beside itself, as a sum of up to 2²⁰ terms in f64.
const LOST_OF_RADII: f64 = f64::EPSILON * (1 << 20) as f64;

impl Arithmetic {
    /// One store of numbers that all lie in `ball`. Rounding to nearest is monotone, so what an engine stores
    /// lies between what the two ends are rounded to:
    ///
    /// ```text
    /// |stored − v|  ≤  max(|RN(v − E) − v|, |RN(v + E) − v|)  ≤  E + half a unit in the last place
    /// ```
    ///
    /// Where E is far below that unit it is |RN(v) − v|, on average half of what [`round`](Self::round) allows.
    /// Where no type is known, beyond its range, and among deviations it is [`round`](Self::round).
    pub(crate) fn round_between(&self, rounding: &Rounding, ball: Ball) -> Ball {
        let rounded = self.round(rounding, ball);
        match rounding.dtype {
            Some(dtype) if self.measure == Measure::Worst && rounded.rad.is_finite() => {
                let reach = ball.rad * (1.0 + LOST_OF_RADII);
                let ends = [(ball.mid - reach).next_down(), (ball.mid + reach).next_up()];
                let farthest = ends.map(|end| (dtype.round(end) - ball.mid).abs());
                Ball { rad: rounded.rad.min(farthest[0].max(farthest[1])), ..ball }
            }
            _ => rounded,
        }
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn whatever_lies_in_a_ball_is_stored_within_the_ball_rounded_and_an_end_attains_it() {
        for storage in [DType::BF16, DType::F16, DType::F32] {
            let arithmetic = arithmetic(storage, Measure::Worst);
            let ulp = 2.0 * storage.unit_roundoff();
            for mid in numbers(storage) {
                for share in [0.0, 1e-6, 0.1, 0.5, 0.9, 3.7, 1e3] {
                    let ball = Ball { mid, rad: share * ulp * mid.abs() };
                    let between = arithmetic.round_between(&arithmetic.storage, ball);
                    let once = arithmetic.round(&arithmetic.storage, ball);
                    assert!(between.mid == mid && between.rad <= once.rad, "{storage} {ball:?}");
                    let off = |value: f64| (storage.round(value) - mid).abs();
                    let stored = (-8..=8).map(|place| off(mid + f64::from(place) / 8.0 * ball.rad));
                    let farthest = stored.fold(0.0, f64::max);
                    assert!(farthest <= between.rad, "{storage} {ball:?}: {farthest} beyond {}", between.rad);
                    // An end may lie half way between two numbers: a little farther out it does not.
                    let out = ball.rad * (1.0 + 1e-9) + 1e-15 * mid.abs();
                    assert!(between.rad <= off(mid - out).max(off(mid + out)), "{storage} {ball:?}");
                }
            }
        }
    }

    /// The error of a number that is known exactly is known exactly: on average it is half of the worst.
    #[test]
    fn a_store_of_what_is_known_errs_by_what_it_rounds_off() {
        let arithmetic = arithmetic(DType::BF16, Measure::Worst);
        let (mut between, mut once) = (0.0, 0.0);
        for step in 0..10_000 {
            let mid = 1.0 + f64::from(step) / 10_000.0;
            let ball = Ball { mid, rad: 1e-9 };
            let rad = arithmetic.round_between(&arithmetic.storage, ball).rad;
            let rounded_off = (DType::BF16.round(mid) - mid).abs();
            assert!(rad >= rounded_off, "{mid}: {rad} < {rounded_off}");
            between += rad;
            once += arithmetic.round(&arithmetic.storage, ball).rad;
        }
        assert!((0.49..0.51).contains(&(between / once)), "{}", between / once);
    }

    #[test]
    fn where_no_ends_are_known_a_store_between_them_is_one_rounding() {
        let flushing = Numerics { flushes_denormals: true, ..numerics_of(DType::BF16, RoundingModel::Fused) };
        let flushing = Arithmetic::new(&flushing, Measure::Worst);
        for arithmetic in [flushing, arithmetic(DType::BF16, Measure::Deviation)] {
            for (mid, rad) in [(1.0 + 1e-3, 1e-6), (-3e-39, 1e-45), (0.0, 1e-3)] {
                let ball = Ball { mid, rad };
                let once = arithmetic.round(&arithmetic.storage, ball);
                assert_eq!(arithmetic.round_between(&arithmetic.storage, ball), once);
            }
        }
        let arithmetic = arithmetic(DType::F16, Measure::Worst);
        let beyond = Ball { mid: 65504.0, rad: 20.0 };
        assert_eq!(arithmetic.round_between(&arithmetic.storage, beyond).rad, f64::INFINITY);
    }
}
