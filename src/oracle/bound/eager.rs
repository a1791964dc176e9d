//! The eager model: op by op, as frameworks run it without fusion. Every element-wise result and
//! every partial sum of a combine is stored; products accumulate wide.
//!
//! Forward: h, h + b1, f(gate), a, y, y + b2, s·y, partial sums of o. Backward: s·dO, dO·y per element
//! before ds, dA, dA·up, dA·f(gate), dgate; there is no a′. gpt-oss goes through more operations. dw1, db1 and dx̃ are as in the fused model.

use super::Model;
use super::accumulation::Sum;
use super::ball::Ball;
use super::curve::Curve;
use super::gpt_oss;
use super::line::Line;
use super::matrix::{Balls2, Operand};
use super::midpoints::{Midpoints, Step};
use super::model::lines_of;
use crate::activation::Activation;
use crate::shape::ExpertId;

/// What the backward of the down projection gives.
pub(crate) struct DownBackward {
    pub(crate) dh: Balls2,
    /// By row.
    pub(crate) ds: Vec<Ball>,
}

/// H = X_e W1ᵀ, stored; with biases H + b1, stored.
pub(crate) fn up_forward(model: &Model<'_, '_>, known: &Midpoints<'_>, expert: ExpertId) -> Balls2 {
    let (x, w1) = (known.x(model, expert), Operand::exact(model.w1(expert)));
    let product = known.product(Step::Up, &model.arithmetic, Operand::exact(x), w1.t(), None);
    add_bias(model, product, model.b1(expert))
}

/// A = act(H) of any rows: f(gate) stored, then the product with up.
pub(crate) fn activate(model: &Model<'_, '_>, known: &Midpoints<'_>, h: &Balls2) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let activation = model.problem.activation();
    let curve = Curve::of(activation);
    let mut a = known.balls(model, (h.mid.nrows(), model.problem.n()));
    for (h, (mids, rads)) in h.each_row().zip(a.each_row_mut()) {
        for (first, count) in lines_of(model.problem.n()) {
            let (gate, up) = model.lines_of_h(h, first, count);
            let a = match up {
                Some(up) if activation == Activation::GptOss => {
                    Line::each(|place| gpt_oss::Eager::new(arithmetic, gate.at(place), up.at(place)).value())
                }
                Some(up) => {
                    let of_gate = arithmetic.store_line(arithmetic.curve_values(curve, &gate));
                    arithmetic.store_line(arithmetic.multiply_lines(&of_gate, &up))
                }
                None => arithmetic.store_line(arithmetic.curve_values(curve, &gate)),
            };
            a.put((&mut *mids, &mut *rads), first, 1, count);
        }
    }
    a
}

/// Y = A W2ᵀ, stored; with biases Y + b2, stored. `a` is that of the expert's rows.
pub(crate) fn down_forward(model: &Model<'_, '_>, known: &Midpoints<'_>, expert: ExpertId, a: Operand<'_>) -> Balls2 {
    let product = known.product(Step::Down, &model.arithmetic, a, Operand::exact(model.w2(expert)).t(), None);
    add_bias(model, product, model.b2(expert))
}

fn add_bias(model: &Model<'_, '_>, product: Balls2, bias: Option<ndarray::ArrayView1<'_, f64>>) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let stored = product.rounded(arithmetic, &arithmetic.storage);
    match bias {
        Some(bias) => stored.map_indexed(|_, column, ball| {
            arithmetic.round(&arithmetic.storage, arithmetic.add(ball, Ball::exact(bias[column])))
        }),
        None => stored,
    }
}

/// s·Y of many, in place: each product stored, a term of O.
pub(super) fn weighted_all(model: &Model<'_, '_>, score: Ball, mids: &mut [f64], rads: &mut [f64]) {
    let arithmetic = &model.arithmetic;
    arithmetic.product_all(score, mids, rads);
    arithmetic.round_all(&arithmetic.accumulate, mids, rads);
    arithmetic.round_all(&arithmetic.storage, mids, rads);
}

/// A sum of so many terms, each partial sum of which was stored.
pub(super) fn partial_sums(model: &Model<'_, '_>, sum: Sum, terms: usize) -> Ball {
    let arithmetic = &model.arithmetic;
    let sum = arithmetic.summed(&arithmetic.partial, sum, terms.saturating_sub(1));
    if sum.magnitude() > arithmetic.storage.largest { Ball { rad: f64::INFINITY, ..sum } } else { sum }
}

