//! The activations as functions of one ball: value and slope, their curvature, their evaluation.

#[cfg(test)]
mod tests;

use super::ball::{Arithmetic, Ball, Measure};
use super::line::Line;
use crate::activation::{Activation, Gelu};
use crate::oracle::statistic::LIMIT;

/// Second-order terms of the evaluation errors below stay under a hundredth of the first-order
/// ones for every roundoff up to 2⁻¹⁵ and functions of up to 16 ulps.
pub(super) const SECOND_ORDER: f64 = 1.01;

/// The function f of a = f(gate)·v(up), or of a = f(h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Curve {
    Silu,
    GeluExact,
    GeluTanh,
    Relu,
    ReluSquared,
    /// g·σ(1.702·g) with g = min(x, 7).
    GptOss,
}

/// The slope of gpt-oss's sigmoid.
pub(crate) const STEEPNESS: f64 = 1.702;

/// Where gpt-oss clamps its gate from above, and up from both sides.
pub(crate) const CLAMP: f64 = 7.0;

impl Curve {
    pub(crate) fn of(activation: Activation) -> Self {
        match activation {
            Activation::SwiGlu | Activation::Silu => Self::Silu,
            Activation::GeGlu(Gelu::Exact) | Activation::Gelu(Gelu::Exact) => Self::GeluExact,
            Activation::GeGlu(Gelu::Tanh) | Activation::Gelu(Gelu::Tanh) => Self::GeluTanh,
            Activation::ReGlu | Activation::Relu => Self::Relu,
            Activation::ReluSquared => Self::ReluSquared,
            Activation::GptOss => Self::GptOss,
        }
    }

    /// The ends of the range outside of which f is constant.
    fn range(self) -> [f64; 2] {
        match self {
            Self::Silu | Self::GeluExact | Self::GeluTanh => [f64::NEG_INFINITY, f64::INFINITY],
            Self::Relu | Self::ReluSquared => [0.0, f64::INFINITY],
            Self::GptOss => [f64::NEG_INFINITY, CLAMP],
        }
    }

    /// f, f′ and f″ at x; at the kink of ReLU f′ = f″ = 0, at the clamp of gpt-oss they are those below it.
    pub(crate) fn derivatives(self, x: f64) -> [f64; 3] {
        match self {
            Self::Silu => {
                // σ and 1 − σ by the same exponential, so that neither tail cancels.
                let (on, off) = logistic(x);
                let slope = on * off;
                [x * on, on + x * slope, 2.0 * slope + x * slope * (off - on)]
            }
            Self::GeluExact => {
                let half = std::f64::consts::FRAC_1_SQRT_2;
                let (cdf, pdf) = (0.5 * libm::erfc(-x * half), normal_density(x));
                [x * cdf, cdf + x * pdf, pdf * (2.0 - x * x)]
            }
            Self::GeluTanh => {
                // x/2·(1 + tanh(w/2)) = x·σ(w).
                let [w, w1, w2] = tanh_argument(x);
                let (on, off) = logistic(w);
                let slope = on * off;
                let (q1, q2) = (slope * w1, slope * ((off - on) * w1 * w1 + w2));
                [x * on, on + x * q1, 2.0 * q1 + x * q2]
            }
            Self::Relu => [x.max(0.0), if x > 0.0 { 1.0 } else { 0.0 }, 0.0],
            Self::ReluSquared => {
                let on = x.max(0.0);
                [on * on, 2.0 * on, if x > 0.0 { 2.0 } else { 0.0 }]
            }
            // With z = αx, f(x) = silu(z)/α.
            Self::GptOss if x <= CLAMP => {
                let [value, slope, second] = Self::Silu.derivatives(STEEPNESS * x);
                [value / STEEPNESS, slope, STEEPNESS * second]
            }
            Self::GptOss => [Self::GptOss.derivatives(CLAMP)[0], 0.0, 0.0],
        }
    }

