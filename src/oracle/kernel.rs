//! Each kernel against f64 of its own stored inputs.
//!
//! An engine that hands out h, a, y, dh, a′ and dx̃ is judged kernel by kernel, each from the values
//! that it really read: one sum and one store, floors of about one ulp, and a fault is placed in the
//! kernel that made it. a is judged from x and w1 under the fused model, because its kernel takes it
//! from the accumulator and not from the stored h.

use ndarray::{Dimension, Ix2};

use super::bound::ball::{Ball, Measure};
use super::bound::matrix::{Balls, Balls1, Balls2};
use super::bound::{Keep, Model, add_router_part, check_routing, eager, fused, router};
use super::judge::Bounded;
use crate::engine::{Numerics, Output, Results, RoundingModel};
use crate::error::{Error, Result};
use crate::problem::{Gating, Problem};
use crate::routing::Routing;

/// One result of one kernel, from what that kernel read.
#[derive(Clone, Debug)]
pub struct KernelBound {
    /// The kernel, by its number and name in the method.
    pub kernel: &'static str,
    /// The result.
    pub output: Output,
    /// Its truth and bound.
    pub bounded: Bounded,
}

/// Truth and bound of every result in `results` whose kernel's inputs are the problem's or in
/// `results` too; a kernel with an input that was not recorded is left out.
///
/// Under the fused model:
///
/// | kernel | from | judged |
/// | --- | --- | --- |
/// | 1 up forward | x, w1, b1 | h, a |
/// | 2 down forward | a, w2, b2 | y |
/// | 3 combine | y, scores | o |
/// | 4 down backward, activation | dout, w2, b2, h, scores | dh, a′, ds |
/// | 5 down backward, weight | dout, a′ | dw2 |
/// | 6 up backward, activation | dh, w1 | dx̃ |
/// | 7 up backward, weight | x, dh | dw1 |
/// | 8 combine | dx̃ (and dlogits, W_r) | dx |
/// | bias gradients | dh; dout, scores | db1; db2 |
/// | router | x; logits; logits, scores, ds; dlogits | logits; scores; dlogits; dW_r, db_r |
///
/// Under the eager model a is judged from h, ds and dh from y and h, dw2 from a and scores.
///
/// # Errors
/// A result whose shape is not that of the problem, or a routing that does not fit it.
pub fn kernels(
    problem: &Problem<'_, f64>,
    routing: &Routing,
    results: &Results,
    numerics: &Numerics,
) -> Result<Vec<KernelBound>> {
    let mut list = Vec::new();
    each(problem, routing, results, numerics, &|_| true, &mut |bound| {
        list.push(bound);
        Ok(())
    })?;
    Ok(list)
}

/// The same of the results that `wanted` names, one after the other: together they may be large.
pub(crate) fn each(
    problem: &Problem<'_, f64>,
    routing: &Routing,
    results: &Results,
    numerics: &Numerics,
    wanted: Keep<'_>,
    judge: &mut dyn FnMut(KernelBound) -> Result<()>,
) -> Result<()> {
    check_routing(problem, routing)?;
    let model = Model::new(problem, routing, numerics, Measure::Worst);
    let read = Recorded::read(problem, routing, results)?;
    let mut bounds = Bounds { results, wanted, judge, outcome: Ok(()) };
    match numerics.rounding {
        RoundingModel::Fused => fused_kernels(&model, &read, &mut bounds),
        RoundingModel::Eager => eager_steps(&model, &read, &mut bounds),
    }
    shared_kernels(&model, &read, &mut bounds);
    if let Gating::Router(of_layer) = problem.gating() {
        router_kernels(&model, of_layer, &read, &mut bounds);
    }
    bounds.outcome
}

/// Judges the results that are there and wanted.
struct Bounds<'r> {
    results: &'r Results,
    wanted: Keep<'r>,
    judge: &'r mut dyn FnMut(KernelBound) -> Result<()>,
    outcome: Result<()>,
}

impl Bounds<'_> {
    fn wants(&self, outputs: &[Output]) -> bool {
        self.outcome.is_ok()
            && outputs.iter().any(|&output| self.results.contains_key(&output) && (self.wanted)(output))
    }

    fn push<D: Dimension>(&mut self, kernel: &'static str, output: Output, balls: Balls<D>) {
        if self.wants(&[output]) {
            self.outcome = (self.judge)(KernelBound { kernel, output, bounded: balls.bounded() });
        }
    }
}

/// What the kernels read from each other, as stored.
struct Recorded<'r> {
    results: &'r Results,
    /// By pair.
    scores: Option<Vec<Ball>>,
    /// By row.
    score_of_row: Option<Vec<Ball>>,
    /// By pair.
    ds: Option<Vec<Ball>>,
}

