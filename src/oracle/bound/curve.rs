//! The activations as functions of one ball: value and slope, their curvature, their evaluation.

use super::ball::{Arithmetic, Ball, Measure};
use crate::activation::{Activation, Gelu};
use crate::oracle::statistic::LIMIT;

/// Second-order terms of the evaluation errors below stay under a hundredth of the first-order
/// ones for every roundoff up to 2⁻¹⁵ and functions of up to 16 ulps.
const SECOND_ORDER: f64 = 1.01;

/// The function f of a = f(gate)·up, or of a = f(h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Curve {
    Silu,
    GeluExact,
    GeluTanh,
    Relu,
    ReluSquared,
}

impl Curve {
    pub(crate) fn of(activation: Activation) -> Self {
        match activation {
            Activation::SwiGlu | Activation::Silu => Self::Silu,
            Activation::GeGlu(Gelu::Exact) | Activation::Gelu(Gelu::Exact) => Self::GeluExact,
            Activation::GeGlu(Gelu::Tanh) | Activation::Gelu(Gelu::Tanh) => Self::GeluTanh,
            Activation::ReGlu | Activation::Relu => Self::Relu,
            Activation::ReluSquared => Self::ReluSquared,
        }
    }

    /// f, f′ and f″ at x; at the kink of ReLU f′ = f″ = 0.
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
        }
    }

    /// sup |f″| and sup |f‴| over |x| ≥ m.
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
        }
    }
}

impl Arithmetic {
    /// f(x) as the accumulator has it.
    pub(crate) fn curve_value(&self, curve: Curve, x: Ball) -> Ball {
        let [value, slope, _] = curve.derivatives(x.mid);
        if !x.rad.is_finite() {
            return Ball { mid: value, rad: f64::INFINITY };
        }
        let rad = match (curve, self.measure) {
            // Monotone, so the ends of the ball bound it.
            (Curve::Relu | Curve::ReluSquared, Measure::Worst) => {
                let [above, ..] = curve.derivatives(x.mid + x.rad);
                let [below, ..] = curve.derivatives(x.mid - x.rad);
                (above - value).max(value - below)
            }
            _ => {
                let [second, _] = curve.curvature((x.mid.abs() - x.rad).max(0.0));
                slope.abs() * x.rad + 0.5 * second * x.rad * x.rad
            }
        };
        let roundings = curve.value_roundings(x.magnitude(), value.abs() + rad, self.function_ulps);
        self.evaluated(Ball { mid: value, rad }, roundings, x.magnitude())
    }

    /// f′(x) as the accumulator has it.
    pub(crate) fn curve_slope(&self, curve: Curve, x: Ball) -> Ball {
        let [_, slope, second] = curve.derivatives(x.mid);
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
        };
        let roundings = curve.slope_roundings(x, self.function_ulps);
        self.evaluated(Ball { mid: slope, rad }, roundings, 4.0 * (1.0 + x.magnitude()))
    }

    /// How far from the midpoint an engine's number may lie: several deviations, as a deviation is
    /// no bound.
    fn reach(&self, rad: f64) -> f64 {
        match self.measure {
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
        let own = SECOND_ORDER * self.accumulate.unit * roundings + self.function_underflow * weight;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;
    use crate::engine::{Numerics, RoundingModel, RouterRounding};

    const CURVES: [Curve; 5] = [Curve::Silu, Curve::GeluExact, Curve::GeluTanh, Curve::Relu, Curve::ReluSquared];

    /// −12 … 12 in steps of 1/512, without the kink at 0.
    fn grid() -> impl Iterator<Item = f64> {
        (-6144..=6144).map(|step| f64::from(step) / 512.0 + 1e-4)
    }

    #[test]
    fn derivatives_are_those_of_central_differences() {
        let step = 1e-5;
        for (curve, x) in CURVES.into_iter().flat_map(|curve| grid().map(move |x| (curve, x))) {
            let (above, below) = (curve.derivatives(x + step), curve.derivatives(x - step));
            let [_, slope, second] = curve.derivatives(x);
            for (order, derivative) in [(0, slope), (1, second)] {
                let difference = (above[order] - below[order]) / (2.0 * step);
                // Truncation step²/6 · |f‴|, |f⁗| < 4, and cancellation 2⁻⁵³|f|/step.
                assert!((difference - derivative).abs() < 1e-9 + 1e-10 * x * x, "{curve:?} at {x}");
            }
        }
    }

    #[test]
    fn curvature_bounds_the_derivatives_from_its_point_outwards() {
        let step = 1e-4;
        for curve in [Curve::Silu, Curve::GeluExact, Curve::GeluTanh] {
            let (mut second_outwards, mut third_outwards) = (0.0f64, 0.0f64);
            for x in (0..=12_000).rev().map(|step| f64::from(step) / 1000.0) {
                for x in [x, -x] {
                    let [_, _, second] = curve.derivatives(x);
                    let third = (curve.derivatives(x + step)[2] - curve.derivatives(x - step)[2]) / (2.0 * step);
                    second_outwards = second_outwards.max(second.abs());
                    third_outwards = third_outwards.max(third.abs());
                }
                let [second, third] = curve.curvature(x);
                assert!(second >= second_outwards, "{curve:?} from {x}: {second} < {second_outwards}");
                assert!(third >= third_outwards - 1e-7, "{curve:?} from {x}: {third} < {third_outwards}");
            }
        }
    }

    #[test]
    fn values_and_slopes_of_every_point_of_a_ball_lie_in_the_ball_of_values_and_slopes() {
        let numerics = Numerics {
            storage: DType::F64,
            score: DType::F64,
            accumulator: DType::F64.unit_roundoff(),
            rounding: RoundingModel::Fused,
            router: RouterRounding::Score,
            function_ulps: 4.0,
            flushes_denormals: false,
        };
        let arithmetic = Arithmetic::new(&numerics, Measure::Worst);
        for (curve, mid) in CURVES.into_iter().flat_map(|curve| grid().step_by(37).map(move |x| (curve, x))) {
            for rad in [1e-6, 0.01, 0.3, 2.0] {
                let x = Ball { mid, rad };
                let (value, slope) = (arithmetic.curve_value(curve, x), arithmetic.curve_slope(curve, x));
                for part in -8..=8 {
                    let [there, slope_there, _] = curve.derivatives(mid + rad * f64::from(part) / 8.0);
                    assert!((there - value.mid).abs() <= value.rad, "{curve:?} of {x:?}");
                    assert!((slope_there - slope.mid).abs() <= slope.rad, "{curve:?}′ of {x:?}");
                }
            }
        }
    }
}