    /// sup |f″| and sup |f‴| over |x| ≥ m, kinks apart.
    ///
    /// silu: |f″| ≤ σ(1−σ)(2 + |x|), |f‴| ≤ σ(1−σ)(3 + |x|). gelu: |f″| ≤ φx², |f‴| ≤ φ|x|³ from
    /// 2 on. The tanh form, with w its argument: the chain rule's terms with σ(1−σ) ≤ e^−|w|, which
    /// fall from 3 on. Below that the global suprema stand.
    fn curvature(self, m: f64) -> [f64; 2] {
        match self {
            Self::Silu => {
                let tail = libm::exp(-m);
                [((2.0 + m) * tail).min(0.5), ((3.0 + m) * tail).min(0.3082)]
            }
            Self::GeluExact if m >= 3.0 => {
                let pdf = normal_density(m);
                [pdf * m * m, pdf * m * m * m]
            }
            Self::GeluExact => [0.7979, 0.7788],
            Self::GeluTanh if m >= 3.0 => {
                let [w, w1, w2] = tanh_argument(m);
                let w3 = w2 / m;
                let tail = libm::exp(-w);
                let second = w1 * w1 + w2;
                [tail * (2.0 * w1 + m * second), tail * (3.0 * second + m * (w1 * w1 * w1 + 3.0 * w1 * w2 + w3))]
            }
            Self::GeluTanh => [0.7979, 0.7767],
            Self::Relu => [0.0, 0.0],
            Self::ReluSquared => [2.0, 0.0],
            Self::GptOss => {
                let [second, third] = Self::Silu.curvature(STEEPNESS * m);
                [STEEPNESS * second, STEEPNESS * STEEPNESS * third]
            }
        }
    }

    /// Roundings, in units of the accumulator's roundoff, of any usual evaluation of f(x) = `value`
    /// with elementary functions of `ulps` units.
    fn value_roundings(self, x: f64, value: f64, ulps: f64) -> f64 {
        match self {
            // x·σ: the function, the product, one more for a scaled argument.
            Self::Silu => (ulps + 2.0) * value,
            // x/2·(1 + erf): where erf nears −1 the sum cancels, so the error counts on |x|.
            Self::GeluExact => (ulps / 2.0 + 4.0) * x,
            // The same with tanh, or x·σ(w); w errs by five roundings, and σ(1−σ)|w| < 0.23.
            Self::GeluTanh => (ulps + 5.0) * x,
            Self::Relu => 0.0,
            Self::ReluSquared => value,
            // And α with its product: z = αx errs by two units, which move x·σ by two of xz·σ(1 − σ), and
            // z²σ(1 − σ) < 0.44.
            Self::GptOss => (ulps + 2.0) * value + 2.0 * (value * STEEPNESS * x).min(0.44 / STEEPNESS),
        }
    }

    /// The same for f′ anywhere in the ball `x`.
    fn slope_roundings(self, x: Ball, ulps: f64) -> f64 {
        match self {
            // σ(1 + x(1 − σ)) and σ + silu(1 − σ) in their usual orders of evaluation.
            Self::Silu => {
                let (on, _) = logistic(x.mid + x.rad);
                on * (ulps + 3.0 + x.magnitude() * (3.0 * ulps + 6.0))
            }
            // Φ + xφ with |xφ| ≤ 0.25 and |x³φ| ≤ 0.47.
            Self::GeluExact => ulps + 6.0,
            // (1 + t)/2 + x/2·(1 − t²)w′, where 1 − t² inherits t's absolute error.
            Self::GeluTanh => {
                let [_, w1, _] = tanh_argument(x.magnitude());
                ulps + 6.0 + x.magnitude() * w1 / 4.0 * (2.0 * ulps + 9.0)
            }
            Self::Relu | Self::ReluSquared => 0.0,
            // That of silu′ at z = αx, and two units of z: |z·silu″(z)| < 0.31.
            Self::GptOss => {
                let z = Ball { mid: STEEPNESS * x.mid, rad: STEEPNESS * x.rad };
                Self::Silu.slope_roundings(z, ulps) + 2.0 * 0.31
            }
        }
    }
}

