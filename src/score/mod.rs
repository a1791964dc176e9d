//! Which oracle catches which planted bug, and what published comparators make of the same runs.
//!
//! Every [`Mutant`] runs in every [`Regime`], and so does the correct engine. A mutant is *killed* by an
//! oracle that rejects its run; the score is that every mutant that is not equivalent is killed by one,
//! and that none rejects the correct engine. Comparators judge the same results by their own formulas.

pub mod comparator;
pub mod explain;
mod oracle;
mod report;
mod routing;

use std::collections::{BTreeMap, BTreeSet};

use ndarray::ArrayD;
use rayon::prelude::*;

pub use comparator::{Comparator, Compared};
pub use oracle::Oracle;
use oracle::{Judge, Storage};

use crate::activation::Activation;
use crate::case::{Case, Load, Pairing, Scale};
use crate::element::Element;
use crate::engine::{Engine, Outcome, Output, Record, run};
use crate::error::{Error, Result};
use crate::mutant::{Class, Mutant};
use crate::oracle::exact;
use crate::problem::{Biases, Problem};
use crate::routing::{Convention, GroupedSigmoid};
use crate::shape::Shape;
use crate::sonic::cpu::{CpuEngine, RoundingPoint, Roundings};

/// The data that a mutant is tried on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Regime {
    /// x ~ 1, W ~ fan_in^−1/2, biases, dout ~ 1; a router that leaves the last expert without tokens.
    Unit,
    /// Everything at 0.02, without biases, as SonicMoE's own test has it.
    Small,
    /// The same with biases.
    SmallWithBiases,
    /// Every sum exact, biases, given scores: of 1/2 and 1, and of 9 to 12 bits.
    Exact,
    /// gpt-oss's activation, with one pre-activation in twelve beyond its clamps.
    Clamped,
    /// DeepSeek-V3's router: sigmoids, half of the groups, a bias that only chooses, a factor.
    Grouped,
    /// Logits that tie, and their token rounding: no layer, the routing alone.
    Routing,
}

impl Regime {
    /// Every regime.
    pub const ALL: [Self; 7] =
        [Self::Unit, Self::Small, Self::SmallWithBiases, Self::Exact, Self::Clamped, Self::Grouped, Self::Routing];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unit => "unit",
            Self::Small => "small",
            Self::SmallWithBiases => "small, biases",
            Self::Exact => "exact",
            Self::Clamped => "gpt-oss",
            Self::Grouped => "DeepSeek-V3",
            Self::Routing => "routing",
        }
    }

    /// One letter, for the cells of a table.
    pub fn letter(self) -> char {
        match self {
            Self::Unit => 'u',
            Self::Small => 's',
            Self::SmallWithBiases => 'b',
            Self::Exact => 'x',
            Self::Clamped => 'g',
            Self::Grouped => 'd',
            Self::Routing => 'r',
        }
    }

    /// The layers of this regime.
    fn cases(self, shape: Shape, seed: u64) -> Vec<Case> {
        let last = shape.e as u32 - 1;
        let load = if shape.e > shape.k { Load::Without(vec![last]) } else { Load::Biased };
        let pairing = Pairing::Router { convention: Convention::SoftmaxOverTopK, load };
        let case = Case::new(shape).with_pairing(pairing).with_seed(seed);
        match self {
            Self::Unit => vec![case.with_biases()],
            Self::Small => vec![Case { scale: Scale::Small, ..case }],
            Self::SmallWithBiases => vec![Case { scale: Scale::Small, ..case.with_biases() }],
            Self::Exact => {
                let exact = case.with_biases().with_pairing(Pairing::TopK);
                [Scale::Exact, Scale::ExactFineScores].map(|scale| Case { scale, ..exact.clone() }).to_vec()
            }
            Self::Clamped => vec![case.with_biases().with_activation(Activation::GptOss)],
            Self::Grouped => {
                let (shape, router) = groups_of(shape);
                let load = Load::Without(vec![shape.e as u32 - 1]);
                let pairing = Pairing::Router { convention: Convention::GroupedSigmoid(router), load };
                vec![Case { shape, ..case.with_biases() }.with_pairing(pairing)]
            }
            Self::Routing => Vec::new(),
        }
    }

    /// The problem of a case of this regime.
    fn problem(self, case: &Case) -> Result<Problem<'static, Storage>> {
        let drawn = case.problem::<Storage>()?;
        if self != Self::Clamped {
            return Ok(drawn);
        }
        // Pre-activations of deviation 4: P(|h| > 7) = 0.08.
        let times_four = |value: Storage| Storage::from_f64(4.0 * Element::to_f64(value));
        Problem::new(
            drawn.x().to_owned(),
            drawn.w1().mapv(times_four),
            drawn.w2().to_owned(),
            drawn.biases().map(|biases| Biases { b1: biases.b1.to_owned().into(), b2: biases.b2.to_owned().into() }),
            drawn.gating().clone(),
            drawn.activation(),
            drawn.dout().to_owned(),
        )
    }
}

