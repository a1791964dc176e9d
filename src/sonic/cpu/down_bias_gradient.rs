//! db2, beside the eight kernels: dout[token], scores → db2.

use ndarray::{Array2, ArrayView2, Axis};
use rayon::prelude::*;

use crate::element::{Element, Real};
use crate::routing::Routing;
use crate::shape::ExpertId;

/// db2_e = store(Σ s·dout over the expert's rows); +0 for an expert without tokens. `scores` are
/// by row. Gathers dout on the fly.
pub(super) fn down_bias_gradient<S: Element, A: Real>(
    dout: ArrayView2<'_, S>,
    scores: &[A],
    routing: &Routing,
) -> Array2<S> {
    let d = dout.ncols();
    let mut db2 = Array2::from_elem((routing.experts(), d), S::default());
    db2.axis_iter_mut(Axis(0)).into_par_iter().enumerate().for_each(|(expert, mut db2)| {
        let mut sums = vec![A::zero(); d];
        for row in routing.rows_of_expert(ExpertId(expert as u32)) {
            let dout = dout.row(routing.row_token()[row].index());
            sums.iter_mut().zip(dout).for_each(|(sum, &dout)| *sum += scores[row] * A::widen(dout));
        }
        db2.iter_mut().zip(sums).for_each(|(db2, sum)| *db2 = sum.store());
    });
    db2
}
