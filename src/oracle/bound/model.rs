//! What the kernels of both rounding models share: the layer's operands and its activation.

use ndarray::{Array2, ArrayView1, ArrayView2, Axis};

use super::ball::{Arithmetic, Ball, Measure, Sum};
use super::curve::Curve;
use super::gpt_oss;
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
    pub(crate) fn gather(&self, source: ArrayView2<'_, f64>, expert: ExpertId) -> Array2<f64> {
        let rows = self.routing.rows_of_expert(expert);
        let mut gathered = Vec::with_capacity(rows.len() * source.ncols());
        for token in &self.routing.row_token()[rows.clone()] {
            match source.row(token.index()).to_slice() {
                Some(row) => gathered.extend_from_slice(row),
                None => gathered.extend(source.row(token.index())),
            }
        }
        Array2::from_shape_vec((rows.len(), source.ncols()), gathered).unwrap_or_default()
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

    /// act(H) at one unit, in the accumulator.
    pub(crate) fn activation(&self, h: &Balls2, row: usize, unit: usize) -> Ball {
        let (arithmetic, curve) = (&self.arithmetic, Curve::of(self.problem.activation()));
        if self.problem.activation().gated() {
            let [gate, up] = self.gate_and_up(unit).map(|column| h.at(row, column));
            arithmetic.multiply(arithmetic.curve_value(curve, gate), self.up_factor(up))
        } else {
            arithmetic.curve_value(curve, h.at(row, unit))
        }
    }

    /// v(up) of a = f(gate)·v(up).
    fn up_factor(&self, up: Ball) -> Ball {
        if self.problem.activation() == Activation::GptOss { gpt_oss::lifted(&self.arithmetic, up) } else { up }
    }

    /// v′(up).
    fn up_slope(&self, up: Ball) -> Ball {
        if self.problem.activation() == Activation::GptOss {
            gpt_oss::passes(&self.arithmetic, up)
        } else {
            Ball::exact(1.0)
        }
    }

    /// dact(dA, H) at one unit, in the accumulator: dgate = dA·v(up)·f′(gate) and dup = dA·f(gate)·v′(up),
    /// or dA·f′(h); each goes to `put` with its column of h.
    pub(crate) fn activation_backward(
        &self,
        h: &Balls2,
        row: usize,
        unit: usize,
        da: Ball,
        mut put: impl FnMut(usize, Ball),
    ) {
        let (arithmetic, curve) = (&self.arithmetic, Curve::of(self.problem.activation()));
        if self.problem.activation().gated() {
            let [of_gate, of_up] = self.gate_and_up(unit);
            let (gate, up) = (h.at(row, of_gate), h.at(row, of_up));
            let slope = arithmetic.curve_slope(curve, gate);
            let dgate = arithmetic.multiply(arithmetic.multiply(da, self.up_factor(up)), slope);
            // v(up)·f′(gate) first, then dA: another product may underflow, and be magnified by dA.
            let other = (arithmetic.accumulate.underflow * da.magnitude()).min(dgate.magnitude());
            put(of_gate, Ball { rad: arithmetic.join(dgate.rad, other), ..dgate });
            let dup = arithmetic.multiply(da, arithmetic.curve_value(curve, gate));
            put(of_up, arithmetic.product(dup, self.up_slope(up)));
        } else {
            put(unit, arithmetic.multiply(da, arithmetic.curve_slope(curve, h.at(row, unit))));
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
