//! Balls side by side. What one instruction does to several numbers it does to several balls: each comes
//! to what the operations on one ball come to, bit for bit.

use pulp::{Arch, Simd, WithSimd};

use super::ball::{Arithmetic, Ball, Measure, known, usual};

/// So many balls are worked on together.
pub(super) const LINE: usize = 32;

/// Runs `body`, compiled for the widest vectors of this machine; a closure has to be inlined into it. Numbers that
/// it reads beside its slices it owns: what lies behind a reference might change with every number written, and is
/// loaded again for each.
pub(super) fn vectorized<R>(body: impl FnMut() -> R) -> R {
    struct Body<F>(F);

    // By reference: of a closure that is taken as `FnOnce` the compiler calls a shim, which it does not inline.
    impl<R, F: FnMut() -> R> WithSimd for Body<F> {
        type Output = R;

        #[inline(always)]
        fn with_simd<S: Simd>(mut self, _: S) -> R {
            (self.0)()
        }
    }

    Arch::new().dispatch(Body(body))
}

/// One line of balls.
#[derive(Clone, Copy, Debug)]
pub(super) struct Line {
    pub(super) mid: [f64; LINE],
    pub(super) rad: [f64; LINE],
}

impl Line {
    /// The same ball throughout.
    pub(super) fn all(ball: Ball) -> Self {
        Self { mid: [ball.mid; LINE], rad: [ball.rad; LINE] }
    }

    /// Numbers that engine and truth share.
    pub(super) fn exact(number: impl Fn(usize) -> f64) -> Self {
        Self { mid: std::array::from_fn(number), rad: [0.0; LINE] }
    }

    /// Every `step`th of the balls from `from` on, `count` of them. Where that is no full line, its first ball
    /// stands in the places that are left.
    pub(super) fn of((mids, rads): (&[f64], &[f64]), from: usize, step: usize, count: usize) -> Self {
        Self { mid: every(&mids[from..], step, count), rad: every(&rads[from..], step, count) }
    }

    /// Writes its first `count` balls to every `step`th place from `from` on.
    pub(super) fn put(&self, (mids, rads): (&mut [f64], &mut [f64]), from: usize, step: usize, count: usize) {
        for (into, line) in [(mids, &self.mid), (rads, &self.rad)] {
            let places = into[from..].chunks_mut(step);
            places.zip(&line[..count]).for_each(|(place, &number)| place[0] = number);
        }
    }

    #[inline(always)]
    pub(super) fn at(&self, place: usize) -> Ball {
        Ball { mid: self.mid[place], rad: self.rad[place] }
    }

    /// A function of one ball, or of several in the same place.
    pub(super) fn each(ball: impl Fn(usize) -> Ball) -> Self {
        let mut line = Self::all(Ball::default());
        for place in 0..LINE {
            let ball = ball(place);
            (line.mid[place], line.rad[place]) = (ball.mid, ball.rad);
        }
        line
    }

    /// Two results of each ball.
    pub(super) fn pairs(balls: impl Fn(usize) -> [Ball; 2]) -> [Self; 2] {
        let mut lines = [Self::all(Ball::default()); 2];
        for place in 0..LINE {
            for (line, ball) in lines.iter_mut().zip(balls(place)) {
                (line.mid[place], line.rad[place]) = (ball.mid, ball.rad);
            }
        }
        lines
    }
}

fn every(from: &[f64], step: usize, count: usize) -> [f64; LINE] {
    let mut line = [from.first().copied().unwrap_or(0.0); LINE];
    match step {
        1 => line[..count].copy_from_slice(&from[..count]),
        _ => line[..count].iter_mut().zip(from.chunks(step)).for_each(|(into, of_step)| *into = of_step[0]),
    }
    line
}

