//! A sum of numbers ≥ 0 without rounding, and so without an order.

/// Bits of a digit; each is summed in 64 bits, so that 2³² numbers fit before a carry is due.
const DIGIT: usize = 32;
/// Digits from 2⁻¹⁰⁷⁴ beyond the largest f64.
const DIGITS: usize = 68;

/// Σ in units of the smallest f64.
pub(super) struct ExactSum([u64; DIGITS]);

impl Default for ExactSum {
    fn default() -> Self {
        Self([0; DIGITS])
    }
}

impl ExactSum {
    /// Adds a finite number ≥ 0, at most 2³² times.
    pub fn add(&mut self, value: f64) {
        let bits = value.to_bits();
        let (exponent, fraction) = ((bits >> 52 & 0x7ff) as usize, bits & ((1 << 52) - 1));
        let units = if exponent > 0 { fraction | 1 << 52 } else { fraction };
        let shift = exponent.saturating_sub(1);
        let mut shifted = u128::from(units) << (shift % DIGIT);
        for digit in &mut self.0[shift / DIGIT..] {
            if shifted == 0 {
                break;
            }
            *digit += u64::from(shifted as u32);
            shifted >>= DIGIT;
        }
    }

    /// The sum, rounded once to nearest even.
    pub fn rounded(&self) -> f64 {
        let mut carry = 0;
        let digits = self.0.map(|digit| {
            let sum = digit + carry;
            carry = sum >> DIGIT;
            sum as u32
        });
        let lowest = digits.iter().rposition(|&digit| digit != 0).unwrap_or(0).saturating_sub(2);
        let window =
            digits[lowest..].iter().take(3).rev().fold(0u128, |window, &digit| window << DIGIT | u128::from(digit));
        // Three digits hold more than 64 bits of the number, or all of it: below them only whether
        // anything is left can change the rounding.
        let sticky = digits[..lowest].iter().any(|&digit| digit != 0);
        libm::scalbn((window | u128::from(sticky)) as f64, (DIGIT * lowest) as i32 - 1074)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(values: &[f64]) -> f64 {
        let mut sum = ExactSum::default();
        values.iter().for_each(|&value| sum.add(value));
        sum.rounded()
    }

    #[test]
    fn one_number_is_itself_from_the_smallest_to_the_largest() {
        for value in [0.0, f64::from_bits(1), f64::MIN_POSITIVE, 1e-300, 0.1, 1.0, 1e300, f64::MAX] {
            assert_eq!(sum(&[value]).to_bits(), value.to_bits(), "{value:e}");
        }
    }

    #[test]
    fn nothing_is_lost_before_the_one_rounding() {
        let tiny = 2f64.powi(-53);
        // Added one by one to 1, each 2⁻⁵³ would vanish.
        assert_eq!(sum(&[1.0, tiny, tiny]), 1.0 + f64::EPSILON);
        assert_eq!(sum(&[1.0, tiny]), 1.0, "a tie goes to even");
        assert_eq!(sum(&[1.0, tiny, f64::from_bits(1)]), 1.0 + f64::EPSILON, "just above a tie goes up");
        let many: Vec<f64> = (1..=1000).map(|n| 2f64.powi(-(n % 120)) / f64::from(n)).collect();
        let reversed: Vec<f64> = many.iter().rev().copied().collect();
        assert_eq!(sum(&many).to_bits(), sum(&reversed).to_bits());
        assert!((sum(&many) - many.iter().sum::<f64>()).abs() < 1e-12);
    }
}