/// dY = s·dO, stored, of one expert's rows, whose scores are `s`.
pub(crate) fn y_gradient(model: &Model<'_, '_>, known: &Midpoints<'_>, expert: ExpertId, s: &[Ball]) -> Balls2 {
    let mut dy = known.exact(model, known.dout(model, expert));
    for ((mids, rads), &score) in dy.each_row_mut().zip(s) {
        weighted_all(model, score, mids, rads);
    }
    dy
}

/// dS = Σ dO·Y with each product stored; dA = dY W2, stored; then the activation op by op. `h`, `y` and
/// `dy` are those of the expert's rows.
pub(crate) fn down_backward_activation(
    model: &Model<'_, '_>,
    known: &Midpoints<'_>,
    expert: ExpertId,
    [h, y, dy]: [&Balls2; 3],
) -> DownBackward {
    let arithmetic = &model.arithmetic;
    let w2 = Operand::exact(model.w2(expert));
    let da = known.product(Step::DownBackward, arithmetic, dy.operand(), w2, None);
    let da = da.rounded(arithmetic, &arithmetic.storage);
    let mut dh = known.balls(model, h.mid.dim());
    for ((h, da), (mids, rads)) in h.each_row().zip(da.each_row()).zip(dh.each_row_mut()) {
        for (first, count) in lines_of(model.problem.n()) {
            let gradients = activation_backward(model, h, &Line::of(da, first, 1, count), first, count);
            model.put_gradients((&mut *mids, &mut *rads), first, count, gradients);
        }
    }
    known.give(model, da);

    let dout = known.dout(model, expert);
    let ds = dout.rows().into_iter().zip(y.each_row()).map(|(dout, y)| {
        let mut sum = Sum::default();
        for (first, count) in lines_of(dout.len()) {
            let dout = Line::exact(|place| dout[first + place.min(count - 1)]);
            let products = arithmetic.multiply_lines(&dout, &Line::of(y, first, 1, count));
            sum.add_line(arithmetic, &arithmetic.store_line(products), count);
        }
        let sum = arithmetic.summed(&arithmetic.accumulate, sum, dout.len() - 1);
        arithmetic.round(&arithmetic.score, sum)
    });
    DownBackward { ds: ds.collect(), dh }
}

/// dact(dA, H) of units from `first` on, by operations that are each stored.
fn activation_backward(
    model: &Model<'_, '_>,
    h: (&[f64], &[f64]),
    da: &Line,
    first: usize,
    count: usize,
) -> (Line, Option<Line>) {
    let (arithmetic, activation) = (&model.arithmetic, model.problem.activation());
    let curve = Curve::of(activation);
    let (gate, up) = model.lines_of_h(h, first, count);
    match up {
        Some(up) if activation == Activation::GptOss => {
            let [dgate, dup] = Line::pairs(|place| {
                gpt_oss::Eager::new(arithmetic, gate.at(place), up.at(place)).backward(da.at(place))
            });
            (dgate, Some(dup))
        }
        Some(up) => {
            let of_gate = arithmetic.store_line(arithmetic.curve_values(curve, &gate));
            let times_up = arithmetic.store_line(arithmetic.multiply_lines(da, &up));
            let dgate = arithmetic.multiply_lines(&times_up, &arithmetic.curve_slopes(curve, &gate));
            let dup = arithmetic.multiply_lines(da, &of_gate);
            (arithmetic.store_line(dgate), Some(arithmetic.store_line(dup)))
        }
        None => {
            let slope = arithmetic.curve_slopes(curve, &gate);
            (arithmetic.store_line(arithmetic.multiply_lines(da, &slope)), None)
        }
    }
}

/// dW2 = dYᵀ A. `a` and `dy` are those of the expert's rows.
pub(crate) fn down_backward_weight(
    model: &Model<'_, '_>,
    known: &Midpoints<'_>,
    a: Operand<'_>,
    dy: &Balls2,
) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let product = known.product(Step::DownWeight, arithmetic, dy.operand().t(), a, None);
    product.rounded(arithmetic, &arithmetic.storage)
}

/// db2 = Σ dY over the rows of one expert, of the stored dY.
pub(crate) fn b2_gradient(model: &Model<'_, '_>, dy: &Balls2) -> Vec<Ball> {
    let (rows, columns) = dy.mid.dim();
    model.sum_of_rows(rows, columns, |row, column| dy.at(row, column), rows.saturating_sub(1))
}