impl Arithmetic {
    /// [`Arithmetic::product`] of each.
    pub(super) fn product_of_lines(&self, a: &Line, b: &Line) -> Line {
        let mut product = Line::all(Ball::default());
        let (mut as_all, measure) = (true, self.measure);
        vectorized(
            #[inline(always)]
            || {
                for place in 0..LINE {
                    let (a, b) = (a.at(place), b.at(place));
                    product.mid[place] = a.mid * b.mid;
                    product.rad[place] = match measure {
                        Measure::Midpoint => 0.0,
                        Measure::Worst => known(a.rad * b.mid.abs() + a.magnitude() * b.rad),
                        Measure::Deviation => {
                            let [first, second, third] = [a.rad * b.mid, a.mid * b.rad, a.rad * b.rad];
                            let sum = first * first + second * second;
                            let square = sum.sqrt() * sum.sqrt() + third * third;
                            as_all &= usual(sum) & usual(square);
                            square.sqrt()
                        }
                    };
                }
            },
        );
        if as_all { product } else { Line::each(|place| self.product(a.at(place), b.at(place))) }
    }

    /// [`Arithmetic::operation`] on each.
    pub(super) fn operation_on_line(&self, mut line: Line) -> Line {
        self.round_all(&self.accumulate, &line.mid, &mut line.rad);
        line
    }

    /// [`Arithmetic::multiply`] of each.
    pub(super) fn multiply_lines(&self, a: &Line, b: &Line) -> Line {
        self.operation_on_line(self.product_of_lines(a, b))
    }

    /// Each stored to the tensors' type.
    pub(super) fn store_line(&self, mut line: Line) -> Line {
        self.round_all(&self.storage, &line.mid, &mut line.rad);
        line
    }

    /// Each joined with the radius of an error of its own.
    pub(super) fn join_to_line(&self, mut line: Line, rads: &[f64; LINE]) -> Line {
        self.join_all(&mut line.rad, rads);
        line
    }
}

#[cfg(test)]
mod tests {
    use super::super::accumulation::Sum;
    use super::*;
    use crate::element::DType;
    use crate::engine::RoundingModel;
    use crate::oracle::bound::curve::Curve;
    use crate::oracle::bound::numerics_of;

    /// Balls of every size, exact and unknown ones among them.
    fn lines() -> Vec<Line> {
        let drawn = |at: usize, factor: f64| libm::sin(factor * at as f64);
        let sizes = [1.0, 8.0, 40.0, 800.0, 1e-9, 1e-160, 1e200];
        let mut lines: Vec<Line> = sizes
            .iter()
            .flat_map(|&size| [1e-9, 1e-3, 0.7, 30.0].map(|spread| (size, spread)))
            .map(|(size, spread)| {
                Line::each(|at| Ball { mid: size * drawn(at + 1, 1.3), rad: spread * size * drawn(at, 0.7).abs() })
            })
            .collect();
        lines.push(Line::each(|at| Ball::exact(drawn(at, 1.1))));
        for odd in [f64::INFINITY, f64::NAN] {
            let mut line = lines[0];
            (line.mid[3], line.rad[7], line.rad[9], line.mid[9]) = (odd, f64::INFINITY, 0.0, 0.0);
            lines.push(line);
        }
        lines
    }

    fn same(line: &Line, ball: impl Fn(usize) -> Ball, what: &str) {
        for place in 0..LINE {
            let (found, expected) = (line.at(place), ball(place));
            let bits =
                |ball: Ball| [ball.mid, ball.rad].map(|number| if number.is_nan() { 0 } else { number.to_bits() });
            assert_eq!(bits(found), bits(expected), "{what}, {place}: {found:?} for {expected:?}");
        }
    }

