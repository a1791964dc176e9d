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
use super::fault::Fault;
use super::intermediate::{Intermediate, zeros};
use super::roundings::{RoundingPoint, Roundings};
use super::router;
use super::up_backward_activation::up_backward_activation;
use super::up_backward_weight::up_backward_weight;
use super::up_bias_gradient::up_bias_gradient;
use super::up_forward::up_forward;
use crate::element::{DType, Element, Real};
use crate::engine::{
    Backward, BackwardIntermediates, Engine, Forward, ForwardIntermediates, Gradients, Keeping, Ledger, Numerics,
    Output, Pass, Record, RoundingModel, RouterRounding,
};
use crate::error::{Error, Result};
use crate::mutant::Mutant;
use crate::problem::{Gating, Problem};
use crate::routing::{Choice, Routing};

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
#[derive(Clone, Debug, Default)]
pub struct CpuEngine<A> {
    roundings: Roundings,
    fault: Fault,
    choice: Option<Choice>,
    accumulator: PhantomData<fn() -> A>,
}

impl<A: Real> CpuEngine<A> {
    /// The method, with its rounding points.
    pub fn new() -> Self {
        Self::with_roundings(Roundings::FUSED)
    }

    /// The same kernels with other rounding points: what a check has to tell from the method.
    pub fn with_roundings(roundings: Roundings) -> Self {
        Self { roundings, fault: Fault::NONE, choice: None, accumulator: PhantomData }
    }

    /// The method with a planted bug, or without one: what every check is tried on.
    pub fn with_mutant(mutant: Option<Mutant>) -> Self {
        let fault = Fault(mutant);
        Self { roundings: fault.roundings(), fault, choice: None, accumulator: PhantomData }
    }

    /// The same layer with its choice of experts made: `routing` is what a router has chosen, pairs
    /// t·K + rank.
    ///
    /// # Errors
    /// Pairs that are not K for every token, or more experts than the types allow.
    pub fn with_choice(self, routing: &Routing) -> Result<Self> {
        let tokens = routing.tokens();
        let k = routing.routed().checked_div(tokens).unwrap_or(0);
        let ids = Array2::from_shape_vec((tokens, k), routing.pair_expert().to_vec())
            .map_err(|_| Error::shape("routing", &[tokens, k], &[routing.routed()], "K pairs for every token"))?;
        Ok(Self { choice: Some(Choice::new(routing.experts(), ids)?), ..self })
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
        let (roundings, fault) = (self.roundings, self.fault);
        let (routing, scores, logits) = match problem.gating() {
            Gating::Given { routing, scores } => (Cow::Borrowed(routing), fault.given::<S>(scores), None),
            Gating::Router(layer) => {
                let routed =
                    router::forward::<S, A>(problem.x(), layer, self.choice.as_ref(), record, roundings, fault)?;
                (Cow::Owned(routed.routing), Cow::Owned(routed.scores), routed.logits)
            }
        };
        let (w1, b1) = (fault.w1_of_h(problem.w1()), fault.b1_of_h(problem.b1()));
        let (b1, activation) = (b1.as_ref().map(|b1| b1.view()), fault.activation(problem.activation()));
        let (mut h, mut a) = up_forward::<S, A>(problem.x(), w1.view(), b1, activation, &routing, roundings, fault);
        fault.between(Output::H, &mut h, &routing);
        fault.between(Output::A, &mut a, &routing);
        let scores_by_row = scores_by_row(&routing, &scores);
        let mut o = zeros(problem.x().raw_dim());
        let mut y = Intermediate::zeros(0, 0, roundings.rounds(RoundingPoint::Y));
        for slab in slabs(problem.d(), record == Record::Intermediates) {
            y.reshape(routing.routed(), slab.columns.len());
            down_forward(&a, problem.w2(), fault.b2_of_y(problem.b2()), &routing, &slab, &mut y);
            fault.between(Output::Y, &mut y, &routing);
            let scores = fault.scores_of_o(&scores_by_row, &routing);
            combine_output(&y, &scores, &routing, roundings, slab.columns, &mut o);
        }
        fault.o(&mut o, problem.b2(), &scores_by_row, &routing);
        let intermediates = (record == Record::Intermediates).then(|| ForwardIntermediates {
            h: h.clone().into_stored(),
            a: a.into_stored(),
            y: y.into_stored(),
        });
        let pass = CpuPass { layer: problem, roundings, fault, x: problem.x(), h, routing, scores, logits };
        Ok(Forward { o, intermediates, pass: Box::new(pass) })
    }
}

