//! Sums over each token's rows: o of y, dx of dx̃. A layer adds them up expert by expert; kernels 3 and 8 take
//! them token by token.

use std::ops::Range;

use ndarray::{Array2, Axis};
use rayon::prelude::*;

use super::accumulation::Sum;
use super::ball::{Arithmetic, Ball, Measure};
use super::layer::Expanded;
use super::line::vectorized;
use super::matrix::{Balls2, Operand};
use super::{Model, eager};
use crate::engine::RoundingModel;
use crate::shape::TokenId;

/// Sums of some tokens, so far.
pub(super) struct Sums {
    mid: Array2<f64>,
    rad: Array2<f64>,
    magnitude: Array2<f64>,
    /// Empty where no deviation asks for it.
    square: Array2<f64>,
}

/// Kernels 3 and 8 of some tokens: Σ s·Y, or Σ dX̃, over the rows of each, stored; `weights` by row.
pub(crate) fn of_tokens(
    model: &Model<'_, '_>,
    rows: Operand<'_>,
    weights: Option<&[Ball]>,
    tokens: Range<usize>,
) -> Balls2 {
    let width = rows.dim().1;
    let mut sums = Sums::of(&model.arithmetic, (tokens.len(), width));
    let mut terms = [vec![0.0; width], vec![0.0; width]];
    for token in tokens.clone() {
        for &row in model.routing.rows_of_token(TokenId(token as u32)) {
            let row = row as usize;
            let (mids, rads) = rows.row(row);
            let weight = weights.map(|weights| weights[row]);
            sums.add(model, token - tokens.start, (&mids, rads.as_deref()), weight, &mut terms);
        }
    }
    sums.finish(model, weights.is_some(), tokens.start)
}

impl Sums {
    /// Of all tokens.
    pub(super) fn new(model: &Model<'_, '_>) -> Self {
        Self::of(&model.arithmetic, (model.problem.t(), model.problem.d()))
    }

    fn of(arithmetic: &Arithmetic, dim: (usize, usize)) -> Self {
        // Written before it is read: of memory that is only read the system gives a page of zeros first, and then
        // another.
        let of = |needed: bool| {
            let mut sums = Array2::zeros(if needed { dim } else { (dim.0, 0) });
            sums.fill(0.0);
            sums
        };
        let measure = arithmetic.measure;
        let radii = measure != Measure::Midpoint;
        Self { mid: of(true), rad: of(radii), magnitude: of(radii), square: of(measure == Measure::Deviation) }
    }

    /// Adds the rows of some experts: those of y, which `scores` by row weight, or of dx̃.
    pub(super) fn add_all<'e>(
        &mut self,
        model: &Model<'_, '_>,
        scores: Option<&Vec<Ball>>,
        lane: usize,
        computed: impl Iterator<Item = &'e Expanded>,
    ) {
        let width = model.problem.d();
        let mut terms = [vec![0.0; width], vec![0.0; width]];
        for Expanded { expert, lanes } in computed {
            let [y, dx_expanded] = &lanes[lane];
            let Some(balls) = (if scores.is_some() { y } else { dx_expanded }) else { continue };
            for (row, (mids, rads)) in model.routing.rows_of_expert(*expert).zip(balls.each_row()) {
                let token = model.routing.row_token()[row].index();
                self.add(model, token, (mids, Some(rads)), scores.map(|scores| scores[row]), &mut terms);
            }
        }
    }

    /// Adds one row to a token, weighted as the rounding model has it, or as it is. `terms` is memory for a row.
    fn add(
        &mut self,
        model: &Model<'_, '_>,
        token: usize,
        (mids, rads): (&[f64], Option<&[f64]>),
        weight: Option<Ball>,
        terms: &mut [Vec<f64>; 2],
    ) {
        let arithmetic = &model.arithmetic;
        let [of_mids, of_rads] = terms;
        let (mids, rads): (&[f64], &[f64]) = match (weight, rads) {
            (None, Some(rads)) => (mids, rads),
            (weight, rads) => {
                of_mids.copy_from_slice(mids);
                match rads {
                    Some(rads) => of_rads.copy_from_slice(rads),
                    None => of_rads.fill(0.0),
                }
                match (weight, model.rounding) {
                    (None, _) => {}
                    (Some(score), RoundingModel::Fused) => arithmetic.product_all(score, of_mids, of_rads),
                    (Some(score), RoundingModel::Eager) => eager::weighted_all(model, score, of_mids, of_rads),
                }
                (of_mids, of_rads)
            }
        };
        let width = mids.len();
        let line = |array: &mut Array2<f64>, add: &mut dyn FnMut(&mut [f64])| {
            if let Some(numbers) = array.as_slice_mut() {
                add(&mut numbers[token * width..(token + 1) * width]);
            }
        };
        line(&mut self.mid, &mut |sums| add_all(sums, mids.iter().copied()));
        if arithmetic.measure == Measure::Midpoint {
            return;
        }
        line(&mut self.rad, &mut |sums| arithmetic.join_all(sums, rads));
        line(&mut self.magnitude, &mut |sums| add_all(sums, mids.iter().zip(rads).map(|(mid, rad)| mid.abs() + rad)));
        if arithmetic.measure == Measure::Deviation {
            line(&mut self.square, &mut |sums| add_all(sums, mids.iter().map(|mid| mid * mid)));
        }
    }

    /// The sums of tokens from `first` on with their roundings, stored. Without weights a sum of m rows takes
    /// m − 1 roundings.
    pub(super) fn finish(self, model: &Model<'_, '_>, weighted: bool, first: usize) -> Balls2 {
        let arithmetic = &model.arithmetic;
        let Self { mid, mut rad, magnitude, square } = self;
        if arithmetic.measure == Measure::Midpoint {
            return Balls2::exact(mid);
        }
        let lines = mid.axis_iter(Axis(0)).into_par_iter().zip(rad.axis_iter_mut(Axis(0)));
        let lines = lines.zip(magnitude.axis_iter(Axis(0))).zip(square.axis_iter(Axis(0)));
        lines.enumerate().for_each(|(token, (((mids, mut rads), magnitudes), squares))| {
            let terms = model.rows_of_token(first + token);
            let roundings =
                if weighted && model.rounding == RoundingModel::Fused { terms } else { terms.saturating_sub(1) };
            let rows = (mids.to_slice(), rads.as_slice_mut(), magnitudes.to_slice(), squares.to_slice());
            let (Some(mids), Some(rads), Some(magnitudes), Some(squares)) = rows else { return };
            match model.rounding {
                RoundingModel::Fused => {
                    let sums = [mids, magnitudes, squares];
                    arithmetic.summed_all(&arithmetic.accumulate, sums, rads, roundings);
                    arithmetic.round_all(&arithmetic.storage, mids, rads);
                }
                RoundingModel::Eager => {
                    for (column, rad) in rads.iter_mut().enumerate() {
                        let square = squares.get(column).copied().unwrap_or(0.0);
                        let ball = Ball { mid: mids[column], rad: *rad };
                        *rad =
                            eager::partial_sums(model, Sum { ball, magnitude: magnitudes[column], square }, terms).rad;
                    }
                }
            }
        });
        Balls2 { mid, rad }
    }
}