impl Arithmetic {
    /// f(x) as the accumulator has it.
    pub(crate) fn curve_value(&self, curve: Curve, x: Ball) -> Ball {
        let [low, high] = curve.range();
        let x = self.clamp(x, low, high);
        let [value, slope, _] = curve.derivatives(x.mid);
        if self.measure == Measure::Midpoint {
            return Ball::exact(value);
        }
        if !x.rad.is_finite() {
            return Ball { mid: value, rad: f64::INFINITY };
        }
        let rad = match curve {
            // Clamping has done it all.
            Curve::Relu => x.rad,
            _ => {
                let [second, _] = curve.curvature((x.mid.abs() - x.rad).max(0.0));
                slope.abs() * x.rad + 0.5 * second * x.rad * x.rad
            }
        };
        let roundings = curve.value_roundings(x.magnitude(), value.abs() + rad, self.function_ulps);
        self.evaluated(Ball { mid: value, rad }, roundings, x.magnitude())
    }

    /// [`Arithmetic::curve_value`] of each.
    pub(super) fn curve_values(&self, curve: Curve, x: &Line) -> Line {
        let values = if curve == Curve::Silu { self.silu_values(x) } else { None };
        values.unwrap_or_else(|| Line::each(|place| self.curve_value(curve, x.at(place))))
    }

    /// [`Arithmetic::curve_slope`] of each.
    pub(super) fn curve_slopes(&self, curve: Curve, x: &Line) -> Line {
        let slopes = if curve == Curve::Silu { self.silu_slopes(x) } else { None };
        slopes.unwrap_or_else(|| Line::each(|place| self.curve_slope(curve, x.at(place))))
    }

    /// f′(x) as the accumulator has it.
    pub(crate) fn curve_slope(&self, curve: Curve, x: Ball) -> Ball {
        let [_, slope, second] = curve.derivatives(x.mid);
        if self.measure == Measure::Midpoint {
            return Ball::exact(slope);
        }
        if !x.rad.is_finite() {
            return Ball { mid: slope, rad: f64::INFINITY };
        }
        let rad = match curve {
            // Within reach of the kink the slope is 0 or 1, whatever the midpoint says. An exact 0
            // is no kink: f′(0) = 0.
            Curve::Relu => f64::from(u8::from(x.rad > 0.0 && x.mid.abs() <= self.reach(x.rad))),
            Curve::ReluSquared => {
                let twice = |x: f64| 2.0 * x.max(0.0);
                (twice(x.mid + x.rad) - slope).max(slope - twice(x.mid - x.rad))
            }
            Curve::Silu | Curve::GeluExact | Curve::GeluTanh => {
                let [_, third] = curve.curvature((x.mid.abs() - x.rad).max(0.0));
                // No slope of these leaves [−0.13, 1.13].
                (second.abs() * x.rad + 0.5 * third * x.rad * x.rad).min(1.26)
            }
            Curve::GptOss => return self.slope_below_a_clamp(x),
        };
        let roundings = curve.slope_roundings(x, self.function_ulps);
        self.evaluated(Ball { mid: slope, rad }, roundings, 4.0 * (1.0 + x.magnitude()))
    }

    /// f′ of gpt-oss: 0 beyond the clamp, and within its reach 0 or what it is below, whatever the
    /// midpoint says.
    fn slope_below_a_clamp(&self, x: Ball) -> Ball {
        let curve = Curve::GptOss;
        let [_, mid, _] = curve.derivatives(x.mid);
        let (reach, below) = (self.reach(x.rad), self.clamp(x, f64::NEG_INFINITY, CLAMP));
        if x.mid - reach > CLAMP {
            return Ball::exact(mid);
        }
        let [_, slope, second] = curve.derivatives(below.mid);
        let [_, third] = curve.curvature((below.mid.abs() - below.rad).max(0.0));
        let smooth = (second.abs() * below.rad + 0.5 * third * below.rad * below.rad).min(1.26);
        let rad = if x.mid + reach > CLAMP { slope.abs() + smooth } else { smooth };
        let roundings = curve.slope_roundings(below, self.function_ulps);
        self.evaluated(Ball { mid, rad }, roundings, 4.0 * (1.0 + below.magnitude()))
    }

