//! The standard MoE layer on a tape, as an autograd framework would run it.
//!
//! ```text
//! for each expert with tokens:
//!     X_e = x[tokens]   H = X_e W1ᵀ (+ b1)   A = act(H)   Y = A W2ᵀ (+ b2)
//! O_t = Σ s·Y over the pairs of t
//! ```
//!
//! It keeps, for its backward: x, every X_e (for dW1), H (the activation is recomputed from it), A
//! (for dW2) and Y (for dS). In elements T·d + R(2n + n + 2d), which in a 2-byte type are
//! 2Td + 6Rn + 4Rd bytes: 6TKn + 4TKd where SonicMoE has 4TKn.

use std::borrow::Cow;
use std::marker::PhantomData;
use std::ops::Range;

use ndarray::{Array1, Array2, Array3, ArrayView2, Axis, s};

use super::activation::activate;
use super::router;
use super::tape::{Indices, Role, Sweep, Tape, Var};
use crate::element::{Element, Real};
use crate::engine::{
    self, Backward, BackwardIntermediates, Engine, Forward, ForwardIntermediates, Gradients, Keeping, Ledger, Numerics,
    Outcome, Pass, Record, RoundingModel, RouterGradients, RouterRounding,
};
use crate::error::{Error, Result};
use crate::problem::{Gating, Problem, Router};
use crate::routing::Routing;
use crate::shape::ExpertId;

/// The plain layer with everything in `A`, f32 or f64.
#[derive(Clone, Debug)]
pub struct StandardMoe<A> {
    choice: Option<Routing>,
    number: PhantomData<A>,
}

impl<A> StandardMoe<A> {
    /// A layer that makes its own choice of experts.
    pub fn new() -> Self {
        Self { choice: None, number: PhantomData }
    }

    /// A layer whose choice of experts is made: behind a router, scores follow from its logits by
    /// its convention, the sums of normalised conventions running over the token's pairs in
    /// `routing`, whose number may vary; with given routing, `routing` has to be the given one.
    pub fn with_routing(routing: Routing) -> Self {
        Self { choice: Some(routing), number: PhantomData }
    }
}

impl<A> Default for StandardMoe<A> {
    fn default() -> Self {
        Self::new()
    }
}

/// Forward and backward of `problem` with the choice of experts fixed by the caller; everything is
/// returned, intermediates included. Behind a router gradients flow through the scores, by the
/// router's convention, and the choice is held fixed. See [`StandardMoe::with_routing`].
///
/// # Errors
/// A routing of other T or E than the problem's, or other than its given routing; a logit that is
/// NaN or +∞; a token without a logit above −∞; a score that is not finite because all logits of a
/// token's pairs are −∞ or underflow.
pub fn run_with<A: Real>(problem: &Problem<'_, A>, routing: &Routing) -> Result<Outcome> {
    engine::run(&StandardMoe::with_routing(routing.clone()), problem, Record::Intermediates)
}

/// What one expert's part of the graph is made of.
struct Expert {
    id: usize,
    rows: Range<usize>,
    w1: Var,
    w2: Var,
    biases: Option<(Var, Var)>,
    /// X_e, H, A, Y.
    x: Var,
    h: Var,
    a: Var,
    y: Var,
}

struct RouterVars {
    w: Var,
    b: Option<Var>,
    logits: Var,
}

struct StandardPass<'p, 'q, A: Real> {
    problem: &'p Problem<'q, A>,
    tape: Tape<'p, A>,
    routing: Routing,
    x: Var,
    scores: Var,
    router: Option<RouterVars>,
    experts: Vec<Expert>,
    o: Var,
}