impl<'r> Recorded<'r> {
    fn read(problem: &Problem<'_, f64>, routing: &Routing, results: &'r Results) -> Result<Self> {
        let (r, t, d, n, e) = (routing.routed(), problem.t(), problem.d(), problem.n(), problem.e());
        let width = problem.h_width();
        let matrices = [
            (Output::H, [r, width]),
            (Output::A, [r, n]),
            (Output::Y, [r, d]),
            (Output::Dh, [r, width]),
            (Output::APrime, [r, n]),
            (Output::DxExpanded, [r, d]),
            (Output::Logits, [t, e]),
            (Output::Dlogits, [t, e]),
        ];
        let fits = |output: Output, shape: &[usize]| match results.get(&output) {
            Some(stored) if stored.values.shape() != shape => {
                Err(Error::shape(output.name(), shape, stored.values.shape(), "the sizes of the problem"))
            }
            _ => Ok(()),
        };
        for (output, shape) in matrices {
            fits(output, &shape)?;
        }
        let by_pair = |output: Output| -> Result<Option<Vec<Ball>>> {
            fits(output, &[r])?;
            let stored = results.get(&output);
            Ok(stored.map(|stored| stored.values.iter().copied().map(Ball::exact).collect()))
        };
        let scores = match problem.gating() {
            Gating::Router(_) => by_pair(Output::Scores)?,
            Gating::Given { scores, .. } => Some(scores.iter().copied().map(Ball::exact).collect()),
        };
        let score_of_row = scores.as_ref().map(|scores| routing.to_rows(scores));
        Ok(Self { results, scores, score_of_row, ds: by_pair(Output::Ds)? })
    }

    /// A matrix, if it is there: it is copied for the kernel that reads it, and gone after.
    fn matrix(&self, output: Output) -> Option<Balls2> {
        let stored = self.results.get(&output)?;
        Some(Balls::exact(stored.values.view().into_dimensionality::<Ix2>().ok()?.to_owned()))
    }
}

const UP_FORWARD: &str = "1 up forward";
const DOWN_FORWARD: &str = "2 down forward";
const COMBINE: &str = "3 combine";
const DOWN_BACKWARD_ACTIVATION: &str = "4 down backward, activation";
const DOWN_BACKWARD_WEIGHT: &str = "5 down backward, weight";
const UP_BACKWARD_ACTIVATION: &str = "6 up backward, activation";
const UP_BACKWARD_WEIGHT: &str = "7 up backward, weight";
const COMBINE_GRADIENT: &str = "8 combine";
const BIAS_GRADIENTS: &str = "bias gradients";
const ROUTER: &str = "router";

/// Kernels 1 to 5 and db2, as they round when fused.
fn fused_kernels(model: &Model<'_, '_>, read: &Recorded<'_>, bounds: &mut Bounds<'_>) {
    if bounds.wants(&[Output::H, Output::A]) {
        let [h, a] = fused::up_forward(model);
        bounds.push(UP_FORWARD, Output::H, h);
        bounds.push(UP_FORWARD, Output::A, a);
    }
    if bounds.wants(&[Output::Y])
        && let Some(a) = &read.matrix(Output::A)
    {
        bounds.push(DOWN_FORWARD, Output::Y, fused::down_forward(model, a));
    }
    if bounds.wants(&[Output::Dw2])
        && let Some(a_prime) = &read.matrix(Output::APrime)
    {
        bounds.push(DOWN_BACKWARD_WEIGHT, Output::Dw2, fused::down_backward_weight(model, a_prime));
    }
    let Some(scores) = &read.score_of_row else { return };
    if bounds.wants(&[Output::O])
        && let Some(y) = &read.matrix(Output::Y)
    {
        bounds.push(COMBINE, Output::O, fused::combine(model, y, scores));
    }
    if bounds.wants(&[Output::Dh, Output::APrime, Output::Ds])
        && let Some(h) = &read.matrix(Output::H)
    {
        let fused::DownBackward { dh, a_prime, ds } = fused::down_backward_activation(model, h, scores);
        bounds.push(DOWN_BACKWARD_ACTIVATION, Output::Dh, dh);
        bounds.push(DOWN_BACKWARD_ACTIVATION, Output::APrime, a_prime);
        bounds.push(DOWN_BACKWARD_ACTIVATION, Output::Ds, Balls1::from_balls(model.routing.to_pairs(&ds)));
    }
    if bounds.wants(&[Output::Db2]) {
        bounds.push(BIAS_GRADIENTS, Output::Db2, fused::b2_gradient(model, scores));
    }
}

