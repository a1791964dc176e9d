//! Kernel 5, down backward, weight (dW2): dout[token], a′ → dw2.

use ndarray::{Array3, ArrayView2};

use super::intermediate::{Intermediate, zeros};
use super::matmul::{Operand, contract_over_rows};
use crate::element::{Element, Real};
use crate::routing::Routing;
use crate::shape::ExpertId;

/// dw2_e = store(dout_eᵀ a′); +0 for an expert without tokens. Gathers dout on the fly.
pub(super) fn down_backward_weight<S: Element, A: Real>(
    dout: ArrayView2<'_, S>,
    a_prime: &Intermediate<S, A>,
    routing: &Routing,
) -> Array3<S> {
    let mut dw2 = zeros((routing.experts(), dout.ncols(), a_prime.columns()));
    let rows = |expert| routing.rows_of_expert(ExpertId(expert as u32));
    contract_over_rows(
        &mut dw2,
        |expert| Operand::<S, A>::Gathered(dout, &routing.row_token()[rows(expert)]),
        |expert| a_prime.operand(rows(expert)),
    );
    dw2
}
