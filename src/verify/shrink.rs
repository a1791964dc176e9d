//! A failing case made small: fewer tokens, then fewer experts, then narrower, then simpler numbers,
//! while the same result fails before the same oracle.

use ndarray::{Array, CowArray, Dimension};

use super::claim::Section;
use super::identity::{CaseId, Task};
use crate::case::{Case, Load, Pairing};
use crate::element::Element;
use crate::engine::{Engine, Record, run};
use crate::error::{Error, Result};
use crate::problem::{Biases, Gating, Problem, Router};
use crate::shape::Shape;

/// Sizes where tiles begin and end: what a size is first tried at, from below.
const EDGES: [usize; 24] =
    [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 512, 513];

/// Runs of the engine that simpler numbers may cost.
const TRIALS_OF_VALUES: usize = 400;

/// The smallest failing case that was found.
#[derive(Clone, Debug)]
pub struct Shrunk {
    /// Its name.
    pub id: CaseId,
    /// Runs of the engine that it took.
    pub trials: usize,
    /// Numbers other than 0 among the tensors of the small case, and after its values were simplified.
    pub nonzeros: [usize; 2],
    /// What the oracle says of the simplified case.
    pub explanation: String,
}

/// Makes a failing case small; with `write`, writes it with the engine's results as a dump.
///
/// # Errors
/// A case that does not fail, an engine that is not there, or a file that cannot be written.
pub fn shrink(id: &CaseId, write: Option<&std::path::Path>) -> Result<Shrunk> {
    struct Small<'i>(&'i CaseId, Option<&'i std::path::Path>);
    impl Task for Small<'_> {
        type Outcome = Shrunk;

        fn with<S: Element>(self, engine: &dyn Engine<S>) -> Result<Shrunk> {
            shrink_on(self.0, engine, self.1)
        }
    }
    id.engine_of_oracle().run(Small(id, write))
}

fn shrink_on<S: Element>(id: &CaseId, engine: &dyn Engine<S>, write: Option<&std::path::Path>) -> Result<Shrunk> {
    if id.oracle.section == Section::Museum {
        return Err(Error::parse("case", id.to_string(), "an exhibit of the museum is the smallest of its kind"));
    }
    let trials = std::cell::Cell::new(0);
    // A problem that the engine refuses does not fail.
    let fails = |problem: &Problem<'_, S>| {
        trials.set(trials.get() + 1);
        id.oracle.judge(engine, problem).is_ok_and(|replay| replay.fails())
    };
    if !fails(&id.case.problem::<S>()?) {
        return Err(Error::parse("case", id.to_string(), "it does not fail, so there is nothing to make small"));
    }
    let case = shrink_case(&id.case, |case| case.problem::<S>().is_ok_and(|problem| fails(&problem)));
    let whole = case.problem::<S>()?;
    let problem = shrink_values(&whole, TRIALS_OF_VALUES, fails)?;
    let replay = id.oracle.judge(engine, &problem)?;
    let small = CaseId { case, ..id.clone() };
    if let Some(path) = write {
        let outcome = run(engine, &problem, Record::Intermediates)?;
        let metadata = crate::dump::Metadata {
            producer: Some(format!("sonicmoe shrink {id}, from {small}")),
            ..Default::default()
        };
        crate::dump::write(path, &problem, &outcome.routing, &outcome.results, &metadata)?;
    }
    Ok(Shrunk {
        id: small,
        trials: trials.get(),
        nonzeros: [nonzeros(&whole), nonzeros(&problem)],
        explanation: replay.finding.map(|finding| finding.explanation).unwrap_or_default(),
    })
}

/// The smallest case for which `fails` still holds: T, then E and K, then n and d, then what is left
/// to simplify, until nothing gets smaller.
pub fn shrink_case(case: &Case, mut fails: impl FnMut(&Case) -> bool) -> Case {
    let mut case = case.clone();
    loop {
        let before = case.clone();
        case = smallest(case, |case| case.shape.t, with_tokens, &mut fails);
        case = fewer_experts(case, &mut fails);
        case = smallest(
            case,
            |case| case.shape.n,
            |case, n| Some(with_shape(case, Shape { n, ..case.shape })),
            &mut fails,
        );
        case = smallest(
            case,
            |case| case.shape.d,
            |case, d| Some(with_shape(case, Shape { d, ..case.shape })),
            &mut fails,
        );
        case = plainer(case, &mut fails);
        if case == before {
            return case;
        }
    }
}