    /// σ(x) as the accumulator has it: |σ″| ≤ 0.0963, and |σ″| ≤ e^−m over |x| ≥ m.
    pub(crate) fn sigmoid(&self, x: Ball) -> Ball {
        let (on, off) = logistic(x.mid);
        if self.measure == Measure::Midpoint {
            return Ball::exact(on);
        }
        if !x.rad.is_finite() {
            return Ball { mid: on, rad: f64::INFINITY };
        }
        let second = libm::exp(-(x.mid.abs() - x.rad).max(0.0)).min(0.0963);
        // σ never leaves [0, 1].
        let rad = (on * off * x.rad + 0.5 * second * x.rad * x.rad).min(1.0);
        self.evaluated(Ball { mid: on, rad }, self.function_ulps * (on + rad), 1.0)
    }

    /// σ(1 − σ) of a σ that an engine has: σ′, by the two operations.
    pub(crate) fn bend(&self, sigma: Ball) -> Ball {
        let rad = (1.0 - 2.0 * sigma.mid).abs() * sigma.rad + sigma.rad * sigma.rad;
        self.operation(self.operation(Ball { mid: sigma.mid * (1.0 - sigma.mid), rad }))
    }

    /// x within [low, high], exactly.
    pub(crate) fn clamp(&self, x: Ball, low: f64, high: f64) -> Ball {
        let mid = x.mid.clamp(low, high);
        let rad = match self.measure {
            // A NaN in the ball stays one.
            _ if !x.rad.is_finite() => f64::INFINITY,
            Measure::Midpoint => 0.0,
            Measure::Worst => {
                let end = |x: f64| (x.clamp(low, high) - mid).abs();
                end(x.mid + x.rad).max(end(x.mid - x.rad))
            }
            Measure::Deviation if (x.mid - mid).abs() <= self.reach(x.rad) => x.rad,
            Measure::Deviation => 0.0,
        };
        Ball { mid, rad }
    }

    /// How far from the midpoint an engine's number may lie: several deviations, as a deviation is
    /// no bound.
    pub(super) fn reach(&self, rad: f64) -> f64 {
        match self.measure {
            Measure::Midpoint => 0.0,
            Measure::Worst => rad,
            Measure::Deviation => LIMIT * rad,
        }
    }

    /// Adds the evaluation's own error; `weight` is what an absolute error of the elementary
    /// function is multiplied with at most.
    fn evaluated(&self, ball: Ball, roundings: f64, weight: f64) -> Ball {
        if roundings == 0.0 {
            return ball;
        }
        // A product of the evaluation may underflow itself, the argument's half and cube among them.
        let products = 4.0 * self.accumulate.underflow;
        let own = SECOND_ORDER * self.accumulate.unit * roundings + self.function_underflow * weight + products;
        Ball { rad: self.join(ball.rad, self.spread(own)), ..ball }
    }
}

/// σ(x) and 1 − σ(x), each to full relative accuracy.
fn logistic(x: f64) -> (f64, f64) {
    let tail = libm::exp(-x.abs());
    let (large, small) = (1.0 / (1.0 + tail), tail / (1.0 + tail));
    if x >= 0.0 { (large, small) } else { (small, large) }
}

/// φ(x) = e^(−x²/2)/√2π.
fn normal_density(x: f64) -> f64 {
    libm::exp(-0.5 * x * x) / std::f64::consts::TAU.sqrt()
}

/// w = 2√(2/π)(x + 0.044715 x³), w′ and w″.
fn tanh_argument(x: f64) -> [f64; 3] {
    let scale = 2.0 * (2.0 / std::f64::consts::PI).sqrt();
    let cubic = 0.044715;
    [scale * (x + cubic * x * x * x), scale * (1.0 + 3.0 * cubic * x * x), scale * 6.0 * cubic * x]
}
