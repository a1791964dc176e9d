//! What the kernels of both rounding models share: the layer's operands and its activation.

use ndarray::{Array2, ArrayView1, ArrayView2, Axis};

use super::accumulation::Sum;
use super::ball::{Arithmetic, Ball, Measure};
use super::buffers::Buffers;
use super::curve::Curve;
use super::gpt_oss;
use super::line::{LINE, Line};
use super::matrix::Balls2;
use crate::activation::Activation;
use crate::engine::{Numerics, RoundingModel};
use crate::problem::Problem;
use crate::routing::Routing;
use crate::shape::{ExpertId, TokenId};

/// One layer with a fixed routing, and the arithmetic that an engine declares.
pub(crate) struct Model<'a, 'p> {
    pub(crate) problem: &'a Problem<'p, f64>,
    pub(crate) routing: &'a Routing,
    pub(crate) arithmetic: Arithmetic,
    pub(crate) rounding: RoundingModel,
    /// Whether gate is taken for up, and up for gate.
    swapped: bool,
}

impl<'a, 'p> Model<'a, 'p> {
    pub(crate) fn new(
        problem: &'a Problem<'p, f64>,
        routing: &'a Routing,
        numerics: &Numerics,
        measure: Measure,
    ) -> Self {
        Self {
            problem,
            routing,
            arithmetic: Arithmetic::new(numerics, measure),
            rounding: numerics.rounding,
            swapped: false,
        }
    }

    /// The same of an engine that takes gate rows for up rows, and up rows for gate rows.
    pub(crate) fn taking_gate_for_up(self) -> Self {
        Self { swapped: true, ..self }
    }

    /// Whether there are radii, and not midpoints alone.
    pub(crate) fn has_radii(&self) -> bool {
        self.arithmetic.measure != Measure::Midpoint
    }

    /// Takes back the memory of balls that nobody reads any more.
    pub(crate) fn give(&self, buffers: &Buffers, balls: Balls2) {
        buffers.give(balls.mid);
        if self.has_radii() {
            buffers.give(balls.rad);
        } else {
            buffers.give_zeros(balls.rad);
        }
    }

    /// The columns of h that hold gate and up of a unit.
    pub(crate) fn gate_and_up(&self, unit: usize) -> [usize; 2] {
        if self.swapped { [2 * unit + 1, 2 * unit] } else { [2 * unit, 2 * unit + 1] }
    }

