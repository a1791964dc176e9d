//! Which conventions explain a run: every order of gate and up, convention of scores and activation
//! that its shapes allow, computed in f64 and compared with its results.
//!
//! A token's rows of o and dx depend on that token alone, so a sample of tokens is enough, and a
//! token that a router of low precision sent elsewhere spoils its own row only: the residual of a
//! result is the **median over tokens** of ‖c_t − r_t‖/‖r_t‖, c in the file and r computed.

use std::path::Path;

use ndarray::{Array2, ArrayD, Axis};

use super::container::Container;
use super::{Dump, GatingKind, Metadata, Model, Overrides};
use crate::activation::Activation;
use crate::engine::Output;
use crate::error::{Error, Result};
use crate::layout::GateLayout;
use crate::oracle::judge::compare;
use crate::oracle::{Bounded, bound};
use crate::problem::{Biases, Gating, Problem, Router};
use crate::routing::{Convention, Routing, grouped_top_k};
use crate::shape::{ExpertId, TokenId};

/// Tokens looked at: a few for every reading, more for the readings that are nearest by those.
const FEW_TOKENS: usize = 16;
const TOKENS: usize = 256;

/// Readings looked at closely.
const NEAREST: usize = 24;

/// K is looked for up to this where the file does not say it.
const MOST_EXPERTS_PER_TOKEN: usize = 16;

/// Two functions whose results differ by less than this, relative to their size, are one.
const SAME: f64 = 1e-9;

/// One way to read a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// The order of gate and up; none without a gate.
    pub layout: Option<GateLayout>,
    /// Where the routing comes from.
    pub router: GatingKind,
    /// The activation.
    pub activation: Activation,
    /// K, behind a router.
    pub k: Option<usize>,
}

/// A reading, and how far the file's results are from it.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Readings that are one function on this file: nothing in its results tells them apart.
    pub readings: Vec<Reading>,
    /// Median over tokens of the relative error of o and of dx, where the file has them.
    pub residuals: Vec<(Output, f64)>,
    /// Whether most tokens are within what an eager engine of the file's types cannot exceed.
    pub explains: bool,
}

impl Candidate {
    /// The worst residual.
    pub fn residual(&self) -> f64 {
        self.residuals.iter().map(|(_, residual)| *residual).fold(0.0, f64::max)
    }
}

/// The readings of a file, the nearest first, and what it says of itself.
///
/// `known` holds what the caller is sure of. `progress` is told which reading is tried.
///
/// # Errors
/// What [`Dump::read`] returns, or a file that has neither o nor dx.
pub fn identify(
    path: &Path,
    known: &Overrides,
    mut progress: impl FnMut(&Reading),
) -> Result<(Vec<Candidate>, Metadata)> {
    let (file, metadata) = File::read(path, known)?;
    let few = file.sample(FEW_TOKENS);
    let mut readings = Vec::new();
    for reading in file.readings(known) {
        progress(&reading);
        let (candidate, _) = file.candidate(reading, &few)?;
        readings.push((candidate.residual(), reading));
    }
    // A stable sort: where nothing tells readings apart, the first of our names stays first.
    readings.sort_by(|a, b| a.0.total_cmp(&b.0));
    let more = file.sample(TOKENS);
    let mut found: Vec<(Candidate, Vec<ArrayD<f64>>)> = Vec::new();
    for (_, reading) in readings.into_iter().take(NEAREST) {
        progress(&reading);
        let (candidate, truths) = file.candidate(reading, &more)?;
        let same = found.iter_mut().find(|(_, others)| others.iter().zip(&truths).all(|(a, b)| equal(a, b)));
        match same {
            Some((same, _)) => same.readings.push(reading),
            None => found.push((candidate, truths)),
        }
    }
    let mut candidates: Vec<Candidate> = found.into_iter().map(|(candidate, _)| candidate).collect();
    candidates.sort_by(|a, b| a.residual().total_cmp(&b.residual()));
    Ok((candidates, metadata))
}

fn equal(a: &ArrayD<f64>, b: &ArrayD<f64>) -> bool {
    let (mut squares, mut size) = (0.0, 0.0);
    for (a, b) in a.iter().zip(b) {
        squares += (a - b) * (a - b);
        size += a * a;
    }
    squares <= SAME * SAME * size
}

/// A file with everything in its own order.
struct File {
    dump: Dump,
    /// What K may be.
    sizes: Vec<usize>,
}

