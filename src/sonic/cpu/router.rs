//! The router before the eight kernels, and its backward after them.
//!
//! l = store(x W_rᵀ + b_r) chooses and scores; with dlogits from ds and the convention,
//! dW_r = dlogitsᵀ x, db_r = Σ dlogits, and dx gains dlogits W_r. Logits, scores, dlogits and the
//! router's part of dx have the score type.

use ndarray::{Array1, Array2, ArrayView2, aview0};

use super::fault::Fault;
use super::intermediate::Intermediate;
use super::matmul::{Operand, Product, add_bias, product};
use super::roundings::{RoundingPoint, Roundings};
use crate::element::{Element, Real};
use crate::engine::{Record, RouterGradients};
use crate::error::{Error, Result};
use crate::mutant::Mutant;
use crate::problem::Router;
use crate::routing::{Choice, Convention, Routing, grouped, scores, top_k};

/// What the router hands to the layer.
pub(in crate::sonic) struct Routed<V> {
    pub routing: Routing,
    /// By pair, t·K + rank.
    pub scores: Vec<V>,
    /// Kept where backward needs all of them, or where they were asked for.
    pub logits: Option<Array2<V>>,
}

/// Logits, choice (unless it is made) and scores.
pub(in crate::sonic) fn forward<S: Element, A: Real>(
    x: ArrayView2<'_, S>,
    router: &Router<'_, S>,
    choice: Option<&Choice>,
    record: Record,
    roundings: Roundings,
    fault: Fault,
) -> Result<Routed<S::Score>> {
    let convention = fault.convention(router.convention);
    let (x, w) = (Operand::<S, A>::Stored(x), Operand::<S, A>::Stored(router.w.view()));
    let logits: Array2<S::Score> = product(Product::RightTransposed, &x, &w, |_, first, sums| {
        add_bias(sums, router.b.as_ref().map(|b| b.view()), first);
        roundings.apply::<S, A>(RoundingPoint::Logits, sums);
    });
    let bias = router.selection_bias.as_ref().map(|bias| bias.mapv(S::Score::widen));
    let bias = bias.as_ref().map(|bias| bias.view());
    let choice = match (choice, router.convention) {
        (Some(choice), _) => choice.clone(),
        (None, Convention::GroupedSigmoid(groups)) => {
            grouped::mutated(logits.view(), bias, router.k, &groups, fault.0)?
        }
        (None, _) => top_k::mutated(logits.view(), router.k, fault.0)?,
    };
    let mut scores = scores::forward(logits.view(), &choice, convention)?;
    fault.router_scores(convention, logits.view(), bias, &choice, &mut scores);
    roundings.apply::<S, S::Score>(RoundingPoint::Scores, &mut scores);
    let keep = convention.backward_reads_logits() || record == Record::Intermediates;
    Ok(Routed { routing: choice.routing(), scores, logits: keep.then_some(logits) })
}

/// What the layer kept of [`Routed`].
pub(in crate::sonic) struct Kept<'k, V> {
    pub routing: &'k Routing,
    pub scores: &'k [V],
    pub logits: Option<ArrayView2<'k, V>>,
}

/// dx = store(experts' dx + store(dlogits W_r)), and the router's gradients; `ds` is by pair.
pub(in crate::sonic) fn backward<S: Element, A: Real>(
    x: ArrayView2<'_, S>,
    router: &Router<'_, S>,
    kept: Kept<'_, S::Score>,
    ds: &[S::Score],
    expert_dx: Intermediate<S, A>,
    roundings: Roundings,
    fault: Fault,
) -> Result<(Array2<S>, RouterGradients<S>)> {
    let mut dlogits = dlogits(router, kept, ds, fault)?;
    if let Some(dlogits) = dlogits.as_slice_mut() {
        roundings.apply::<S, S::Score>(RoundingPoint::Dlogits, dlogits);
    }

    let (upstream, w) = (Operand::<S::Score, A>::Stored(dlogits.view()), Operand::<S, A>::Stored(router.w.view()));
    let dx = product(Product::Plain, &upstream, &w, |token, first, sums| {
        roundings.apply::<S, A>(RoundingPoint::RouterDx, sums);
        let mut buffer = Vec::new();
        let experts = expert_dx.read(token, first..first + sums.len(), &mut buffer);
        if fault.0 == Some(Mutant::RouterPartMissing) {
            sums.copy_from_slice(experts);
            return;
        }
        for (sum, &experts) in sums.iter_mut().zip(experts) {
            *sum = experts + A::widen(sum.store::<S::Score>());
        }
    });
    let drouter_w = product(Product::LeftTransposed, &upstream, &Operand::<S, A>::Stored(x), |_, _, _| ());
    let drouter_b = router.b.as_ref().map(|_| {
        let mut sums = Array1::<A>::zeros(dlogits.ncols());
        for dlogits in dlogits.rows() {
            sums.zip_mut_with(&dlogits, |sum, &dlogit| *sum += A::widen(dlogit));
        }
        sums.mapv(A::store)
    });
    Ok((dx, RouterGradients { dlogits, drouter_w, drouter_b }))
}

/// dlogits (T, E) by the router's convention.
fn dlogits<S: Element>(
    router: &Router<'_, S>,
    kept: Kept<'_, S::Score>,
    ds: &[S::Score],
    fault: Fault,
) -> Result<Array2<S::Score>> {
    let Kept { routing, scores, logits } = kept;
    let (tokens, experts) = (routing.tokens(), routing.experts());
    let ids = Array2::from_shape_vec((tokens, router.k), routing.pair_expert().to_vec())
        .map_err(|error| Error::internal(format!("the pairs of a top-K routing do not form (T, K): {error}")))?;
    let choice = Choice::new(experts, ids)?;
    // A normalised score is its own derivative's only input: the logits were let go, and zeros
    // that take no memory stand for them.
    let none = S::Score::default();
    let stand_in = aview0(&none);
    let logits = match logits {
        Some(logits) => logits,
        None => stand_in
            .broadcast((tokens, experts))
            .ok_or_else(|| Error::internal("a scalar does not broadcast to (T, E)"))?,
    };
    let convention = fault.convention(router.convention);
    let mut dlogits = scores::mutated(logits, scores, &choice, convention, ds, fault.0)?;
    fault.router_gradient(convention, logits, &choice, ds, &mut dlogits);
    Ok(dlogits)
}
