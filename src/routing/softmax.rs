//! e^x and Σ as every device has them: token rounding compares probabilities, so that a device which
//! is to round as the CPU does needs their very bits.
//!
//! kernels/softmax.cuh is the same in CUDA, operation by operation; nothing here is contracted into a
//! fused multiply-add.

use crate::element::Real;

/// Lanes of a sum: those of a warp.
const LANES: usize = 32;
/// Neighbours that one lane adds: what it loads at a time.
const NEIGHBOURS: usize = 4;

/// Σ in the order of a warp: lane i adds the values 4i … 4i + 3 of every 128 in turn, then halves of
/// the lanes are added to each other. The order depends on the number of values alone.
pub(in crate::routing) fn sum<A: Real>(values: impl Iterator<Item = A>) -> A {
    let mut lanes = [A::zero(); LANES];
    for (place, value) in values.enumerate() {
        lanes[place / NEIGHBOURS % LANES] += value;
    }
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            let other = lanes[lane + half];
            lanes[lane] += other;
        }
        half /= 2;
    }
    lanes[0]
}

/// e^x for x ≤ 0, within two units of 2⁻²⁴; a NaN stays one.
///
/// x = n·ln 2 + r, with ln 2 in two parts of which the first times n is exact, and a polynomial in
/// |r| ≤ ln 2 / 2. Below −104 the result rounds to 0; above, it may be subnormal.
pub(crate) fn exponential(x: f32) -> f32 {
    // 1.5·2²³: adding it rounds to an integer, which stands in the low bits.
    const SHIFT: f32 = 12_582_912.0;
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const MINUS_LN_2_LOW: f32 = 2.121_944_4e-4;
    if x < -104.0 {
        return 0.0;
    }
    let shifted = x * LOG2_E + SHIFT;
    let n = shifted.to_bits().wrapping_sub(SHIFT.to_bits()) as i32;
    let whole = shifted - SHIFT;
    let r = x - whole * LN_2_HIGH;
    let r = r + whole * MINUS_LN_2_LOW;
    let p = [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_66, 0.5]
        .into_iter()
        .fold(1.987_569_1e-4_f32, |p, coefficient| p * r + coefficient);
    let value = p * (r * r) + r + 1.0;
    // 2ⁿ in two factors, each of them normal: the product rounds once.
    let power = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
    let half = n / 2;
    value * power(half) * power(n - half)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One in 97 of the numbers from −0 to −110, every binade alike.
    #[test]
    fn the_exponential_is_within_two_units_and_ends_in_zero() {
        let mut worst = 0.0f64;
        for bits in (0..110f32.to_bits()).step_by(97) {
            let x = -f32::from_bits(bits);
            let truth = f64::from(x).exp();
            let error = (f64::from(exponential(x)) - truth).abs();
            let allowed = truth * f64::from(f32::EPSILON) / 2.0 + 2f64.powi(-150);
            worst = worst.max(error / allowed);
        }
        assert!(worst <= 2.0, "{worst} units");
        assert_eq!([-0.0, 0.0, -104.5, f32::NEG_INFINITY].map(exponential), [1.0, 1.0, 0.0, 0.0]);
        assert!(exponential(f32::NAN).is_nan());
    }

    /// The constants of kernels/softmax.cuh, by their bits.
    #[test]
    fn the_constants_are_those_of_the_kernels() {
        let source = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/softmax.cuh"));
        for (constant, text) in [
            (std::f32::consts::LOG2_E, "0x1.715476p+0f"),
            (0.693_359_4, "0x1.63p-1f"),
            (2.121_944_4e-4, "0x1.bd0106p-13f"),
            (1.987_569_1e-4, "0x1.a0d2cep-13f"),
            (1.398_199_9e-3, "0x1.6e879cp-10f"),
            (8.333_452e-3, "0x1.11121p-7f"),
            (4.166_579_6e-2, "0x1.555382p-5f"),
            (0.166_666_66, "0x1.555554p-3f"),
            (0.5, "0x1.0p-1f"),
        ] {
            assert!(source.contains(text), "{text} is not in the kernel");
            assert_eq!(hexadecimal(text).to_bits(), constant.to_bits(), "{text} is not {constant:e}");
        }
    }

    /// A hexadecimal constant of C.
    fn hexadecimal(text: &str) -> f32 {
        let text = text.trim_end_matches('f').trim_start_matches("0x");
        let (digits, power) = text.split_once('p').unwrap();
        let (whole, fraction) = digits.split_once('.').unwrap();
        let mantissa = u64::from_str_radix(&format!("{whole}{fraction}"), 16).unwrap();
        let exponent = power.parse::<i32>().unwrap() - 4 * fraction.len() as i32;
        (mantissa as f64 * 2f64.powi(exponent)) as f32
    }

    #[test]
    fn a_sum_is_that_of_the_lanes() {
        // Of a few numbers two orders may round alike: of many lengths they do not.
        let mut as_in_a_row = 0;
        for count in (1..=300).step_by(7) {
            let values: Vec<f32> = (0..count).map(|place| 1.0 / (1 + place * place % 101) as f32).collect();
            let mut lanes = [0.0f32; 32];
            for (lane, own) in lanes.iter_mut().enumerate() {
                for chunk in values.chunks(128) {
                    for value in chunk.iter().skip(4 * lane).take(4) {
                        *own += value;
                    }
                }
            }
            for distance in [16, 8, 4, 2, 1] {
                lanes = std::array::from_fn(|lane| lanes[lane] + lanes[lane ^ distance]);
            }
            assert_eq!(sum(values.iter().copied()).to_bits(), lanes[0].to_bits(), "{count} values");
            as_in_a_row += usize::from(values.iter().sum::<f32>() == lanes[0]);
        }
        assert!(as_in_a_row < 30, "{as_in_a_row} of 43 sums cannot tell the order");
        assert_eq!(sum(std::iter::empty::<f32>()), 0.0);
    }
}
