//! silu of lines of balls, as [`Curve::Silu`](super::curve::Curve) has it of each: the same operations in the
//! same order, without a branch, so that they run on several numbers at once.

use super::ball::{Arithmetic, Measure, usual};
use super::curve::SECOND_ORDER;
use super::line::{LINE, Line, vectorized};

/// Beyond this e^−x comes near the end of f64's range.
const USUAL: f64 = 700.0;

/// e^x for −700 ≤ x ≤ 0, as [`libm::exp`] computes it, to the last bit.
///
/// x = k ln 2 + r with |r| ≤ ln 2 / 2, and e^r by the same rational function.
#[inline(always)]
fn exponential(x: f64) -> f64 {
    const LN2_HIGH: f64 = f64::from_bits(0x3fe6_2e42_fee0_0000);
    const LN2_LOW: f64 = f64::from_bits(0x3dea_39ef_3579_3c76);
    const INVERSE_LN2: f64 = f64::from_bits(0x3ff7_1547_652b_82fe);
    const P: [f64; 5] = [
        f64::from_bits(0x3fc5_5555_5555_553e),
        f64::from_bits(0xbf66_c16c_16be_bd93),
        f64::from_bits(0x3f11_566a_af25_de2c),
        f64::from_bits(0xbebb_bd41_c5d2_6bf1),
        f64::from_bits(0x3e66_3769_72be_a4d0),
    ];
    // 1.5·2⁵²: added to an integer it leaves it in the last bits.
    const SHIFT: f64 = 6_755_399_441_055_744.0;
    let high = (x.to_bits() >> 32) & 0x7fff_ffff;
    let rounded = (INVERSE_LN2 * x - 0.5).trunc();
    let k = if high >= 0x3ff0_a2b2 { rounded } else { -1.0 };
    let k = if high > 0x3fd6_2e42 { k } else { 0.0 };
    let (head, tail) = (x - k * LN2_HIGH, k * LN2_LOW);
    let r = head - tail;
    let square = r * r;
    let c = r - square * (P[0] + square * (P[1] + square * (P[2] + square * (P[3] + square * P[4]))));
    let y = 1.0 + (r * c / (2.0 - c) - tail + head);
    let power = f64::from_bits((k + SHIFT).to_bits().wrapping_add(1023) << 52);
    if high > 0x3e30_0000 { y * power } else { 1.0 + x }
}

/// σ(x) and 1 − σ(x) of each.
#[inline(always)]
fn logistic(x: &[f64; LINE]) -> [[f64; LINE]; 2] {
    let (mut on, mut off) = ([0.0; LINE], [0.0; LINE]);
    for place in 0..LINE {
        let tail = exponential(-x[place].abs());
        let (large, small) = (1.0 / (1.0 + tail), tail / (1.0 + tail));
        on[place] = if x[place] >= 0.0 { large } else { small };
        off[place] = if x[place] >= 0.0 { small } else { large };
    }
    [on, off]
}

/// The least |x| in each ball, and e to the power of −that.
#[inline(always)]
fn least(mids: &[f64; LINE], rads: &[f64; LINE]) -> [[f64; LINE]; 2] {
    let (mut least, mut tail) = ([0.0; LINE], [0.0; LINE]);
    for place in 0..LINE {
        least[place] = (mids[place].abs() - rads[place]).max(0.0);
        tail[place] = exponential(-least[place]);
    }
    [least, tail]
}

/// Whether every ball keeps away from where the operations on one would take another way.
fn as_usual(x: &Line) -> bool {
    x.mid.iter().zip(&x.rad).fold(true, |usual, (mid, rad)| usual & (mid.abs() + rad <= USUAL))
}

impl Arithmetic {
    /// silu of each, where all are usual.
    pub(super) fn silu_values(&self, x: &Line) -> Option<Line> {
        if !as_usual(x) {
            return None;
        }
        vectorized(
            #[inline(always)]
            || match self.measure {
                Measure::Midpoint => {
                    let [on, _] = logistic(&x.mid);
                    let mut values = *x;
                    values.mid.iter_mut().zip(on).for_each(|(value, on)| *value *= on);
                    Some(values)
                }
                Measure::Worst => self.values_and_radii::<true>(x),
                Measure::Deviation => self.values_and_radii::<false>(x),
            },
        )
    }

    /// silu′ of each, where all are usual.
    pub(super) fn silu_slopes(&self, x: &Line) -> Option<Line> {
        if !as_usual(x) {
            return None;
        }
        vectorized(
            #[inline(always)]
            || match self.measure {
                Measure::Midpoint => {
                    let [on, off] = logistic(&x.mid);
                    let mut slopes = *x;
                    let on_and_off = on.into_iter().zip(off);
                    slopes.mid.iter_mut().zip(on_and_off).for_each(|(mid, (on, off))| *mid = on + *mid * (on * off));
                    Some(slopes)
                }
                Measure::Worst => self.slopes_and_radii::<true>(x),
                Measure::Deviation => self.slopes_and_radii::<false>(x),
            },
        )
    }

