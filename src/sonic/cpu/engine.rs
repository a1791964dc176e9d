//! The layer from its kernels: what runs in which order, and what stays in between.

use std::borrow::Cow;
use std::marker::PhantomData;

use ndarray::{Array2, ArrayView2};

use super::blocks::slabs;
use super::combine_input_gradient::combine_input_gradient;
use super::combine_output::combine_output;
use super::down_backward_activation::{DownBackward, down_backward_activation};
use super::down_backward_weight::down_backward_weight;
use super::down_bias_gradient::down_bias_gradient;
use super::down_forward::down_forward;
use super::intermediate::{Intermediate, zeros};
use super::roundings::{RoundingPoint, Roundings};
use super::router;
use super::up_backward_activation::up_backward_activation;
use super::up_backward_weight::up_backward_weight;
use super::up_bias_gradient::up_bias_gradient;
use super::up_forward::up_forward;
use crate::element::{DType, Element, Real};
use crate::engine::{
    Backward, BackwardIntermediates, Engine, Forward, ForwardIntermediates, Gradients, Keeping, Ledger, Numerics, Pass,
    Record, RoundingModel, RouterRounding,
};
use crate::error::{Error, Result};
use crate::problem::{Gating, Problem};
use crate::routing::Routing;

/// SonicMoE on the CPU, with sums in `A`: f32, as the tensor cores have it, or f64.
///
/// ```
/// use ndarray::{Array2, Array3};
/// use sonicmoe::sonic::cpu::CpuEngine;
/// use sonicmoe::engine::Output;
/// use sonicmoe::{Activation, ExpertId, Gating, Problem, Record, TokenId, routing::Routing, run};
/// // One token, one expert, n = 1: h = [1, 2], a = relu(1)·2 = 2, y = a·[3, 4].
/// let routing = Routing::new(1, 1, [(TokenId(0), ExpertId(0))])?;
/// let problem = Problem::new(
///     Array2::<f32>::ones((1, 1)),
///     Array3::from_shape_vec((1, 2, 1), vec![1.0, 2.0]).unwrap(),
///     Array3::from_shape_vec((1, 1, 1), vec![3.0]).unwrap(),
///     None,
///     Gating::Given { routing, scores: vec![0.5] },
///     Activation::ReGlu,
///     Array2::ones((1, 1)),
/// )?;
/// let outcome = run(&CpuEngine::<f32>::new(), &problem, Record::Results)?;
/// assert_eq!(outcome.results[&Output::O].values[[0, 0]], 0.5 * 6.0);
/// assert_eq!(outcome.results[&Output::Ds].values[[0]], 6.0);
/// # Ok::<(), sonicmoe::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuEngine<A> {
    roundings: Roundings,
    accumulator: PhantomData<fn() -> A>,
}

impl<A: Real> CpuEngine<A> {
    /// The method, with its rounding points.
    pub fn new() -> Self {
        Self::with_roundings(Roundings::FUSED)
    }

    /// The same kernels with other rounding points: what a check has to tell from the method.
    pub fn with_roundings(roundings: Roundings) -> Self {
        Self { roundings, accumulator: PhantomData }
    }
}

impl<S: Element, A: Real> Engine<S> for CpuEngine<A> {
    fn name(&self) -> Cow<'static, str> {
        format!("cpu ({} sums)", A::DTYPE).into()
    }

    fn numerics(&self) -> Numerics {
        Numerics {
            storage: S::DTYPE,
            score: S::Score::DTYPE,
            accumulator: A::DTYPE.unit_roundoff(),
            rounding: RoundingModel::Fused,
            router: RouterRounding::Score,
            // σ = t/(1 + t): t = exp within one ulp, a sum and a division; two roundings to an ulp.
            function_ulps: 8.0,
            flushes_denormals: false,
        }
    }

    fn accepts(&self, _problem: &Problem<'_, S>) -> Result<()> {
        if S::DTYPE == DType::F64 && A::DTYPE != DType::F64 {
            return Err(Error::missing("an accumulator as wide as f64 storage", "use CpuEngine::<f64>"));
        }
        Ok(())
    }

    fn forward<'p>(&'p self, problem: &'p Problem<'_, S>, record: Record) -> Result<Forward<'p, S>> {
        let roundings = self.roundings;
        let (routing, scores, logits) = match problem.gating() {
            Gating::Given { routing, scores } => (Cow::Borrowed(routing), Cow::Borrowed(&scores[..]), None),
            Gating::Router(layer) => {
                let routed = router::forward::<S, A>(problem.x(), layer, record, roundings)?;
                (Cow::Owned(routed.routing), Cow::Owned(routed.scores), routed.logits)
            }
        };
        let (h, a) =
            up_forward::<S, A>(problem.x(), problem.w1(), problem.b1(), problem.activation(), &routing, roundings);
        let scores_by_row = scores_by_row(&routing, &scores);
        let mut o = zeros(problem.x().raw_dim());
        let mut y = Intermediate::zeros(0, 0, roundings.rounds(RoundingPoint::Y));
        for slab in slabs(problem.d(), record == Record::Intermediates) {
            y.reshape(routing.routed(), slab.columns.len());
            down_forward(&a, problem.w2(), problem.b2(), &routing, &slab, &mut y);
            combine_output(&y, &scores_by_row, &routing, roundings, slab.columns, &mut o);
        }
        let intermediates = (record == Record::Intermediates).then(|| ForwardIntermediates {
            h: h.clone().into_stored(),
            a: a.into_stored(),
            y: y.into_stored(),
        });
        let pass = CpuPass { layer: problem, roundings, x: problem.x(), h, routing, scores, logits };
        Ok(Forward { o, intermediates, pass: Box::new(pass) })
    }
}

