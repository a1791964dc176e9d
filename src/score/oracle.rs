//! The project's oracles, as the columns of the score.

use std::collections::{BTreeMap, BTreeSet};

use half::bf16;
use ndarray::{Array2, ArrayD};

use crate::engine::{Numerics, Outcome, Output, Results};
use crate::error::Result;
use crate::mutant::{Class, Mutant};
use crate::oracle::bias::Twin;
use crate::oracle::{Bounded, bound, energy, exact, judge, kernel, statistic};
use crate::problem::{Gating, Problem};
use crate::routing::certificate::{certify_choice, certify_grouped_choice};
use crate::routing::{Convention, Routing};
use crate::verify::{empty_experts, pairless_tokens};

/// One way to judge a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Oracle {
    /// Each kernel from what it read ([`kernel`]).
    Kernel,
    /// Each result within its a-priori bound ([`bound`]).
    Bound,
    /// Each result within λ deviations ([`statistic`]).
    Twin,
    /// No result errs to one side ([`bias`](crate::oracle::bias)).
    SignedBias,
    /// No result errs towards a known fault ([`bias`](crate::oracle::bias)).
    DirectedBias,
    /// No result is of another kind ([`energy`]).
    Energy,
    /// Each number is the only one that exact sums leave ([`exact`]).
    Exact,
    /// Empty experts and pairless tokens have +0.
    Zeros,
    /// Choice and token rounding are certified ([`certificate`](crate::routing::certificate)).
    Certificate,
}

impl Oracle {
    /// Every oracle.
    pub const ALL: [Self; 9] = [
        Self::Kernel,
        Self::Bound,
        Self::Twin,
        Self::SignedBias,
        Self::DirectedBias,
        Self::Energy,
        Self::Exact,
        Self::Zeros,
        Self::Certificate,
    ];

    /// What it asks, for a legend.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kernel => "each kernel from what it read",
            Self::Bound => "a-priori bound of the layer",
            Self::Twin => "statistical twin",
            Self::SignedBias => "signed bias",
            Self::DirectedBias => "directed bias",
            Self::Energy => "energy difference",
            Self::Exact => "exact sums, bit by bit",
            Self::Zeros => "+0 of empty experts",
            Self::Certificate => "routing certificates",
        }
    }

    /// One letter, for the cells of a table.
    pub fn letter(self) -> char {
        match self {
            Self::Kernel => 'K',
            Self::Bound => 'B',
            Self::Twin => 'T',
            Self::SignedBias => 'S',
            Self::DirectedBias => 'D',
            Self::Energy => 'E',
            Self::Exact => 'X',
            Self::Zeros => 'Z',
            Self::Certificate => 'C',
        }
    }

    /// The oracle that a mutant is expected to die by.
    pub fn expected(mutant: Mutant) -> Self {
        match (mutant.class(), mutant) {
            (Class::EmptyExpert, _) => Self::Zeros,
            (Class::TopK | Class::TokenRounding, _) if mutant != Mutant::RankingScores => Self::Certificate,
            (_, Mutant::BiasNotChoosing | Mutant::GroupOfOne | Mutant::GroupsIgnored) => Self::Certificate,
            (_, Mutant::RankingScores | Mutant::B1Missing) => Self::Bound,
            _ => Self::Kernel,
        }
    }
}

/// A problem with its truths, ready to judge runs of one engine.
pub(super) struct Judge<'p> {
    problem: &'p Problem<'static, f64>,
    numerics: Numerics,
    routing: Routing,
    bounds: BTreeMap<Output, Bounded>,
    limits: BTreeMap<Output, Bounded>,
    twin: Twin,
    /// What each mutant gives in f64.
    wrong: &'p [BTreeMap<Output, ArrayD<f64>>],
    /// The only right values, where all sums are exact; such data are not random, and oracles that
    /// hold for random data stay out.
    exact: Option<Results>,
}

