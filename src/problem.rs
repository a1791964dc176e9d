//! A problem: everything that goes into one forward and backward of an MoE layer, checked once.

use ndarray::{Array, ArrayView, ArrayView1, ArrayView2, ArrayView3, CowArray, Dimension, Ix1, Ix2, Ix3};

use crate::activation::Activation;
use crate::element::{DType, Element};
use crate::error::{Error, Result};
use crate::routing::{Convention, GroupedSigmoid, Routing, check_bias};

/// The biases of both projections; a layer has both or none.
#[derive(Clone, Debug)]
pub struct Biases<'p, S: Element> {
    /// (E, 2n), or (E, n) without a gate; interleaved as w1 is.
    pub b1: CowArray<'p, S, Ix2>,
    /// (E, d).
    pub b2: CowArray<'p, S, Ix2>,
}

/// The linear router of a layer: logits l = x W_rᵀ (+ b_r).
#[derive(Clone, Debug)]
pub struct Router<'p, S: Element> {
    /// W_r (E, d).
    pub w: CowArray<'p, S, Ix2>,
    /// b_r (E).
    pub b: Option<CowArray<'p, S, Ix1>>,
    /// K, experts per token.
    pub k: usize,
    /// How scores follow from the logits.
    pub convention: Convention,
    /// (E) what a grouped sigmoid router adds to the probabilities for its choice, and for nothing
    /// else; it gets no gradient.
    pub selection_bias: Option<CowArray<'p, S, Ix1>>,
}

impl<'p, S: Element> Router<'p, S> {
    /// A router without biases.
    pub fn new(w: impl Into<CowArray<'p, S, Ix2>>, k: usize, convention: Convention) -> Self {
        Self { w: w.into(), b: None, k, convention, selection_bias: None }
    }

    /// The same router, its tensors borrowed.
    pub fn view(&self) -> Router<'_, S> {
        Router {
            w: self.w.view().into(),
            b: self.b.as_ref().map(|b| b.view().into()),
            k: self.k,
            convention: self.convention,
            selection_bias: self.selection_bias.as_ref().map(|bias| bias.view().into()),
        }
    }

    /// The same router, its tensors mapped.
    pub fn map<V: Element>(&self, mut map: impl FnMut(S) -> V) -> Router<'static, V> {
        Router {
            w: self.w.mapv(&mut map).into(),
            b: self.b.as_ref().map(|b| b.mapv(&mut map).into()),
            k: self.k,
            convention: self.convention,
            selection_bias: self.selection_bias.as_ref().map(|bias| bias.mapv(&mut map).into()),
        }
    }
}

/// Where the routing comes from.
#[derive(Clone, Debug)]
pub enum Gating<'p, S: Element> {
    /// A router inside the layer: its weights get gradients, and dx has its part.
    Router(Router<'p, S>),
    /// Supplied pairs and finite scores, one per pair in pair order; ds is returned.
    Given {
        /// The pairs.
        routing: Routing,
        /// (R) by pair.
        scores: Vec<S::Score>,
    },
}

/// One MoE layer with its input and the gradient of the loss in its output.
///
/// Tensors are owned or borrowed, contiguous or strided. Shapes are checked by [`Problem::new`],
/// and nowhere else: an engine may rely on them.
///
/// | tensor | shape |
/// | --- | --- |
/// | x, dout | (T, d) |
/// | w1 | (E, 2n, d), interleaved gate first; (E, n, d) without a gate |
/// | w2 | (E, d, n) |
///
/// ```
/// use ndarray::{Array2, Array3};
/// use sonicmoe::{Activation, ExpertId, Gating, Problem, TokenId, routing::Routing};
///
/// let (t, d, n, e) = (3, 4, 2, 2);
/// let pairs = (0..3).map(|token| (TokenId(token), ExpertId(token % 2)));
/// let gating = Gating::Given { routing: Routing::new(t, e, pairs)?, scores: vec![1.0f32; 3] };
/// let wrong = Problem::new(
///     Array2::<f32>::ones((t, d)),
///     Array3::ones((e, n, d)), // a gated layer needs 2n rows
///     Array3::ones((e, d, n)),
///     None,
///     gating,
///     Activation::SwiGlu,
///     Array2::ones((t, d)),
/// );
/// assert_eq!(
///     wrong.unwrap_err().to_string(),
///     "tensor `w1` has shape [2, 2, 4], expected [2, 4, 4] (swiglu with n = 2 from w2 (E, d, n))"
/// );
/// # Ok::<(), sonicmoe::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Problem<'p, S: Element> {
    x: CowArray<'p, S, Ix2>,
    w1: CowArray<'p, S, Ix3>,
    w2: CowArray<'p, S, Ix3>,
    biases: Option<Biases<'p, S>>,
    gating: Gating<'p, S>,
    activation: Activation,
    dout: CowArray<'p, S, Ix2>,
}