    #[inline(always)]
    fn values_and_radii<const WORST: bool>(&self, x: &Line) -> Option<Line> {
        let Line { mid: mids, rad: rads } = x;
        // A clamp at ±∞ has moved the ends by a rounding.
        let mut clamped = *rads;
        if WORST {
            for place in 0..LINE {
                let (mid, rad) = (mids[place], rads[place]);
                clamped[place] = ((mid + rad) - mid).abs().max(((mid - rad) - mid).abs());
            }
        }
        let ([on, off], [least, tail]) = (logistic(mids), least(mids, &clamped));
        let mut values = *x;
        let mut as_all = true;
        for place in 0..LINE {
            let (mid, rad, on) = (mids[place], clamped[place], on[place]);
            let (value, slope) = (mid * on, on + mid * (on * off[place]));
            let second = ((2.0 + least[place]) * tail[place]).min(0.5);
            let passed_on = slope.abs() * rad + 0.5 * second * rad * rad;
            let roundings = (self.function_ulps + 2.0) * (value.abs() + passed_on);
            let (joined, fits) = self.with_evaluation::<WORST>(passed_on, roundings, mid.abs() + rad);
            (values.mid[place], values.rad[place]) = (value, joined);
            as_all &= fits;
        }
        as_all.then_some(values)
    }

    #[inline(always)]
    fn slopes_and_radii<const WORST: bool>(&self, x: &Line) -> Option<Line> {
        let Line { mid: mids, rad: rads } = x;
        let mut ends = *mids;
        ends.iter_mut().zip(rads).for_each(|(end, rad)| *end += rad);
        let ([on, off], [least, tail]) = (logistic(mids), least(mids, rads));
        let [most, _] = logistic(&ends);
        let mut slopes = *x;
        let mut as_all = true;
        for place in 0..LINE {
            let (mid, rad) = (mids[place], rads[place]);
            let bend = on[place] * off[place];
            let second = 2.0 * bend + mid * bend * (off[place] - on[place]);
            let third = ((3.0 + least[place]) * tail[place]).min(0.3082);
            let passed_on = (second.abs() * rad + 0.5 * third * rad * rad).min(1.26);
            let magnitude = mid.abs() + rad;
            let roundings = most[place] * (self.function_ulps + 3.0 + magnitude * (3.0 * self.function_ulps + 6.0));
            let (joined, fits) = self.with_evaluation::<WORST>(passed_on, roundings, 4.0 * (1.0 + magnitude));
            (slopes.mid[place], slopes.rad[place]) = (on[place] + mid * bend, joined);
            as_all &= fits;
        }
        as_all.then_some(slopes)
    }

    /// A radius with the evaluation's own error, as [`Arithmetic::evaluated`] adds it, and whether it may be
    /// taken for that.
    #[inline(always)]
    fn with_evaluation<const WORST: bool>(&self, rad: f64, roundings: f64, weight: f64) -> (f64, bool) {
        let products = 4.0 * self.accumulate.underflow;
        let own = SECOND_ORDER * self.accumulate.unit * roundings + self.function_underflow * weight + products;
        let nothing = roundings == 0.0;
        if WORST {
            let joined = rad + own;
            return (if nothing { rad } else { joined }, true);
        }
        let own = own / 3.0f64.sqrt();
        let square = rad * rad + own * own;
        let root = square.sqrt();
        (if nothing { rad } else { root }, nothing | usual(square))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_that_of_libm_to_the_last_bit() {
        let mut bits = 0x9e37_79b9_7f4a_7c15_u64;
        let check = |x: f64| assert_eq!(exponential(x).to_bits(), libm::exp(x).to_bits(), "{x:e}");
        for edge in [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 1009.0].map(|multiple| multiple * std::f64::consts::LN_2) {
            for step in -40..=40i64 {
                check(-f64::from_bits((edge.to_bits() as i64 + step).max(0) as u64));
                // The high words decide which way an argument goes.
                check(-f64::from_bits((edge.to_bits() as i64 + (step << 32)).max(0) as u64).min(USUAL));
            }
        }
        for at in 0..2_000_000 {
            bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let uniform = (bits >> 11) as f64 / (1u64 << 53) as f64;
            check(-uniform * [1.0, 8.0, USUAL][at % 3]);
            check(-libm::exp2(-70.0 * uniform));
        }
    }
}
