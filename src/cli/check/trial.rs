//! One file under one rounding model.

use std::collections::{BTreeMap, BTreeSet};

use super::given_scores;
use super::sweep::{Found, Limit, SWAPPED, Sweep};
use crate::dump::{Chosen, Dump, Model};
use crate::element::DType;
use crate::engine::{Numerics, Output, Stored};
use crate::error::{Error, Result};
use crate::oracle::judge::{Judging, in_order, judge};
use crate::oracle::kernel::{self, KernelBound, KernelPiece};
use crate::oracle::vacuity::{self, Impostor};
use crate::oracle::{Judgement, Verdict, dependence};
use crate::problem::Problem;
use crate::report::number;

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
}

impl Trial {
    /// Judges every result that `wanted` names: against the whole layer, and where the file has
    /// what a kernel read, against that kernel alone. Where all are within their bounds, it looks for bias in
    /// each result of the layer, and lets wrong results try to pass in its place.
    ///
    /// Bias is a statistic: it judges only where the inputs repeat nothing.
    pub fn run(dump: &Dump, model: Model, wanted: impl Fn(Output) -> bool + Sync) -> Result<Self> {
        let numerics = dump.numerics(model);
        let chosen = dump.choose(&numerics)?;
        let counts = dump.check_counts(&chosen)?;
        let is_asked = |output: &Output| wanted(*output) && dump.results.contains_key(output);
        let asked = Output::RESULTS.into_iter().chain(Output::INTERMEDIATES).filter(is_asked);
        let outputs: BTreeSet<Output> = asked.clone().collect();
        let dependent = match &dump.shared {
            None => dependence::repetition(&dump.problem).map(|what| format!("{what}, so errors are not independent")),
            Some(_) => Some("the statistics of the routed experts leave out a shared expert's part of o and dx".into()),
        };
        let twin = dependent.is_none().then(|| (&dump.problem, loosest(dump, &numerics)));
        let sweep = Sweep { dump, routing: &chosen.routing, outputs: &outputs, numerics, limit: Limit::Bound, twin };
        let mut found = sweep.run()?;
        let mut judged = Vec::new();
        let mut unjudged = Vec::new();
        for output in asked {
            match found.remove(&output) {
                Some(found) => judged.push(Judged::of(dump, None, found)),
                None => unjudged.push(output),
            }
        }
        if reads_intermediates(dump) {
            // With a shared expert o and dx hold more than the last kernel's sum.
            let of_kernel = |output: Output| dump.shared.is_none() || !matches!(output, Output::O | Output::Dx);
            let wanted = |output: Output| outputs.contains(&output) && of_kernel(output);
            let mut kernels: Vec<(&'static str, Output, Judging)> = Vec::new();
            kernel::each(&dump.problem, &chosen.routing, &dump.results, &numerics, &wanted, &mut |piece| {
                let KernelPiece { kernel, output, shape, place, truth, bound } = *piece;
                let stored = &dump.results[&output];
                if stored.values.shape() != shape {
                    return Err(Error::shape(output.name(), shape, stored.values.shape(), "the shape of the truth"));
                }
                let at = kernels.iter().position(|known| (known.0, known.1) == (kernel, output));
                let at = at.unwrap_or_else(|| {
                    let judging = Judging::new(output, stored.dtype, shape, dump.file_order(output));
                    kernels.push((kernel, output, judging));
                    kernels.len() - 1
                });
                let values = in_order(&stored.values);
                kernels[at].2.continue_at(place, &values[place..place + truth.len()], truth, bound);
                Ok(())
            })?;
            for (kernel, _, judging) in kernels {
                let found = Found { judgement: judging.finish(), biased: Vec::new(), impostors: Vec::new() };
                judged.push(Judged::of(dump, Some(kernel), found));
            }
        }
        let mut trial = Self { model, numerics, chosen, counts, judged, unjudged, dependent };
        if !trial.passes() {
            // What is beyond its bound needs no statistics, and the rest of the file is not judged by them either.
            trial.dependent = None;
            for judged in &mut trial.judged {
                judged.biased.clear();
                judged.impostors.clear();
            }
        }
        Ok(trial)
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

    /// Looks again at the results in whose place a wrong one passes.
    ///
    /// Behind a router the experts are judged by the file's own scores, if it has them ([`given_scores`]). A
    /// result that was judged by its kernel too passes for right only where both let it pass.
    ///
    /// A wrong result that is within the bound still fails where the result itself is within the bound's
    /// statistical twin and the wrong one is not. The twin holds for random data only, so a result beyond it
    /// is no failure; but then nothing shows that the check could have failed.
    pub fn look_again(&mut self, dump: &Dump) -> Result<()> {
        if self.dependent.is_none() {
            let outputs =
                self.hidden(|judged| judged.biased.is_empty() && given_scores::judges(judged.judgement.output));
            let experts = match outputs.is_empty() {
                true => None,
                false => given_scores::experts(dump, &self.chosen.routing)?,
            };
            if let Some(experts) = &experts {
                let twin = Some((experts, loosest(dump, &self.numerics)));
                let mut found = self.sweep(dump, &outputs, Limit::Bound, twin)?;
                for judged in self.of_layer() {
                    if let Some(found) = found.remove(&judged.judgement.output) {
                        (judged.biased, judged.impostors) = (found.biased, found.impostors);
                    }
                }
            }
        }
        self.meet_kernels(dump)?;
        let outputs = self.hidden(|_| true);
        if outputs.is_empty() {
            return Ok(());
        }
        let mut found = self.sweep(dump, &outputs, Limit::Twin, None)?;
        for judged in self.of_layer() {
            let Some(found) = found.remove(&judged.judgement.output) else { continue };
            if found.judgement.passes() {
                judged.impostors.retain(|impostor| found.impostors.contains(impostor));
                judged.twin = Some(found.judgement.ratio());
            }
        }
        Ok(())
    }

    /// Where the file has what a kernel read, the wrong results meet that kernel's bound too, as the result did:
    /// drouter_w from the file's dlogits, say.
    fn meet_kernels(&mut self, dump: &Dump) -> Result<()> {
        let by_kernel = self.judged.iter().filter(|judged| judged.kernel.is_some());
        let by_kernel: BTreeSet<Output> = by_kernel.map(|judged| judged.judgement.output).collect();
        let outputs = self.hidden(|judged| by_kernel.contains(&judged.judgement.output));
        if outputs.is_empty() {
            return Ok(());
        }
        let (routing, numerics) = (&self.chosen.routing, &self.numerics);
        let keep = |output: Output| outputs.contains(&output);
        let of_layer = dump.bounds_of(routing, numerics, &keep)?;
        let swapped = vacuity::gate_and_up_swapped(&dump.problem, dump.shared.as_ref(), routing, numerics, &keep)?;
        let mut passing: BTreeMap<Output, Vec<&'static str>> = BTreeMap::new();
        for of_kernel in kernel::whole(&dump.problem, routing, &dump.results, numerics, &keep)? {
            let KernelBound { output, bounded: of_kernel, .. } = of_kernel;
            let Some(bounded) = of_layer.get(&output) else { continue };
            let others: Vec<Impostor<'_>> = swapped.get(&output).map(|values| (SWAPPED, values)).into_iter().collect();
            let passes = |stored: &Stored| Ok(judge(output, stored, &of_kernel)?.passes());
            let dtype = dump.results[&output].dtype;
            passing.insert(output, vacuity::passing(output, dtype, bounded, &others, passes)?);
        }
        for judged in self.of_layer() {
            if let Some(passing) = passing.get(&judged.judgement.output) {
                judged.impostors.retain(|impostor| passing.contains(impostor));
            }
        }
        Ok(())
    }

    fn of_layer(&mut self) -> impl Iterator<Item = &mut Judged> {
        self.judged.iter_mut().filter(|judged| judged.kernel.is_none())
    }

    /// The results of the layer in whose place a wrong one passes.
    fn hidden(&self, which: impl Fn(&Judged) -> bool) -> BTreeSet<Output> {
        let of_layer = self.judged.iter().filter(|judged| judged.kernel.is_none());
        let hidden = of_layer.filter(|judged| !judged.impostors.is_empty() && which(judged));
        hidden.map(|judged| judged.judgement.output).collect()
    }

    fn sweep(
        &self,
        dump: &Dump,
        outputs: &BTreeSet<Output>,
        limit: Limit,
        twin: Option<(&Problem<'_, f64>, Numerics)>,
    ) -> Result<BTreeMap<Output, Found>> {
        Sweep { dump, routing: &self.chosen.routing, outputs, numerics: self.numerics, limit, twin }.run()
    }
}

impl Judged {
    fn of(dump: &Dump, kernel: Option<&'static str>, found: Found) -> Self {
        let Found { judgement, biased, impostors } = found;
        let dtype = dump.results.get(&judgement.output).map_or(dump.storage, |stored| stored.dtype);
        Self { kernel, dtype, judgement, biased, impostors, twin: None }
    }
}

/// The arithmetic of the last model that the file may have: bias is judged by it, because roundings of a
/// looser model look like bias to a tighter one.
fn loosest(dump: &Dump, numerics: &Numerics) -> Numerics {
    dump.models().last().map_or(*numerics, |&model| dump.numerics(model))
}

pub(super) fn is_result(output: Output) -> bool {
    Output::RESULTS.contains(&output)
}

/// Whether the file has a tensor that one kernel wrote for another to read.
fn reads_intermediates(dump: &Dump) -> bool {
    let between = Output::INTERMEDIATES.into_iter().filter(|output| *output != Output::Logits);
    between.chain([Output::Dlogits]).any(|output| dump.results.contains_key(&output))
}
