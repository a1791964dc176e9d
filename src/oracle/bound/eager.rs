//! The eager model: op by op, as frameworks run it without fusion. Every element-wise result and
//! every partial sum of a combine is stored; products accumulate wide.
//!
//! Forward: h, h + b1, f(gate), a, y, y + b2, s·y, partial sums of o. Backward: s·dO, dO·y per element
//! before ds, dA, dA·up, dA·f(gate), dgate; there is no a′. gpt-oss goes through more operations. dw1, db1 and dx̃ are as in the fused model.

use super::Model;
use super::ball::Ball;
use super::curve::Curve;
use super::gpt_oss;
use super::matrix::{Balls2, Balls3, by_expert, of_experts};
use crate::activation::Activation;
use crate::shape::ExpertId;

/// What the backward of the down projection gives.
pub(crate) struct DownBackward {
    pub(crate) dh: Balls2,
    /// By row.
    pub(crate) ds: Vec<Ball>,
}

/// H = X_e W1ᵀ, stored; with biases H + b1, stored.
pub(crate) fn up_forward(model: &Model<'_, '_>) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let [h] = by_expert(model.routing, [model.problem.h_width()], |expert| {
        let x = super::matrix::Balls::exact(model.gather(model.problem.x(), expert));
        let product = arithmetic.matrix_product(&x, model.w1(expert).t(), None);
        [add_bias(model, product, model.b1(expert))]
    });
    h
}

/// A = act(H): f(gate) stored, then the product with up.
pub(crate) fn activate(model: &Model<'_, '_>, h: &Balls2) -> Balls2 {
    let (problem, arithmetic) = (model.problem, &model.arithmetic);
    let curve = Curve::of(problem.activation());
    let [a] = by_expert(model.routing, [problem.n()], |expert| {
        let h = h.rows(model.routing.rows_of_expert(expert));
        [Balls2::from_fn(h.mid.nrows(), problem.n(), |row, unit| {
            let store = |ball| arithmetic.round(&arithmetic.storage, ball);
            if problem.activation() == Activation::GptOss {
                gpt_oss::Eager::new(arithmetic, h.at(row, 2 * unit), h.at(row, 2 * unit + 1)).value()
            } else if problem.activation().gated() {
                let of_gate = store(arithmetic.curve_value(curve, h.at(row, 2 * unit)));
                store(arithmetic.multiply(of_gate, h.at(row, 2 * unit + 1)))
            } else {
                store(arithmetic.curve_value(curve, h.at(row, unit)))
            }
        })]
    });
    a
}

