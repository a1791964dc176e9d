//! Sums over each token's rows, expert by expert.

use std::ops::Range;

use ndarray::{Array2, ArrayViewMut1, Zip};

use super::ball::{Arithmetic, Ball, Measure, Sum};
use super::layer::Expanded;
use super::matrix::Balls2;
use super::{Model, eager};
use crate::engine::RoundingModel;

/// Sums over each token's rows, so far.
pub(super) struct Sums {
    mid: Array2<f64>,
    rad: Array2<f64>,
    magnitude: Array2<f64>,
    /// Empty where no deviation asks for it.
    square: Array2<f64>,
}

impl Sums {
    pub(super) fn new(model: &Model<'_, '_>) -> Self {
        let dim = (model.problem.t(), model.problem.d());
        let of = |needed: bool| Array2::zeros(if needed { dim } else { (dim.0, 0) });
        let measure = model.arithmetic.measure;
        let radii = measure != Measure::Midpoint;
        Self { mid: of(true), rad: of(radii), magnitude: of(radii), square: of(measure == Measure::Deviation) }
    }

    /// Adds the rows of some experts: those of y, which `scores` by row weight, or of dx̃.
    pub(super) fn add_all(
        &mut self,
        model: &Model<'_, '_>,
        scores: Option<&Vec<Ball>>,
        lane: usize,
        computed: &[Expanded],
    ) {
        for Expanded { expert, lanes } in computed {
            let [y, dx_expanded] = &lanes[lane];
            let rows = model.routing.rows_of_expert(*expert);
            match (scores, y, dx_expanded) {
                (Some(scores), Some(y), _) => self.add(model, rows, y, |row, mids, rads| match model.rounding {
                    RoundingModel::Fused => model.arithmetic.product_all(scores[row], mids, rads),
                    RoundingModel::Eager => eager::weighted_all(model, scores[row], mids, rads),
                }),
                (None, _, Some(dx_expanded)) => self.add(model, rows, dx_expanded, |_, _, _| {}),
                _ => {}
            }
        }
    }

    /// Adds rows to their tokens, each turned into terms by `terms`.
    fn add(
        &mut self,
        model: &Model<'_, '_>,
        rows: Range<usize>,
        balls: &Balls2,
        terms: impl Fn(usize, &mut [f64], &mut [f64]),
    ) {
        let arithmetic: &Arithmetic = &model.arithmetic;
        let width = balls.mid.ncols();
        let (mut mids, mut rads) = (vec![0.0; width], vec![0.0; width]);
        let sum = |mut sums: ArrayViewMut1<'_, f64>, term: &dyn Fn(&mut [f64])| {
            if let Some(sums) = sums.as_slice_mut() {
                term(sums);
            }
        };
        for (here, row) in rows.enumerate() {
            let token = model.routing.row_token()[row].index();
            mids.iter_mut().zip(balls.mid.row(here)).for_each(|(into, &mid)| *into = mid);
            rads.iter_mut().zip(balls.rad.row(here)).for_each(|(into, &rad)| *into = rad);
            terms(row, &mut mids, &mut rads);
            sum(self.mid.row_mut(token), &|sums| add(sums, mids.iter().copied()));
            if arithmetic.measure == Measure::Midpoint {
                continue;
            }
            sum(self.rad.row_mut(token), &|sums| arithmetic.join_all(sums, &rads));
            sum(self.magnitude.row_mut(token), &|sums| {
                add(sums, mids.iter().zip(&rads).map(|(mid, rad)| mid.abs() + rad));
            });
            sum(self.square.row_mut(token), &|sums| add(sums, mids.iter().map(|mid| mid * mid)));
        }
    }

    /// The sums with their roundings, stored. Without weights a sum of m rows takes m − 1 roundings.
    pub(super) fn finish(self, model: &Model<'_, '_>, weighted: bool) -> Balls2 {
        let arithmetic = &model.arithmetic;
        let Self { mut mid, mut rad, magnitude, square } = self;
        if arithmetic.measure == Measure::Midpoint {
            return Balls2::exact(mid);
        }
        let square = |token: usize, column: usize| square.get((token, column)).copied().unwrap_or(0.0);
        Zip::indexed(&mut mid).and(&mut rad).and(&magnitude).par_for_each(|(token, column), mid, rad, &magnitude| {
            let sum = Sum { ball: Ball { mid: *mid, rad: *rad }, magnitude, square: square(token, column) };
            let terms = model.rows_of_token(token);
            let ball = match model.rounding {
                RoundingModel::Fused => {
                    let roundings = if weighted { terms } else { terms.saturating_sub(1) };
                    let sum = arithmetic.summed(&arithmetic.accumulate, sum, roundings);
                    arithmetic.round(&arithmetic.storage, sum)
                }
                RoundingModel::Eager => eager::partial_sums(model, sum, terms),
            };
            (*mid, *rad) = (ball.mid, ball.rad);
        });
        Balls2 { mid, rad }
    }
}

fn add(sums: &mut [f64], terms: impl Iterator<Item = f64>) {
    sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term);
}
