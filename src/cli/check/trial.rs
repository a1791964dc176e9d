//! One file under one rounding model.

use std::collections::{BTreeMap, BTreeSet};

use ndarray::ArrayD;

use super::given_scores;
use crate::dump::{Chosen, Dump, Model};
use crate::element::DType;
use crate::engine::{Numerics, Output, Stored};
use crate::error::Result;
use crate::oracle::bias::Twin;
use crate::oracle::judge::{compare, judge_with};
use crate::oracle::{Bounded, HeatMap, Judgement, Verdict, dependence, judge, kernel, vacuity};
use crate::report::number;
use crate::routing::Routing;

/// One result, judged; coordinates are those of the file.
#[derive(Debug)]
pub(super) struct Judged {
    /// The kernel that was judged by what it read; none if the whole layer stands behind it.
    pub kernel: Option<&'static str>,
    /// The type in the file.
    pub dtype: DType,
    /// Element by element.
    pub judgement: Judgement,
    /// What is biased though every element is within its bound.
    pub biased: Vec<String>,
    /// Wrong results that would have passed.
    pub impostors: Vec<&'static str>,
    /// Where the bound alone could not have failed: the largest error over the limit of its statistical
    /// twin, if the result is within.
    pub twin: Option<f64>,
}

impl Judged {
    pub fn verdict(&self) -> Verdict {
        let nothing_judged = self.judgement.elements > 0 && self.judgement.judged() == 0;
        if !self.judgement.passes() || !self.biased.is_empty() {
            Verdict::NumericFailure
        } else if nothing_judged || !self.impostors.is_empty() {
            Verdict::Vacuous
        } else {
            Verdict::Pass
        }
    }
}

/// All results of a file under one model.
#[derive(Debug)]
pub(super) struct Trial {
    pub model: Model,
    pub numerics: Numerics,
    pub chosen: Chosen,
    /// What holds of the counts per expert.
    pub counts: Vec<String>,
    /// The layer's results, then those of single kernels.
    pub judged: Vec<Judged>,
    /// Results of the file for which this model has no bound.
    pub unjudged: Vec<Output>,
    /// Why no statistics judge, if none do.
    pub dependent: Option<String>,
    /// The layer's truths and bounds, until impostors have tried to pass.
    bounds: BTreeMap<Output, Bounded>,
}

impl Trial {
    /// Judges every result that `wanted` names: against the whole layer, and where the file has
    /// what a kernel read, against that kernel alone.
    pub fn run(dump: &Dump, model: Model, wanted: impl Fn(Output) -> bool + Sync) -> Result<Self> {
        let numerics = dump.numerics(model);
        let chosen = dump.choose(&numerics)?;
        let counts = dump.check_counts(&chosen)?;
        let asked = |output: Output| wanted(output) && dump.results.contains_key(&output);
        let bounds = dump.bounds_of(&chosen.routing, &numerics, &asked)?;
        let mut judged = Vec::new();
        let mut unjudged = Vec::new();
        for output in Output::RESULTS.into_iter().chain(Output::INTERMEDIATES).filter(|output| wanted(*output)) {
            let Some(stored) = dump.results.get(&output) else { continue };
            match bounds.get(&output) {
                Some(bounded) => judged.push(judge_in_file(dump, &chosen.routing, None, output, stored, bounded)?),
                None => unjudged.push(output),
            }
        }
        if reads_intermediates(dump) {
            for kernel::KernelBound { kernel, output, bounded } in
                kernel::kernels(&dump.problem, &chosen.routing, &dump.results, &numerics)?
            {
                // With a shared expert o and dx hold more than the last kernel's sum.
                let of_kernel = dump.shared.is_none() || !matches!(output, Output::O | Output::Dx);
                if let (true, Some(stored)) = (of_kernel && wanted(output), dump.results.get(&output)) {
                    judged.push(judge_in_file(dump, &chosen.routing, Some(kernel), output, stored, &bounded)?);
                }
            }
        }
        Ok(Self { model, numerics, chosen, counts, judged, unjudged, dependent: None, bounds })
    }

