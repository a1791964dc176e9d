//! The shared expert of a dump: a layer of one expert to which every token goes with score 1.

use std::collections::BTreeMap;

use ndarray::{Array2, Array3, ArrayView2, Axis, Ix2};

use super::Dump;
use super::read::Reader;
use crate::activation::Activation;
use crate::engine::{Numerics, Output};
use crate::error::{Error, Result};
use crate::oracle::{Bounded, bound, statistic};
use crate::problem::{Gating, Problem};
use crate::routing::Routing;
use crate::shape::{ExpertId, TokenId};

/// The shared expert of a file, if it has one.
pub(super) fn read(
    reader: &mut Reader<'_>,
    x: &Array2<f64>,
    dout: &Array2<f64>,
) -> Result<Option<Problem<'static, f64>>> {
    let Some(down) = reader.optional::<Ix2>("shared_down", "(d, n)")? else { return Ok(None) };
    let gate = reader.input::<Ix2>("shared_gate", "(n, d)")?;
    let up = reader.input::<Ix2>("shared_up", "(n, d)")?;
    if up.dim() != gate.dim() {
        return Err(Error::shape("shared_up", gate.shape(), up.shape(), "the shape of shared_gate"));
    }
    if gate.ncols() != x.ncols() {
        let expected = [gate.nrows(), x.ncols()];
        return Err(Error::shape("shared_gate", &expected, gate.shape(), "d is the width of x (T, d)"));
    }
    if down.dim() != (gate.ncols(), gate.nrows()) {
        let expected = [gate.ncols(), gate.nrows()];
        return Err(Error::shape("shared_down", &expected, down.shape(), "the widths of shared_gate (n, d)"));
    }
    let mut w1 = Array3::zeros((1, 2 * gate.nrows(), gate.ncols()));
    for (unit, (gate, up)) in gate.rows().into_iter().zip(up.rows()).enumerate() {
        w1.index_axis_mut(Axis(0), 0).row_mut(2 * unit).assign(&gate);
        w1.index_axis_mut(Axis(0), 0).row_mut(2 * unit + 1).assign(&up);
    }
    dense(x.view(), w1, down.insert_axis(Axis(0)), dout.view()).map(Some)
}

/// A layer of one expert.
fn dense(
    x: ArrayView2<'_, f64>,
    w1: Array3<f64>,
    w2: Array3<f64>,
    dout: ArrayView2<'_, f64>,
) -> Result<Problem<'static, f64>> {
    let t = x.nrows();
    let tokens = u32::try_from(t).map_err(|_| Error::size("T", t, "tokens are counted in 32 bits"))?;
    let routing = Routing::new(t, 1, (0..tokens).map(|token| (TokenId(token), ExpertId(0))))?;
    let gating = Gating::Given { routing, scores: vec![1.0; t] };
    Problem::new(x.to_owned(), w1, w2, None, gating, Activation::SwiGlu, dout.to_owned())
}

/// The same expert for some of its tokens.
pub(super) fn of_tokens(shared: &Problem<'_, f64>, tokens: &[usize]) -> Result<Problem<'static, f64>> {
    let (x, dout) = (shared.x().select(Axis(0), tokens), shared.dout().select(Axis(0), tokens));
    dense(x.view(), shared.w1().to_owned(), shared.w2().to_owned(), dout.view())
}

impl Dump {
    /// Truth and bound of every result, by the routing that was used.
    ///
    /// # Errors
    /// As [`bound::layer`].
    pub fn bounds(&self, routing: &Routing, numerics: &Numerics) -> Result<BTreeMap<Output, Bounded>> {
        self.bounds_of(routing, numerics, &|_| true)
    }

    /// The same of the results that `keep` names at least.
    ///
    /// # Errors
    /// As [`bound::layer`].
    pub fn bounds_of(
        &self,
        routing: &Routing,
        numerics: &Numerics,
        keep: bound::Keep<'_>,
    ) -> Result<BTreeMap<Output, Bounded>> {
        match &self.shared {
            None => bound::layer_of(&self.problem, routing, numerics, keep),
            Some(shared) => bound::layer_beside(&self.problem, shared, routing, numerics),
        }
    }

    /// The same with the statistical twin of each bound.
    ///
    /// # Errors
    /// As [`statistic::layer`].
    pub fn twins_of(
        &self,
        routing: &Routing,
        numerics: &Numerics,
        keep: bound::Keep<'_>,
    ) -> Result<BTreeMap<Output, Bounded>> {
        match &self.shared {
            None => statistic::layer_of(&self.problem, routing, numerics, keep),
            Some(shared) => statistic::layer_beside(&self.problem, shared, routing, numerics),
        }
    }
}