impl File {
    /// Reads the file under any reading that its shapes allow.
    fn read(path: &Path, known: &Overrides) -> Result<(Self, Metadata)> {
        let container = Container::open(path)?;
        // What a file says of itself may be wrong; it is shown, and not needed.
        let metadata = Metadata::read(container.strings(), known).unwrap_or_default();
        let name = |ours: &str| known.names.get(ours).map_or(ours.to_owned(), Clone::clone);
        let shape = |ours: &str| container.shape(&name(ours));
        let (Some([t, _]), Some([_, rows, _]), Some([e, _, n])) =
            (shape("x").and_then(fixed), shape("w1").and_then(fixed), shape("w2").and_then(fixed))
        else {
            return Err(Error::missing(
                "tensor `x`, `w1` or `w2`",
                "they have 2, 3 and 3 axes; see `sonicmoe check --help`",
            ));
        };
        let activation = known.activation.unwrap_or(if rows == 2 * n { Activation::SwiGlu } else { Activation::Silu });
        let router = known.router.unwrap_or(match shape("router_w") {
            Some(_) => GatingKind::Router(Convention::SoftmaxOverTopK),
            None => GatingKind::Given,
        });
        let of_ids = shape("token_idx").and_then(fixed).map(|[pairs]| pairs / t.max(1));
        let k = known.k.or(of_ids.filter(|k| *k > 0)).or(metadata.k);
        drop(container);
        let overrides = Overrides {
            router: Some(router),
            layout: Some(GateLayout::InterleavedGateFirst),
            activation: Some(activation),
            k: Some(k.unwrap_or(1)),
            names: known.names.clone(),
        };
        let dump = Dump::read(path, &overrides)?;
        if ![Output::O, Output::Dx].iter().any(|output| dump.results.contains_key(output)) {
            return Err(Error::missing("o and dx", "a reading is judged by them; write at least one into the file"));
        }
        let sizes = match (router, k) {
            (GatingKind::Given, _) => vec![1],
            (_, Some(k)) => vec![k],
            (_, None) => (1..=e.min(MOST_EXPERTS_PER_TOKEN)).collect(),
        };
        Ok((Self { dump, sizes }, metadata))
    }

    /// Tokens at equal distances, about so many.
    fn sample(&self, count: usize) -> Vec<usize> {
        let t = self.dump.problem.t();
        (0..t).step_by(t.div_ceil(count).max(1)).collect()
    }

    fn readings(&self, known: &Overrides) -> Vec<Reading> {
        let gated = self.dump.problem.activation().gated();
        let layouts = match known.layout {
            _ if !gated => vec![None],
            Some(layout) => vec![Some(layout)],
            None => GateLayout::ALL.map(Some).to_vec(),
        };
        let routers = match (known.router, self.dump.problem.gating()) {
            (Some(router), _) => vec![router],
            (None, Gating::Router(_)) => Convention::ALL.map(GatingKind::Router).to_vec(),
            (None, Gating::Given { .. }) => vec![GatingKind::Given],
        };
        let fits = |activation: &Activation| {
            activation.gated() == gated && known.activation.is_none_or(|known| known == *activation)
        };
        let mut readings = Vec::new();
        for &size in &self.sizes {
            for &layout in &layouts {
                for &router in &routers {
                    readings.extend(Activation::ALL.into_iter().filter(fits).map(|activation| {
                        let k = matches!(router, GatingKind::Router(_)).then_some(size);
                        Reading { layout, router, activation, k }
                    }));
                }
            }
        }
        readings
    }

    /// How far the file is from a reading, and the truths that say so.
    fn candidate(&self, reading: Reading, tokens: &[usize]) -> Result<(Candidate, Vec<ArrayD<f64>>)> {
        let (problem, routing) = self.problem(&reading, tokens)?;
        let bounds = bound::layer(&problem, &routing, &self.dump.numerics(Model::Eager))?;
        let (mut residuals, mut truths, mut explains) = (Vec::new(), Vec::new(), true);
        for output in [Output::O, Output::Dx] {
            let (Some(stored), Some(Bounded { truth, bound })) = (self.dump.results.get(&output), bounds.get(&output))
            else {
                continue;
            };
            let (mut errors, mut ratios) = (Vec::new(), Vec::new());
            for (row, &token) in tokens.iter().enumerate() {
                let (truth, bound) = (truth.index_axis(Axis(0), row), bound.index_axis(Axis(0), row));
                let values = stored.values.index_axis(Axis(0), token);
                let (mut squares, mut size, mut worst) = (0.0, 0.0, 0.0f64);
                for ((&value, &truth), &bound) in values.iter().zip(&truth).zip(&bound) {
                    squares += (value - truth) * (value - truth);
                    size += truth * truth;
                    let ratio = compare(value, truth, bound, stored.dtype.largest());
                    worst = worst.max(ratio.map_or(0.0, |(_, ratio)| ratio));
                }
                // A token without pairs says nothing unless the file has something else than 0 there.
                if size > 0.0 || squares > 0.0 {
                    errors.push(if squares.is_nan() { f64::INFINITY } else { (squares / size).sqrt() });
                    ratios.push(worst);
                }
            }
            residuals.push((output, median(errors)));
            explains &= median(ratios) <= 1.0;
            truths.push(truth.clone());
        }
        Ok((Candidate { readings: vec![reading], residuals, explains }, truths))
    }