/// Four groups, of which two stay, for a layer of about E experts; more experts where fewer would leave K
/// no choice.
pub(in crate::score) fn groups_of(shape: Shape) -> (Shape, GroupedSigmoid) {
    let (groups, kept) = (4, 2);
    let size = shape.e.div_ceil(groups).max(shape.k.div_ceil(kept)).max(2);
    (Shape { e: groups * size, ..shape }, GroupedSigmoid { groups, kept, renormalized: true, factor: 2.5 })
}

/// What became of one run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fate {
    /// Why the mutant is no fault here; it was not run.
    pub equivalent: Option<&'static str>,
    /// The oracles that reject it.
    pub oracles: BTreeSet<Oracle>,
    /// The comparators that reject it.
    pub comparators: BTreeSet<Comparator>,
}

/// The whole matrix.
#[derive(Clone, Debug)]
pub struct Score {
    /// T, d, n, E, K of the layers.
    pub shape: Shape,
    /// What they were drawn from.
    pub seed: u64,
    /// The correct engine, by regime.
    pub correct: BTreeMap<Regime, Fate>,
    /// Each mutant, by regime.
    pub mutants: BTreeMap<Mutant, BTreeMap<Regime, Fate>>,
}

impl Score {
    /// The oracles that kill a mutant in some regime.
    pub fn killers(&self, mutant: Mutant) -> BTreeSet<Oracle> {
        self.mutants[&mutant].values().flat_map(|fate| fate.oracles.iter().copied()).collect()
    }

    /// The reason why a mutant is no fault in any regime.
    pub fn equivalent(&self, mutant: Mutant) -> Option<&'static str> {
        let fates = &self.mutants[&mutant];
        let reasons: Option<Vec<_>> = fates.values().map(|fate| fate.equivalent).collect();
        reasons.and_then(|reasons| reasons.first().copied())
    }

    /// Mutants that are a fault somewhere and die nowhere.
    pub fn survivors(&self) -> Vec<Mutant> {
        let all = self.mutants.keys().copied();
        all.filter(|&mutant| self.equivalent(mutant).is_none() && self.killers(mutant).is_empty()).collect()
    }

    /// Oracles that reject the correct engine, with the regime.
    pub fn wrongly_rejected(&self) -> Vec<(Regime, Oracle)> {
        let by_regime = self.correct.iter();
        by_regime.flat_map(|(&regime, fate)| fate.oracles.iter().map(move |&oracle| (regime, oracle))).collect()
    }
}

/// Runs every mutant in every regime. The result depends on the arguments alone.
///
/// # Errors
/// A shape that a case refuses.
pub fn score(shape: Shape, seed: u64) -> Result<Score> {
    if shape.t == 0 {
        return Err(Error::size("T", 0, "without tokens there is nothing that a mutant could change"));
    }
    let mut score = Score { shape, seed, correct: BTreeMap::new(), mutants: BTreeMap::new() };
    for regime in Regime::ALL {
        for (mutant, fate) in fates(regime, shape, seed)? {
            match mutant {
                None => _ = score.correct.insert(regime, fate),
                Some(mutant) => _ = score.mutants.entry(mutant).or_default().insert(regime, fate),
            }
        }
    }
    Ok(score)
}