impl<A: Real> Engine<A> for StandardMoe<A> {
    fn name(&self) -> Cow<'static, str> {
        format!("standard autograd, {}", A::DTYPE).into()
    }

    fn numerics(&self) -> Numerics {
        Numerics {
            storage: A::DTYPE,
            score: A::DTYPE,
            accumulator: A::DTYPE.unit_roundoff(),
            rounding: RoundingModel::Eager,
            router: RouterRounding::Score,
            // σ is the worst: an exponential within 1 ulp (2u), a sum and a quotient (u each) stay
            // below 4u and terms of u².
            function_ulps: 5.0,
            flushes_denormals: false,
        }
    }

    fn forward<'p>(&'p self, problem: &'p Problem<'_, A>, record: Record) -> Result<Forward<'p, A>> {
        let mut pass = StandardPass::record(problem, self.choice.as_ref())?;
        let o = pass.tape.take(pass.o);
        pass.tape.release();
        let intermediates = (record == Record::Intermediates).then(|| ForwardIntermediates {
            h: pass.by_row(problem.h_width(), |expert| pass.tape.value(expert.h)),
            a: pass.by_row(problem.n(), |expert| pass.tape.value(expert.a)),
            y: pass.by_row(problem.d(), |expert| pass.tape.value(expert.y)),
        });
        Ok(Forward { o, intermediates, pass: Box::new(pass) })
    }
}

impl<'p, 'q, A: Real> StandardPass<'p, 'q, A> {
    /// Runs the layer forward on a new tape.
    fn record(problem: &'p Problem<'q, A>, choice: Option<&Routing>) -> Result<Self> {
        let mut tape = Tape::new();
        let x = tape.leaf("x", problem.x(), Role::Activation);
        let (routing, scores, router) = match problem.gating() {
            Gating::Given { routing, scores } => {
                if let Some(choice) = choice {
                    same_pairs(choice, routing)?;
                }
                let scores = ArrayView2::from_shape((scores.len(), 1), scores)
                    .map_err(|error| Error::internal(format!("scores as a column: {error}")))?;
                (routing.clone(), tape.leaf("scores", scores, Role::Metadata), None)
            }
            Gating::Router(router) => {
                tape.record_as(Role::Metadata);
                let vars = logits(&mut tape, problem, x, router);
                let values = tape.value(vars.logits);
                let routing = match choice {
                    Some(choice) => {
                        same_sizes(choice, problem)?;
                        router::check(values, router.convention)?;
                        choice.clone()
                    }
                    None => router::choose(values, router)?,
                };
                let tokens: Indices = routing.pair_token().iter().map(|token| token.index()).collect();
                let experts: Indices = routing.pair_expert().iter().map(|expert| expert.index()).collect();
                let scores = router::scores(&mut tape, vars.logits, router.convention, &tokens, &experts);
                tape.label(scores, "scores");
                tape.pin(scores);
                (routing, scores, Some(vars))
            }
        };
        if let Some((pair, score)) = tape.value(scores).iter().enumerate().find(|(_, score)| !score.is_finite()) {
            return Err(Error::not_finite("scores", &[pair], Element::to_f64(*score)));
        }

        let mut experts = Vec::new();
        let mut scaled = Vec::new();
        for id in 0..routing.experts() {
            let rows = routing.rows_of_expert(ExpertId(id as u32));
            if !rows.is_empty() {
                let (expert, part) = expert(&mut tape, problem, &routing, x, scores, id, rows);
                experts.push(expert);
                scaled.push(part);
            }
        }
        let o = tape.scatter_add_rows((problem.t(), problem.d()), &scaled);
        Ok(Self { problem, tape, routing, x, scores, router, experts, o })
    }

    /// (R, width) from one block of rows per expert.
    fn by_row<'t>(&'t self, width: usize, block: impl Fn(&Expert) -> ArrayView2<'t, A>) -> Array2<A> {
        let mut rows = Array2::zeros((self.routing.routed(), width));
        for expert in &self.experts {
            rows.slice_mut(s![expert.rows.clone(), ..]).assign(&block(expert));
        }
        rows
    }
}

/// l = x W_rᵀ (+ b_r), pinned.
fn logits<'p, A: Real>(
    tape: &mut Tape<'p, A>,
    problem: &'p Problem<'_, A>,
    x: Var,
    router: &'p Router<'_, A>,
) -> RouterVars {
    let w = tape.leaf("router_w", router.w.view(), Role::Parameter);
    let mut logits = tape.product(x, w);
    let b = problem.router_b().map(|b| tape.leaf("router_b", b.insert_axis(Axis(0)), Role::Parameter));
    if let Some(b) = b {
        logits = tape.add_row(logits, b);
    }
    tape.label(logits, "logits");
    tape.pin(logits);
    RouterVars { w, b, logits }
}

