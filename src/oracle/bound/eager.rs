//! The eager model: op by op, as frameworks run it without fusion. Every element-wise result and
//! every partial sum of a combine is stored; products accumulate wide.
//!
//! Forward: h, h + b1, f(gate), a, y, y + b2, s·y, partial sums of o. Backward: s·dO, dO·y per element
//! before ds, dA, dA·up, dA·f(gate), dgate; there is no a′. gpt-oss goes through more operations. dw1, db1 and dx̃ are as in the fused model.

use super::Model;
use super::ball::{Ball, Sum};
use super::curve::Curve;
use super::gpt_oss;
use super::matrix::{Balls, Balls2, Balls3, Operand, by_expert, of_experts};
use super::midpoints::{Midpoints, Step};
use crate::activation::Activation;
use crate::shape::ExpertId;

/// What the backward of the down projection gives.
pub(crate) struct DownBackward {
    pub(crate) dh: Balls2,
    /// By row.
    pub(crate) ds: Vec<Ball>,
}

/// H = X_e W1ᵀ, stored; with biases H + b1, stored.
pub(super) fn up_forward_of(model: &Model<'_, '_>, known: &Midpoints, expert: ExpertId) -> Balls2 {
    let (x, w1) = (model.gather(model.problem.x(), expert), Operand::exact(model.w1(expert)));
    let product = known.product(Step::Up, &model.arithmetic, Operand::exact(x.view()), w1.t(), None);
    add_bias(model, product, model.b1(expert))
}

pub(crate) fn up_forward(model: &Model<'_, '_>) -> Balls2 {
    let [h] = by_expert(model.routing, [model.problem.h_width()], |expert| {
        [up_forward_of(model, &Midpoints::default(), expert)]
    });
    h
}

/// A = act(H) of any rows: f(gate) stored, then the product with up.
pub(super) fn activate_rows(model: &Model<'_, '_>, h: &Balls2) -> Balls2 {
    let (problem, arithmetic) = (model.problem, &model.arithmetic);
    let curve = Curve::of(problem.activation());
    Balls2::from_fn(h.mid.nrows(), problem.n(), |row, unit| {
        let store = |ball| arithmetic.round(&arithmetic.storage, ball);
        let [gate, up] = model.gate_and_up(unit);
        if problem.activation() == Activation::GptOss {
            gpt_oss::Eager::new(arithmetic, h.at(row, gate), h.at(row, up)).value()
        } else if problem.activation().gated() {
            let of_gate = store(arithmetic.curve_value(curve, h.at(row, gate)));
            store(arithmetic.multiply(of_gate, h.at(row, up)))
        } else {
            store(arithmetic.curve_value(curve, h.at(row, unit)))
        }
    })
}

pub(crate) fn activate(model: &Model<'_, '_>, h: &Balls2) -> Balls2 {
    let [a] = by_expert(model.routing, [model.problem.n()], |expert| {
        [activate_rows(model, &h.rows(model.routing.rows_of_expert(expert)))]
    });
    a
}

/// Y = A W2ᵀ, stored; with biases Y + b2, stored. `a` is that of the expert's rows.
pub(super) fn down_forward_of(model: &Model<'_, '_>, known: &Midpoints, expert: ExpertId, a: &Balls2) -> Balls2 {
    let product = known.product(Step::Down, &model.arithmetic, a.operand(), Operand::exact(model.w2(expert)).t(), None);
    add_bias(model, product, model.b2(expert))
}