impl<'p> Judge<'p> {
    pub fn new(
        problem: &'p Problem<'static, f64>,
        routing: &Routing,
        numerics: Numerics,
        wrong: &'p [BTreeMap<Output, ArrayD<f64>>],
        exact: Option<Results>,
    ) -> Result<Self> {
        Ok(Self {
            problem,
            numerics,
            routing: routing.clone(),
            bounds: bound::layer(problem, routing, &numerics)?,
            limits: statistic::layer(problem, routing, &numerics)?,
            twin: Twin::new(problem, routing, &numerics)?,
            wrong,
            exact,
        })
    }

    /// The truth of a result.
    pub fn truth(&self, output: Output) -> Option<&ArrayD<f64>> {
        self.twin.truth(output)
    }

    /// The oracles that reject a run.
    pub fn rejections(&self, outcome: &Outcome) -> Result<BTreeSet<Oracle>> {
        let mut rejections = BTreeSet::new();
        if self.choice_is_wrong(outcome) {
            rejections.insert(Oracle::Certificate);
        }
        if outcome.routing != self.routing {
            // The truth of another routing is another truth; the certificate has judged the choice.
            return Ok(rejections);
        }
        let mut reject = |oracle, rejected: bool| {
            if rejected {
                rejections.insert(oracle);
            }
        };
        for found in kernel::kernels(self.problem, &self.routing, &outcome.results, &self.numerics)? {
            let stored = &outcome.results[&found.output];
            reject(Oracle::Kernel, !judge(found.output, stored, &found.bounded)?.passes());
        }
        for (&output, stored) in outcome.results.iter().filter(|(output, _)| Output::RESULTS.contains(output)) {
            let (bounded, limit) = (&self.bounds[&output], &self.limits[&output]);
            reject(Oracle::Bound, !judge(output, stored, bounded)?.passes());
            reject(Oracle::Energy, !energy::screen(stored, bounded).passes());
            if self.exact.is_some() {
                continue;
            }
            reject(Oracle::Twin, !judge(output, stored, limit)?.passes());
            let signed = self.twin.signed(output, stored)?;
            reject(Oracle::SignedBias, signed.iter().any(|(_, bias)| !bias.passes()));
            for wrong in self.wrong.iter().filter_map(|wrong| wrong.get(&output)) {
                let directed = self.twin.directed(output, stored, wrong)?;
                reject(Oracle::DirectedBias, directed.is_some_and(|bias| !bias.passes()));
            }
        }
        if let Some(exact) = &self.exact {
            reject(Oracle::Exact, !exact::differences(&outcome.results, exact)?.is_empty());
        }
        let broken = empty_experts(outcome).failing + pairless_tokens(outcome).failing;
        reject(Oracle::Zeros, broken > 0);
        Ok(rejections)
    }

    fn choice_is_wrong(&self, outcome: &Outcome) -> bool {
        let (Gating::Router(router), Some(logits)) = (self.problem.gating(), outcome.results.get(&Output::Logits))
        else {
            return false;
        };
        let ids = Array2::from_shape_vec((self.problem.t(), router.k), outcome.routing.pair_expert().to_vec());
        let (Ok(ids), Ok(logits)) = (ids, logits.values.view().into_dimensionality()) else { return true };
        let certified = match router.convention {
            Convention::GroupedSigmoid(groups) => {
                let bias = router.selection_bias.as_ref().map(|bias| bias.view());
                // σ(l) and the sum with the bias, each of the score type.
                let unit = self.numerics.score.unit_roundoff();
                let error = (self.numerics.function_ulps + 2.0) * unit;
                certify_grouped_choice::<f64>(logits, bias, &groups, error, router.k, ids.view())
            }
            _ => certify_choice::<f64>(logits, router.k, ids.view()),
        };
        certified.is_err()
    }
}

/// The storage type of the engine that the mutants are planted in.
pub(super) type Storage = bf16;
