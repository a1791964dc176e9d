//! An engine made of one function, for implementations that compute everything in one call.

use std::borrow::Cow;

use ndarray::{Array2, ArrayView2};

use crate::element::Element;
use crate::engine::{Backward, Engine, Forward, Gradients, Ledger, Numerics, Pass, Record};
use crate::error::{Error, Result};
use crate::problem::{Gating, Problem};
use crate::routing::Routing;

/// o (T, d) and all gradients of a layer, from the problem and dout.
pub type Layer<S> = fn(&Problem<'_, S>, ArrayView2<'_, S>) -> Result<(Array2<S>, Gradients<S>)>;

/// An engine that calls a function, in forward for o and in backward for the gradients. It takes given
/// routing, and states nothing of what it keeps in between.
#[derive(Clone, Copy, Debug)]
pub struct FunctionEngine<S: Element> {
    /// For reports.
    pub name: &'static str,
    /// The arithmetic of the function.
    pub numerics: Numerics,
    /// Why the function cannot take a problem, if it cannot.
    pub accepts: fn(&Problem<'_, S>) -> Result<()>,
    /// The function.
    pub layer: Layer<S>,
}

struct Called<'p, 'q, S: Element> {
    problem: &'p Problem<'q, S>,
    routing: &'p Routing,
    scores: &'p [S::Score],
    layer: Layer<S>,
}

impl<S: Element> Engine<S> for FunctionEngine<S> {
    fn name(&self) -> Cow<'static, str> {
        self.name.into()
    }

    fn numerics(&self) -> Numerics {
        self.numerics
    }

    fn accepts(&self, problem: &Problem<'_, S>) -> Result<()> {
        given(problem)?;
        (self.accepts)(problem)
    }

    fn forward<'p>(&'p self, problem: &'p Problem<'_, S>, _: Record) -> Result<Forward<'p, S>> {
        let (routing, scores) = given(problem)?;
        let (o, _) = (self.layer)(problem, problem.dout())?;
        Ok(Forward { o, intermediates: None, pass: Box::new(Called { problem, routing, scores, layer: self.layer }) })
    }
}

impl<S: Element> Pass<S> for Called<'_, '_, S> {
    fn routing(&self) -> &Routing {
        self.routing
    }

    fn scores(&self) -> Vec<S::Score> {
        self.scores.to_vec()
    }

    fn logits(&self) -> Option<ArrayView2<'_, S::Score>> {
        None
    }

    fn kept(&self) -> Ledger {
        Ledger::default()
    }

    fn backward(&self, dout: ArrayView2<'_, S>, _: Record) -> Result<Backward<S>> {
        let (_, gradients) = (self.layer)(self.problem, dout)?;
        Ok(Backward { gradients, intermediates: None })
    }
}

fn given<'p, S: Element>(problem: &'p Problem<'_, S>) -> Result<(&'p Routing, &'p [S::Score])> {
    match problem.gating() {
        Gating::Given { routing, scores } => Ok((routing, scores)),
        Gating::Router(_) => Err(Error::parse("problem", "a router", "this engine takes given routing")),
    }
}
