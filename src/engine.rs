//! What every implementation of the layer looks like from outside: the CPU path, the CUDA path,
//! the reference, and anybody's own.
//!
//! ```text
//! problem ─ forward ─▶ o, a Pass that keeps what backward needs ─ backward ─▶ gradients
//! ```

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use ndarray::{Array1, Array2, Array3, ArrayD, ArrayView2, Dimension};

use crate::element::{DType, Element};
use crate::error::Result;
use crate::problem::Problem;
use crate::routing::Routing;

/// At which points an engine rounds to its storage type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RoundingModel {
    /// SonicMoE's points: each of the eight kernels rounds its results once.
    Fused,
    /// Op by op, as eager frameworks do: every element-wise result and partial sum is stored.
    Eager,
}

/// The type that logits, scores, dlogits and the router's part of dx are kept in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RouterRounding {
    /// f32 (f64 beside f64 storage).
    Score,
    /// The type of the tensors.
    TensorType,
}

/// What an engine declares of its arithmetic; the bounds follow from it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Numerics {
    /// The type tensors are stored in.
    pub storage: DType,
    /// The type of scores, logits and ds.
    pub score: DType,
    /// The unit roundoff of the type that sums are kept in: a sum of m products in any order errs
    /// by at most γ_m Σ|a||b|.
    pub accumulator: f64,
    /// Where it rounds.
    pub rounding: RoundingModel,
    /// What the router rounds to.
    pub router: RouterRounding,
    /// How far each elementary function (σ, erf, tanh, exp) may be from the exact one, in units of
    /// the accumulator's roundoff relative to the result.
    pub function_ulps: f64,
    /// Whether results below the normal range become 0.
    pub flushes_denormals: bool,
}

/// One named result of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Output {
    /// o (T, d).
    O,
    /// dx (T, d), with the router's part behind a router.
    Dx,
    /// dw1, the shape of w1.
    Dw1,
    /// dw2, the shape of w2.
    Dw2,
    /// db1, with biases.
    Db1,
    /// db2, with biases.
    Db2,
    /// ds (R), by pair.
    Ds,
    /// dlogits (T, E), behind a router.
    Dlogits,
    /// dW_r (E, d), behind a router.
    DrouterW,
    /// db_r (E), behind a router with a bias.
    DrouterB,
    /// The gradient of a shared expert's gate projection (n, d).
    DsharedGate,
    /// Of its up projection (n, d).
    DsharedUp,
    /// Of its down projection (d, n).
    DsharedDown,
    /// h (R, 2n), by row.
    H,
    /// a (R, n), by row.
    A,
    /// y (R, d), by row.
    Y,
    /// dh (R, 2n), by row.
    Dh,
    /// a′ = s·a (R, n), by row.
    APrime,
    /// dx̃ (R, d), by row.
    DxExpanded,
    /// logits (T, E), behind a router.
    Logits,
    /// scores (R), by pair, behind a router.
    Scores,
}

impl Output {
    /// The results that a user of the layer sees.
    pub const RESULTS: [Self; 13] = [
        Self::O,
        Self::Dx,
        Self::Dw1,
        Self::Dw2,
        Self::Db1,
        Self::Db2,
        Self::Ds,
        Self::Dlogits,
        Self::DrouterW,
        Self::DrouterB,
        Self::DsharedGate,
        Self::DsharedUp,
        Self::DsharedDown,
    ];

    /// What the kernels hand to each other.
    pub const INTERMEDIATES: [Self; 8] =
        [Self::H, Self::A, Self::Y, Self::Dh, Self::APrime, Self::DxExpanded, Self::Logits, Self::Scores];

    /// The shape of the result in this problem with R = `routed` pairs. Of a shared expert's projections the
    /// problem is the shared expert's own layer.
    pub(crate) fn shape(self, problem: &Problem<'_, f64>, routed: usize) -> Vec<usize> {
        let (t, d, n, e) = (problem.t(), problem.d(), problem.n(), problem.e());
        let width = problem.h_width();
        match self {
            Self::O | Self::Dx => vec![t, d],
            Self::Dw1 => vec![e, width, d],
            Self::Dw2 => vec![e, d, n],
            Self::Db1 => vec![e, width],
            Self::Db2 | Self::DrouterW => vec![e, d],
            Self::DrouterB => vec![e],
            Self::Ds | Self::Scores => vec![routed],
            Self::Dlogits | Self::Logits => vec![t, e],
            Self::DsharedGate | Self::DsharedUp => vec![n, d],
            Self::DsharedDown => vec![d, n],
            Self::H | Self::Dh => vec![routed, width],
            Self::A | Self::APrime => vec![routed, n],
            Self::Y | Self::DxExpanded => vec![routed, d],
        }
    }

