//! From named tensors to a problem and its results.

use std::collections::BTreeSet;
use std::path::Path;

use ndarray::{Array, Dimension, Ix1, Ix2, Ix3};
use rayon::prelude::*;

use super::container::{Container, list};
use super::counts::Counts;
use super::import::import;
use super::shared;
use super::{Dump, GatingKind, Metadata, Overrides};
use crate::activation::Activation;
use crate::element::DType;
use crate::engine::{Output, Results, Stored};
use crate::error::{Error, Result};
use crate::layout::GateLayout;
use crate::problem::{Biases, Gating, Problem, Router};
use crate::routing::Routing;
use crate::shape::{ExpertId, TokenId};

/// How far exp, σ, erf and tanh of an f32 library may be off, in units of the accumulator's
/// roundoff: two or three roundings beyond the function's own last place.
const FUNCTION_ULPS: f64 = 8.0;

impl Dump {
    /// Reads a file and checks all that can be checked without computing the layer.
    ///
    /// # Errors
    /// *Contract*: no such file, a malformed one, a type or shape that does not fit, ids out of
    /// range or a pair twice, K > E, an input that is not finite, a logit that is NaN or +∞,
    /// sizes in the metadata that contradict the tensors.
    /// A layer whose truth would take far more memory than the file.
    /// *Incomplete*: an input or a convention that is not there; the message names the flag that
    /// supplies it. (A missing result is no error here: see [`Dump::missing`].)
    pub fn read(path: impl AsRef<Path>, overrides: &Overrides) -> Result<Self> {
        let path = path.as_ref();
        let mut container = Container::open(path)?;
        import(&mut container, path)?;
        for (ours, theirs) in &overrides.names {
            if !is_known(ours) {
                return Err(Error::unknown("tensor", ours, KNOWN));
            }
            container.rename(ours, theirs)?;
        }
        let metadata = Metadata::read(container.strings(), overrides)?;
        let mut reader = Reader { container: &container, read: BTreeSet::new(), types: BTreeSet::new() };

        let x = reader.input::<Ix2>("x", "(T, d)")?;
        let w1 = reader.input::<Ix3>("w1", "(E, 2n, d), or (E, n, d) without a gate")?;
        let w2 = reader.input::<Ix3>("w2", "(E, d, n)")?;
        let dout = reader.input::<Ix2>("dout", "(T, d)")?;
        // Any number of rows without elements takes no bytes of the file, but as many offsets here.
        if x.ncols() == 0 {
            return Err(Error::size("d", 0, "it must be at least 1"));
        }
        let activation = metadata.required_activation()?;
        let layout = metadata.required_layout(activation)?;
        let border = Border { activation, layout };
        let biases = match (reader.optional::<Ix2>("b1", "(E, 2n)")?, reader.optional::<Ix2>("b2", "(E, d)")?) {
            (Some(b1), Some(b2)) => Some(Biases { b1: border.to_ours("b1", b1)?.into(), b2: b2.into() }),
            (None, None) => None,
            (Some(_), None) => return Err(Error::missing("tensor `b2`", "b1 is there, and biases come in twos")),
            (None, Some(_)) => return Err(Error::missing("tensor `b1`", "b2 is there, and biases come in twos")),
        };
        let w1 = border.to_ours("w1", w1)?;
        let (t, e) = (x.nrows(), w2.dim().0);
        let router = metadata.required_router()?;
        let (gating, ids) = match router {
            GatingKind::Router(convention) => {
                let w = reader.input::<Ix2>("router_w", "(E, d)")?;
                let b = reader.optional::<Ix1>("router_b", "(E)")?;
                let k = metadata.required_k()?;
                let ids = if reader.has("token_idx") || reader.has("expert_idx") {
                    Some(reader.routing(t, e)?)
                } else {
                    None
                };
                let selection_bias = reader.optional::<Ix1>("selection_bias", "(E)")?.map(Into::into);
                let router = Router { w: w.into(), b: b.map(Into::into), k, convention, selection_bias };
                (Gating::Router(router), ids)
            }
            GatingKind::Given => {
                let routing = reader.routing(t, e)?;
                let scores = reader.given_scores()?;
                (Gating::Given { routing, scores }, None)
            }
        };
        let shared = shared::read(&mut reader, &x, &dout)?;
        let problem = Problem::new(x, w1, w2, biases, gating, activation, dout)?;
        agree_on_sizes(&metadata, &problem)?;
        affordable(&problem, container.size())?;
        if let Some(ids) = &ids {
            expect_k_each(ids, metadata.required_k()?)?;
        }

        let pairs_known = ids.is_some() || router == GatingKind::Given;
        let results = reader.results(&problem, shared.as_ref(), &border, pairs_known)?;
        let logits = match results.get(&Output::Logits) {
            Some(logits) => Some(logits.values.clone()),
            None => reader.floats("router_logits", &[t, e])?.map(|logits| logits.values),
        }
        .map(|logits| logits.into_dimensionality::<Ix2>().map_err(|error| Error::internal(error.to_string())))
        .transpose()?;
        let counts = Counts::read(&container, e)?;
        reader.read.extend(["expert_frequency", "topk_frequency"]);

        let missing =
            required(&problem, shared.is_some()).into_iter().filter(|output| !results.contains_key(output)).collect();
        let score = coarsest([Output::Ds, Output::Dlogits, Output::Scores].into_iter().filter_map(|output| {
            // Scores in a given routing are no result; behind a router they are.
            results.get(&output).map(|stored| stored.dtype)
        }));
        let storage = coarsest(reader.types.iter().copied()).unwrap_or(DType::F32);
        let fallback = if storage == DType::F64 { DType::F64 } else { DType::F32 };
        let unused = container.names().filter(|name| !reader.read.contains(name)).map(str::to_string).collect();
        Ok(Self {
            path: path.to_path_buf(),
            mixed: reader.types.len() > 1,
            metadata: Metadata { router: Some(router), ..metadata },
            problem,
            shared,
            results,
            missing,
            unused,
            notes: container.notes().to_vec(),
            layout,
            storage,
            score: score.unwrap_or(fallback),
            function_ulps: FUNCTION_ULPS,
            ids,
            logits,
            counts,
        })
    }
}