/// Y = A W2ᵀ, stored; with biases Y + b2, stored.
pub(crate) fn down_forward(model: &Model<'_, '_>, a: &Balls2) -> Balls2 {
    let [y] = by_expert(model.routing, [model.problem.d()], |expert| {
        let a = a.rows(model.routing.rows_of_expert(expert));
        let product = model.arithmetic.matrix_product(&a, model.w2(expert).t(), None);
        [add_bias(model, product, model.b2(expert))]
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

/// O_t = Σ s·Y: each s·Y stored, and each partial sum.
pub(crate) fn combine(model: &Model<'_, '_>, y: &Balls2, scores: &[Ball]) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let weighted =
        y.clone().map_indexed(|row, _, y| arithmetic.round(&arithmetic.storage, arithmetic.multiply(scores[row], y)));
    combine_gradient(model, &weighted)
}

/// Σ over the token's rows, each partial sum stored.
pub(crate) fn combine_gradient(model: &Model<'_, '_>, rows: &Balls2) -> Balls2 {
    let arithmetic = &model.arithmetic;
    arithmetic.each_token(model.routing, rows.mid.ncols(), |token, column| {
        let of_token = model.routing.rows_of_token(token);
        let terms = of_token.iter().map(|&row| rows.at(row as usize, column));
        let sum = arithmetic.sum(&arithmetic.partial, terms, of_token.len().saturating_sub(1));
        if sum.magnitude() > arithmetic.storage.largest { Ball { rad: f64::INFINITY, ..sum } } else { sum }
    })
}

/// dY = s·dO, stored.
fn y_gradient(model: &Model<'_, '_>, scores: &[Ball], expert: ExpertId) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let rows = model.routing.rows_of_expert(expert);
    let dout = super::matrix::Balls::exact(model.gather(model.problem.dout(), expert));
    dout.map_indexed(|row, _, dout| {
        arithmetic.round(&arithmetic.storage, arithmetic.multiply(scores[rows.start + row], dout))
    })
}

/// dS = Σ dO·Y with each product stored; dA = dY W2, stored; then the activation op by op.
pub(crate) fn down_backward_activation(model: &Model<'_, '_>, h: &Balls2, y: &Balls2, scores: &[Ball]) -> DownBackward {
    let (problem, arithmetic) = (model.problem, &model.arithmetic);
    let curve = Curve::of(problem.activation());
    let store = |ball| arithmetic.round(&arithmetic.storage, ball);
    let [dh, ds] = by_expert(model.routing, [problem.h_width(), 1], |expert| {
        let rows = model.routing.rows_of_expert(expert);
        let h = h.rows(rows.clone());
        let dy = y_gradient(model, scores, expert);
        let da = arithmetic.matrix_product(&dy, model.w2(expert), None).rounded(arithmetic, &arithmetic.storage);
        let mut dh = Balls2::zeros(rows.len(), problem.h_width());
        for row in 0..rows.len() {
            for unit in 0..problem.n() {
                let da = da.at(row, unit);
                if problem.activation() == Activation::GptOss {
                    let unit_of = gpt_oss::Eager::new(arithmetic, h.at(row, 2 * unit), h.at(row, 2 * unit + 1));
                    let [dgate, dup] = unit_of.backward(da);
                    dh.set(row, 2 * unit, dgate);
                    dh.set(row, 2 * unit + 1, dup);
                } else if problem.activation().gated() {
                    let (gate, up) = (h.at(row, 2 * unit), h.at(row, 2 * unit + 1));
                    let of_gate = store(arithmetic.curve_value(curve, gate));
                    let times_up = store(arithmetic.multiply(da, up));
                    let dgate = arithmetic.multiply(times_up, arithmetic.curve_slope(curve, gate));
                    dh.set(row, 2 * unit, store(dgate));
                    dh.set(row, 2 * unit + 1, store(arithmetic.multiply(da, of_gate)));
                } else {
                    let slope = arithmetic.curve_slope(curve, h.at(row, unit));
                    dh.set(row, unit, store(arithmetic.multiply(da, slope)));
                }
            }
        }
        let ds = Balls2::from_fn(rows.len(), 1, |row, _| {
            let row = rows.start + row;
            let dout = problem.dout();
            let dout = dout.row(model.routing.row_token()[row].index());
            let terms = dout
                .iter()
                .enumerate()
                .map(|(column, &dout)| store(arithmetic.multiply(Ball::exact(dout), y.at(row, column))));
            let sum = arithmetic.sum(&arithmetic.accumulate, terms, problem.d() - 1);
            arithmetic.round(&arithmetic.score, sum)
        });
        [dh, ds]
    });
    let ds = ds.mid.iter().zip(&ds.rad).map(|(&mid, &rad)| Ball { mid, rad }).collect();
    DownBackward { dh, ds }
}

/// dW2 = dYᵀ A.
pub(crate) fn down_backward_weight(model: &Model<'_, '_>, a: &Balls2, scores: &[Ball]) -> Balls3 {
    let (problem, arithmetic) = (model.problem, &model.arithmetic);
    of_experts(model.routing, (problem.d(), problem.n()), |expert| {
        let a = a.rows(model.routing.rows_of_expert(expert));
        let dy = y_gradient(model, scores, expert).transposed();
        arithmetic.matrix_product_of_balls(&dy, &a).rounded(arithmetic, &arithmetic.storage)
    })
}

/// db2 = Σ dY over the expert's rows, of the stored dY.
pub(crate) fn b2_gradient(model: &Model<'_, '_>, scores: &[Ball]) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let dout = model.problem.dout();
    let term = |row: usize, column: usize| {
        let token = model.routing.row_token()[row].index();
        let product = arithmetic.multiply(scores[row], Ball::exact(dout[[token, column]]));
        arithmetic.round(&arithmetic.storage, product)
    };
    model.sum_over_rows(model.problem.d(), term, |rows| rows.saturating_sub(1))
}