fn fates(regime: Regime, shape: Shape, seed: u64) -> Result<Vec<(Option<Mutant>, Fate)>> {
    let everyone = || [None].into_iter().chain(Mutant::ALL.iter().copied().map(Some)).collect::<Vec<_>>();
    if regime == Regime::Routing {
        let of_layer = |mutant: Mutant| !mutant.of_routing();
        return everyone()
            .into_par_iter()
            .map(|mutant| match mutant {
                Some(of) if of_layer(of) => {
                    Ok((mutant, Fate { equivalent: Some("the layer alone is changed"), ..Fate::default() }))
                }
                _ => Ok((mutant, Fate { oracles: routing::rejections(shape, seed, mutant)?, ..Fate::default() })),
            })
            .collect();
    }
    let mut fates: BTreeMap<Option<Mutant>, Fate> = BTreeMap::new();
    for case in regime.cases(shape, seed) {
        for (mutant, fate) in fates_of_case(regime, &case, everyone())? {
            match fates.get_mut(&mutant) {
                None => _ = fates.insert(mutant, fate),
                Some(before) => {
                    before.equivalent = before.equivalent.and(fate.equivalent);
                    before.oracles.extend(fate.oracles);
                    before.comparators.extend(fate.comparators);
                }
            }
        }
    }
    Ok(fates.into_iter().collect())
}

fn fates_of_case(regime: Regime, case: &Case, everyone: Vec<Option<Mutant>>) -> Result<Vec<(Option<Mutant>, Fate)>> {
    let problem = regime.problem(case)?;
    let wide = problem.widen();
    let engine = CpuEngine::<f32>::new();
    let correct = run(&engine, &problem, Record::Intermediates)?;
    let plain = run(&CpuEngine::<f32>::with_roundings(op_by_op()), &problem, Record::Results)?;

    // What rounds otherwise has no direction in f64.
    let is_fault =
        |mutant: &Mutant| mutant.class() != Class::Precision && mutant.equivalent(&wide, &correct.routing).is_none();
    let faults: Vec<Mutant> = Mutant::ALL.iter().copied().filter(is_fault).collect();
    let wrong: Vec<BTreeMap<Output, ArrayD<f64>>> = faults
        .par_iter()
        .map(|&mutant| {
            let outcome = run(&CpuEngine::<f64>::with_mutant(Some(mutant)), &wide, Record::Results)?;
            Ok(outcome.results.into_iter().map(|(output, stored)| (output, stored.values)).collect())
        })
        .collect::<Result<_>>()?;
    let random = matches!(case.scale, Scale::Unit | Scale::Small);
    let exact = if random { None } else { Some(exact::expected(&wide, Storage::DTYPE)?) };
    let judge = Judge::new(&wide, &correct.routing, Engine::<Storage>::numerics(&engine), &wrong, exact)?;

    everyone
        .into_par_iter()
        .map(|mutant| {
            if let Some(equivalent) = mutant.and_then(|mutant| mutant.equivalent(&wide, &correct.routing)) {
                return Ok((mutant, Fate { equivalent: Some(equivalent), ..Fate::default() }));
            }
            let outcome = run(&CpuEngine::<f32>::with_mutant(mutant), &problem, Record::Intermediates)?;
            let oracles = judge.rejections(&outcome)?;
            Ok((mutant, Fate { equivalent: None, oracles, comparators: refusals(&judge, &outcome, &plain) }))
        })
        .collect()
}

/// The comparators that do not accept some result.
fn refusals(judge: &Judge<'_>, outcome: &Outcome, plain: &Outcome) -> BTreeSet<Comparator> {
    // Suites compare what the layer's user sees; gradients of logits are inside it.
    let compared: Vec<Compared<'_>> = outcome
        .results
        .iter()
        .filter(|(output, _)| Output::RESULTS.contains(output) && **output != Output::Dlogits)
        .filter_map(|(&output, stored)| {
            let (truth, plain) = (judge.truth(output)?, &plain.results.get(&output)?.values);
            Some(Compared { output, values: &stored.values, truth, plain })
        })
        .collect();
    let refuses = |comparator: &Comparator| compared.iter().any(|compared| !comparator.accepts(*compared));
    Comparator::ALL.into_iter().filter(refuses).collect()
}

/// The roundings of code that stores the result of every operation of the experts; its router is in f32.
fn op_by_op() -> Roundings {
    use RoundingPoint as P;
    let experts = [P::PreActivation, P::H, P::A, P::Y, P::ScoredY, P::PartialO, P::G, P::RecomputedA, P::DA, P::Dh];
    let rest = [P::APrime, P::Ds, P::DxExpanded, P::ExpertDx];
    let points: Vec<P> = experts.into_iter().chain(rest).collect();
    Roundings::at(&points)
}
