//! Ball arithmetic: the truth as midpoint, and how far from it a correct engine may be as radius.
//!
//! Every operation adds to the radius what the operation passes on from its operands, what the
//! engine's own rounding adds, and what the f64 evaluation of the midpoint adds.

use super::line::{LINE, vectorized};
use crate::element::DType;
use crate::engine::{Numerics, RouterRounding};

/// The roundoff of the f64 operations that compute midpoints.
const UNIT_OF_TRUTH: f64 = f64::EPSILON / 2.0;

/// How radii of several sources join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Measure {
    /// There are none: midpoints are all that is asked for.
    Midpoint,
    /// Radii add: no correct engine exceeds them.
    Worst,
    /// Radii are standard deviations of independent errors, uniform within each rounding: squares
    /// add, and one rounding by at most u|v| contributes u|v|/√3.
    Deviation,
}

/// A number of the truth, `mid`, and a bound `rad` on |engine's number − `mid`|: ∞ where the engine's
/// number may be infinite or NaN, and never NaN itself, for comparisons pass over a NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Ball {
    pub(crate) mid: f64,
    pub(crate) rad: f64,
}

/// 2^⌊log₂ x⌋ of a normal number x > 0: its exponent, without its fraction. 0 below the normal range, and
/// ∞ and NaN become ∞.
#[inline(always)]
fn binade(x: f64) -> f64 {
    f64::from_bits(x.to_bits() & f64::INFINITY.to_bits())
}

/// A radius, with ∞ for NaN.
#[inline(always)]
pub(crate) fn known(rad: f64) -> f64 {
    if rad.is_nan() { f64::INFINITY } else { rad }
}

impl Ball {
    /// A number that engine and truth share.
    pub(crate) fn exact(mid: f64) -> Self {
        Self { mid, rad: 0.0 }
    }

    /// The largest magnitude in the ball.
    #[inline(always)]
    pub(crate) fn magnitude(self) -> f64 {
        self.mid.abs() + self.rad
    }
}

/// One rounding of an engine's number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rounding {
    /// Relative error of a normal result.
    pub(crate) unit: f64,
    /// Absolute error of a result below the normal range.
    pub(crate) underflow: f64,
    /// The smallest number of the normal range, and whether underflow counts below it alone.
    normal: f64,
    below_normal: bool,
    /// Beyond this the result may be infinite, and nothing is known of it.
    pub(crate) largest: f64,
    /// The type stored to, where it is known: its own numbers are stored without error.
    pub(super) dtype: Option<DType>,
}

impl Rounding {
    /// A store to `dtype`.
    fn store(dtype: DType, flushes: bool) -> Self {
        Self {
            unit: dtype.unit_roundoff(),
            underflow: if flushes { dtype.smallest_normal() } else { dtype.underflow() },
            normal: dtype.smallest_normal(),
            below_normal: false,
            largest: dtype.largest(),
            dtype: (!flushes).then_some(dtype),
        }
    }

    /// γ_m = m·u / (1 − m·u): the relative error of m roundings one after the other.
    pub(crate) fn gamma(&self, m: usize) -> f64 {
        let product = m as f64 * self.unit;
        if product < 1.0 { product / (1.0 - product) } else { f64::INFINITY }
    }

    /// What may underflow of a number of at most this magnitude, known within `rad`.
    #[inline(always)]
    fn underflow_of(&self, magnitude: f64, rad: f64) -> f64 {
        if self.below_normal && magnitude - 2.0 * rad >= self.normal { 0.0 } else { self.underflow.min(magnitude) }
    }

    fn holds(&self, value: f64) -> bool {
        self.dtype.is_some_and(|dtype| dtype.round(value) == value)
    }
}

/// An engine's declared roundings, ready to propagate balls through.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arithmetic {
    pub(crate) measure: Measure,
    /// One operation in the accumulator, the f64 operation of the midpoint included.
    pub(crate) accumulate: Rounding,
    /// One store to the tensors' type.
    pub(crate) storage: Rounding,
    /// One addition in the tensors' type, the f64 addition of the midpoint included.
    pub(crate) partial: Rounding,
    /// One store of a logit, a score, a dlogit.
    pub(crate) router: Rounding,
    /// One store of ds.
    pub(crate) score: Rounding,
    /// One operation on scores and their gradients: where the accumulator is wider than the score
    /// type, these are still operations of the score type.
    score_operation: Rounding,
    /// Relative error of an elementary function, in units of `accumulate.unit`.
    pub(crate) function_ulps: f64,
    /// What an elementary function may lose absolutely: where exp overflows or underflows in the
    /// accumulator, σ comes out as 0 a little early.
    pub(crate) function_underflow: f64,
}