/// Every name that has a meaning.
const KNOWN: [&str; 37] = [
    "shared_gate",
    "shared_up",
    "shared_down",
    "dshared_gate",
    "dshared_up",
    "dshared_down",
    "x",
    "w1",
    "w2",
    "b1",
    "b2",
    "dout",
    "router_w",
    "router_b",
    "router_logits",
    "selection_bias",
    "token_idx",
    "expert_idx",
    "scores",
    "expert_frequency",
    "topk_frequency",
    "o",
    "dx",
    "dw1",
    "dw2",
    "db1",
    "db2",
    "ds",
    "dlogits",
    "drouter_w",
    "drouter_b",
    "h",
    "a",
    "y",
    "dh",
    "a_prime",
    "dx_expanded",
];

fn is_known(name: &str) -> bool {
    KNOWN.contains(&name)
}

/// The results without which a check proves nothing of the layer.
fn required(problem: &Problem<'_, f64>, shared: bool) -> Vec<Output> {
    let mut required = vec![Output::O, Output::Dx, Output::Dw1, Output::Dw2];
    if problem.b1().is_some() {
        required.extend([Output::Db1, Output::Db2]);
    }
    match problem.gating() {
        Gating::Router(router) => {
            required.push(Output::DrouterW);
            if router.b.is_some() {
                required.push(Output::DrouterB);
            }
        }
        Gating::Given { .. } => required.push(Output::Ds),
    }
    if shared {
        required.extend([Output::DsharedGate, Output::DsharedUp, Output::DsharedDown]);
    }
    required
}

fn coarsest(types: impl IntoIterator<Item = DType>) -> Option<DType> {
    types.into_iter().max_by(|a, b| a.unit_roundoff().total_cmp(&b.unit_roundoff()))
}

/// The file's order of gate and up, and ours.
struct Border {
    activation: Activation,
    layout: GateLayout,
}

