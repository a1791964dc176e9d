//! Kernel 7, up backward, weight (dW1): x[token], dh → dw1.

use ndarray::{Array3, ArrayView2};

use super::intermediate::{Intermediate, zeros};
use super::matmul::{Operand, contract_over_rows};
use crate::element::{Element, Real};
use crate::routing::Routing;
use crate::shape::ExpertId;

/// dw1_e = store(dhᵀ x_e); +0 for an expert without tokens. Gathers x on the fly.
pub(super) fn up_backward_weight<S: Element, A: Real>(
    x: ArrayView2<'_, S>,
    dh: &Intermediate<S, A>,
    routing: &Routing,
) -> Array3<S> {
    let mut dw1 = zeros((routing.experts(), dh.columns(), x.ncols()));
    let rows = |expert| routing.rows_of_expert(ExpertId(expert as u32));
    contract_over_rows(
        &mut dw1,
        |expert| dh.operand(rows(expert)),
        |expert| Operand::<S, A>::Gathered(x, &routing.row_token()[rows(expert)]),
    );
    dw1
}
