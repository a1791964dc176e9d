//! The activation of gpt-oss, (u + 1)·g·σ(1.702·g) with g = min(gate, 7) and u = up within ±7: what its
//! up factor adds to the fused model, and the eager model of all of it.
//!
//! Clamps are exact. Where one is within reach its slope may be 0 or 1, whatever the midpoint says.

use super::ball::{Arithmetic, Ball};
use super::curve::{CLAMP, STEEPNESS};

/// u + 1, in the accumulator.
pub(crate) fn lifted(arithmetic: &Arithmetic, up: Ball) -> Ball {
    arithmetic.add(arithmetic.clamp(up, -CLAMP, CLAMP), Ball::exact(1.0))
}

/// The slope of u: 1 up to the clamps, 0 beyond.
pub(crate) fn passes(arithmetic: &Arithmetic, up: Ball) -> Ball {
    passes_within(arithmetic, up, -CLAMP, CLAMP)
}

fn passes_within(arithmetic: &Arithmetic, x: Ball, low: f64, high: f64) -> Ball {
    let reach = arithmetic.reach(x.rad);
    let inside = low <= x.mid && x.mid <= high;
    let surely_inside = low <= x.mid - reach && x.mid + reach <= high;
    let surely_outside = x.mid + reach < low || high < x.mid - reach;
    let rad = if surely_inside || surely_outside { 0.0 } else { 1.0 };
    Ball { mid: f64::from(u8::from(inside)), rad }
}

/// One unit, op by op: each of g·α, σ, g·σ, u + 1 is stored, and so are their gradients.
pub(crate) struct Eager<'a> {
    arithmetic: &'a Arithmetic,
    gate: Ball,
    up: Ball,
    /// g = min(gate, 7).
    clamped: Ball,
    /// σ(αg).
    sigma: Ball,
    /// g·σ(αg).
    opened: Ball,
    /// u + 1.
    lifted: Ball,
}

impl<'a> Eager<'a> {
    pub(crate) fn new(arithmetic: &'a Arithmetic, gate: Ball, up: Ball) -> Self {
        let store = |ball| arithmetic.round(&arithmetic.storage, ball);
        let clamped = arithmetic.clamp(gate, f64::NEG_INFINITY, CLAMP);
        let sigma = store(arithmetic.sigmoid(times_steepness(arithmetic, clamped)));
        let opened = store(arithmetic.multiply(clamped, sigma));
        Self { arithmetic, gate, up, clamped, sigma, opened, lifted: store(lifted(arithmetic, up)) }
    }

    /// (u + 1)·(g·σ), stored.
    pub(crate) fn value(&self) -> Ball {
        self.product(self.lifted, self.opened)
    }

    /// dgate = dO·σ + α·((dO·g)·σ(1 − σ)) with dO = dA·(u + 1), and dup = dA·(g·σ); every product and the
    /// sum stored, nothing beyond the clamps.
    pub(crate) fn backward(&self, da: Ball) -> [Ball; 2] {
        let Self { arithmetic, gate, up, clamped, sigma, opened, lifted } = *self;
        let store = |ball| arithmetic.round(&arithmetic.storage, ball);
        let d_opened = self.product(da, lifted);
        let d_sigma = self.product(d_opened, clamped);
        let d_steep = store(arithmetic.multiply(d_sigma, arithmetic.bend(sigma)));
        let through_sigma = times_steepness(arithmetic, d_steep);
        let dgate = store(arithmetic.add(self.product(d_opened, sigma), through_sigma));
        let gate_passes = passes_within(arithmetic, gate, f64::NEG_INFINITY, CLAMP);
        [arithmetic.product(dgate, gate_passes), arithmetic.product(self.product(da, opened), passes(arithmetic, up))]
    }

    fn product(&self, a: Ball, b: Ball) -> Ball {
        self.arithmetic.round(&self.arithmetic.storage, self.arithmetic.multiply(a, b))
    }
}

/// αx, stored; α itself is rounded to the accumulator.
fn times_steepness(arithmetic: &Arithmetic, x: Ball) -> Ball {
    let steepness = arithmetic.operation(Ball::exact(STEEPNESS));
    arithmetic.round(&arithmetic.storage, arithmetic.multiply(x, steepness))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;
    use crate::engine::RoundingModel;
    use crate::oracle::bound::ball::Measure;
    use crate::oracle::bound::numerics_of;

    /// A gradient passes inside [−7, 7] and at both ends; within reach of an end it may or may not.
    #[test]
    fn a_gradient_surely_passes_surely_stops_or_may_do_either() {
        let numerics = numerics_of(DType::BF16, RoundingModel::Fused);
        let arithmetic = Arithmetic::new(&numerics, Measure::Worst);
        // Ends that lie on a clamp count as inside.
        for (mid, rad, passing, unknown) in [
            (0.0, 6.5, 1.0, 0.0),
            (6.5, 0.25, 1.0, 0.0),
            (6.5, 0.5, 1.0, 0.0),
            (6.5, 0.75, 1.0, 1.0),
            (7.0, 0.0, 1.0, 0.0),
            (7.0, 0.25, 1.0, 1.0),
            (7.5, 0.25, 0.0, 0.0),
            (7.5, 0.5, 0.0, 1.0),
            (7.5, 0.75, 0.0, 1.0),
        ] {
            for mid in [mid, -mid] {
                let found = passes(&arithmetic, Ball { mid, rad });
                assert_eq!(found, Ball { mid: passing, rad: unknown }, "{mid} ± {rad}");
            }
        }
    }
}
