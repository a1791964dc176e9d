//! The fused model: the eight kernels of the method, each of which rounds its results once, and the
//! two bias gradients beside them.
//!
//! Each function takes balls for what its kernel reads. With radii of 0 it gives the bound of that
//! kernel alone; with the radii that other kernels left, the bound of the layer.

use ndarray::Array1;

use super::Model;
use super::ball::Ball;
use super::matrix::{Balls, Balls2, Balls3, by_expert, of_experts};

/// Kernel 4's results.
pub(crate) struct DownBackward {
    pub(crate) dh: Balls2,
    pub(crate) a_prime: Balls2,
    /// By row.
    pub(crate) ds: Vec<Ball>,
}

/// Kernel 1: H = X_e W1ᵀ (+ b1) and A = act(H), A from the accumulator before it is rounded to H.
pub(crate) fn up_forward(model: &Model<'_, '_>) -> [Balls2; 2] {
    let arithmetic = &model.arithmetic;
    by_expert(model.routing, [model.problem.h_width(), model.problem.n()], |expert| {
        let h = model.pre_activation(expert);
        let a = Balls2::from_fn(h.mid.nrows(), model.problem.n(), |row, unit| {
            arithmetic.round(&arithmetic.storage, model.activation(&h, row, unit))
        });
        [h.rounded(arithmetic, &arithmetic.storage), a]
    })
}

/// Kernel 2: Y = A W2ᵀ (+ b2).
pub(crate) fn down_forward(model: &Model<'_, '_>, a: &Balls2) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let [y] = by_expert(model.routing, [model.problem.d()], |expert| {
        let a = a.rows(model.routing.rows_of_expert(expert));
        let b2 = model.b2(expert);
        [arithmetic.matrix_product(&a, model.w2(expert).t(), b2).rounded(arithmetic, &arithmetic.storage)]
    });
    y
}

/// Kernel 3: O_t = Σ s·Y over the token's rows; `scores` by row.
pub(crate) fn combine(model: &Model<'_, '_>, y: &Balls2, scores: &[Ball]) -> Balls2 {
    let arithmetic = &model.arithmetic;
    arithmetic.combine(y, Some(scores), model.routing).rounded(arithmetic, &arithmetic.storage)
}

/// Kernel 4: G = dO_e W2; dS = ⟨G, A⟩ + ⟨dO, b2⟩; dH = dact(s·G, H); A′ = s·A, with A recomputed
/// from the stored H.
pub(crate) fn down_backward_activation(model: &Model<'_, '_>, h: &Balls2, scores: &[Ball]) -> DownBackward {
    let (problem, arithmetic) = (model.problem, &model.arithmetic);
    let [dh, a_prime, ds] = by_expert(model.routing, [problem.h_width(), problem.n(), 1], |expert| {
        let rows = model.routing.rows_of_expert(expert);
        let (h, s) = (h.rows(rows.clone()), &scores[rows.clone()]);
        let dout = model.gather(problem.dout(), expert);
        let of_bias = model.b2(expert).map(|b2| OfBias::new(&dout, &b2.to_owned()));
        let g = arithmetic.matrix_product(&Balls::exact(dout), model.w2(expert), None);

        let store = |ball| arithmetic.round(&arithmetic.storage, ball);
        let mut dh = Balls2::zeros(rows.len(), problem.h_width());
        let mut a_prime = Balls2::zeros(rows.len(), problem.n());
        let mut ds = Balls2::zeros(rows.len(), 1);
        for (row, &score) in s.iter().enumerate() {
            let mut factors = Vec::with_capacity(problem.n());
            for unit in 0..problem.n() {
                let g = g.at(row, unit);
                let a = model.activation(&h, row, unit);
                factors.push((g, a));
                a_prime.set(row, unit, store(arithmetic.multiply(score, a)));
                model.activation_backward(&h, row, unit, arithmetic.multiply(score, g), |column, gradient| {
                    dh.set(row, column, store(gradient));
                });
            }
            let terms = problem.n() + if of_bias.is_some() { problem.d() } else { 0 };
            let mut sum = arithmetic.dot(factors.into_iter(), terms);
            if let Some(of_bias) = &of_bias {
                sum.mid += of_bias.value[row];
                let addend = Ball::exact(0.0);
                let rounded = arithmetic.summed(
                    &arithmetic.accumulate,
                    addend,
                    of_bias.magnitude[row],
                    of_bias.square[row],
                    terms,
                );
                sum.rad = arithmetic.join(sum.rad, rounded.rad);
            }
            ds.set(row, 0, arithmetic.round(&arithmetic.score, sum));
        }
        [dh, a_prime, ds]
    });
    let ds = ds.mid.iter().zip(&ds.rad).map(|(&mid, &rad)| Ball { mid, rad }).collect();
    DownBackward { dh, a_prime, ds }
}