    #[test]
    fn lines_come_to_what_their_balls_come_to() {
        let curves = [Curve::Silu, Curve::GeluExact, Curve::GeluTanh, Curve::Relu, Curve::ReluSquared, Curve::GptOss];
        for measure in [Measure::Midpoint, Measure::Worst, Measure::Deviation] {
            for storage in [DType::BF16, DType::F32] {
                let arithmetic = Arithmetic::new(&numerics_of(storage, RoundingModel::Fused), measure);
                // Midpoints alone have no radii.
                let exact =
                    |line: Line| if measure == Measure::Midpoint { Line { rad: [0.0; LINE], ..line } } else { line };
                let lines: Vec<Line> = lines().into_iter().map(exact).collect();
                for (a, b) in lines.iter().zip(lines.iter().skip(1)) {
                    let what = format!("{measure:?}, {storage:?}");
                    same(&arithmetic.product_of_lines(a, b), |at| arithmetic.product(a.at(at), b.at(at)), &what);
                    same(&arithmetic.multiply_lines(a, b), |at| arithmetic.multiply(a.at(at), b.at(at)), &what);
                    let stored = |at| arithmetic.round(&arithmetic.storage, a.at(at));
                    same(&arithmetic.store_line(*a), stored, &what);
                    let joined = |at: usize| Ball { rad: arithmetic.join(a.rad[at], b.rad[at]), ..a.at(at) };
                    if measure != Measure::Midpoint {
                        same(&arithmetic.join_to_line(*a, &b.rad), joined, &what);
                    }
                    for curve in curves {
                        let what = format!("{curve:?} of {a:?}, {what}");
                        same(&arithmetic.curve_values(curve, a), |at| arithmetic.curve_value(curve, a.at(at)), &what);
                        same(&arithmetic.curve_slopes(curve, a), |at| arithmetic.curve_slope(curve, a.at(at)), &what);
                    }
                }
            }
        }
    }

    #[test]
    fn sums_come_to_what_each_of_them_comes_to() {
        for measure in [Measure::Midpoint, Measure::Worst, Measure::Deviation] {
            let arithmetic = Arithmetic::new(&numerics_of(DType::BF16, RoundingModel::Fused), measure);
            for line in lines().iter_mut() {
                (line.mid[5], line.rad[5]) = (0.0, 0.0);
                let magnitudes: [f64; LINE] = std::array::from_fn(|at| line.at(at).magnitude());
                let squares = line.mid.map(|mid| mid * mid);
                for roundings in [0, 1, 7, 1 << 25] {
                    let mut summed = *line;
                    let sums: [&[f64]; 3] = [&line.mid, &magnitudes, &squares];
                    arithmetic.summed_all(&arithmetic.accumulate, sums, &mut summed.rad, roundings);
                    let of_one = |at: usize| {
                        let sum = Sum { ball: line.at(at), magnitude: magnitudes[at], square: squares[at] };
                        arithmetic.summed(&arithmetic.accumulate, sum, roundings)
                    };
                    same(&summed, of_one, &format!("{measure:?}, {roundings} roundings of {line:?}"));
                }
            }
        }
    }

    #[test]
    fn radii_join_beyond_where_their_squares_leave_the_range() {
        let arithmetic = Arithmetic::new(&numerics_of(DType::F32, RoundingModel::Fused), Measure::Deviation);
        for unit in [1e200, 1.0, 1e-170, 1e-200] {
            let joined = arithmetic.join(3.0 * unit, 4.0 * unit) / unit;
            assert!((joined - 5.0).abs() < 1e-12, "{joined} of {unit}");
        }
    }

    #[test]
    fn a_line_reads_and_writes_every_so_manieth_place() {
        let (mids, rads): (Vec<f64>, Vec<f64>) = (0..10).map(|at| (f64::from(at), 0.5)).unzip();
        let line = Line::of((&mids, &rads), 1, 2, 4);
        assert_eq!((&line.mid[..6], line.rad[LINE - 1]), (&[1.0, 3.0, 5.0, 7.0, 1.0, 1.0][..], 0.5));
        let (mut into, mut radii) = (vec![0.0; 10], vec![0.0; 10]);
        line.put((&mut into, &mut radii), 2, 2, 3);
        assert_eq!(into, [0.0, 0.0, 1.0, 0.0, 3.0, 0.0, 5.0, 0.0, 0.0, 0.0]);
    }
}
