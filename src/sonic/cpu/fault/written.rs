//! What a kernel computes or has written, changed.

use ndarray::{Array, Array2, Array3, ArrayView2, ArrayViewMut2, Axis, Dimension, s};

use super::super::intermediate::Intermediate;
use super::{Fault, middle_row, neighbour, row_tails, tail, two_rows_of_a_token};
use crate::element::{Element, Real};
use crate::engine::Output;
use crate::mutant::{Mutant, TILE};
use crate::routing::Routing;
use crate::shape::ExpertId;

impl Fault {
    /// ∂a/∂h of one row of SwiGLU, h interleaved.
    pub(in crate::sonic::cpu) fn partials<A: Real>(self, h: &[A], partials: &mut [A]) {
        let Some(Mutant::SlopeWithoutTail | Mutant::UpWithoutActivation | Mutant::GateWithoutUp) = self.0 else {
            return;
        };
        for (unit, partials) in h.chunks_exact(2).zip(partials.chunks_exact_mut(2)) {
            let ([gate, up], silu) = ([unit[0], unit[1]], partials[1]);
            let sigma = if gate == A::zero() { A::from_f64(0.5) } else { silu / gate };
            match self.0 {
                Some(Mutant::SlopeWithoutTail) => partials[0] = up * sigma,
                Some(Mutant::UpWithoutActivation) => partials[1] = gate,
                _ => partials[0] = sigma * (A::one() + gate * (A::one() - sigma)),
            }
        }
    }

    /// A tensor between two kernels was written.
    pub(in crate::sonic::cpu) fn between<S: Element, A: Real>(
        self,
        output: Output,
        values: &mut Intermediate<S, A>,
        routing: &Routing,
    ) {
        match (self.0, values) {
            (None, _) => {}
            (_, Intermediate::Rounded(values)) => self.written(output, values, routing),
            (_, Intermediate::Unrounded(values)) => self.written(output, values, routing),
        }
    }

    /// ds was written, by row; `scores` too are by row.
    pub(in crate::sonic::cpu) fn ds<V: Element, A: Real>(self, ds: &mut [V], scores: &[A], routing: &Routing) {
        match self.0 {
            Some(Mutant::ZeroGradients) => ds.fill(V::default()),
            Some(Mutant::ScoreInDs) => {
                ds.iter_mut().zip(scores).for_each(|(ds, &s)| *ds = V::from_f64(ds.to_f64() * Element::to_f64(s)));
            }
            Some(Mutant::DoutOfNeighbour) => {
                let row = middle_row(routing);
                if let Some(before) = neighbour(routing, row) {
                    ds[row] = ds[before];
                }
            }
            Some(Mutant::DsSwapped) => {
                if let Some([a, b]) = two_rows_of_a_token(routing) {
                    ds.swap(a, b);
                }
            }
            _ => {}
        }
    }

    /// o was written; b2 enters it with the pairs' scores, by row.
    pub(in crate::sonic::cpu) fn o<S: Element, A: Real>(
        self,
        o: &mut Array2<S>,
        b2: Option<ArrayView2<'_, S>>,
        scores: &[A],
        routing: &Routing,
    ) {
        if let (Some(Mutant::B2Unweighted), Some(b2)) = (self.0, b2) {
            for (row, token) in routing.row_token().iter().enumerate() {
                let expert = routing.pair_expert()[routing.row_pair()[row] as usize].index();
                let missing = 1.0 - Element::to_f64(scores[row]);
                let o = o.row_mut(token.index());
                ndarray::Zip::from(o).and(b2.row(expert)).for_each(|o, b2| {
                    *o = S::from_f64(o.to_f64() + missing * b2.to_f64());
                });
            }
        }
        self.written(Output::O, o, routing);
    }

    /// dw1 was written from x and dh.
    pub(in crate::sonic::cpu) fn dw1<S: Element, A: Real>(
        self,
        dw1: &mut Array3<S>,
        x: ArrayView2<'_, S>,
        dh: &Intermediate<S, A>,
        routing: &Routing,
    ) {
        if self.0 == Some(Mutant::StorageSumOfDw1) {
            let mut buffer = Vec::new();
            dw1.fill(S::default());
            for (expert, mut dw1) in dw1.axis_iter_mut(Axis(0)).enumerate() {
                for row in routing.rows_of_expert(ExpertId(expert as u32)) {
                    let x = x.row(routing.row_token()[row].index());
                    let dh = dh.read(row, 0..dh.columns(), &mut buffer);
                    for (mut sums, &dh) in dw1.rows_mut().into_iter().zip(dh) {
                        sums.zip_mut_with(&x, |sum, &x| *sum = (A::widen(*sum) + dh * A::widen(x)).store());
                    }
                }
            }
        }
        self.written(Output::Dw1, dw1, routing);
    }

    /// A tensor was written.
    pub(in crate::sonic::cpu) fn written<V: Element, D: Dimension>(
        self,
        output: Output,
        tensor: &mut Array<V, D>,
        routing: &Routing,
    ) {
        let Some(mutant) = self.0 else { return };
        let width = tensor.shape().last().copied().unwrap_or(1);
        let height = tensor.len().checked_div(width).unwrap_or(0);
        let Ok(values) = tensor.view_mut().into_shape_with_order((height, width)) else { return };
        if !values.is_empty() && routing.routed() > 0 {
            self.plant(mutant, output, values, routing);
        }
    }