    /// The layer of the sampled tokens under a reading.
    fn problem(&self, reading: &Reading, tokens: &[usize]) -> Result<(Problem<'_, f64>, Routing)> {
        let whole = &self.dump.problem;
        let ours = |name: &str| -> Result<_> {
            match reading.layout {
                Some(layout) => layout.to_interleaved(name, whole.w1()),
                None => Ok(whole.w1().to_owned()),
            }
        };
        let biases = match (whole.b1(), whole.b2()) {
            (Some(b1), Some(b2)) => {
                let b1 = match reading.layout {
                    Some(layout) => layout.to_interleaved("b1", b1)?,
                    None => b1.to_owned(),
                };
                Some(Biases { b1: b1.into(), b2: b2.into() })
            }
            _ => None,
        };
        let x = whole.x().select(Axis(0), tokens);
        let (gating, routing) = match (whole.gating(), reading.router) {
            (Gating::Router(Router { w, b, selection_bias, .. }), GatingKind::Router(convention)) => {
                let k = reading.k.unwrap_or(1);
                let selection_bias = match convention {
                    Convention::GroupedSigmoid(_) => selection_bias.as_ref().map(|bias| bias.view().into()),
                    _ => None,
                };
                let b = b.as_ref().map(|b| b.view().into());
                let router = Router { w: w.view().into(), b, k, convention, selection_bias };
                let routing = self.choice(&x, &router, tokens)?;
                (Gating::Router(router), routing)
            }
            (Gating::Given { routing, scores }, _) => {
                let of_tokens = tokens.iter().enumerate().flat_map(|(row, &token)| {
                    let rows = routing.rows_of_token(TokenId(token as u32)).iter();
                    rows.map(move |&at| (TokenId(row as u32), routing.row_pair()[at as usize] as usize))
                });
                let (tokens_of_pairs, kept): (Vec<_>, Vec<_>) = of_tokens.unzip();
                let experts = kept.iter().map(|&pair| routing.pair_expert()[pair]);
                let scores = kept.iter().map(|&pair| scores[pair]).collect();
                let routing = Routing::new(tokens.len(), whole.e(), tokens_of_pairs.into_iter().zip(experts))?;
                (Gating::Given { routing: routing.clone(), scores }, routing)
            }
            (Gating::Router(_), GatingKind::Given) => {
                return Err(Error::missing("tensor `scores`", "routing is given by pairs and scores"));
            }
        };
        let dout = whole.dout().select(Axis(0), tokens);
        let problem = Problem::new(x, ours("w1")?, whole.w2(), biases, gating, reading.activation, dout)?;
        Ok((problem, routing))
    }

    /// The file's ids where it has K of them for every token, else the K largest logits.
    fn choice(&self, x: &Array2<f64>, router: &Router<'_, f64>, tokens: &[usize]) -> Result<Routing> {
        let mut pairs = Vec::with_capacity(tokens.len() * router.k);
        let mut logits = x.dot(&router.w.t());
        if let Some(b) = &router.b {
            logits += b;
        }
        if let Some(stored) = &self.dump.logits {
            logits = stored.select(Axis(0), tokens);
        }
        let grouped = match &router.convention {
            Convention::GroupedSigmoid(groups) => {
                let bias = router.selection_bias.as_ref().map(|bias| bias.view());
                Some(grouped_top_k(logits.view(), bias, router.k, groups)?)
            }
            _ => None,
        };
        for (row, &token) in tokens.iter().enumerate() {
            let experts = match (self.dump.experts_of(token), &grouped) {
                (Some(experts), _) if experts.len() == router.k => experts,
                (_, Some(choice)) => choice.ids().row(row).iter().map(|expert| expert.index()).collect(),
                _ => super::choice::ranking(logits.row(row)).into_iter().take(router.k).collect(),
            };
            pairs.extend(experts.into_iter().map(|expert| (TokenId(row as u32), ExpertId(expert as u32))));
        }
        Routing::new(tokens.len(), self.dump.problem.e(), pairs)
    }
}

fn fixed<const N: usize>(shape: &[usize]) -> Option<[usize; N]> {
    shape.try_into().ok()
}

/// The upper median; 0 of nothing.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