impl Arithmetic {
    pub(crate) fn new(numerics: &Numerics, measure: Measure) -> Self {
        // Tensor cores have roundoffs of no IEEE type; all of them keep f32's exponents.
        let accumulator = if numerics.accumulator < libm::exp2(-40.0) { DType::F64 } else { DType::F32 };
        let flushes = numerics.flushes_denormals;
        let router = match numerics.router {
            RouterRounding::Score => numerics.score,
            RouterRounding::TensorType => numerics.storage,
        };
        let accumulate = Rounding {
            unit: numerics.accumulator + UNIT_OF_TRUTH,
            dtype: None,
            ..Rounding::store(accumulator, flushes)
        };
        let storage = Rounding::store(numerics.storage, flushes);
        let coarser = if numerics.score.unit_roundoff() > numerics.accumulator { numerics.score } else { accumulator };
        let score_operation = Rounding {
            unit: numerics.accumulator.max(numerics.score.unit_roundoff()) + UNIT_OF_TRUTH,
            dtype: None,
            ..Rounding::store(coarser, flushes)
        };
        Self {
            measure,
            accumulate,
            score_operation,
            storage,
            partial: Rounding { unit: storage.unit + UNIT_OF_TRUTH, dtype: None, ..storage },
            router: Rounding::store(router, flushes),
            // Scores and their gradient share a type: where the router rounds to the tensors', ds does.
            score: Rounding::store(router, flushes),
            // The midpoint's own exp, erf and tanh err by up to 4 of its units.
            function_ulps: numerics.function_ulps.max(4.0),
            function_underflow: accumulator.smallest_normal().max(coarser.smallest_normal()),
        }
    }

    /// The same with what stores of `rounded` to a coarser type lose below its normal range.
    pub(crate) fn underflowing_as(self, rounded: &Self) -> Self {
        let lose = |exact: Rounding, rounded: Rounding| match exact.unit < rounded.unit {
            true => Rounding {
                underflow: rounded.underflow,
                normal: rounded.normal,
                below_normal: true,
                dtype: None,
                ..exact
            },
            false => exact,
        };
        Self {
            storage: lose(self.storage, rounded.storage),
            partial: lose(self.partial, rounded.partial),
            router: lose(self.router, rounded.router),
            score: lose(self.score, rounded.score),
            ..self
        }
    }

    /// The arithmetic of scores and their gradients.
    pub(crate) fn of_scores(&self) -> Self {
        Self { accumulate: self.score_operation, ..*self }
    }

    /// Two radii of independent sources.
    pub(crate) fn join(&self, a: f64, b: f64) -> f64 {
        match self.measure {
            Measure::Midpoint => 0.0,
            Measure::Worst => a + b,
            Measure::Deviation => hypotenuse(a, b),
        }
    }

    /// A rounding by at most `most` as a radius.
    pub(crate) fn spread(&self, most: f64) -> f64 {
        match self.measure {
            Measure::Midpoint => 0.0,
            Measure::Worst => most,
            Measure::Deviation => most / 3.0f64.sqrt(),
        }
    }

    /// One rounding: E += max(u(|v| + E), η), and never more than |v| + E, for 0 is a number too.
    ///
    /// A store to a known type rounds to the nearest number, half a unit in the last place away at most:
    /// the worst case is u·2^⌊log₂(|v| + E)⌋, on average 0.7 times u(|v| + E).
    pub(crate) fn round(&self, rounding: &Rounding, ball: Ball) -> Ball {
        if self.measure == Measure::Midpoint || (ball.rad == 0.0 && rounding.holds(ball.mid)) {
            return ball;
        }
        let magnitude = ball.magnitude();
        if magnitude > rounding.largest {
            return Ball { rad: f64::INFINITY, ..ball };
        }
        let nearest = self.measure == Measure::Worst && rounding.dtype.is_some();
        let error = rounding.unit * if nearest { binade(magnitude) } else { magnitude };
        let error = error.max(rounding.underflow_of(magnitude, ball.rad));
        Ball { rad: self.join(ball.rad, self.spread(error)), ..ball }
    }

    /// [`Arithmetic::round`] of many: midpoints stay, radii grow.
    pub(crate) fn round_all(&self, rounding: &Rounding, mids: &[f64], rads: &mut [f64]) {
        let rounding = *rounding;
        match self.measure {
            Measure::Midpoint => {}
            Measure::Worst if rounding.dtype.is_some() => self.round_lines(
                rounding,
                mids,
                rads,
                #[inline(always)]
                move |magnitude, rad| {
                    let error = (rounding.unit * binade(magnitude)).max(rounding.underflow_of(magnitude, rad));
                    (rad + error, true)
                },
            ),
            Measure::Worst => self.round_lines(
                rounding,
                mids,
                rads,
                #[inline(always)]
                move |magnitude, rad| {
                    let error = (rounding.unit * magnitude).max(rounding.underflow_of(magnitude, rad));
                    (rad + error, true)
                },
            ),
            Measure::Deviation => self.round_lines(
                rounding,
                mids,
                rads,
                #[inline(always)]
                move |magnitude, rad| {
                    let error = (rounding.unit * magnitude).max(rounding.underflow_of(magnitude, rad)) / 3.0f64.sqrt();
                    let square = rad * rad + error * error;
                    (square.sqrt(), usual(square))
                },
            ),
        }
    }