    /// The name used in dumps and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::O => "o",
            Self::Dx => "dx",
            Self::Dw1 => "dw1",
            Self::Dw2 => "dw2",
            Self::Db1 => "db1",
            Self::Db2 => "db2",
            Self::Ds => "ds",
            Self::Dlogits => "dlogits",
            Self::DrouterW => "drouter_w",
            Self::DrouterB => "drouter_b",
            Self::DsharedGate => "dshared_gate",
            Self::DsharedUp => "dshared_up",
            Self::DsharedDown => "dshared_down",
            Self::H => "h",
            Self::A => "a",
            Self::Y => "y",
            Self::Dh => "dh",
            Self::APrime => "a_prime",
            Self::DxExpanded => "dx_expanded",
            Self::Logits => "router_logits",
            Self::Scores => "scores",
        }
    }
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Values of one result, widened exactly, and the type that they were stored in.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// The type in which the engine stored them.
    pub dtype: DType,
    /// The values.
    pub values: ArrayD<f64>,
}

impl Stored {
    /// Widens a tensor.
    pub fn of<S: Element, D: Dimension>(tensor: &ndarray::Array<S, D>) -> Self {
        Self { dtype: S::DTYPE, values: tensor.mapv(S::to_f64).into_dyn() }
    }
}

/// Named results of one run, as oracles read them.
pub type Results = BTreeMap<Output, Stored>;

/// Whether a run hands out the tensors between the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// Only the results.
    Results,
    /// h, a, y, dh, a′ and dx_expanded too: per-kernel oracles judge each kernel from what it read.
    Intermediates,
}

/// Why a kept tensor is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Keeping {
    /// An activation: what the memory formula counts.
    Activation,
    /// Routing metadata: indices, scores, logits; counted apart.
    Metadata,
}

/// One tensor kept from forward to backward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// The tensor's name.
    pub tensor: Cow<'static, str>,
    /// Its size.
    pub bytes: usize,
    /// Why it is kept.
    pub keeping: Keeping,
}

/// Everything that is kept from forward to backward, tensor by tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger(pub Vec<Kept>);

impl Ledger {
    /// Adds a tensor.
    pub fn keep(&mut self, tensor: impl Into<Cow<'static, str>>, bytes: usize, keeping: Keeping) {
        self.0.push(Kept { tensor: tensor.into(), bytes, keeping });
    }

    /// Bytes of the activations: 2Td + 4Rn for SonicMoE in a 2-byte type.
    pub fn activations(&self) -> usize {
        self.sum(Keeping::Activation)
    }

    /// Bytes of routing metadata.
    pub fn metadata(&self) -> usize {
        self.sum(Keeping::Metadata)
    }

    fn sum(&self, keeping: Keeping) -> usize {
        self.0.iter().filter(|kept| kept.keeping == keeping).map(|kept| kept.bytes).sum()
    }
}

/// a, y beside the kept h, all by row.
#[derive(Clone, Debug)]
pub struct ForwardIntermediates<S> {
    /// h (R, 2n).
    pub h: Array2<S>,
    /// a (R, n).
    pub a: Array2<S>,
    /// y (R, d).
    pub y: Array2<S>,
}

/// What backward's kernels hand to each other, all by row.
#[derive(Clone, Debug)]
pub struct BackwardIntermediates<S> {
    /// dh (R, 2n).
    pub dh: Array2<S>,
    /// a′ (R, n).
    pub a_prime: Array2<S>,
    /// dx̃ (R, d).
    pub dx_expanded: Array2<S>,
}

/// The gradients of a router.
#[derive(Clone, Debug)]
pub struct RouterGradients<S: Element> {
    /// dlogits (T, E).
    pub dlogits: Array2<S::Score>,
    /// dW_r (E, d).
    pub drouter_w: Array2<S>,
    /// db_r (E), for a router with a bias.
    pub drouter_b: Option<Array1<S>>,
}

/// The gradients of a layer.
#[derive(Clone, Debug)]
pub struct Gradients<S: Element> {
    /// dx (T, d), with the router's part behind a router.
    pub dx: Array2<S>,
    /// dw1, the shape of w1.
    pub dw1: Array3<S>,
    /// dw2 (E, d, n).
    pub dw2: Array3<S>,
    /// db1, the shape of b1, with biases.
    pub db1: Option<Array2<S>>,
    /// db2 (E, d), with biases.
    pub db2: Option<Array2<S>>,
    /// ds (R), by pair.
    pub ds: Vec<S::Score>,
    /// Behind a router.
    pub router: Option<RouterGradients<S>>,
}

