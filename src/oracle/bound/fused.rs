//! The fused model: the eight kernels of the method, each of which rounds its results once, and the
//! two bias gradients beside them.
//!
//! Each function takes balls for what its kernel reads. With radii of 0 it gives the bound of that
//! kernel alone; with the radii that other kernels left, the bound of the layer. A kernel of experts is
//! there for one expert and for all of them.

use ndarray::Array1;

use super::Model;
use super::ball::{Ball, Sum};
use super::matrix::{Balls2, Balls3, Operand, by_expert, of_experts};
use super::midpoints::{Midpoints, Step};
use crate::shape::ExpertId;

/// Kernel 4's results.
pub(crate) struct DownBackward {
    pub(crate) dh: Balls2,
    pub(crate) a_prime: Balls2,
    /// By row.
    pub(crate) ds: Vec<Ball>,
}

/// Kernel 1: H = X_e W1ᵀ (+ b1) and A = act(H), A from the accumulator before it is rounded to H.
pub(super) fn up_forward_of(model: &Model<'_, '_>, known: &Midpoints, expert: ExpertId) -> [Balls2; 2] {
    let arithmetic = &model.arithmetic;
    let (x, w1) = (model.gather(model.problem.x(), expert), Operand::exact(model.w1(expert)));
    let h = known.product(Step::Up, arithmetic, Operand::exact(x.view()), w1.t(), model.b1(expert));
    let a = Balls2::from_fn(h.mid.nrows(), model.problem.n(), |row, unit| {
        arithmetic.round(&arithmetic.storage, model.activation(&h, row, unit))
    });
    [h.rounded(arithmetic, &arithmetic.storage), a]
}

pub(crate) fn up_forward(model: &Model<'_, '_>) -> [Balls2; 2] {
    let widths = [model.problem.h_width(), model.problem.n()];
    by_expert(model.routing, widths, |expert| up_forward_of(model, &Midpoints::default(), expert))
}

/// Kernel 2: Y = A W2ᵀ (+ b2).
pub(super) fn down_forward_of(model: &Model<'_, '_>, known: &Midpoints, expert: ExpertId, a: &Balls2) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let y = known.product(Step::Down, arithmetic, a.operand(), Operand::exact(model.w2(expert)).t(), model.b2(expert));
    y.rounded(arithmetic, &arithmetic.storage)
}

pub(crate) fn down_forward(model: &Model<'_, '_>, a: &Balls2) -> Balls2 {
    let [y] = by_expert(model.routing, [model.problem.d()], |expert| {
        [down_forward_of(model, &Midpoints::default(), expert, &a.rows(model.routing.rows_of_expert(expert)))]
    });
    y
}

/// Kernel 3: O_t = Σ s·Y over the token's rows; `scores` by row.
pub(crate) fn combine(model: &Model<'_, '_>, y: &Balls2, scores: &[Ball]) -> Balls2 {
    let arithmetic = &model.arithmetic;
    arithmetic.combine(y, Some(scores), model.routing).rounded(arithmetic, &arithmetic.storage)
}

/// Kernel 4: G = dO_e W2; dS = ⟨G, A⟩ + ⟨dO, b2⟩; dH = dact(s·G, H); A′ = s·A, with A recomputed
/// from the stored H. `h` and `s` are those of the expert's rows.
pub(super) fn down_backward_activation_of(
    model: &Model<'_, '_>,
    known: &Midpoints,
    expert: ExpertId,
    h: &Balls2,
    s: &[Ball],
) -> DownBackward {
    let (problem, arithmetic) = (model.problem, &model.arithmetic);
    let dout = model.gather(problem.dout(), expert);
    let of_bias = model.b2(expert).map(|b2| OfBias::new(&dout, &b2.to_owned()));
    let (dout, w2) = (Operand::exact(dout.view()), Operand::exact(model.w2(expert)));
    let g = known.product(Step::DownBackward, arithmetic, dout, w2, None);

    let store = |ball| arithmetic.round(&arithmetic.storage, ball);
    let mut dh = Balls2::zeros(s.len(), problem.h_width());
    let mut a_prime = Balls2::zeros(s.len(), problem.n());
    let mut ds = Vec::with_capacity(s.len());
    for (row, &score) in s.iter().enumerate() {
        let mut sum = Sum::default();
        for unit in 0..problem.n() {
            let g = g.at(row, unit);
            let a = model.activation(h, row, unit);
            sum.add(arithmetic, arithmetic.product(g, a));
            a_prime.set(row, unit, store(arithmetic.multiply(score, a)));
            model.activation_backward(h, row, unit, arithmetic.multiply(score, g), |column, gradient| {
                dh.set(row, column, store(gradient));
            });
        }
        let terms = problem.n() + if of_bias.is_some() { problem.d() } else { 0 };
        let mut sum = arithmetic.summed(&arithmetic.accumulate, sum, terms);
        if let Some(of_bias) = &of_bias {
            sum.mid += of_bias.value[row];
            let of_bias =
                Sum { ball: Ball::exact(0.0), magnitude: of_bias.magnitude[row], square: of_bias.square[row] };
            let rounded = arithmetic.summed(&arithmetic.accumulate, of_bias, terms);
            sum.rad = arithmetic.join(sum.rad, rounded.rad);
        }
        ds.push(arithmetic.round(&arithmetic.score, sum));
    }
    DownBackward { dh, a_prime, ds }
}