impl Border {
    fn to_ours<D: Dimension + ndarray::RemoveAxis>(&self, name: &str, values: Array<f64, D>) -> Result<Array<f64, D>> {
        let even = values.shape().get(1).is_some_and(|rows| *rows > 0 && rows.is_multiple_of(2));
        // An odd number of rows is refused in any order.
        let in_place = self.layout == GateLayout::InterleavedGateFirst && even;
        if self.activation.gated() && !in_place { self.layout.to_interleaved(name, values.view()) } else { Ok(values) }
    }
}

/// Reads tensors by name and remembers which ones.
pub(super) struct Reader<'c> {
    container: &'c Container,
    read: BTreeSet<&'static str>,
    types: BTreeSet<DType>,
}

impl Reader<'_> {
    fn has(&self, name: &str) -> bool {
        self.container.names().any(|other| other == name)
    }

    fn absent(&self, name: &str) -> Error {
        let names = list(self.container.names());
        let remedy = format!("the file has {names}; if one of them is meant, say --map {name}=THEIRS");
        Error::missing(format!("tensor `{name}`"), remedy)
    }

    /// An input: its type counts for the storage type, and every value must be finite.
    pub fn optional<D: Dimension>(&mut self, name: &'static str, axes: &str) -> Result<Option<Array<f64, D>>> {
        let Some(Stored { dtype, values }) = self.container.floats(name)? else { return Ok(None) };
        self.read.insert(name);
        self.types.insert(dtype);
        let finite = |values: &[f64]| values.par_iter().all(|value| value.is_finite());
        if !values.as_slice().is_some_and(finite)
            && let Some((at, value)) = values.indexed_iter().find(|(_, value)| !value.is_finite())
        {
            return Err(Error::not_finite(name, ndarray::Dimension::slice(&at), *value));
        }
        let shape = values.shape().to_vec();
        // T may be 0, and nothing else: an axis beside one of 0 may claim any size without a byte.
        if values.is_empty() && !matches!(name, "x" | "dout") {
            return Err(Error::parse(
                "tensor",
                name,
                format!("it has shape {shape:?} and no element, expected {axes}"),
            ));
        }
        let wrong = |_| Error::parse("tensor", name, format!("it has shape {shape:?}, expected {axes}"));
        values.into_dimensionality().map(Some).map_err(wrong)
    }

    pub fn input<D: Dimension>(&mut self, name: &'static str, axes: &str) -> Result<Array<f64, D>> {
        self.optional(name, axes)?.ok_or_else(|| self.absent(name))
    }

    fn ids(&mut self, name: &'static str, limit: usize) -> Result<Vec<u32>> {
        let ids = self.container.integers(name)?.ok_or_else(|| self.absent(name))?;
        self.read.insert(name);
        ids.iter()
            .enumerate()
            .map(|(pair, &id)| match u32::try_from(id) {
                Ok(valid) if (valid as usize) < limit => Ok(valid),
                _ => {
                    let reason = format!("entry {pair} is {id}, but ids are 0 to {limit} (exclusive)");
                    Err(Error::parse("tensor", name, reason))
                }
            })
            .collect()
    }

    fn routing(&mut self, t: usize, e: usize) -> Result<Routing> {
        let tokens = self.ids("token_idx", t)?;
        let experts = self.ids("expert_idx", e)?;
        if tokens.len() != experts.len() {
            return Err(Error::shape("expert_idx", &[tokens.len()], &[experts.len()], "one entry per token_idx"));
        }
        Routing::new(t, e, tokens.into_iter().map(TokenId).zip(experts.into_iter().map(ExpertId)))
    }

    /// Scores of a given routing are an input, but their type is not the tensors'.
    fn given_scores(&mut self) -> Result<Vec<f64>> {
        let Stored { values, .. } = self.container.floats("scores")?.ok_or_else(|| self.absent("scores"))?;
        self.read.insert("scores");
        if values.ndim() != 1 {
            let reason = format!("it has shape {:?}, expected one score per pair", values.shape());
            return Err(Error::parse("tensor", "scores", reason));
        }
        Ok(values.into_iter().collect())
    }

    fn floats(&mut self, name: &'static str, shape: &[usize]) -> Result<Option<Stored>> {
        let Some(stored) = self.container.floats(name)? else { return Ok(None) };
        self.read.insert(name);
        if stored.values.shape() != shape {
            return Err(Error::shape(name, shape, stored.values.shape(), "the sizes of the inputs"));
        }
        Ok(Some(stored))
    }

    /// Values by pair are read only where the pairs are known: the order of an inferred choice is a
    /// guess wherever two logits are close.
    fn results(
        &mut self,
        problem: &Problem<'_, f64>,
        shared: Option<&Problem<'_, f64>>,
        border: &Border,
        pairs_known: bool,
    ) -> Result<Results> {
        let mut results = Results::new();
        for output in Output::RESULTS.into_iter().chain(Output::INTERMEDIATES) {
            if matches!(output, Output::Ds | Output::Scores) && !pairs_known {
                continue;
            }
            let Some(shape) = shape_of(output, problem, shared) else { continue };
            let Some(mut stored) = self.floats(output.name(), &shape)? else { continue };
            match output {
                Output::Ds | Output::Dlogits | Output::Scores | Output::Logits => {}
                _ => drop(self.types.insert(stored.dtype)),
            }
            if matches!(output, Output::Dw1 | Output::Db1 | Output::H | Output::Dh) {
                stored.values = border.to_ours(output.name(), stored.values)?;
            }
            results.insert(output, stored);
        }
        Ok(results)
    }
}