    /// Of `values` the last axis is the columns; experts, where there are any, stand one below the other.
    fn plant<V: Element>(self, mutant: Mutant, output: Output, mut values: ArrayViewMut2<'_, V>, routing: &Routing) {
        use Mutant as M;
        let (height, width) = values.dim();
        let zero = V::default();
        let place = [height / 2, width / 2];
        let change = |values: &mut ArrayViewMut2<'_, V>, change: &dyn Fn(f64) -> f64| {
            // An element that is not 0, from the middle on.
            let near = (0..height * width).map(|step| (place[0] * width + place[1] + step) % (height * width));
            let found = near.map(|at| [at / width, at % width]).find(|&at| values[at].to_f64() != 0.0);
            let at = found.unwrap_or(place);
            values[at] = V::from_f64(change(values[at].to_f64()));
        };
        match (mutant, output) {
            (M::ZeroOutput, Output::O)
            | (M::ZeroGradients, Output::Dx | Output::Dw1 | Output::Dw2 | Output::Db1 | Output::Db2) => {
                values.fill(zero)
            }
            (M::NanRow, Output::O) => values.row_mut(place[0]).fill(V::from_f64(f64::NAN)),
            (M::InfiniteElement, Output::Dw1) => values[place] = V::from_f64(f64::INFINITY),
            (M::EmptyExpertUnwritten, Output::Dw1) | (M::EmptyExpertStale, Output::Dw2) => {
                let rows = height / routing.experts();
                let is_empty = |&expert: &usize| routing.rows_of_expert(ExpertId(expert as u32)).is_empty();
                let full = (0..routing.experts()).find(|expert| !is_empty(expert)).unwrap_or(0) * rows;
                let stale = values.slice(s![full..full + rows, ..]).to_owned();
                for expert in (0..routing.experts()).filter(is_empty) {
                    let mut into = values.slice_mut(s![expert * rows..(expert + 1) * rows, ..]);
                    match mutant {
                        M::EmptyExpertStale => into.assign(&stale),
                        _ => into.fill(V::from_f64(f64::NAN)),
                    }
                }
            }
            (M::RowTailUnwritten, Output::Y) => {
                row_tails(routing).flatten().for_each(|row| values.row_mut(row).fill(zero));
            }
            (M::StaleWorkspace, Output::Y) => {
                for row in row_tails(routing).flatten().filter(|&row| row >= TILE) {
                    copy_row(&mut values, row - TILE, row);
                }
            }
            (M::ColumnTailUnwritten, Output::A) => values.slice_mut(s![.., tail(width)]).fill(zero),
            (M::RowRepeated, Output::Y)
            | (M::RowOfNeighbour, Output::H | Output::A)
            | (M::DoutOfNeighbour, Output::Dh | Output::APrime) => {
                let row = middle_row(routing);
                if let Some(before) = neighbour(routing, row) {
                    copy_row(&mut values, before, row);
                }
            }
            (M::RowLostInDx, Output::DxExpanded) => values.row_mut(middle_row(routing)).fill(zero),
            (M::StripeInY, Output::Y) | (M::StripeInDw1, Output::Dw1) if width >= 2 * TILE => {
                let stripe = values.slice(s![.., ..TILE]).to_owned();
                values.slice_mut(s![.., TILE..2 * TILE]).assign(&stripe);
            }
            (M::SignInO, Output::O) | (M::SignInDw2, Output::Dw2) => change(&mut values, &|value| -value),
            (M::UlpsInO, Output::O) | (M::UlpsInDx, Output::Dx) => change(&mut values, &|value| {
                let last_place = 2.0 * V::DTYPE.unit_roundoff() * libm::exp2(libm::log2(value.abs()).floor());
                value + 8.0 * last_place
            }),
            (M::Dw2Doubled, Output::Dw2) => values.mapv_inplace(|value| V::from_f64(2.0 * value.to_f64())),
            (M::PreviousOutput, Output::O) => {
                let previous = values.slice(s![..;-1, ..]).to_owned();
                values.assign(&previous);
            }
            (M::GateUpSwappedInDw1, Output::Dw1) => put(&mut values, routing.experts(), |row| row ^ 1),
            (_, Output::Dw1) => {
                if let Some(order) = self.order(height / routing.experts()) {
                    put(&mut values, routing.experts(), |row| order[row]);
                }
            }
            (_, Output::Db1) => {
                if let Some(order) = self.order(width) {
                    let taken = values.to_owned();
                    order.iter().zip(taken.columns()).for_each(|(&to, from)| values.column_mut(to).assign(&from));
                }
            }
            _ => {}
        }
    }
}

fn copy_row<V: Element>(values: &mut ArrayViewMut2<'_, V>, from: usize, to: usize) {
    let row = values.row(from).to_owned();
    values.row_mut(to).assign(&row);
}

/// Row i of each expert is put at `to(i)`.
fn put<V: Element>(values: &mut ArrayViewMut2<'_, V>, experts: usize, to: impl Fn(usize) -> usize) {
    let rows = values.nrows() / experts;
    let taken = values.to_owned();
    for (row, from) in taken.rows().into_iter().enumerate() {
        values.row_mut(row / rows * rows + to(row % rows)).assign(&from);
    }
}