    /// Whether every result is within its bound.
    pub fn passes(&self) -> bool {
        self.judged.iter().all(|judged| judged.judgement.passes())
    }

    /// The worst verdict of all results; without any result nothing could have failed.
    pub fn verdict(&self) -> Verdict {
        self.judged.iter().map(Judged::verdict).max().unwrap_or(Verdict::Vacuous)
    }

    /// The failing results with the worst ratio of each, in a line: the worst first, and not all.
    pub fn failures(&self) -> String {
        const SHOWN: usize = 4;
        let mut failing: Vec<&Judgement> =
            self.judged.iter().map(|judged| &judged.judgement).filter(|judgement| !judgement.passes()).collect();
        failing.sort_by(|a, b| b.ratio().total_cmp(&a.ratio()));
        let each = failing.iter().take(SHOWN).map(|judgement| {
            let Judgement { output, failing, elements, .. } = judgement;
            format!("{output} {failing}/{elements} (worst {}× its bound)", number(judgement.ratio()))
        });
        let mut text = each.collect::<Vec<_>>().join(", ");
        if failing.len() > SHOWN {
            text += &format!(" and {} more", failing.len() - SHOWN);
        }
        text
    }

    /// Looks for bias in each result of the layer, and lets wrong results try to pass in its place.
    ///
    /// Bias is a statistic: it judges only where the inputs repeat nothing, and by the arithmetic of the
    /// last model that the file may have, because roundings of a looser model look like bias to a
    /// tighter one.
    ///
    /// Where that lets a wrong result pass behind a router, the experts are judged again by the file's own
    /// scores, if it has them ([`given_scores`]).
    ///
    /// A wrong result that is within the bound still fails where the result itself is within the bound's
    /// statistical twin and the wrong one is not. The twin holds for random data only, so a result beyond it
    /// is no failure; but then nothing shows that the check could have failed.
    pub fn try_impostors(&mut self, dump: &Dump) -> Result<()> {
        let bounds = std::mem::take(&mut self.bounds);
        let (problem, shared, routing) = (&dump.problem, dump.shared.as_ref(), &self.chosen.routing);
        let judged: BTreeSet<Output> = bounds.keys().copied().collect();
        let keep = |output: Output| judged.contains(&output);
        let swapped = vacuity::gate_and_up_swapped(problem, shared, routing, &self.numerics, &keep)?;
        self.dependent = match shared {
            None => dependence::repetition(problem).map(|what| format!("{what}, so errors are not independent")),
            Some(_) => Some("the statistics of the routed experts leave out a shared expert's part of o and dx".into()),
        };
        let loosest = dump.models().last().map_or(self.numerics, |&model| dump.numerics(model));
        let twin = match self.dependent {
            // Intermediates share roundings in ways that the twin does not list.
            None => Some(Twin::of(problem, routing, &loosest, &|output| keep(output) && is_result(output))?),
            Some(_) => None,
        };
        let mut of_experts: Option<Option<Twin>> = None;
        let mut twins: Option<BTreeMap<Output, Bounded>> = None;
        for judged in self.judged.iter_mut().filter(|judged| judged.kernel.is_none()) {
            let output = judged.judgement.output;
            let (Some(bounded), Some(stored)) = (bounds.get(&output), dump.results.get(&output)) else { continue };
            let swapped = swapped.get(&output);
            let biases = |stored: &Stored| match &twin {
                Some(twin) => biased(twin, output, stored, swapped),
                None => Ok(Vec::new()),
            };
            judged.biased = biases(stored)?;
            let others = swapped.map(|swapped| ("gate and up swapped", swapped));
            let unbiased = |impostor: &Stored| Ok(biases(impostor)?.is_empty());
            judged.impostors = vacuity::passing(output, stored.dtype, bounded, others.as_slice(), unbiased)?;
            let hidden = !judged.impostors.is_empty() && judged.biased.is_empty();
            if hidden && twin.is_some() && given_scores::judges(output) {
                let experts = match &mut of_experts {
                    Some(experts) => experts,
                    none => none.insert(given_scores::twin(dump, routing, &loosest)?),
                };
                if let Some(experts) = experts {
                    judged.biased = biased(experts, output, stored, swapped)?;
                    let unbiased = |impostor: &Stored| Ok(biased(experts, output, impostor, swapped)?.is_empty());
                    judged.impostors = vacuity::passing(output, stored.dtype, bounded, others.as_slice(), unbiased)?;
                }
            }
            if judged.impostors.is_empty() {
                continue;
            }
            let twins = match &mut twins {
                Some(twins) => twins,
                none => none.insert(dump.twins_of(&self.chosen.routing, &self.numerics, &keep)?),
            };
            let Some(twin) = twins.get(&output) else { continue };
            let of_twin = judge(output, stored, twin)?;
            if of_twin.passes() {
                let passing = vacuity::passing(output, stored.dtype, twin, others.as_slice(), |_| Ok(true))?;
                judged.impostors.retain(|impostor| passing.contains(impostor));
                judged.twin = Some(of_twin.ratio());
            }
        }
        Ok(())
    }
}

