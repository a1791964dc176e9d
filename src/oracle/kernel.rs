//! Each kernel against f64 of its own stored inputs.
//!
//! An engine that hands out h, a, y, dh, a′ and dx̃ is judged kernel by kernel, each from the values
//! that it really read: one sum and one store, floors of about one ulp, and a fault is placed in the
//! kernel that made it. a is judged from x and w1 under the fused model, because its kernel takes it
//! from the accumulator and not from the stored h.

mod judging;

use ndarray::{ArrayD, ArrayView2, Ix2, s};

use super::bound::ball::{Ball, Measure};
use super::bound::buffers::Buffers;
use super::bound::matrix::{Balls, Balls1, Balls2, Operand};
use super::bound::midpoints::Midpoints;
use super::bound::{Keep, Model, add_router_part, check_routing, eager, fused, router, sums};
use super::judge::Bounded;
use crate::engine::{Numerics, Output, Results, RoundingModel};
use crate::error::{Error, Result};
use crate::problem::{Gating, Problem};
use crate::routing::Routing;
use crate::shape::ExpertId;
use judging::Bounds;
pub(crate) use judging::KernelPiece;

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
    whole(problem, routing, results, numerics, &|_| true)
}

/// The same of the results that `wanted` names.
pub(crate) fn whole(
    problem: &Problem<'_, f64>,
    routing: &Routing,
    results: &Results,
    numerics: &Numerics,
    wanted: Keep<'_>,
) -> Result<Vec<KernelBound>> {
    let mut list: Vec<KernelBound> = Vec::new();
    each(problem, routing, results, numerics, wanted, &mut |piece| {
        let KernelPiece { kernel, output, shape, place, truth, bound } = *piece;
        let at = list.iter().position(|known| (known.kernel, known.output) == (kernel, output));
        let at = at.unwrap_or_else(|| {
            let bounded = Bounded { truth: ArrayD::zeros(shape), bound: ArrayD::zeros(shape) };
            list.push(KernelBound { kernel, output, bounded });
            list.len() - 1
        });
        let Bounded { truth: whole, bound: of_whole } = &mut list[at].bounded;
        for (into, from) in [(whole, truth), (of_whole, bound)] {
            let into = into.as_slice_mut().and_then(|into| into.get_mut(place..place + from.len()));
            into.ok_or_else(|| Error::internal(format!("{output} has more parts than elements")))?
                .copy_from_slice(from);
        }
        Ok(())
    })?;
    Ok(list)
}