/// What stays from forward to backward: x and h, and who went where.
struct CpuPass<'p, 'q, S: Element, A> {
    /// For its weights and sizes.
    layer: &'p Problem<'q, S>,
    roundings: Roundings,
    fault: Fault,
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
        let Self { layer: _, roundings: _, fault: _, x, h, routing, scores, logits } = self;
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
        let Self { layer, roundings, fault, x, h, routing, scores, logits } = self;
        let (x, roundings, fault, b2) = (*x, *roundings, *fault, layer.b2());
        if dout.dim() != x.dim() {
            return Err(Error::shape("dout", x.shape(), dout.shape(), "the shape of o is that of x"));
        }
        let scores_by_row = scores_by_row(routing, scores);

        let (w2, b2_of_ds) = (fault.w2_of_dh(layer.w2()), fault.b2_of_ds(b2));
        let (w2, activation) = (w2.view(), fault.activation(layer.activation()));
        let DownBackward { mut dh, mut a_prime, mut ds } =
            down_backward_activation(dout, w2, b2_of_ds, h, &scores_by_row, activation, routing, roundings, fault);
        fault.between(Output::Dh, &mut dh, routing);
        fault.between(Output::APrime, &mut a_prime, routing);
        fault.ds(&mut ds, &scores_by_row, routing);
        let mut dw2 = down_backward_weight(dout, &fault.summed(Output::Dw2, &a_prime, routing), routing);
        fault.written(Output::Dw2, &mut dw2, routing);
        let mut dx_expanded = Intermediate::zeros(0, 0, roundings.rounds(RoundingPoint::DxExpanded));
        let mut expert_dx = Intermediate::zeros(layer.t(), layer.d(), roundings.rounds(RoundingPoint::ExpertDx));
        let w1 = fault.w1_of_dx(layer.w1());
        for slab in slabs(layer.d(), record == Record::Intermediates) {
            dx_expanded.reshape(routing.routed(), slab.columns.len());
            up_backward_activation(&dh, w1.view(), routing, &slab, &mut dx_expanded);
            fault.between(Output::DxExpanded, &mut dx_expanded, routing);
            combine_input_gradient(&dx_expanded, routing, slab.columns, &mut expert_dx);
        }
        let mut dw1 = up_backward_weight(x, &fault.summed(Output::Dw1, &dh, routing), routing);
        fault.dw1(&mut dw1, x, &dh, routing);
        let mut db1 = layer.b1().map(|_| up_bias_gradient(&dh, routing));
        let mut db2 = b2.map(|_| down_bias_gradient(dout, &fault.scores_of_db2(&scores_by_row), routing));
        db1.iter_mut().for_each(|db1| fault.written(Output::Db1, db1, routing));
        db2.iter_mut().for_each(|db2| fault.written(Output::Db2, db2, routing));

        let ds = routing.to_pairs(&ds);
        let (mut dx, router) = match layer.gating() {
            Gating::Given { .. } => (expert_dx.into_stored(), None),
            Gating::Router(router) => {
                let kept = router::Kept { routing, scores, logits: logits.as_ref().map(|logits| logits.view()) };
                let (dx, gradients) = router::backward(x, router, kept, &ds, expert_dx, roundings, fault)?;
                (dx, Some(gradients))
            }
        };
        fault.written(Output::Dx, &mut dx, routing);
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