fn with_shape(case: &Case, shape: Shape) -> Case {
    Case { shape, ..case.clone() }
}

/// The first size that fails, of the tile edges from below; then one less as long as that fails.
fn smallest(
    mut case: Case,
    size: impl Fn(&Case) -> usize,
    resized: impl Fn(&Case, usize) -> Option<Case>,
    fails: &mut impl FnMut(&Case) -> bool,
) -> Case {
    let now = size(&case);
    for edge in EDGES.into_iter().filter(|edge| *edge < now) {
        if let Some(smaller) = resized(&case, edge)
            && fails(&smaller)
        {
            case = smaller;
            break;
        }
    }
    while let Some(smaller) = size(&case).checked_sub(1).filter(|size| *size > 0).and_then(|less| resized(&case, less))
        && fails(&smaller)
    {
        case = smaller;
    }
    case
}

fn with_tokens(case: &Case, t: usize) -> Option<Case> {
    let mut smaller = with_shape(case, Shape { t, ..case.shape });
    if let Pairing::Counts(counts) = &mut smaller.pairing {
        counts.iter_mut().for_each(|count| *count = (*count).min(t));
    }
    Some(smaller)
}

fn fewer_experts(mut case: Case, fails: &mut impl FnMut(&Case) -> bool) -> Case {
    if let Pairing::Counts(counts) = &case.pairing {
        let mut counts = counts.clone();
        let mut expert = 0;
        while expert < counts.len() && counts.len() > 1 {
            let mut fewer = counts.clone();
            fewer.remove(expert);
            let smaller = with_shape(&case, Shape { e: fewer.len(), ..case.shape });
            let smaller = Case { pairing: Pairing::Counts(fewer.clone()), ..smaller };
            if fails(&smaller) {
                (case, counts) = (smaller, fewer);
            } else {
                expert += 1;
            }
        }
        return case;
    }
    case = smallest(case, |case| case.shape.e, with_experts, fails);
    smallest(case, |case| case.shape.k, |case, k| with_sizes(case, case.shape.e, k), fails)
}

/// K stays where it can.
fn with_experts(case: &Case, e: usize) -> Option<Case> {
    with_sizes(case, e, case.shape.k.min(e))
}

fn with_sizes(case: &Case, e: usize, k: usize) -> Option<Case> {
    let mut smaller = with_shape(case, Shape { e, k, ..case.shape });
    if let Pairing::Router { load, .. } = &mut smaller.pairing
        && let Load::Without(experts) = load
    {
        experts.retain(|expert| (*expert as usize) < e);
        experts.truncate(e - k);
        if experts.is_empty() {
            *load = Load::Biased;
        }
    }
    Some(smaller)
}

/// Without biases, with a router that spreads tokens evenly, with seed 0.
fn plainer(mut case: Case, fails: &mut impl FnMut(&Case) -> bool) -> Case {
    let mut plain = vec![Case { biases: false, ..case.clone() }];
    if let Pairing::Router { convention, load } = &case.pairing
        && *load != Load::Uniform
    {
        let convention = *convention;
        plain.push(case.clone().with_pairing(Pairing::Router { convention, load: Load::Uniform }));
    }
    plain.push(case.clone().with_seed(0));
    for plain in plain {
        // Each is one change of the case as it was, so later ones are tried on what is left of it.
        let plain = Case {
            biases: plain.biases && case.biases,
            seed: if plain.seed == 0 { 0 } else { case.seed },
            pairing: if plain.pairing == case.pairing { case.pairing.clone() } else { plain.pairing },
            ..case.clone()
        };
        if plain != case && fails(&plain) {
            case = plain;
        }
    }
    case
}

/// Every tensor of a problem by itself, to be changed and put together again.
struct Values<S: Element> {
    tensors: Vec<Vec<S>>,
    scores: Vec<S::Score>,
}

impl<S: Element> Values<S> {
    fn of(problem: &Problem<'_, S>) -> Self {
        let mut tensors = vec![flat(&problem.dout()), flat(&problem.x()), flat(&problem.w2()), flat(&problem.w1())];
        tensors.push(problem.b2().map_or(Vec::new(), |b2| flat(&b2)));
        tensors.push(problem.b1().map_or(Vec::new(), |b1| flat(&b1)));
        tensors.push(problem.router_w().map_or(Vec::new(), |w| flat(&w)));
        tensors.push(problem.router_b().map_or(Vec::new(), |b| flat(&b)));
        let scores = match problem.gating() {
            Gating::Given { scores, .. } => scores.clone(),
            Gating::Router(_) => Vec::new(),
        };
        Self { tensors, scores }
    }