/// The same piece by piece: together they may be large. The pieces of one
/// result come in order, and the first of every result is there even where it has no element.
pub(crate) fn each(
    problem: &Problem<'_, f64>,
    routing: &Routing,
    results: &Results,
    numerics: &Numerics,
    wanted: Keep<'_>,
    judge: &mut dyn FnMut(&KernelPiece<'_>) -> Result<()>,
) -> Result<()> {
    check_routing(problem, routing)?;
    let model = Model::new(problem, routing, numerics, Measure::Worst);
    let read = Recorded::read(problem, routing, results)?;
    let buffers = Buffers::default();
    let mut bounds = Bounds::new(&model, results, wanted, judge, &buffers);
    match numerics.rounding {
        RoundingModel::Fused => fused_kernels(&model, &read, &mut bounds),
        RoundingModel::Eager => eager_steps(&model, &read, &mut bounds),
    }
    shared_kernels(&model, &read, &mut bounds);
    if let Gating::Router(of_layer) = problem.gating() {
        router_kernels(&model, of_layer, &read, &mut bounds);
    }
    bounds.finish()
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
        // Whether or not something else is judged from it. Given scores are the problem's, and of a shared
        // expert nothing is judged by kernel.
        for (&output, stored) in results {
            match output {
                Output::DsharedGate | Output::DsharedUp | Output::DsharedDown => continue,
                Output::Scores if matches!(problem.gating(), Gating::Given { .. }) => continue,
                _ => {}
            }
            let (expected, found) = (output.shape(problem, routing.routed()), stored.values.shape());
            if found != expected {
                return Err(Error::shape(output.name(), &expected, found, "the sizes of the problem"));
            }
        }
        let by_pair = |output: Output| -> Option<Vec<Ball>> {
            Some(results.get(&output)?.values.iter().copied().map(Ball::exact).collect())
        };
        let scores = match problem.gating() {
            Gating::Router(_) => by_pair(Output::Scores),
            Gating::Given { scores, .. } => Some(scores.iter().copied().map(Ball::exact).collect()),
        };
        let score_of_row = scores.as_ref().map(|scores| routing.to_rows(scores));
        Ok(Self { results, scores, score_of_row, ds: by_pair(Output::Ds) })
    }

    /// A matrix, if it is there.
    fn matrix(&self, output: Output) -> Option<ArrayView2<'_, f64>> {
        self.results.get(&output)?.values.view().into_dimensionality::<Ix2>().ok()
    }

    /// A matrix by token and expert, copied.
    fn balls(&self, output: Output) -> Option<Balls2> {
        Some(Balls::exact(self.matrix(output)?.to_owned()))
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
fn fused_kernels(model: &Model<'_, '_>, read: &Recorded<'_>, bounds: &mut Bounds<'_, '_>) {
    let rows = |expert: ExpertId| model.routing.rows_of_expert(expert);
    if bounds.wants(&[Output::H, Output::A]) {
        let outputs = [Output::H, Output::A];
        bounds.each_expert(UP_FORWARD, outputs, |known, expert| {
            let fused::UpForward { h, a, .. } = fused::up_forward(model, known, expert, false);
            ([h, a], ())
        });
    }
    if bounds.wants(&[Output::Y])
        && let Some(a) = read.matrix(Output::A)
    {
        bounds.each_expert(DOWN_FORWARD, [Output::Y], |known, expert| {
            ([fused::down_forward(model, known, expert, Operand::exact(a).rows(rows(expert)))], ())
        });
    }
    if bounds.wants(&[Output::Dw2])
        && let Some(a_prime) = read.matrix(Output::APrime)
    {
        bounds.each_expert(DOWN_BACKWARD_WEIGHT, [Output::Dw2], |known, expert| {
            ([fused::down_backward_weight(model, known, expert, Operand::exact(a_prime).rows(rows(expert)))], ())
        });
    }
    let Some(scores) = &read.score_of_row else { return };
    if bounds.wants(&[Output::O])
        && let Some(y) = read.matrix(Output::Y)
    {
        let y = Operand::exact(y);
        bounds.each_token(COMBINE, Output::O, |tokens| sums::of_tokens(model, y, Some(scores), tokens));
    }
    if bounds.wants(&[Output::Dh, Output::APrime, Output::Ds])
        && let Some(h) = read.matrix(Output::H)
    {
        let outputs = [Output::Dh, Output::APrime];
        let ds = bounds.each_expert(DOWN_BACKWARD_ACTIVATION, outputs, |known, expert| {
            let h = known.exact(model, h.slice(s![rows(expert), ..]));
            let fused::DownBackward { dh, a_prime, ds } =
                fused::down_backward_activation(model, known, expert, (&h, None), &scores[rows(expert)]);
            known.give(model, h);
            ([dh, a_prime], ds)
        });
        push_ds(model, bounds, &ds.concat());
    }
    if bounds.wants(&[Output::Db2]) {
        let gradients = model.of_each_expert(model.problem.d(), |expert| {
            fused::b2_gradient(model, &Midpoints::new(bounds.buffers), expert, &scores[rows(expert)])
        });
        bounds.push(BIAS_GRADIENTS, Output::Db2, gradients);
    }
}

/// The same steps, op by op.
fn eager_steps(model: &Model<'_, '_>, read: &Recorded<'_>, bounds: &mut Bounds<'_, '_>) {
    let rows = |expert: ExpertId| model.routing.rows_of_expert(expert);
    if bounds.wants(&[Output::H]) {
        bounds.each_expert(UP_FORWARD, [Output::H], |known, expert| ([eager::up_forward(model, known, expert)], ()));
    }
    if bounds.wants(&[Output::A])
        && let Some(h) = read.matrix(Output::H)
    {
        bounds.each_expert(UP_FORWARD, [Output::A], |known, expert| {
            let h = known.exact(model, h.slice(s![rows(expert), ..]));
            let a = eager::activate(model, known, &h);
            known.give(model, h);
            ([a], ())
        });
    }
    if bounds.wants(&[Output::Y])
        && let Some(a) = read.matrix(Output::A)
    {
        bounds.each_expert(DOWN_FORWARD, [Output::Y], |known, expert| {
            ([eager::down_forward(model, known, expert, Operand::exact(a).rows(rows(expert)))], ())
        });
    }
    let Some(scores) = &read.score_of_row else { return };
    if bounds.wants(&[Output::O])
        && let Some(y) = read.matrix(Output::Y)
    {
        let y = Operand::exact(y);
        bounds.each_token(COMBINE, Output::O, |tokens| sums::of_tokens(model, y, Some(scores), tokens));
    }
    if bounds.wants(&[Output::Dh, Output::Ds])
        && let (Some(h), Some(y)) = (read.matrix(Output::H), read.matrix(Output::Y))
    {
        let ds = bounds.each_expert(DOWN_BACKWARD_ACTIVATION, [Output::Dh], |known, expert| {
            let dy = eager::y_gradient(model, known, expert, &scores[rows(expert)]);
            let [h, y] = [h, y].map(|matrix| known.exact(model, matrix.slice(s![rows(expert), ..])));
            let eager::DownBackward { dh, ds } = eager::down_backward_activation(model, known, expert, [&h, &y, &dy]);
            [h, y, dy].into_iter().for_each(|balls| known.give(model, balls));
            ([dh], ds)
        });
        push_ds(model, bounds, &ds.concat());
    }
    if bounds.wants(&[Output::Dw2])
        && let Some(a) = read.matrix(Output::A)
    {
        bounds.each_expert(DOWN_BACKWARD_WEIGHT, [Output::Dw2], |known, expert| {
            let dy = eager::y_gradient(model, known, expert, &scores[rows(expert)]);
            let dw2 = eager::down_backward_weight(model, known, Operand::exact(a).rows(rows(expert)), &dy);
            known.give(model, dy);
            ([dw2], ())
        });
    }
    if bounds.wants(&[Output::Db2]) {
        let gradients = model.of_each_expert(model.problem.d(), |expert| {
            let known = Midpoints::new(bounds.buffers);
            let dy = eager::y_gradient(model, &known, expert, &scores[rows(expert)]);
            let db2 = eager::b2_gradient(model, &dy);
            known.give(model, dy);
            db2
        });
        bounds.push(BIAS_GRADIENTS, Output::Db2, gradients);
    }
}

fn push_ds(model: &Model<'_, '_>, bounds: &mut Bounds<'_, '_>, by_row: &[Ball]) {
    bounds.push(DOWN_BACKWARD_ACTIVATION, Output::Ds, Balls1::from_balls(model.routing.to_pairs(by_row)));
}

/// Kernels 6 and 7 and db1, which round the same way in both models, and kernel 8.
fn shared_kernels(model: &Model<'_, '_>, read: &Recorded<'_>, bounds: &mut Bounds<'_, '_>) {
    if let Some(dh) = read.matrix(Output::Dh) {
        let of_expert = |expert: ExpertId| Operand::exact(dh).rows(model.routing.rows_of_expert(expert));
        if bounds.wants(&[Output::DxExpanded]) {
            bounds.each_expert(UP_BACKWARD_ACTIVATION, [Output::DxExpanded], |known, expert| {
                ([fused::up_backward_activation(model, known, expert, of_expert(expert))], ())
            });
        }
        if bounds.wants(&[Output::Dw1]) {
            bounds.each_expert(UP_BACKWARD_WEIGHT, [Output::Dw1], |known, expert| {
                ([fused::up_backward_weight(model, known, expert, of_expert(expert))], ())
            });
        }
        if bounds.wants(&[Output::Db1]) {
            let gradients = model.of_each_expert(dh.ncols(), |expert| fused::b1_gradient(model, of_expert(expert)));
            bounds.push(BIAS_GRADIENTS, Output::Db1, gradients);
        }
    }
    if !bounds.wants(&[Output::Dx]) {
        return;
    }
    let Some(dx_expanded) = read.matrix(Output::DxExpanded) else { return };
    let of_experts = |tokens| sums::of_tokens(model, Operand::exact(dx_expanded), None, tokens);
    match model.problem.gating() {
        Gating::Given { .. } => bounds.each_token(COMBINE_GRADIENT, Output::Dx, of_experts),
        Gating::Router(of_layer) => {
            if let Some(dlogits) = &read.balls(Output::Dlogits) {
                let of_router = router::dx(model, of_layer, dlogits);
                bounds.each_token(COMBINE_GRADIENT, Output::Dx, |tokens| {
                    add_router_part(model, of_experts(tokens.clone()), of_router.operand().rows(tokens))
                });
            }
        }
    }
}

fn router_kernels(
    model: &Model<'_, '_>,
    of_layer: &crate::problem::Router<'_, f64>,
    read: &Recorded<'_>,
    bounds: &mut Bounds<'_, '_>,
) {
    bounds.push(ROUTER, Output::Logits, router::logits(model, of_layer));
    if let Some(logits) = &read.balls(Output::Logits) {
        bounds.push(ROUTER, Output::Scores, Balls1::from_balls(router::scores(model, of_layer, logits)));
        if let (Some(scores), Some(ds)) = (&read.scores, &read.ds) {
            bounds.push(ROUTER, Output::Dlogits, router::dlogits(model, of_layer, logits, scores, ds));
        }
    }
    if let Some(dlogits) = &read.balls(Output::Dlogits) {
        bounds.push(ROUTER, Output::DrouterW, router::w_gradient(model, dlogits));
        bounds.push(ROUTER, Output::DrouterB, router::b_gradient(model, dlogits));
    }
}
