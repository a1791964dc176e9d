use super::*;
use crate::element::DType;
use crate::engine::{Numerics, RoundingModel, RouterRounding};

const CURVES: [Curve; 6] =
    [Curve::Silu, Curve::GeluExact, Curve::GeluTanh, Curve::Relu, Curve::ReluSquared, Curve::GptOss];

/// −12 … 12 in steps of 1/512, without the kinks at 0 and 7.
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
    for curve in [Curve::Silu, Curve::GeluExact, Curve::GeluTanh, Curve::GptOss] {
        let (mut second_outwards, mut third_outwards) = (0.0f64, 0.0f64);
        for x in (0..=12_000).rev().map(|step| f64::from(step) / 1000.0) {
            // No difference across a kink.
            for x in [x, -x].into_iter().filter(|x| curve.range().iter().all(|end| (x - end).abs() > step)) {
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

fn arithmetic(measure: Measure) -> Arithmetic {
    let numerics = Numerics {
        storage: DType::F64,
        score: DType::F64,
        accumulator: DType::F64.unit_roundoff(),
        rounding: RoundingModel::Fused,
        router: RouterRounding::Score,
        function_ulps: 4.0,
        flushes_denormals: false,
    };
    Arithmetic::new(&numerics, measure)
}

/// p(1 − p) is flat at 1/2: an error of p counts there in the square alone.
#[test]
fn the_slope_of_a_sigmoid_errs_as_the_sigmoid_does_and_at_one_half_in_the_square() {
    let arithmetic = arithmetic(Measure::Worst);
    for (mid, rad) in [(0.5, 1e-3), (0.25, 1e-3), (0.9, 1e-2), (0.01, 1e-4)] {
        let found = arithmetic.bend(Ball { mid, rad });
        let at = |p: f64| (p * (1.0 - p) - found.mid).abs();
        let farthest = at(mid - rad).max(at(mid + rad));
        assert!((farthest..1.01 * farthest + 1e-15).contains(&found.rad), "{mid} ± {rad}: {found:?}, {farthest}");
    }
}

/// f′(0) = 0 in every engine.
#[test]
fn an_exact_0_is_no_kink_and_a_ball_that_ends_at_the_kink_reaches_it() {
    for measure in [Measure::Worst, Measure::Deviation] {
        let arithmetic = arithmetic(measure);
        assert_eq!(arithmetic.curve_slope(Curve::Relu, Ball::exact(0.0)), Ball::exact(0.0));
    }
    let arithmetic = arithmetic(Measure::Worst);
    for (mid, rad, reaches) in [(0.5, 0.5, true), (-0.5, 0.5, true), (0.5, 0.25, false), (-0.5, 0.25, false)] {
        let slope = arithmetic.curve_slope(Curve::Relu, Ball { mid, rad });
        assert_eq!((slope.mid, slope.rad), (f64::from(u8::from(mid > 0.0)), f64::from(u8::from(reaches))));
    }
}

/// A deviation is no bound: what lies within several of them may be met, on either side of a kink.
#[test]
fn a_kink_within_several_deviations_is_within_reach() {
    let arithmetic = arithmetic(Measure::Deviation);
    for (curve, flat, slope) in [(Curve::Relu, -0.01, 1.0), (Curve::GptOss, CLAMP + 0.01, 1.0)] {
        let x = Ball { mid: flat, rad: 0.01 };
        assert!(arithmetic.curve_value(curve, x).rad >= 0.01 * slope, "{curve:?}");
        assert!(arithmetic.curve_slope(curve, x).rad >= slope, "{curve:?}");
        let far = Ball { rad: 1e-4, ..x };
        assert!(arithmetic.curve_value(curve, far).rad < 1e-13, "{curve:?}");
        assert_eq!(arithmetic.curve_slope(curve, far), Ball::exact(0.0), "{curve:?}");
    }
}

#[test]
fn values_and_slopes_of_every_point_of_a_ball_lie_in_the_ball_of_values_and_slopes() {
    let arithmetic = arithmetic(Measure::Worst);
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

/// Radii of values and of slopes over balls of many sizes: the mean of log₂, weighted by their places. Each constant
/// and each term of the formulas moves it by more than 10⁻⁹; that they are right is what the other tests say.
#[test]
fn radii_of_values_and_slopes_are_what_they_were() {
    let mut found = Vec::new();
    for (curve, measure) in CURVES.into_iter().flat_map(|c| [Measure::Worst, Measure::Deviation].map(|m| (c, m))) {
        let arithmetic = arithmetic(measure);
        let (mut sums, mut weights) = ([0.0; 2], 0.0);
        let points = grid().step_by(7).flat_map(|mid| [1e-14, 1e-6, 0.01, 0.3, 2.0].map(|rad| Ball { mid, rad }));
        for (place, x) in points.enumerate() {
            let weight = 1.0 + (0.618_033_988_749_895 * place as f64).fract();
            let radii = [arithmetic.curve_value(curve, x).rad, arithmetic.curve_slope(curve, x).rad];
            sums.iter_mut()
                .zip(radii)
                .filter(|(_, rad)| *rad > 0.0)
                .for_each(|(sum, rad)| *sum += weight * libm::log2(rad));
            weights += weight;
        }
        let x = Ball { mid: 0.5, rad: 0.25 };
        let sigmoid = arithmetic.sigmoid(x).rad;
        found.push((curve, measure, [sums[0] / weights, sums[1] / weights, sigmoid]));
    }
    let moved = |(found, kept): &(&(Curve, Measure, [f64; 3]), &[f64; 3])| {
        found.2.iter().zip(*kept).any(|(found, kept)| (found - kept).abs() > 1e-9)
    };
    let moved: Vec<_> = found.iter().zip(&KEPT).filter(moved).collect();
    assert!(found.len() == KEPT.len() && moved.is_empty(), "{moved:#?}, of all {found:?}");
}

/// By curve, bounds and then deviations: values, slopes, and the sigmoid at 0.5 ± 0.25.
const KEPT: [[f64; 3]; 12] = [
    [-17.786911312378, -20.354794943557, 0.061760303050],
    [-17.877415119771, -20.498211767583, 0.061760303050],
    [-22.738814500370, -31.022429726726, 0.061760303050],
    [-22.991160383660, -31.373685966262, 0.061760303050],
    [-23.059387329675, -29.385555529155, 0.061760303050],
    [-23.345700242405, -29.803708016923, 0.061760303050],
    [-7.396775259290, 0.000000000000, 0.061760303050],
    [-7.311372718399, 0.000000000000, 0.061760303050],
    [-5.780747233519, -6.877643537042, 0.061760303050],
    [-5.616409570391, -6.877643537042, 0.061760303050],
    [-25.894485663496, -17.258438117472, 0.061760303050],
    [-24.287630035112, -17.186842744807, 0.061760303050],
];