    /// The same layer with these numbers; none if they do not fit it, which cannot be.
    fn problem(&self, like: &Problem<'_, S>) -> Option<Problem<'static, S>> {
        let [dout, x, w2, w1, b2, b1, router_w, router_b] = &self.tensors[..] else { return None };
        let biases = match (like.b1(), like.b2()) {
            (Some(old1), Some(old2)) => {
                Some(Biases { b1: shaped(b1, old1.raw_dim())?, b2: shaped(b2, old2.raw_dim())? })
            }
            _ => None,
        };
        let gating = match like.gating() {
            Gating::Router(Router { w, b, k, convention, selection_bias }) => Gating::Router(Router {
                w: shaped(router_w, w.raw_dim())?,
                b: match b {
                    Some(b) => Some(shaped(router_b, b.raw_dim())?),
                    None => None,
                },
                k: *k,
                convention: *convention,
                selection_bias: selection_bias.as_ref().map(|bias| bias.to_owned().into()),
            }),
            Gating::Given { routing, .. } => Gating::Given { routing: routing.clone(), scores: self.scores.clone() },
        };
        Problem::new(
            shaped(x, like.x().raw_dim())?,
            shaped(w1, like.w1().raw_dim())?,
            shaped(w2, like.w2().raw_dim())?,
            biases,
            gating,
            like.activation(),
            shaped(dout, like.dout().raw_dim())?,
        )
        .ok()
    }
}

fn flat<S: Element, D: Dimension>(values: &ndarray::ArrayView<'_, S, D>) -> Vec<S> {
    values.iter().copied().collect()
}

fn shaped<S: Element, D: Dimension>(values: &[S], shape: D) -> Option<CowArray<'static, S, D>> {
    Array::from_shape_vec(shape, values.to_vec()).ok().map(Into::into)
}

/// Simpler numbers for which `fails` still holds: tensor by tensor powers of two, then ever smaller
/// blocks of zeros, within so many trials.
///
/// # Errors
/// None that a caller could cause.
pub fn shrink_values<S: Element>(
    problem: &Problem<'_, S>,
    trials: usize,
    mut fails: impl FnMut(&Problem<'_, S>) -> bool,
) -> Result<Problem<'static, S>> {
    let mut values = Values::of(problem);
    let mut left = trials;
    let mut accepts = |values: &Values<S>| {
        left = left.saturating_sub(1);
        left > 0 && values.problem(problem).is_some_and(|simpler| fails(&simpler))
    };
    for tensor in 0..values.tensors.len() {
        let rounded: Vec<S> = values.tensors[tensor].iter().map(|value| power_of_two(*value)).collect();
        if rounded == values.tensors[tensor] {
            continue;
        }
        let before = std::mem::replace(&mut values.tensors[tensor], rounded);
        if !accepts(&values) {
            values.tensors[tensor] = before;
        }
    }
    let mut parts = 1;
    while parts <= 64 {
        for tensor in 0..values.tensors.len() {
            let length = values.tensors[tensor].len();
            if length < parts {
                continue;
            }
            for part in 0..parts {
                let range = part * length / parts..(part + 1) * length / parts;
                if values.tensors[tensor][range.clone()].iter().all(|value| value.to_f64() == 0.0) {
                    continue;
                }
                let before = values.tensors[tensor][range.clone()].to_vec();
                values.tensors[tensor][range.clone()].fill(S::from_f64(0.0));
                if !accepts(&values) {
                    values.tensors[tensor][range].copy_from_slice(&before);
                }
            }
        }
        parts *= 2;
    }
    values.problem(problem).ok_or_else(|| Error::internal("a problem's own numbers do not fit it"))
}

/// The power of two below, with the sign; 0 stays.
fn power_of_two<S: Element>(value: S) -> S {
    let value = value.to_f64();
    if value == 0.0 || !value.is_finite() {
        S::from_f64(value)
    } else {
        S::from_f64(libm::exp2(value.abs().log2().floor()).copysign(value))
    }
}

fn nonzeros<S: Element>(problem: &Problem<'_, S>) -> usize {
    let values = Values::of(problem);
    let scores = values.scores.iter().filter(|score| score.to_f64() != 0.0).count();
    let of_tensor = |tensor: &Vec<S>| tensor.iter().filter(|value| value.to_f64() != 0.0).count();
    values.tensors.iter().map(of_tensor).sum::<usize>() + scores
}