/// The biases of a result that a correct engine does not have: of its size, and towards the result of
/// an engine that takes gate for up.
fn biased(twin: &Twin, output: Output, stored: &Stored, swapped: Option<&ArrayD<f64>>) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let Some(truth) = twin.truth(output) else { return Ok(found) };
    let zeros = ArrayD::zeros(truth.raw_dim());
    let directions = [("of a kernel that shrinks it to 0", Some(&zeros)), ("of gate and up swapped", swapped)];
    for (fault, wrong) in directions {
        let Some(wrong) = wrong else { continue };
        if let Some(bias) = twin.directed(output, stored, wrong)?.filter(|bias| !bias.passes()) {
            found.push(format!("{}% {fault} ({} deviations)", number(100.0 * bias.beta), number(bias.z)));
        }
    }
    Ok(found)
}

fn is_result(output: Output) -> bool {
    Output::RESULTS.contains(&output)
}

/// Whether the file has a tensor that one kernel wrote for another to read.
fn reads_intermediates(dump: &Dump) -> bool {
    let between = Output::INTERMEDIATES.into_iter().filter(|output| *output != Output::Logits);
    between.chain([Output::Dlogits]).any(|output| dump.results.contains_key(&output))
}

fn judge_in_file(
    dump: &Dump,
    routing: &Routing,
    kernel: Option<&'static str>,
    output: Output,
    stored: &Stored,
    bounded: &Bounded,
) -> Result<Judged> {
    let order = dump.file_order(output);
    let mut judgement = judge_with(output, stored, bounded, order.as_deref())?;
    if matches!(output, Output::Ds | Output::Scores) {
        judgement.heat = by_token_and_expert(routing, stored, bounded);
    }
    Ok(Judged { kernel, dtype: stored.dtype, judgement, biased: Vec::new(), impostors: Vec::new(), twin: None })
}

/// Where the errors of values by pair are; the number of a pair would say nothing.
fn by_token_and_expert(routing: &Routing, stored: &Stored, bounded: &Bounded) -> HeatMap {
    let mut map = HeatMap::new(["token", "expert"], [routing.tokens(), routing.experts()]);
    let pairs = routing.pair_token().iter().zip(routing.pair_expert());
    let numbers = stored.values.iter().zip(&bounded.truth).zip(&bounded.bound);
    for ((token, expert), ((&value, &truth), &bound)) in pairs.zip(numbers) {
        if let Some((_, ratio)) = compare(value, truth, bound, stored.dtype.largest()) {
            map.add([token.index(), expert.index()], ratio);
        }
    }
    map
}