impl<S: Element> Biases<'_, S> {
    /// The same biases, borrowed: for a problem that changes something else.
    pub fn borrowed(&self) -> Biases<'_, S> {
        Biases { b1: self.b1.view().into(), b2: self.b2.view().into() }
    }
}

impl<S: Element> Gating<'_, S> {
    /// The same gating with its tensors borrowed: for a problem that changes something else.
    pub fn borrowed(&self) -> Gating<'_, S> {
        match self {
            Self::Router(router) => Gating::Router(router.view()),
            Self::Given { routing, scores } => Gating::Given { routing: routing.clone(), scores: scores.clone() },
        }
    }
}

impl<'p, S: Element> Problem<'p, S> {
    /// Checks every shape against x (T, d) and w2 (E, d, n).
    ///
    /// # Errors
    /// A shape that does not fit, a size of 0 other than T, K outside `1..=E`, groups of experts that
    /// [`GroupedSigmoid::check`] refuses, a routing of other T or E, or a supplied score that is not finite.
    pub fn new(
        x: impl Into<CowArray<'p, S, Ix2>>,
        w1: impl Into<CowArray<'p, S, Ix3>>,
        w2: impl Into<CowArray<'p, S, Ix3>>,
        biases: Option<Biases<'p, S>>,
        gating: Gating<'p, S>,
        activation: Activation,
        dout: impl Into<CowArray<'p, S, Ix2>>,
    ) -> Result<Self> {
        let problem = Self { x: x.into(), w1: w1.into(), w2: w2.into(), biases, gating, activation, dout: dout.into() };
        problem.check()?;
        Ok(problem)
    }

    fn check(&self) -> Result<()> {
        let (t, d) = self.x.dim();
        let (e, w2_d, n) = self.w2.dim();
        for (what, size) in [("d", d), ("n", n), ("E", e)] {
            if size == 0 {
                return Err(Error::size(what, size, "it must be at least 1"));
            }
        }
        if w2_d != d {
            return Err(Error::shape("w2", &[e, d, n], self.w2.shape(), "d is the width of x (T, d)"));
        }
        let rows = self.activation.h_width(n);
        let why = format!("{} with n = {n} from w2 (E, d, n)", self.activation);
        expect("w1", &[e, rows, d], &self.w1.view(), &why)?;
        if let Some(Biases { b1, b2 }) = &self.biases {
            expect("b1", &[e, rows], &b1.view(), &why)?;
            expect("b2", &[e, d], &b2.view(), "one row of width d per expert of w2")?;
        }
        expect("dout", &[t, d], &self.dout.view(), "the shape of o is that of x")?;
        match &self.gating {
            Gating::Router(Router { w, b, k, convention, selection_bias }) => {
                expect("router_w", &[e, d], &w.view(), "one row of width d per expert of w2")?;
                if let Some(b) = b {
                    expect("router_b", &[e], &b.view(), "one entry per expert of w2")?;
                }
                if *k == 0 || *k > e {
                    return Err(Error::top_k(*k, e));
                }
                match convention {
                    Convention::GroupedSigmoid(router) => router.check(e, *k)?,
                    _ if selection_bias.is_some() => {
                        let known = [GroupedSigmoid::NAME];
                        return Err(Error::unknown("router with a selection bias", convention.name(), known));
                    }
                    _ => {}
                }
                if let Some(bias) = selection_bias {
                    check_bias(bias.mapv(S::to_f64).view(), e)?;
                }
            }
            Gating::Given { routing, scores } => {
                if (routing.tokens(), routing.experts()) != (t, e) {
                    let found = [routing.tokens(), routing.experts()];
                    return Err(Error::shape("routing", &[t, e], &found, "T of x and E of w2"));
                }
                if scores.len() != routing.routed() {
                    let expected = [routing.routed()];
                    return Err(Error::shape("scores", &expected, &[scores.len()], "one score per routed pair"));
                }
                if let Some(pair) = scores.iter().position(|score| !score.to_f64().is_finite()) {
                    return Err(Error::not_finite("scores", &[pair], scores[pair].to_f64()));
                }
            }
        }
        Ok(())
    }

