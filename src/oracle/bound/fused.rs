//! The fused model: the eight kernels of the method, each of which rounds its results once, and the
//! two bias gradients beside them.
//!
//! Each function takes balls for what its kernel reads of one expert. With radii of 0 it gives the bound of that
//! kernel alone; with the radii that other kernels left, the bound of the layer. Kernels 3 and 8 are
//! [`sums`](super::sums).

use ndarray::{Array1, Array2, ArrayView2};

use super::Model;
use super::accumulation::Sum;
use super::ball::{Ball, Measure};
use super::line::Line;
use super::matrix::{Balls2, Operand};
use super::midpoints::{Midpoints, Step};
use super::model::lines_of;
use crate::shape::ExpertId;

/// Kernel 4's results.
pub(crate) struct DownBackward {
    pub(crate) dh: Balls2,
    pub(crate) a_prime: Balls2,
    /// By row.
    pub(crate) ds: Vec<Ball>,
}

/// Kernel 1's results.
pub(crate) struct UpForward {
    pub(crate) h: Balls2,
    pub(crate) a: Balls2,
    /// The radii of h between what the ends of its balls are rounded to, where that is known better.
    pub(crate) h_between: Option<Array2<f64>>,
}

/// Kernel 1: H = X_e W1ᵀ (+ b1) and A = act(H), A from the accumulator before it is rounded to H. With `for_ds` the
/// radii of H come a second time.
pub(crate) fn up_forward(model: &Model<'_, '_>, known: &Midpoints<'_>, expert: ExpertId, for_ds: bool) -> UpForward {
    let arithmetic = &model.arithmetic;
    let (x, w1) = (known.x(model, expert), Operand::exact(model.w1(expert)));
    let h = known.product(Step::Up, arithmetic, Operand::exact(x), w1.t(), model.b1(expert));
    let mut a = known.balls(model, (h.mid.nrows(), model.problem.n()));
    for (h, (mids, rads)) in h.each_row().zip(a.each_row_mut()) {
        for (first, count) in lines_of(model.problem.n()) {
            arithmetic.store_line(model.units(h, first, count).a).put((&mut *mids, &mut *rads), first, 1, count);
        }
    }
    let unrounded = (for_ds && arithmetic.measure == Measure::Worst).then(|| known.buffers.copy(&h.rad));
    let h = h.rounded(arithmetic, &arithmetic.storage);
    let h_between = unrounded.map(|mut rads| {
        if let Some(rads) = rads.as_slice_mut() {
            let rows = rads.chunks_exact_mut(model.problem.h_width()).zip(h.each_row());
            rows.for_each(|(rads, row)| arithmetic.round_between(&arithmetic.storage, row, rads));
        }
        rads
    });
    UpForward { h, a, h_between }
}