/// ⟨dO, b2⟩ by row, with Σ|dO·b2| and Σ(dO·b2)².
struct OfBias {
    value: Array1<f64>,
    magnitude: Array1<f64>,
    square: Array1<f64>,
}

impl OfBias {
    fn new(dout: &ndarray::Array2<f64>, b2: &Array1<f64>) -> Self {
        Self {
            value: dout.dot(b2),
            magnitude: dout.mapv(f64::abs).dot(&b2.mapv(f64::abs)),
            square: dout.mapv(|dout| dout * dout).dot(&b2.mapv(|b2| b2 * b2)),
        }
    }
}

/// Kernel 5: dW2 = dO_eᵀ A′.
pub(crate) fn down_backward_weight(model: &Model<'_, '_>, a_prime: &Balls2) -> Balls3 {
    let (problem, arithmetic) = (model.problem, &model.arithmetic);
    of_experts(model.routing, (problem.d(), problem.n()), |expert| {
        let a_prime = a_prime.rows(model.routing.rows_of_expert(expert));
        let dout = model.gather(problem.dout(), expert);
        // (A′ᵀ dO)ᵀ, so that the exact operand stands on the right.
        let transposed = arithmetic.matrix_product(&a_prime.transposed(), dout.view(), None);
        transposed.transposed().rounded(arithmetic, &arithmetic.storage)
    })
}

/// Kernel 6: dX̃ = dH W1.
pub(crate) fn up_backward_activation(model: &Model<'_, '_>, dh: &Balls2) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let [dx_expanded] = by_expert(model.routing, [model.problem.d()], |expert| {
        let dh = dh.rows(model.routing.rows_of_expert(expert));
        [arithmetic.matrix_product(&dh, model.w1(expert), None).rounded(arithmetic, &arithmetic.storage)]
    });
    dx_expanded
}

/// Kernel 7: dW1 = dHᵀ X_e.
pub(crate) fn up_backward_weight(model: &Model<'_, '_>, dh: &Balls2) -> Balls3 {
    let (problem, arithmetic) = (model.problem, &model.arithmetic);
    of_experts(model.routing, (problem.h_width(), problem.d()), |expert| {
        let dh = dh.rows(model.routing.rows_of_expert(expert));
        let x = model.gather(problem.x(), expert);
        arithmetic.matrix_product(&dh.transposed(), x.view(), None).rounded(arithmetic, &arithmetic.storage)
    })
}

/// Kernel 8: Σ dX̃ over the token's rows.
pub(crate) fn combine_gradient(model: &Model<'_, '_>, dx_expanded: &Balls2) -> Balls2 {
    let arithmetic = &model.arithmetic;
    arithmetic.combine(dx_expanded, None, model.routing).rounded(arithmetic, &arithmetic.storage)
}

/// db1 = Σ dH over the expert's rows, of the stored dH.
pub(crate) fn b1_gradient(model: &Model<'_, '_>, dh: &Balls2) -> Balls2 {
    model.sum_over_rows(dh.mid.ncols(), |row, column| dh.at(row, column), |rows| rows.saturating_sub(1))
}

/// db2 = Σ s·dO over the expert's rows.
pub(crate) fn b2_gradient(model: &Model<'_, '_>, scores: &[Ball]) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let dout = model.problem.dout();
    let term = |row: usize, column: usize| {
        let token = model.routing.row_token()[row].index();
        arithmetic.product(scores[row], Ball::exact(dout[[token, column]]))
    };
    model.sum_over_rows(model.problem.d(), term, |rows| rows)
}