fn add_all(sums: &mut [f64], terms: impl Iterator<Item = f64> + Clone) {
    vectorized(
        #[inline(always)]
        || sums.iter_mut().zip(terms.clone()).for_each(|(sum, term)| *sum += term),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{Case, Pairing};
    use crate::element::DType;
    use crate::oracle::bound::numerics_of;
    use crate::problem::{Gating, Problem};
    use crate::routing::Routing;
    use crate::shape::ExpertId;

    /// dx of a token with one pair is its dx̃, its o one product; more pairs take a rounding each.
    #[test]
    fn the_sum_of_one_row_is_that_row_and_each_weight_costs_one_rounding() {
        let pairs = [(1, 0), (2, 0), (2, 1), (2, 2)].map(|(token, expert)| (TokenId(token), ExpertId(expert)));
        let routing = Routing::new(3, 3, pairs).unwrap();
        let drawn = Case::new("3,6,4,3,1".parse().unwrap()).with_pairing(Pairing::TopK).problem::<f64>().unwrap();
        let gating = Gating::Given { routing: routing.clone(), scores: vec![1.0; 4] };
        let problem =
            Problem::new(drawn.x(), drawn.w1(), drawn.w2(), None, gating, drawn.activation(), drawn.dout()).unwrap();
        let rows = Balls2::from_fn(4, 6, |row, column| {
            let mid = f64::from((7 * row + 3 * column) as u32 % 11) - 4.5;
            Ball { mid, rad: 1e-7 * f64::from((row + 5 * column) as u32 % 3) }
        });
        let weights = [0.5, 0.75, 0.25, 1.5].map(Ball::exact);
        for measure in [Measure::Worst, Measure::Deviation] {
            // Stores that round to nothing: of the accumulator's roundings none is beside them.
            let mut model = Model::new(&problem, &routing, &numerics_of(DType::F64, RoundingModel::Fused), measure);
            (model.arithmetic.storage.unit, model.arithmetic.storage.underflow) = (0.0, 0.0);
            let arithmetic = &model.arithmetic;
            let plain = of_tokens(&model, rows.operand(), None, 0..3);
            let weighted = of_tokens(&model, rows.operand(), Some(&weights), 0..3);
            let last = of_tokens(&model, rows.operand(), Some(&weights), 2..3);
            for column in 0..6 {
                assert_eq!(last.at(0, column), weighted.at(2, column));
                assert_eq!(plain.at(0, column), Ball::default());
                assert_eq!(plain.at(1, column), rows.at(routing.rows_of_token(TokenId(1))[0] as usize, column));
                for (token, sum, roundings) in [(1, &weighted, 1), (2, &plain, 2), (2, &weighted, 3)] {
                    let of_token = routing.rows_of_token(TokenId(token));
                    let unit = Ball::exact(1.0);
                    let weight = |row: u32| if roundings == 2 { unit } else { weights[row as usize] };
                    let terms =
                        of_token.iter().map(|&row| arithmetic.product(weight(row), rows.at(row as usize, column)));
                    let terms: Vec<Ball> = terms.collect();
                    let u = arithmetic.accumulate.unit;
                    let rad = match measure {
                        Measure::Deviation => {
                            let squares = |f: fn(&Ball) -> f64| terms.iter().map(f).sum::<f64>();
                            let of_terms = squares(|term| term.rad * term.rad);
                            (of_terms + f64::from(roundings) * u * u / 3.0 * squares(|term| term.mid * term.mid)).sqrt()
                        }
                        _ => {
                            let gamma = f64::from(roundings) * u / (1.0 - f64::from(roundings) * u);
                            terms.iter().map(|term| term.rad + gamma * term.magnitude()).sum()
                        }
                    };
                    let found = sum.at(token as usize, column).rad;
                    assert!((found - rad).abs() <= 1e-9 * rad, "{measure:?}, token {token}: {found} for {rad}");
                }
            }
        }
    }
}