/// The shape that a result has, or `None` where this problem has no such result.
fn shape_of(output: Output, problem: &Problem<'_, f64>, shared: Option<&Problem<'_, f64>>) -> Option<Vec<usize>> {
    let routed = problem.routed();
    let has = match output {
        Output::DsharedGate | Output::DsharedUp | Output::DsharedDown => {
            return Some(output.shape(shared?, routed));
        }
        Output::Db1 | Output::Db2 => problem.biases().is_some(),
        Output::Dlogits | Output::Logits | Output::DrouterW | Output::Scores => problem.router_w().is_some(),
        Output::DrouterB => problem.router_b().is_some(),
        _ => true,
    };
    has.then(|| output.shape(problem, routed))
}

/// A file of a megabyte can describe a layer whose truth takes terabytes: R grows with T·K where the file
/// grows with T and with E.
///
/// By row the truth keeps h, dh, a, a′, y and dx̃, and by token and expert what the router does, each with
/// its bound.
fn affordable(problem: &Problem<'_, f64>, file: usize) -> Result<()> {
    const TIMES: u128 = 1024;
    const AND: u128 = 1 << 30;
    let [t, d, n, e] = [problem.t(), problem.d(), problem.n(), problem.e()].map(|size| size as u128);
    let rows = problem.routed() as u128;
    let bytes = 16 * (rows * (2 * problem.h_width() as u128 + 2 * n + 2 * d) + 4 * t * e);
    if bytes > TIMES * file as u128 + AND {
        let limit = format!(
            "its truth in f64 would take {bytes} bytes, more than {TIMES} times the {file} of the file: check fewer              tokens at a time"
        );
        let size = usize::try_from(rows * (d + n)).unwrap_or(usize::MAX);
        return Err(Error::size("R·(d + n)", size, limit));
    }
    Ok(())
}

fn agree_on_sizes(metadata: &Metadata, problem: &Problem<'_, f64>) -> Result<()> {
    let found = [("T", problem.t()), ("d", problem.d()), ("n", problem.n()), ("E", problem.e())];
    for (name, size) in found {
        if let Some(&stated) = metadata.sizes.get(name)
            && stated != size
        {
            return Err(Error::size(format!("metadata `{name}`"), stated, format!("the tensors have {name} = {size}")));
        }
    }
    Ok(())
}

fn expect_k_each(ids: &Routing, k: usize) -> Result<()> {
    for token in 0..ids.tokens() {
        let pairs = ids.rows_of_token(TokenId(token as u32)).len();
        if pairs != k {
            return Err(Error::size(format!("the number of pairs of token {token}"), pairs, format!("K = {k}")));
        }
    }
    Ok(())
}