/// Kernel 2: Y = A W2ᵀ (+ b2).
pub(crate) fn down_forward(model: &Model<'_, '_>, known: &Midpoints<'_>, expert: ExpertId, a: Operand<'_>) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let y = known.product(Step::Down, arithmetic, a, Operand::exact(model.w2(expert)).t(), model.b2(expert));
    y.rounded(arithmetic, &arithmetic.storage)
}
/// Kernel 4: G = dO_e W2; dS = ⟨G, A⟩ + ⟨dO, b2⟩; dH = dact(s·G, H); A′ = s·A, with A recomputed
/// from the stored H. `h` and `s` are those of the expert's rows, and `h_between` are h's radii for dS alone.
///
/// All errors of a row of h may lean to one side in its dS, and those of every dS in db_r: what is known of each
/// is worth most there. It holds for dH and A′ as well, but there a run that rounds a little more than this
/// model does (the OLMoE file of our data, in one element of dw1) would be left to the far wider eager bound.
pub(crate) fn down_backward_activation(
    model: &Model<'_, '_>,
    known: &Midpoints<'_>,
    expert: ExpertId,
    (h, h_between): (&Balls2, Option<&Array2<f64>>),
    s: &[Ball],
) -> DownBackward {
    let (problem, arithmetic) = (model.problem, &model.arithmetic);
    let dout = known.dout(model, expert);
    let of_bias = model.b2(expert).map(|b2| OfBias::new(dout, &b2.to_owned()));
    let (dout, w2) = (Operand::exact(dout), Operand::exact(model.w2(expert)));
    let g = known.product(Step::DownBackward, arithmetic, dout, w2, None);

    let mut dh = known.balls(model, (s.len(), problem.h_width()));
    let mut a_prime = known.balls(model, (s.len(), problem.n()));
    let mut ds = Vec::with_capacity(s.len());
    let read = s.iter().zip(h.each_row()).zip(g.each_row()).zip(h_between.unwrap_or(&h.rad).rows());
    let written = a_prime.each_row_mut().zip(dh.each_row_mut());
    for (row, ((((&score, h), g), between), (a_prime, dh))) in read.zip(written).enumerate() {
        let between = between.to_slice().map(|rads| (h.0, rads)).filter(|_| h_between.is_some());
        let (mut sum, score) = (Sum::default(), Line::all(score));
        for (first, count) in lines_of(problem.n()) {
            let g = Line::of(g, first, 1, count);
            let units = model.units(h, first, count);
            let a_of_ds = between.map_or(units.a, |between| model.units(between, first, count).a);
            sum.add_line(arithmetic, &arithmetic.product_of_lines(&g, &a_of_ds), count);
            let stored = arithmetic.store_line(arithmetic.multiply_lines(&score, &units.a));
            stored.put((&mut *a_prime.0, &mut *a_prime.1), first, 1, count);
            let (dgate, dup) = model.activation_backward(&units, &arithmetic.multiply_lines(&score, &g));
            let stored = (arithmetic.store_line(dgate), dup.map(|dup| arithmetic.store_line(dup)));
            model.put_gradients((&mut *dh.0, &mut *dh.1), first, count, stored);
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
    known.give(model, g);
    DownBackward { dh, a_prime, ds }
}

/// ⟨dO, b2⟩ by row, with Σ|dO·b2| and Σ(dO·b2)².
struct OfBias {
    value: Array1<f64>,
    magnitude: Array1<f64>,
    square: Array1<f64>,
}

impl OfBias {
    fn new(dout: ArrayView2<'_, f64>, b2: &Array1<f64>) -> Self {
        Self {
            value: dout.dot(b2),
            magnitude: dout.mapv(f64::abs).dot(&b2.mapv(f64::abs)),
            square: dout.mapv(|dout| dout * dout).dot(&b2.mapv(|b2| b2 * b2)),
        }
    }
}

/// Kernel 5: dW2 = dO_eᵀ A′. `a_prime` is that of the expert's rows.
pub(crate) fn down_backward_weight(
    model: &Model<'_, '_>,
    known: &Midpoints<'_>,
    expert: ExpertId,
    a_prime: Operand<'_>,
) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let dout = Operand::exact(known.dout(model, expert));
    let product = known.product(Step::DownWeight, arithmetic, dout.t(), a_prime, None);
    product.rounded(arithmetic, &arithmetic.storage)
}

/// Kernel 6: dX̃ = dH W1. `dh` is that of the expert's rows.
pub(crate) fn up_backward_activation(
    model: &Model<'_, '_>,
    known: &Midpoints<'_>,
    expert: ExpertId,
    dh: Operand<'_>,
) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let product = known.product(Step::UpBackward, arithmetic, dh, Operand::exact(model.w1(expert)), None);
    product.rounded(arithmetic, &arithmetic.storage)
}

/// Kernel 7: dW1 = dHᵀ X_e. `dh` is that of the expert's rows.
pub(crate) fn up_backward_weight(
    model: &Model<'_, '_>,
    known: &Midpoints<'_>,
    expert: ExpertId,
    dh: Operand<'_>,
) -> Balls2 {
    let arithmetic = &model.arithmetic;
    let x = Operand::exact(known.x(model, expert));
    let product = known.product(Step::UpWeight, arithmetic, dh.t(), x, None);
    product.rounded(arithmetic, &arithmetic.storage)
}

/// db1 = Σ dH over the rows of one expert, of the stored dH.
pub(crate) fn b1_gradient(model: &Model<'_, '_>, dh: Operand<'_>) -> Vec<Ball> {
    let (rows, columns) = dh.dim();
    model.sum_of_rows(rows, columns, |row, column| dh.at(row, column), rows.saturating_sub(1))
}

/// db2 = Σ s·dO over the rows of one expert, whose scores are `s`.
pub(crate) fn b2_gradient(model: &Model<'_, '_>, known: &Midpoints<'_>, expert: ExpertId, s: &[Ball]) -> Vec<Ball> {
    let dout = known.dout(model, expert);
    let term = |row: usize, column: usize| model.arithmetic.product(s[row], Ball::exact(dout[[row, column]]));
    model.sum_of_rows(s.len(), model.problem.d(), term, s.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{Case, Pairing};
    use crate::element::DType;
    use crate::engine::{Output, RoundingModel};
    use crate::oracle::bound::sums::of_tokens;
    use crate::oracle::bound::{numerics_of, propagate};
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
                let (y, dx_expanded) = (of(Output::Y), of(Output::DxExpanded));
                let o = of_tokens(&model, y.operand(), Some(&scores), 0..problem.t());
                let dx = of_tokens(&model, dx_expanded.operand(), None, 0..problem.t());
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