/// What stays from forward to backward: x and h, and who went where.
struct CpuPass<'p, 'q, S: Element, A> {
    /// For its weights and sizes.
    layer: &'p Problem<'q, S>,
    roundings: Roundings,
    x: ArrayView2<'p, S>,
    h: Intermediate<S, A>,
    routing: Cow<'p, Routing>,
    /// By pair.
    scores: Cow<'p, [S::Score]>,
    /// Where the router's backward needs all of them, or where they were asked for.
    logits: Option<Array2<S::Score>>,
}

impl<S: Element, A: Real> Pass<S> for CpuPass<'_, '_, S, A> {
    fn routing(&self) -> &Routing {
        &self.routing
    }

    fn scores(&self) -> Vec<S::Score> {
        self.scores.to_vec()
    }

    fn logits(&self) -> Option<ArrayView2<'_, S::Score>> {
        self.logits.as_ref().map(|logits| logits.view())
    }

    fn kept(&self) -> Ledger {
        let Self { layer: _, roundings: _, x, h, routing, scores, logits } = self;
        let mut ledger = Ledger::default();
        ledger.keep("the handles of all of these", size_of::<Self>(), Keeping::Metadata);
        ledger.keep("x", x.len() * size_of::<S>(), Keeping::Activation);
        ledger.keep("h", h.bytes(), Keeping::Activation);
        ledger.keep("routing", routing.bytes(), Keeping::Metadata);
        ledger.keep("scores", size_of_val::<[S::Score]>(scores), Keeping::Metadata);
        if let Some(logits) = logits {
            ledger.keep("router_logits", logits.len() * size_of::<S::Score>(), Keeping::Metadata);
        }
        ledger
    }

    fn backward(&self, dout: ArrayView2<'_, S>, record: Record) -> Result<Backward<S>> {
        let Self { layer, roundings, x, h, routing, scores, logits } = self;
        let (x, roundings, b2) = (*x, *roundings, layer.b2());
        if dout.dim() != x.dim() {
            return Err(Error::shape("dout", x.shape(), dout.shape(), "the shape of o is that of x"));
        }
        let scores_by_row = scores_by_row(routing, scores);

        let DownBackward { dh, a_prime, ds } =
            down_backward_activation(dout, layer.w2(), b2, h, &scores_by_row, layer.activation(), routing, roundings);
        let dw2 = down_backward_weight(dout, &a_prime, routing);
        let mut dx_expanded = Intermediate::zeros(0, 0, roundings.rounds(RoundingPoint::DxExpanded));
        let mut expert_dx = Intermediate::zeros(layer.t(), layer.d(), roundings.rounds(RoundingPoint::ExpertDx));
        for slab in slabs(layer.d(), record == Record::Intermediates) {
            dx_expanded.reshape(routing.routed(), slab.columns.len());
            up_backward_activation(&dh, layer.w1(), routing, &slab, &mut dx_expanded);
            combine_input_gradient(&dx_expanded, routing, slab.columns, &mut expert_dx);
        }
        let dw1 = up_backward_weight(x, &dh, routing);
        let db1 = layer.b1().map(|_| up_bias_gradient(&dh, routing));
        let db2 = b2.map(|_| down_bias_gradient(dout, &scores_by_row, routing));

        let ds = routing.to_pairs(&ds);
        let (dx, router) = match layer.gating() {
            Gating::Given { .. } => (expert_dx.into_stored(), None),
            Gating::Router(router) => {
                let kept = router::Kept { routing, scores, logits: logits.as_ref().map(|logits| logits.view()) };
                let (dx, gradients) = router::backward(x, router, kept, &ds, expert_dx, roundings)?;
                (dx, Some(gradients))
            }
        };
        let intermediates = match record {
            Record::Results => None,
            Record::Intermediates => Some(BackwardIntermediates {
                dh: dh.into_stored(),
                a_prime: a_prime.into_stored(),
                dx_expanded: dx_expanded.into_stored(),
            }),
        };
        Ok(Backward { gradients: Gradients { dx, dw1, dw2, db1, db2, ds, router }, intermediates })
    }
}

/// The scores in row order, in the accumulator's type.
fn scores_by_row<V: Real, A: Real>(routing: &Routing, scores: &[V]) -> Vec<A> {
    routing.row_pair().iter().map(|&pair| A::widen(scores[pair as usize])).collect()
}