/// The same steps, op by op.
fn eager_steps(model: &Model<'_, '_>, read: &Recorded<'_>, bounds: &mut Bounds<'_>) {
    if bounds.wants(&[Output::H]) {
        bounds.push(UP_FORWARD, Output::H, eager::up_forward(model));
    }
    if bounds.wants(&[Output::A])
        && let Some(h) = &read.matrix(Output::H)
    {
        bounds.push(UP_FORWARD, Output::A, eager::activate(model, h));
    }
    if bounds.wants(&[Output::Y])
        && let Some(a) = &read.matrix(Output::A)
    {
        bounds.push(DOWN_FORWARD, Output::Y, eager::down_forward(model, a));
    }
    let Some(scores) = &read.score_of_row else { return };
    if bounds.wants(&[Output::O])
        && let Some(y) = &read.matrix(Output::Y)
    {
        bounds.push(COMBINE, Output::O, eager::combine(model, y, scores));
    }
    if bounds.wants(&[Output::Dh, Output::Ds])
        && let (Some(h), Some(y)) = (&read.matrix(Output::H), &read.matrix(Output::Y))
    {
        let eager::DownBackward { dh, ds } = eager::down_backward_activation(model, h, y, scores);
        bounds.push(DOWN_BACKWARD_ACTIVATION, Output::Dh, dh);
        bounds.push(DOWN_BACKWARD_ACTIVATION, Output::Ds, Balls1::from_balls(model.routing.to_pairs(&ds)));
    }
    if bounds.wants(&[Output::Dw2])
        && let Some(a) = &read.matrix(Output::A)
    {
        bounds.push(DOWN_BACKWARD_WEIGHT, Output::Dw2, eager::down_backward_weight(model, a, scores));
    }
    if bounds.wants(&[Output::Db2]) {
        bounds.push(BIAS_GRADIENTS, Output::Db2, eager::b2_gradient(model, scores));
    }
}

/// Kernels 6 and 7 and db1, which round the same way in both models, and kernel 8.
fn shared_kernels(model: &Model<'_, '_>, read: &Recorded<'_>, bounds: &mut Bounds<'_>) {
    if bounds.wants(&[Output::DxExpanded, Output::Dw1, Output::Db1])
        && let Some(dh) = &read.matrix(Output::Dh)
    {
        if bounds.wants(&[Output::DxExpanded]) {
            bounds.push(UP_BACKWARD_ACTIVATION, Output::DxExpanded, fused::up_backward_activation(model, dh));
        }
        if bounds.wants(&[Output::Dw1]) {
            bounds.push(UP_BACKWARD_WEIGHT, Output::Dw1, fused::up_backward_weight(model, dh));
        }
        if bounds.wants(&[Output::Db1]) {
            bounds.push(BIAS_GRADIENTS, Output::Db1, fused::b1_gradient(model, dh));
        }
    }
    if !bounds.wants(&[Output::Dx]) {
        return;
    }
    let Some(dx_expanded) = &read.matrix(Output::DxExpanded) else { return };
    let of_experts = match model.rounding {
        RoundingModel::Fused => fused::combine_gradient(model, dx_expanded),
        RoundingModel::Eager => eager::combine_gradient(model, dx_expanded),
    };
    match model.problem.gating() {
        Gating::Given { .. } => bounds.push(COMBINE_GRADIENT, Output::Dx, of_experts),
        Gating::Router(of_layer) => {
            if let Some(dlogits) = &read.matrix(Output::Dlogits) {
                let of_router = router::dx(model, of_layer, dlogits);
                bounds.push(COMBINE_GRADIENT, Output::Dx, add_router_part(model, of_experts, &of_router));
            }
        }
    }
}

fn router_kernels(
    model: &Model<'_, '_>,
    of_layer: &crate::problem::Router<'_, f64>,
    read: &Recorded<'_>,
    bounds: &mut Bounds<'_>,
) {
    bounds.push(ROUTER, Output::Logits, router::logits(model, of_layer));
    if let Some(logits) = &read.matrix(Output::Logits) {
        bounds.push(ROUTER, Output::Scores, Balls1::from_balls(router::scores(model, of_layer, logits)));
        if let (Some(scores), Some(ds)) = (&read.scores, &read.ds) {
            bounds.push(ROUTER, Output::Dlogits, router::dlogits(model, of_layer, logits, scores, ds));
        }
    }
    if let Some(dlogits) = &read.matrix(Output::Dlogits) {
        bounds.push(ROUTER, Output::DrouterW, router::w_gradient(model, dlogits));
        bounds.push(ROUTER, Output::DrouterB, router::b_gradient(model, dlogits));
    }
}