pub(crate) fn down_backward_activation(model: &Model<'_, '_>, h: &Balls2, scores: &[Ball]) -> DownBackward {
    let problem = model.problem;
    let [dh, a_prime, ds] = by_expert(model.routing, [problem.h_width(), problem.n(), 1], |expert| {
        let rows = model.routing.rows_of_expert(expert);
        let (h, s) = (h.rows(rows.clone()), &scores[rows]);
        let DownBackward { dh, a_prime, ds } = down_backward_activation_of(model, &Midpoints::default(), expert, &h, s);
        [dh, a_prime, Balls2::from_fn(ds.len(), 1, |row, _| ds[row])]
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

/// Kernel 5: dW2 = dO_eᵀ A′. `a_prime` is that of the expert's rows.
pub(super) fn down_backward_weight_of(
    model: &Model<'_, '_>,
    known: &Midpoints,
    expert: ExpertId,
    a_prime: &Balls2,
) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let dout = model.gather(model.problem.dout(), expert);
    let dout = Operand::exact(dout.view());
    let product = known.product(Step::DownWeight, arithmetic, dout.t(), a_prime.operand(), None);
    product.rounded(arithmetic, &arithmetic.storage)
}

pub(crate) fn down_backward_weight(model: &Model<'_, '_>, a_prime: &Balls2) -> Balls3 {
    of_experts(model.routing, (model.problem.d(), model.problem.n()), |expert| {
        let a_prime = a_prime.rows(model.routing.rows_of_expert(expert));
        down_backward_weight_of(model, &Midpoints::default(), expert, &a_prime)
    })
}

/// Kernel 6: dX̃ = dH W1. `dh` is that of the expert's rows.
pub(super) fn up_backward_activation_of(
    model: &Model<'_, '_>,
    known: &Midpoints,
    expert: ExpertId,
    dh: &Balls2,
) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let product = known.product(Step::UpBackward, arithmetic, dh.operand(), Operand::exact(model.w1(expert)), None);
    product.rounded(arithmetic, &arithmetic.storage)
}

pub(crate) fn up_backward_activation(model: &Model<'_, '_>, dh: &Balls2) -> Balls2 {
    let [dx_expanded] = by_expert(model.routing, [model.problem.d()], |expert| {
        let dh = dh.rows(model.routing.rows_of_expert(expert));
        [up_backward_activation_of(model, &Midpoints::default(), expert, &dh)]
    });
    dx_expanded
}

/// Kernel 7: dW1 = dHᵀ X_e. `dh` is that of the expert's rows.
pub(super) fn up_backward_weight_of(model: &Model<'_, '_>, known: &Midpoints, expert: ExpertId, dh: &Balls2) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let x = model.gather(model.problem.x(), expert);
    let product = known.product(Step::UpWeight, arithmetic, dh.operand().t(), Operand::exact(x.view()), None);
    product.rounded(arithmetic, &arithmetic.storage)
}

pub(crate) fn up_backward_weight(model: &Model<'_, '_>, dh: &Balls2) -> Balls3 {
    of_experts(model.routing, (model.problem.h_width(), model.problem.d()), |expert| {
        let dh = dh.rows(model.routing.rows_of_expert(expert));
        up_backward_weight_of(model, &Midpoints::default(), expert, &dh)
    })
}