pub(crate) fn down_forward(model: &Model<'_, '_>, a: &Balls2) -> Balls2 {
    let [y] = by_expert(model.routing, [model.problem.d()], |expert| {
        [down_forward_of(model, &Midpoints::default(), expert, &a.rows(model.routing.rows_of_expert(expert)))]
    });
    y
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

/// s·Y, stored: a term of O.
pub(super) fn weighted(model: &Model<'_, '_>, score: Ball, y: Ball) -> Ball {
    let arithmetic = &model.arithmetic;
    arithmetic.round(&arithmetic.storage, arithmetic.multiply(score, y))
}

/// The same of many, in place.
pub(super) fn weighted_all(model: &Model<'_, '_>, score: Ball, mids: &mut [f64], rads: &mut [f64]) {
    let arithmetic = &model.arithmetic;
    arithmetic.product_all(score, mids, rads);
    arithmetic.round_all(&arithmetic.accumulate, mids, rads);
    arithmetic.round_all(&arithmetic.storage, mids, rads);
}

/// O_t = Σ s·Y: each s·Y stored, and each partial sum.
pub(crate) fn combine(model: &Model<'_, '_>, y: &Balls2, scores: &[Ball]) -> Balls2 {
    combine_gradient(model, &y.clone().map_indexed(|row, _, y| weighted(model, scores[row], y)))
}

/// Σ over the token's rows, each partial sum stored.
pub(crate) fn combine_gradient(model: &Model<'_, '_>, rows: &Balls2) -> Balls2 {
    model.arithmetic.each_token(model.routing, rows.mid.ncols(), |token, column| {
        let of_token = model.routing.rows_of_token(token);
        let mut sum = Sum::default();
        of_token.iter().for_each(|&row| sum.add(&model.arithmetic, rows.at(row as usize, column)));
        partial_sums(model, sum, of_token.len())
    })
}

/// A sum of so many terms, each partial sum of which was stored.
pub(super) fn partial_sums(model: &Model<'_, '_>, sum: Sum, terms: usize) -> Ball {
    let arithmetic = &model.arithmetic;
    let sum = arithmetic.summed(&arithmetic.partial, sum, terms.saturating_sub(1));
    if sum.magnitude() > arithmetic.storage.largest { Ball { rad: f64::INFINITY, ..sum } } else { sum }
}

/// dY = s·dO, stored, of one expert's rows, whose scores are `s`.
fn y_gradient(model: &Model<'_, '_>, expert: ExpertId, s: &[Ball]) -> Balls2 {
    let mut dy = Balls::exact(model.gather(model.problem.dout(), expert));
    for ((mut mids, mut rads), &score) in dy.mid.rows_mut().into_iter().zip(dy.rad.rows_mut()).zip(s) {
        if let (Some(mids), Some(rads)) = (mids.as_slice_mut(), rads.as_slice_mut()) {
            weighted_all(model, score, mids, rads);
        }
    }
    dy
}

/// dS = Σ dO·Y with each product stored; dA = dY W2, stored; then the activation op by op. `h`, `y` and
/// `s` are those of the expert's rows.
pub(super) fn down_backward_activation_of(
    model: &Model<'_, '_>,
    known: &Midpoints,
    expert: ExpertId,
    h: &Balls2,
    y: &Balls2,
    s: &[Ball],
) -> DownBackward {
    let (problem, arithmetic) = (model.problem, &model.arithmetic);
    let curve = Curve::of(problem.activation());
    let store = |ball| arithmetic.round(&arithmetic.storage, ball);
    let dy = y_gradient(model, expert, s);
    let da = known.product(Step::DownBackward, arithmetic, dy.operand(), Operand::exact(model.w2(expert)), None);
    let da = da.rounded(arithmetic, &arithmetic.storage);
    let mut dh = Balls2::zeros(s.len(), problem.h_width());
    for row in 0..s.len() {
        for unit in 0..problem.n() {
            let da = da.at(row, unit);
            let [gate_column, up_column] = model.gate_and_up(unit);
            if problem.activation() == Activation::GptOss {
                let unit_of = gpt_oss::Eager::new(arithmetic, h.at(row, gate_column), h.at(row, up_column));
                let [dgate, dup] = unit_of.backward(da);
                dh.set(row, gate_column, dgate);
                dh.set(row, up_column, dup);
            } else if problem.activation().gated() {
                let (gate, up) = (h.at(row, gate_column), h.at(row, up_column));
                let of_gate = store(arithmetic.curve_value(curve, gate));
                let times_up = store(arithmetic.multiply(da, up));
                let dgate = arithmetic.multiply(times_up, arithmetic.curve_slope(curve, gate));
                dh.set(row, gate_column, store(dgate));
                dh.set(row, up_column, store(arithmetic.multiply(da, of_gate)));
            } else {
                let slope = arithmetic.curve_slope(curve, h.at(row, unit));
                dh.set(row, unit, store(arithmetic.multiply(da, slope)));
            }
        }
    }
    let dout = problem.dout();
    let tokens = &model.routing.row_token()[model.routing.rows_of_expert(expert)];
    let ds = tokens.iter().enumerate().map(|(row, token)| {
        let products = dout.row(token.index()).into_iter().enumerate();
        let terms = products.map(|(column, &dout)| store(arithmetic.multiply(Ball::exact(dout), y.at(row, column))));
        let sum = arithmetic.sum(&arithmetic.accumulate, terms, problem.d() - 1);
        arithmetic.round(&arithmetic.score, sum)
    });
    DownBackward { dh, ds: ds.collect() }
}

pub(crate) fn down_backward_activation(model: &Model<'_, '_>, h: &Balls2, y: &Balls2, scores: &[Ball]) -> DownBackward {
    let [dh, ds] = by_expert(model.routing, [model.problem.h_width(), 1], |expert| {
        let rows = model.routing.rows_of_expert(expert);
        let (h, y, s) = (h.rows(rows.clone()), y.rows(rows.clone()), &scores[rows]);
        let DownBackward { dh, ds } = down_backward_activation_of(model, &Midpoints::default(), expert, &h, &y, s);
        [dh, Balls2::from_fn(ds.len(), 1, |row, _| ds[row])]
    });
    let ds = ds.mid.iter().zip(&ds.rad).map(|(&mid, &rad)| Ball { mid, rad }).collect();
    DownBackward { dh, ds }
}

/// dW2 = dYᵀ A. `a` and `s` are those of the expert's rows.
pub(super) fn down_backward_weight_of(
    model: &Model<'_, '_>,
    known: &Midpoints,
    expert: ExpertId,
    a: &Balls2,
    s: &[Ball],
) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let dy = y_gradient(model, expert, s);
    let product = known.product(Step::DownWeight, arithmetic, dy.operand().t(), a.operand(), None);
    product.rounded(arithmetic, &arithmetic.storage)
}

pub(crate) fn down_backward_weight(model: &Model<'_, '_>, a: &Balls2, scores: &[Ball]) -> Balls3 {
    of_experts(model.routing, (model.problem.d(), model.problem.n()), |expert| {
        let rows = model.routing.rows_of_expert(expert);
        down_backward_weight_of(model, &Midpoints::default(), expert, &a.rows(rows.clone()), &scores[rows])
    })
}

/// db2 = Σ dY over the rows of one expert, of the stored dY.
pub(super) fn b2_gradient_of(model: &Model<'_, '_>, expert: ExpertId, s: &[Ball]) -> Vec<Ball> {
    let dy = y_gradient(model, expert, s);
    model.sum_of_rows(s.len(), model.problem.d(), |row, column| dy.at(row, column), s.len().saturating_sub(1))
}

pub(crate) fn b2_gradient(model: &Model<'_, '_>, scores: &[Ball]) -> Balls2 {
    model.of_each_expert(model.problem.d(), |expert| {
        b2_gradient_of(model, expert, &scores[model.routing.rows_of_expert(expert)])
    })
}
