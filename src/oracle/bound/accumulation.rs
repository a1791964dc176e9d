//! Sums of balls, before their roundings and with them.

use super::ball::{Arithmetic, Ball, Measure, Rounding};
use super::line::{Line, vectorized};

impl Arithmetic {
    /// The sum of `terms` in any order in a type of roundoff `rounding`, where each sum takes
    /// `roundings` roundings at most: E = ΣE_i + γ Σ(|v_i| + E_i).
    pub(crate) fn sum(&self, rounding: &Rounding, terms: impl Iterator<Item = Ball>, roundings: usize) -> Ball {
        let mut sum = Sum::default();
        terms.for_each(|term| sum.add(self, term));
        self.summed(rounding, sum, roundings)
    }

    /// A sum with what `roundings` roundings add to it.
    ///
    /// A partial sum of random terms has a deviation of at most √square, so independent roundings
    /// of them add up to u√(roundings·square/3).
    pub(crate) fn summed(&self, rounding: &Rounding, sum: Sum, roundings: usize) -> Ball {
        let Sum { ball, magnitude, square } = sum;
        if self.measure == Measure::Midpoint {
            return ball;
        }
        if magnitude > rounding.largest {
            return Ball { rad: f64::INFINITY, ..ball };
        }
        if magnitude == 0.0 || roundings == 0 {
            return ball;
        }
        let underflow = 2.0 * roundings as f64 * rounding.underflow;
        let rounded = match self.measure {
            Measure::Midpoint => 0.0,
            Measure::Worst => rounding.gamma(roundings) * magnitude + underflow.min(magnitude),
            Measure::Deviation => rounding.unit * (roundings as f64 * square / 3.0).sqrt() + underflow.min(magnitude),
        };
        Ball { rad: self.join(ball.rad, rounded), ..ball }
    }

    /// [`Arithmetic::summed`] of many, radii in place, from Σ|terms| and Σ terms² of each (none where no deviation
    /// asks for them).
    pub(super) fn summed_all(
        &self,
        rounding: &Rounding,
        [mids, magnitudes, squares]: [&[f64]; 3],
        rads: &mut [f64],
        roundings: usize,
    ) {
        if self.measure != Measure::Worst {
            for (column, ((rad, &mid), &magnitude)) in rads.iter_mut().zip(mids).zip(magnitudes).enumerate() {
                let square = squares.get(column).copied().unwrap_or(0.0);
                let sum = Sum { ball: Ball { mid, rad: *rad }, magnitude, square };
                *rad = self.summed(rounding, sum, roundings).rad;
            }
            return;
        }
        let (gamma, underflow) = (rounding.gamma(roundings), 2.0 * roundings as f64 * rounding.underflow);
        let largest = rounding.largest;
        vectorized(
            #[inline(always)]
            move || {
                for (rad, &magnitude) in rads.iter_mut().zip(magnitudes) {
                    let summed = *rad + (gamma * magnitude + underflow.min(magnitude));
                    let summed = if (magnitude == 0.0) | (roundings == 0) { *rad } else { summed };
                    *rad = if magnitude > largest { f64::INFINITY } else { summed };
                }
            },
        );
    }
}

/// A sum so far, before its roundings.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sum {
    /// The sum, and what its terms' radii join to.
    pub(crate) ball: Ball,
    /// Σ|terms|, with their radii.
    pub(crate) magnitude: f64,
    /// Σ terms², where deviations ask for it.
    pub(crate) square: f64,
}

impl Sum {
    pub(crate) fn add(&mut self, arithmetic: &Arithmetic, term: Ball) {
        self.ball = Ball { mid: self.ball.mid + term.mid, rad: arithmetic.join(self.ball.rad, term.rad) };
        self.magnitude += term.magnitude();
        self.square += term.mid * term.mid;
    }

    /// The first `count` terms of a line.
    pub(super) fn add_line(&mut self, arithmetic: &Arithmetic, terms: &Line, count: usize) {
        let mut sum = *self;
        match arithmetic.measure {
            Measure::Worst => {
                for (&mid, &rad) in terms.mid[..count].iter().zip(&terms.rad) {
                    sum.ball = Ball { mid: sum.ball.mid + mid, rad: sum.ball.rad + rad };
                    sum.magnitude += mid.abs() + rad;
                }
            }
            _ => (0..count).for_each(|place| sum.add(arithmetic, terms.at(place))),
        }
        *self = sum;
    }
}