/// Kernel 8: Σ dX̃ over the token's rows.
pub(crate) fn combine_gradient(model: &Model<'_, '_>, dx_expanded: &Balls2) -> Balls2 {
    let arithmetic = &model.arithmetic;
    arithmetic.combine(dx_expanded, None, model.routing).rounded(arithmetic, &arithmetic.storage)
}

/// db1 = Σ dH over the rows of one expert, of the stored dH.
pub(super) fn b1_gradient_of(model: &Model<'_, '_>, dh: &Balls2) -> Vec<Ball> {
    let rows = dh.mid.nrows();
    model.sum_of_rows(rows, dh.mid.ncols(), |row, column| dh.at(row, column), rows.saturating_sub(1))
}

pub(crate) fn b1_gradient(model: &Model<'_, '_>, dh: &Balls2) -> Balls2 {
    model.of_each_expert(dh.mid.ncols(), |expert| b1_gradient_of(model, &dh.rows(model.routing.rows_of_expert(expert))))
}

/// db2 = Σ s·dO over the rows of one expert, whose scores are `s`.
pub(super) fn b2_gradient_of(model: &Model<'_, '_>, expert: ExpertId, s: &[Ball]) -> Vec<Ball> {
    let dout = model.gather(model.problem.dout(), expert);
    let term = |row: usize, column: usize| model.arithmetic.product(s[row], Ball::exact(dout[[row, column]]));
    model.sum_of_rows(s.len(), model.problem.d(), term, s.len())
}

pub(crate) fn b2_gradient(model: &Model<'_, '_>, scores: &[Ball]) -> Balls2 {
    model.of_each_expert(model.problem.d(), |expert| {
        b2_gradient_of(model, expert, &scores[model.routing.rows_of_expert(expert)])
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{Case, Pairing};
    use crate::element::DType;
    use crate::engine::{Output, RoundingModel};
    use crate::oracle::bound::ball::Measure;
    use crate::oracle::bound::{eager, numerics_of, propagate};
    use crate::oracle::judge::Bounded;
    use crate::problem::Gating;

    /// A layer adds y and dx̃ to their tokens as its experts come: with the bounds of kernels 3 and 8 on the
    /// whole of y and dx̃.
    #[test]
    fn o_and_dx_of_a_layer_have_the_bounds_of_the_combines() {
        for rounding in [RoundingModel::Fused, RoundingModel::Eager] {
            for (storage, measure) in [(DType::F32, Measure::Worst), (DType::BF16, Measure::Deviation)] {
                let numerics = numerics_of(storage, rounding);
                let case = Case::new("7,12,8,6,5".parse().unwrap()).with_pairing(Pairing::TopK);
                let problem = case.problem::<f32>().unwrap().widen();
                let Gating::Given { routing, scores } = problem.gating() else { panic!("given pairs") };
                let model = Model::new(&problem, routing, &numerics, measure);
                let scores: Vec<Ball> = routing.to_rows(scores).into_iter().map(Ball::exact).collect();
                let layer = propagate(&problem, routing, &numerics, measure).unwrap();
                let of = |output: Output| {
                    let Bounded { truth, bound } = layer[&output].clone();
                    let matrix = |values: ndarray::ArrayD<f64>| values.into_dimensionality().unwrap();
                    Balls2 { mid: matrix(truth), rad: matrix(bound) }
                };
                let [o, dx] = match rounding {
                    RoundingModel::Fused => {
                        [combine(&model, &of(Output::Y), &scores), combine_gradient(&model, &of(Output::DxExpanded))]
                    }
                    RoundingModel::Eager => [
                        eager::combine(&model, &of(Output::Y), &scores),
                        eager::combine_gradient(&model, &of(Output::DxExpanded)),
                    ],
                };
                for (output, by_kernel) in [(Output::O, o), (Output::Dx, dx)] {
                    let in_layer = of(output);
                    for (found, expected) in in_layer.rad.iter().zip(&by_kernel.rad) {
                        let off = (found - expected).abs();
                        assert!(off <= 1e-9 * expected, "{output} {rounding:?} {measure:?}: {found} for {expected}");
                    }
                }
            }
        }
    }
}