    /// W1 of one expert, (2n, d).
    pub(crate) fn w1(&self, expert: ExpertId) -> ArrayView2<'_, f64> {
        self.problem.w1().index_axis_move(Axis(0), expert.index())
    }

    /// W2 of one expert, (d, n).
    pub(crate) fn w2(&self, expert: ExpertId) -> ArrayView2<'_, f64> {
        self.problem.w2().index_axis_move(Axis(0), expert.index())
    }

    pub(crate) fn b1(&self, expert: ExpertId) -> Option<ArrayView1<'_, f64>> {
        self.problem.b1().map(|b1| b1.index_axis_move(Axis(0), expert.index()))
    }

    pub(crate) fn b2(&self, expert: ExpertId) -> Option<ArrayView1<'_, f64>> {
        self.problem.b2().map(|b2| b2.index_axis_move(Axis(0), expert.index()))
    }

    /// The rows of x or dout that an expert reads, in its row order.
    pub(super) fn gather(&self, buffers: &Buffers, source: ArrayView2<'_, f64>, expert: ExpertId) -> Array2<f64> {
        let rows = self.routing.rows_of_expert(expert);
        let mut gathered = buffers.wide.matrix((rows.len(), source.ncols()));
        for (mut into, token) in gathered.rows_mut().into_iter().zip(&self.routing.row_token()[rows]) {
            into.assign(&source.row(token.index()));
        }
        gathered
    }

    pub(crate) fn tokens(&self) -> impl Iterator<Item = TokenId> + use<> {
        (0..self.routing.tokens() as u32).map(TokenId)
    }

    /// How many rows one token has.
    pub(crate) fn rows_of_token(&self, token: usize) -> usize {
        self.routing.rows_of_token(TokenId(token as u32)).len()
    }

    /// The pairs of one token, in pair order.
    pub(crate) fn pairs_of_token(&self, token: TokenId) -> Vec<usize> {
        let row_pair = self.routing.row_pair();
        self.routing.rows_of_token(token).iter().map(|&row| row_pair[row as usize] as usize).collect()
    }

    pub(crate) fn expert_of_pair(&self, pair: usize) -> usize {
        self.routing.pair_expert()[pair].index()
    }

    /// Gate and up of `count` units of one row of H from `first` on, or all there is of them.
    pub(super) fn lines_of_h(&self, row: (&[f64], &[f64]), first: usize, count: usize) -> (Line, Option<Line>) {
        if !self.problem.activation().gated() {
            return (Line::of(row, first, 1, count), None);
        }
        let [gate, up] = self.gate_and_up(first).map(|column| Line::of(row, column, 2, count));
        (gate, Some(up))
    }

    /// `count` units of one row of H from `first` on, act(H) of them in the accumulator. The numbers are those of
    /// the whole row.
    pub(super) fn units(&self, row: (&[f64], &[f64]), first: usize, count: usize) -> Units {
        let (arithmetic, curve) = (&self.arithmetic, Curve::of(self.problem.activation()));
        let (gate, up) = self.lines_of_h(row, first, count);
        let opened = arithmetic.curve_values(curve, &gate);
        let Some(up) = up else { return Units { gate, opened, up: None, a: opened } };
        // v(up) of a = f(gate)·v(up).
        let factor = match self.problem.activation() {
            Activation::GptOss => Line::each(|place| gpt_oss::lifted(arithmetic, up.at(place))),
            _ => up,
        };
        let a = arithmetic.multiply_lines(&opened, &factor);
        Units { gate, opened, up: Some([up, factor]), a }
    }

    /// dact(dA, H) of these units, in the accumulator: dgate = dA·v(up)·f′(gate) and dup = dA·f(gate)·v′(up), or
    /// dA·f′(h).
    pub(super) fn activation_backward(&self, units: &Units, da: &Line) -> (Line, Option<Line>) {
        let (arithmetic, curve) = (&self.arithmetic, Curve::of(self.problem.activation()));
        let Units { gate, opened, up, .. } = units;
        let slope = arithmetic.curve_slopes(curve, gate);
        let Some([up, factor]) = up else { return (arithmetic.multiply_lines(da, &slope), None) };
        let dgate = arithmetic.multiply_lines(&arithmetic.multiply_lines(da, factor), &slope);
        // v(up)·f′(gate) first, then dA: another product may underflow, and be magnified by dA.
        let mut other = [0.0; LINE];
        for (place, other) in other.iter_mut().enumerate() {
            *other = (arithmetic.accumulate.underflow * da.at(place).magnitude()).min(dgate.at(place).magnitude());
        }
        let dgate = arithmetic.join_to_line(dgate, &other);
        let dup = arithmetic.multiply_lines(da, opened);
        let slope_of_up = match self.problem.activation() {
            Activation::GptOss => Line::each(|place| gpt_oss::passes(arithmetic, up.at(place))),
            _ => Line::all(Ball::exact(1.0)),
        };
        (dgate, Some(arithmetic.product_of_lines(&dup, &slope_of_up)))
    }

    /// Writes the gradients of these units to their columns of one row of dH.
    pub(super) fn put_gradients(
        &self,
        (mids, rads): (&mut [f64], &mut [f64]),
        first: usize,
        count: usize,
        (dgate, dup): (Line, Option<Line>),
    ) {
        match dup {
            Some(dup) => {
                let [of_gate, of_up] = self.gate_and_up(first);
                dgate.put((&mut *mids, &mut *rads), of_gate, 2, count);
                dup.put((mids, rads), of_up, 2, count);
            }
            None => dgate.put((mids, rads), first, 1, count),
        }
    }

    /// The sums of `term(row, column)` over `rows` rows in the accumulator, `roundings` in each, stored.
    pub(crate) fn sum_of_rows(
        &self,
        rows: usize,
        columns: usize,
        term: impl Fn(usize, usize) -> Ball,
        roundings: usize,
    ) -> Vec<Ball> {
        let arithmetic = &self.arithmetic;
        let mut sums = vec![Sum::default(); columns];
        for row in 0..rows {
            for (column, sum) in sums.iter_mut().enumerate() {
                sum.add(arithmetic, term(row, column));
            }
        }
        let stored = sums.into_iter().map(|sum| {
            let sum = arithmetic.summed(&arithmetic.accumulate, sum, roundings);
            arithmetic.round(&arithmetic.storage, sum)
        });
        stored.collect()
    }

    /// (E, columns), a row for each expert.
    pub(crate) fn of_each_expert(&self, columns: usize, row: impl Fn(ExpertId) -> Vec<Ball>) -> Balls2 {
        let mut balls = Balls2::zeros(self.routing.experts(), columns);
        for expert in 0..self.routing.experts() {
            for (column, ball) in row(ExpertId(expert as u32)).into_iter().enumerate() {
                balls.set(expert, column, ball);
            }
        }
        balls
    }
}

/// Some units of one row.
pub(super) struct Units {
    /// The gate, or all there is.
    pub(super) gate: Line,
    /// f(gate).
    opened: Line,
    /// With a gate, up and v(up).
    up: Option<[Line; 2]>,
    /// act(H).
    pub(super) a: Line,
}

/// The units of a row by lines: the first of each, and how many.
pub(super) fn lines_of(units: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..units).step_by(LINE).map(move |first| (first, LINE.min(units - first)))
}