/// One expert with tokens, up to s·Y and the tokens that its rows are added to.
fn expert<'p, A: Real>(
    tape: &mut Tape<'p, A>,
    problem: &'p Problem<'_, A>,
    routing: &Routing,
    x: Var,
    scores: Var,
    id: usize,
    rows: Range<usize>,
) -> (Expert, (Var, Indices)) {
    let tokens: Indices = routing.row_token()[rows.clone()].iter().map(|token| token.index()).collect();
    let pairs: Indices = routing.row_pair()[rows.clone()].iter().map(|&pair| pair as usize).collect();
    tape.record_as(Role::Metadata);
    let s_e = tape.gather_rows(scores, &pairs);
    tape.label(s_e, format!("scores of expert {id}"));
    tape.record_as(Role::Activation);

    let w1 = tape.leaf("w1", problem.w1().index_axis_move(Axis(0), id), Role::Parameter);
    let w2 = tape.leaf("w2", problem.w2().index_axis_move(Axis(0), id), Role::Parameter);
    let biases = problem.b1().zip(problem.b2()).map(|(b1, b2)| {
        let mut row =
            |name, bias: ArrayView2<'p, A>| tape.leaf(name, bias.slice_move(s![id..=id, ..]), Role::Parameter);
        (row("b1", b1), row("b2", b2))
    });

    let x_e = tape.gather_rows(x, &tokens);
    let mut h = tape.product(x_e, w1);
    if let Some((b1, _)) = biases {
        h = tape.add_row(h, b1);
    }
    let activation = problem.activation();
    let a = tape.checkpoint(h, move |tape, h| activate(tape, activation, h));
    let mut y = tape.product(a, w2);
    if let Some((_, b2)) = biases {
        y = tape.add_row(y, b2);
    }
    for (var, name) in [(x_e, "x"), (h, "h"), (a, "a"), (y, "y")] {
        tape.label(var, format!("{name} of expert {id}"));
    }
    let scaled = tape.scale_rows(y, s_e);
    (Expert { id, rows, w1, w2, biases, x: x_e, h, a, y }, (scaled, tokens))
}

impl<A: Real> Pass<A> for StandardPass<'_, '_, A> {
    fn routing(&self) -> &Routing {
        &self.routing
    }

    fn scores(&self) -> Vec<A> {
        self.tape.value(self.scores).iter().copied().collect()
    }

    fn logits(&self) -> Option<ArrayView2<'_, A>> {
        self.router.as_ref().map(|router| self.tape.value(router.logits))
    }

    fn kept(&self) -> Ledger {
        let mut ledger = self.tape.ledger();
        ledger.keep("routing", self.routing.bytes(), Keeping::Metadata);
        ledger
    }

    fn backward(&self, dout: ArrayView2<'_, A>, record: Record) -> Result<Backward<A>> {
        let (t, d) = (self.problem.t(), self.problem.d());
        if dout.dim() != (t, d) {
            return Err(Error::shape("dout", &[t, d], dout.shape(), "the shape of o is that of x"));
        }
        let mut watched = vec![self.scores];
        watched.extend(self.router.iter().map(|router| router.logits));
        if record == Record::Intermediates {
            watched.extend(self.experts.iter().flat_map(|expert| [expert.x, expert.h]));
        }
        let mut sweep = self.tape.backward(self.o, dout.to_owned(), &watched);
        Ok(Backward {
            intermediates: (record == Record::Intermediates).then(|| self.backward_intermediates(&mut sweep)),
            gradients: self.gradients(&mut sweep),
        })
    }
}