    /// `rounded` gives the radius of a magnitude and a radius, and whether it may be taken for it.
    fn round_lines(
        &self,
        rounding: Rounding,
        mids: &[f64],
        rads: &mut [f64],
        rounded: impl Fn(f64, f64) -> (f64, bool) + Copy,
    ) {
        let (may_hold, largest) = (rounding.dtype.is_some(), rounding.largest);
        vectorized(
            #[inline(always)]
            move || {
                for (mids, rads) in mids.chunks(LINE).zip(rads.chunks_mut(LINE)) {
                    let mut line = [0.0; LINE];
                    let mut as_all = true;
                    for ((into, &mid), &rad) in line.iter_mut().zip(mids).zip(rads.iter()) {
                        let magnitude = mid.abs() + rad;
                        let (radius, usual) = rounded(magnitude, rad);
                        *into = if magnitude > largest { f64::INFINITY } else { radius };
                        // A number without a radius may be one of the type; 0 is, and gets none either way.
                        as_all &= usual & !(may_hold & (rad == 0.0) & (mid != 0.0));
                    }
                    if as_all {
                        rads.copy_from_slice(&line[..rads.len()]);
                    } else {
                        for (rad, &mid) in rads.iter_mut().zip(mids) {
                            *rad = self.round(&rounding, Ball { mid, rad: *rad }).rad;
                        }
                    }
                }
            },
        );
    }

    /// [`Arithmetic::product`] of one ball and many, in place.
    pub(crate) fn product_all(&self, a: Ball, mids: &mut [f64], rads: &mut [f64]) {
        vectorized(
            #[inline(always)]
            move || match self.measure {
                Measure::Midpoint => mids.iter_mut().for_each(|mid| *mid *= a.mid),
                Measure::Worst => mids.iter_mut().zip(rads.iter_mut()).for_each(|(mid, rad)| {
                    *rad = known(a.rad * mid.abs() + a.magnitude() * *rad);
                    *mid *= a.mid;
                }),
                Measure::Deviation => mids.iter_mut().zip(rads.iter_mut()).for_each(|(mid, rad)| {
                    let product = self.product(a, Ball { mid: *mid, rad: *rad });
                    (*mid, *rad) = (product.mid, product.rad);
                }),
            },
        );
    }

    /// [`Arithmetic::join`] of many with many.
    pub(crate) fn join_all(&self, sums: &mut [f64], rads: &[f64]) {
        vectorized(
            #[inline(always)]
            || match self.measure {
                Measure::Midpoint => {}
                Measure::Worst => sums.iter_mut().zip(rads).for_each(|(sum, &rad)| *sum += rad),
                Measure::Deviation => {
                    for (sums, rads) in sums.chunks_mut(LINE).zip(rads.chunks(LINE)) {
                        let mut line = [0.0; LINE];
                        let mut as_all = true;
                        for ((into, &sum), &rad) in line.iter_mut().zip(sums.iter()).zip(rads) {
                            let square = sum * sum + rad * rad;
                            *into = square.sqrt();
                            as_all &= usual(square);
                        }
                        if as_all {
                            sums.copy_from_slice(&line[..sums.len()]);
                        } else {
                            sums.iter_mut().zip(rads).for_each(|(sum, &rad)| *sum = hypotenuse(*sum, rad));
                        }
                    }
                }
            },
        );
    }

    /// One operation in the accumulator has given `ball`.
    pub(crate) fn operation(&self, ball: Ball) -> Ball {
        self.round(&self.accumulate, ball)
    }

    /// a·b without a rounding: E = E_a|b| + |a|E_b + E_aE_b.
    pub(crate) fn product(&self, a: Ball, b: Ball) -> Ball {
        let rad = match self.measure {
            Measure::Midpoint => 0.0,
            Measure::Worst => a.rad * b.mid.abs() + a.magnitude() * b.rad,
            Measure::Deviation => hypotenuse(hypotenuse(a.rad * b.mid, a.mid * b.rad), a.rad * b.rad),
        };
        // Unknown · 0 is unknown: ∞·0 is NaN in the engine as in `rad`.
        Ball { mid: a.mid * b.mid, rad: known(rad) }
    }

    /// a·b, rounded in the accumulator.
    pub(crate) fn multiply(&self, a: Ball, b: Ball) -> Ball {
        self.operation(self.product(a, b))
    }

    /// a + b, rounded in the accumulator.
    pub(crate) fn add(&self, a: Ball, b: Ball) -> Ball {
        self.operation(Ball { mid: a.mid + b.mid, rad: self.join(a.rad, b.rad) })
    }
}

/// Whether a sum of squares has left nothing behind the range of f64.
#[inline(always)]
pub(super) fn usual(square: f64) -> bool {
    (1e-280..1e280).contains(&square)
}

/// √(a² + b²), by `hypot` where the squares may leave the range of f64.
fn hypotenuse(a: f64, b: f64) -> f64 {
    let square = a * a + b * b;
    if usual(square) { square.sqrt() } else { a.hypot(b) }
}