    /// T, tokens.
    pub fn t(&self) -> usize {
        self.x.nrows()
    }

    /// d, model width.
    pub fn d(&self) -> usize {
        self.x.ncols()
    }

    /// n, expert width.
    pub fn n(&self) -> usize {
        self.w2.dim().2
    }

    /// E, experts.
    pub fn e(&self) -> usize {
        self.w2.dim().0
    }

    /// Columns of h: 2n with a gate, n without.
    pub fn h_width(&self) -> usize {
        self.activation.h_width(self.n())
    }

    /// R, routed pairs: T·K behind a router, else as given.
    pub fn routed(&self) -> usize {
        match &self.gating {
            Gating::Router(router) => self.t() * router.k,
            Gating::Given { routing, .. } => routing.routed(),
        }
    }

    /// x (T, d).
    pub fn x(&self) -> ArrayView2<'_, S> {
        self.x.view()
    }

    /// w1 (E, 2n, d), or (E, n, d) without a gate.
    pub fn w1(&self) -> ArrayView3<'_, S> {
        self.w1.view()
    }

    /// w2 (E, d, n).
    pub fn w2(&self) -> ArrayView3<'_, S> {
        self.w2.view()
    }

    /// b1 (E, 2n), if the layer has biases.
    pub fn b1(&self) -> Option<ArrayView2<'_, S>> {
        self.biases.as_ref().map(|biases| biases.b1.view())
    }

    /// b2 (E, d), if the layer has biases.
    pub fn b2(&self) -> Option<ArrayView2<'_, S>> {
        self.biases.as_ref().map(|biases| biases.b2.view())
    }

    /// Both biases, if the layer has them.
    pub fn biases(&self) -> Option<&Biases<'p, S>> {
        self.biases.as_ref()
    }

    /// The router or the given routing.
    pub fn gating(&self) -> &Gating<'p, S> {
        &self.gating
    }

    /// W_r (E, d), behind a router.
    pub fn router_w(&self) -> Option<ArrayView2<'_, S>> {
        match &self.gating {
            Gating::Router(router) => Some(router.w.view()),
            Gating::Given { .. } => None,
        }
    }

    /// b_r (E), behind a router that has one.
    pub fn router_b(&self) -> Option<ArrayView1<'_, S>> {
        match &self.gating {
            Gating::Router(router) => router.b.as_ref().map(|b| b.view()),
            Gating::Given { .. } => None,
        }
    }

    /// The activation.
    pub fn activation(&self) -> Activation {
        self.activation
    }

    /// dout (T, d), the gradient of the loss in o.
    pub fn dout(&self) -> ArrayView2<'_, S> {
        self.dout.view()
    }

    /// The storage type.
    pub fn dtype(&self) -> DType {
        S::DTYPE
    }

    /// The same numbers in f64, exactly: what truth is computed from.
    pub fn widen(&self) -> Problem<'static, f64> {
        Problem {
            x: widen(&self.x.view()).into(),
            w1: widen(&self.w1.view()).into(),
            w2: widen(&self.w2.view()).into(),
            biases: self
                .biases
                .as_ref()
                .map(|Biases { b1, b2 }| Biases { b1: widen(&b1.view()).into(), b2: widen(&b2.view()).into() }),
            gating: match &self.gating {
                Gating::Router(router) => Gating::Router(router.map(S::to_f64)),
                Gating::Given { routing, scores } => Gating::Given {
                    routing: routing.clone(),
                    scores: scores.iter().map(|score| score.to_f64()).collect(),
                },
            },
            activation: self.activation,
            dout: widen(&self.dout.view()).into(),
        }
    }
}

/// A tensor in f64, exactly.
pub fn widen<S: Element, D: Dimension>(tensor: &ArrayView<'_, S, D>) -> Array<f64, D> {
    tensor.mapv(S::to_f64)
}

fn expect<S, D: Dimension>(tensor: &str, expected: &[usize], found: &ArrayView<'_, S, D>, why: &str) -> Result<()> {
    if found.shape() == expected { Ok(()) } else { Err(Error::shape(tensor, expected, found.shape(), why)) }
}