/// What forward returns.
pub struct Forward<'p, S: Element> {
    /// o (T, d).
    pub o: Array2<S>,
    /// Where asked for.
    pub intermediates: Option<ForwardIntermediates<S>>,
    /// What stays until backward.
    pub pass: Box<dyn Pass<S> + 'p>,
}

/// What backward returns.
pub struct Backward<S: Element> {
    /// The gradients.
    pub gradients: Gradients<S>,
    /// Where asked for.
    pub intermediates: Option<BackwardIntermediates<S>>,
}

impl<S: Element> Backward<S> {
    /// The gradients, and the intermediates where they were recorded, by name.
    pub fn results(&self) -> Results {
        let Self { gradients, intermediates } = self;
        let mut results = Results::new();
        let Gradients { dx, dw1, dw2, db1, db2, ds, router } = gradients;
        results.extend([
            (Output::Dx, Stored::of(dx)),
            (Output::Dw1, Stored::of(dw1)),
            (Output::Dw2, Stored::of(dw2)),
            (Output::Ds, Stored::of(&Array1::from(ds.clone()))),
        ]);
        results.extend(db1.iter().map(|db1| (Output::Db1, Stored::of(db1))));
        results.extend(db2.iter().map(|db2| (Output::Db2, Stored::of(db2))));
        if let Some(RouterGradients { dlogits, drouter_w, drouter_b }) = router {
            results.insert(Output::Dlogits, Stored::of(dlogits));
            results.insert(Output::DrouterW, Stored::of(drouter_w));
            results.extend(drouter_b.iter().map(|drouter_b| (Output::DrouterB, Stored::of(drouter_b))));
        }
        if let Some(BackwardIntermediates { dh, a_prime, dx_expanded }) = intermediates {
            results.extend([
                (Output::Dh, Stored::of(dh)),
                (Output::APrime, Stored::of(a_prime)),
                (Output::DxExpanded, Stored::of(dx_expanded)),
            ]);
        }
        results
    }
}

/// An implementation of the layer.
pub trait Engine<S: Element> {
    /// A name for reports.
    fn name(&self) -> Cow<'static, str>;

    /// What it declares of its arithmetic.
    fn numerics(&self) -> Numerics;

    /// Why this engine cannot take `problem`, if it cannot; asked before anything runs.
    ///
    /// # Errors
    /// A size or a feature that the engine does not have, by name.
    fn accepts(&self, problem: &Problem<'_, S>) -> Result<()> {
        let _ = problem;
        Ok(())
    }

    /// Computes o and keeps what backward needs.
    ///
    /// # Errors
    /// Logits that allow no choice (NaN, +∞, fewer than K above −∞), or a device that fails.
    fn forward<'p>(&'p self, problem: &'p Problem<'_, S>, record: Record) -> Result<Forward<'p, S>>;
}

/// A forward that has run and can go backward, any number of times.
pub trait Pass<S: Element> {
    /// The routing that was used.
    fn routing(&self) -> &Routing;

    /// (R) the scores that were used, by pair.
    fn scores(&self) -> Vec<S::Score>;

    /// Logits (T, E), behind a router.
    fn logits(&self) -> Option<ArrayView2<'_, S::Score>>;

    /// What is kept, tensor by tensor.
    fn kept(&self) -> Ledger;

    /// All gradients from dout (T, d).
    ///
    /// # Errors
    /// A shape of `dout` other than that of o, or a device that fails.
    fn backward(&self, dout: ArrayView2<'_, S>, record: Record) -> Result<Backward<S>>;
}

/// All that one forward and backward of an engine gave.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The routing that was used.
    pub routing: Routing,
    /// Results, and intermediates where they were recorded.
    pub results: Results,
    /// What was kept in between.
    pub ledger: Ledger,
}

/// Runs forward and backward of `problem`.
///
/// # Errors
/// What the engine's `accepts`, `forward` and `backward` return.
pub fn run<S: Element>(engine: &dyn Engine<S>, problem: &Problem<'_, S>, record: Record) -> Result<Outcome> {
    engine.accepts(problem)?;
    let Forward { o, intermediates, pass } = engine.forward(problem, record)?;
    let mut results = Results::new();
    results.insert(Output::O, Stored::of(&o));
    if let Some(ForwardIntermediates { h, a, y }) = &intermediates {
        results.extend([(Output::H, Stored::of(h)), (Output::A, Stored::of(a)), (Output::Y, Stored::of(y))]);
    }
    drop(intermediates);
    if let Some(logits) = pass.logits() {
        results.insert(Output::Logits, Stored::of(&logits.to_owned()));
        results.insert(Output::Scores, Stored::of(&Array1::from(pass.scores())));
    }
    results.extend(pass.backward(problem.dout(), record)?.results());
    Ok(Outcome { routing: pass.routing().clone(), results, ledger: pass.kept() })
}
