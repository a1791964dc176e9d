//! db1, beside the eight kernels: dh → db1.

use ndarray::{Array2, Axis};
use rayon::prelude::*;

use super::combine_output::add;
use super::intermediate::Intermediate;
use crate::element::{Element, Real};
use crate::routing::Routing;
use crate::shape::ExpertId;

/// db1_e = store(Σ dh over the expert's rows), of dh as it was stored; +0 for an expert without
/// tokens.
pub(super) fn up_bias_gradient<S: Element, A: Real>(dh: &Intermediate<S, A>, routing: &Routing) -> Array2<S> {
    let width = dh.columns();
    let mut db1 = Array2::from_elem((routing.experts(), width), S::default());
    db1.axis_iter_mut(Axis(0)).into_par_iter().enumerate().for_each(|(expert, mut db1)| {
        let mut sums = vec![A::zero(); width];
        let mut buffer = Vec::new();
        for row in routing.rows_of_expert(ExpertId(expert as u32)) {
            add(&mut sums, dh.read(row, 0..width, &mut buffer));
        }
        db1.iter_mut().zip(sums).for_each(|(db1, sum)| *db1 = sum.store());
    });
    db1
}