impl<A: Real> StandardPass<'_, '_, A> {
    fn gradients(&self, sweep: &mut Sweep<A>) -> Gradients<A> {
        // Experts without tokens are not on the tape: their gradients are the zeros made here.
        let mut dw1 = Array3::zeros(self.problem.w1().dim());
        let mut dw2 = Array3::zeros(self.problem.w2().dim());
        let mut db1 = self.problem.b1().map(|b1| Array2::zeros(b1.dim()));
        let mut db2 = self.problem.b2().map(|b2| Array2::zeros(b2.dim()));
        for expert in &self.experts {
            dw1.index_axis_mut(Axis(0), expert.id).assign(&sweep.take(expert.w1));
            dw2.index_axis_mut(Axis(0), expert.id).assign(&sweep.take(expert.w2));
            if let (Some((b1, b2)), Some(db1), Some(db2)) = (expert.biases, &mut db1, &mut db2) {
                db1.row_mut(expert.id).assign(&sweep.take(b1).row(0));
                db2.row_mut(expert.id).assign(&sweep.take(b2).row(0));
            }
        }
        Gradients {
            dx: sweep.take(self.x),
            dw1,
            dw2,
            db1,
            db2,
            ds: sweep.take(self.scores).into_iter().collect(),
            router: self.router.as_ref().map(|router| RouterGradients {
                dlogits: sweep.take(router.logits),
                drouter_w: sweep.take(router.w),
                drouter_b: router.b.map(|b| sweep.take(b).into_iter().collect::<Array1<A>>()),
            }),
        }
    }

    /// dh, dx̃, and a′ = s·a. Autograd multiplies Y by s, not A, so it has no a′ of its own: it is
    /// formed here, from the kept s and A, for the record.
    fn backward_intermediates(&self, sweep: &mut Sweep<A>) -> BackwardIntermediates<A> {
        let scores = self.tape.value(self.scores);
        let mut a_prime = self.by_row(self.problem.n(), |expert| self.tape.value(expert.a));
        for (mut row, &pair) in a_prime.rows_mut().into_iter().zip(self.routing.row_pair()) {
            row *= scores[[pair as usize, 0]];
        }
        let mut dh = Array2::zeros((self.routing.routed(), self.problem.h_width()));
        let mut dx_expanded = Array2::zeros((self.routing.routed(), self.problem.d()));
        for expert in &self.experts {
            dh.slice_mut(s![expert.rows.clone(), ..]).assign(&sweep.take(expert.h));
            dx_expanded.slice_mut(s![expert.rows.clone(), ..]).assign(&sweep.take(expert.x));
        }
        BackwardIntermediates { dh, a_prime, dx_expanded }
    }
}

/// # Errors
/// A routing of other T or E than the problem's.
fn same_sizes<A: Real>(routing: &Routing, problem: &Problem<'_, A>) -> Result<()> {
    let (expected, found) = ([problem.t(), problem.e()], [routing.tokens(), routing.experts()]);
    if expected == found { Ok(()) } else { Err(Error::shape("routing", &expected, &found, "T of x and E of w2")) }
}

/// Given scores belong to given pairs, so a fixed choice has to be just those.
///
/// # Errors
/// The first difference.
fn same_pairs(choice: &Routing, given: &Routing) -> Result<()> {
    if choice == given {
        return Ok(());
    }
    let (expected, found) =
        ([given.tokens(), given.experts(), given.routed()], [choice.tokens(), choice.experts(), choice.routed()]);
    if expected != found {
        return Err(Error::shape("routing", &expected, &found, "T, E and R of the given routing"));
    }
    let ids =
        |routing: &Routing, pair: usize| (routing.pair_token()[pair].index(), routing.pair_expert()[pair].index());
    let pair = (0..given.routed()).find(|&pair| ids(choice, pair) != ids(given, pair)).unwrap_or(0);
    let ((token, expert), (found_token, found_expert)) = (ids(given, pair), ids(choice, pair));
    let (what, found, limit) =
        if token != found_token { ("token", found_token, token) } else { ("expert", found_expert, expert) };
    let limit = format!("the given scores belong to {what} {limit} there; pass the problem's own routing");
    Err(Error::size(format!("{what} of pair {pair}"), found, limit))
}
