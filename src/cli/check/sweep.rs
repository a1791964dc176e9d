//! Every oracle of the whole layer in one sweep over its experts.
//!
//! Truth, bound, statistical twin and the result of an engine that takes gate for up come expert by expert,
//! meet the result of the file, and are gone: together they would be seven times the gradients of the
//! weights in f64.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use ndarray::{Array1, Array2, ArrayD, Axis};
use rayon::prelude::*;

use super::trial::is_result;
use crate::dump::Dump;
use crate::element::DType;
use crate::engine::{Numerics, Output, Stored};
use crate::error::{Error, Result};
use crate::oracle::bias::{Leaning, TwinPiece, twin_models};
use crate::oracle::bound::ball::Measure;
use crate::oracle::bound::buffers::Buffers;
use crate::oracle::bound::{self, Model, Part, Parts, Pass, place_of};
use crate::oracle::impostors::{self, Impostors, biases, lean};
use crate::oracle::judge::{Judging, compare, in_order};
use crate::oracle::statistic::LIMIT;
use crate::oracle::{HeatMap, Judgement, vacuity};
use crate::problem::Problem;
use crate::report::number;
use crate::routing::Routing;
use crate::shape::ExpertId;

/// What takes gate for up, among impostors.
pub(super) const SWAPPED: &str = "gate and up swapped";

/// What results are judged by.
pub(super) struct Sweep<'s, 'p> {
    pub dump: &'s Dump,
    pub routing: &'s Routing,
    /// The results to judge.
    pub outputs: &'s BTreeSet<Output>,
    /// The arithmetic of the bound.
    pub numerics: Numerics,
    pub limit: Limit,
    /// The layer and the arithmetic by which bias is judged, if it is.
    pub twin: Option<(&'s Problem<'p, f64>, Numerics)>,
}

/// How far a result may be off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Limit {
    /// What a correct engine cannot exceed.
    Bound,
    /// What it does not exceed on random data.
    Twin,
}

/// What one result has come to.
pub(super) struct Found {
    pub judgement: Judgement,
    pub biased: Vec<String>,
    pub impostors: Vec<&'static str>,
}

impl Sweep<'_, '_> {
    /// Judges the results of the file; those for which the model has no bound are left out. Bias and impostors
    /// are looked at as long as everything is within its limit.
    pub fn run(&self) -> Result<BTreeMap<Output, Found>> {
        let mut bench = Bench { sweep: self, results: BTreeMap::new() };
        match &self.dump.shared {
            Some(shared) => self.with_shared_expert(shared, &mut bench)?,
            None => self.by_expert(&mut bench)?,
        }
        Ok(bench.results.into_iter().map(|(output, result)| (output, result.finish())).collect())
    }

    fn with_shared_expert(&self, shared: &Problem<'_, f64>, bench: &mut Bench<'_, '_, '_>) -> Result<()> {
        let keep = |output: Output| self.outputs.contains(&output);
        let bounds = match self.limit {
            Limit::Bound => self.dump.bounds_of(self.routing, &self.numerics, &keep)?,
            Limit::Twin => self.dump.twins_of(self.routing, &self.numerics, &keep)?,
        };
        let (problem, numerics) = (&self.dump.problem, &self.numerics);
        let swapped = vacuity::gate_and_up_swapped(problem, Some(shared), self.routing, numerics, &keep)?;
        for (output, bounded) in bounds.into_iter().filter(|(output, _)| keep(*output)) {
            let swapped = swapped.get(&output).map(in_order);
            let (truth, bound) = (in_order(&bounded.truth), in_order(&bounded.bound));
            let numbers = Numbers { truth: &truth, bound: &bound, twin: None, swapped: swapped.as_deref() };
            bench.look(output, 0, &numbers)?;
        }
        Ok(())
    }

    fn by_expert(&self, bench: &mut Bench<'_, '_, '_>) -> Result<()> {
        let (problem, routing, numerics) = (&self.dump.problem, self.routing, &self.numerics);
        let keep = |output: Output| self.outputs.contains(&output);
        let keep_results = |output: Output| keep(output) && is_result(output);
        let apart = |_: Output| true;

        let (measure, times) = match self.limit {
            Limit::Bound => (Measure::Worst, 1.0),
            Limit::Twin => (Measure::Deviation, LIMIT),
        };
        let model = [Model::new(problem, routing, numerics, measure)];
        let swapped_model = [Model::new(problem, routing, numerics, Measure::Midpoint).taking_gate_for_up()];
        let twin_models = self.twin.as_ref().map(|(problem, numerics)| twin_models(problem, routing, numerics));
        let shift = self.twin.as_ref().map_or(0.0, |(_, numerics)| numerics.storage.unit_roundoff());

        let buffers = Buffers::default();
        let mut limits = Pass::new(&model, &keep, &apart, &buffers)?;
        let mut swapped = match problem.activation().gated() {
            true => Some(Pass::new(&swapped_model, &keep, &apart, &buffers)?),
            false => None,
        };
        let mut twins = match &twin_models {
            Some(models) => Some(Pass::new(models, &keep_results, &apart, &buffers)?),
            None => None,
        };
        loop {
            let ((of_limit, mut of_swapped), mut of_twin) =
                rayon::join(|| rayon::join(|| limits.next_experts(), || next(&mut swapped)), || next(&mut twins));
            let Some((experts, of_limit)) = of_limit else { break };
            let mut pieces: BTreeMap<Output, Vec<Piece>> = BTreeMap::new();
            for (index, (expert, parts)) in experts.zip(of_limit).enumerate() {
                for (output, part) in parts {
                    let place = place_of(output, problem, routing, ExpertId(expert as u32));
                    let swapped = take(&mut of_swapped, index, output);
                    let twin = take(&mut of_twin, index, output);
                    pieces.entry(output).or_default().push(Piece { place, limit: part, swapped, twin });
                }
            }
            bench.look_at(pieces, [times, shift], &buffers)?;
            if bench.fails() {
                (swapped, twins) = (None, None);
            }
        }
        buffers.clear();
        let mut rest = limits.finish()?;
        let mut rest_of_swapped = swapped.map(Pass::finish).transpose()?;
        let mut rest_of_twins = twins.map(Pass::finish).transpose()?;
        for output in self.outputs {
            let part = |found: &mut bound::Found| {
                let truth = found.truths.remove(output)?;
                let radii = found.radii.iter_mut().filter_map(|radii| radii.remove(output));
                Some(Part { radii: radii.map(in_one_row).collect(), truth: in_one_row(truth) })
            };
            let Some(limit) = part(&mut rest) else { continue };
            let [swapped, twin] = [&mut rest_of_swapped, &mut rest_of_twins].map(|rest| rest.as_mut().and_then(part));
            let pieces = BTreeMap::from([(*output, vec![Piece { place: 0, limit, swapped, twin }])]);
            bench.look_at(pieces, [times, shift], &buffers)?;
        }
        Ok(())
    }
}

fn next(pass: &mut Option<Pass<'_, '_, '_>>) -> Option<Vec<Parts>> {
    pass.as_mut().and_then(Pass::next_experts).map(|(_, parts)| parts)
}

fn take(parts: &mut Option<Vec<Parts>>, index: usize, output: Output) -> Option<Part> {
    parts.as_mut()?.get_mut(index)?.remove(&output)
}

fn in_one_row(array: ArrayD<f64>) -> Array2<f64> {
    let numbers: Vec<f64> = match array.is_standard_layout() {
        true => array.into_raw_vec_and_offset().0,
        false => array.iter().copied().collect(),
    };
    Array1::from(numbers).insert_axis(Axis(0))
}

/// A piece of a result, as each of the three passes has it.
struct Piece {
    /// Where it begins, in row-major order.
    place: usize,
    limit: Part,
    swapped: Option<Part>,
    twin: Option<Part>,
}

/// All results on their way.
struct Bench<'b, 's, 'p> {
    sweep: &'b Sweep<'s, 'p>,
    results: BTreeMap<Output, Before<'b>>,
}

/// Some indices of a result's first axis, in row-major order.
struct Numbers<'n> {
    truth: &'n [f64],
    bound: &'n [f64],
    twin: Option<TwinPiece<'n>>,
    swapped: Option<&'n [f64]>,
}

impl Bench<'_, '_, '_> {
    fn fails(&self) -> bool {
        self.results.values().any(|result| result.judging.fails())
    }

    /// Looks at pieces of several results at once, at those of one result in their order.
    fn look_at(
        &mut self,
        mut pieces: BTreeMap<Output, Vec<Piece>>,
        factors: [f64; 2],
        buffers: &Buffers,
    ) -> Result<()> {
        let sweep = self.sweep;
        for (&output, pieces) in &pieces {
            let (Some(stored), Some(Piece { swapped, twin, .. })) = (sweep.dump.results.get(&output), pieces.first())
            else {
                continue;
            };
            let result = || Before::new(sweep, output, stored, twin.is_some(), swapped.is_some());
            self.results.entry(output).or_insert_with(result);
        }
        let results = self.results.iter_mut();
        let results = results.filter_map(|(&output, result)| Some((output, result, pieces.remove(&output)?)));
        let results: Vec<(Output, &mut Before<'_>, Vec<Piece>)> = results.collect();
        results.into_par_iter().try_for_each(|(output, result, pieces)| {
            pieces.into_iter().try_for_each(|piece| result.look_at(sweep.routing, output, piece, factors, buffers))
        })
    }

    fn look(&mut self, output: Output, place: usize, numbers: &Numbers<'_>) -> Result<()> {
        let sweep = self.sweep;
        let Some(stored) = sweep.dump.results.get(&output) else { return Ok(()) };
        let (twin, swapped) = (numbers.twin.is_some(), numbers.swapped.is_some());
        let result = self.results.entry(output).or_insert_with(|| Before::new(sweep, output, stored, twin, swapped));
        result.look(sweep.routing, output, place, numbers)
    }
}

fn row_major(output: Output, array: &Array2<f64>) -> Result<&[f64]> {
    array.as_slice().ok_or_else(|| Error::internal(format!("{output} is not in row-major order")))
}

/// One result before every oracle.
struct Before<'b> {
    values: Cow<'b, [f64]>,
    dtype: DType,
    judging: Judging,
    /// Towards 0, and towards gate and up swapped.
    leanings: Vec<Leaning>,
    impostors: Impostors,
    heat: Option<HeatMap>,
}

impl<'b> Before<'b> {
    fn new(sweep: &Sweep<'_, '_>, output: Output, stored: &'b Stored, twin: bool, swapped: bool) -> Self {
        let (shape, dtype) = (stored.values.shape(), stored.dtype);
        let judging = Judging::new(output, stored.dtype, shape, sweep.dump.file_order(output));
        let impostors = Impostors::new(stored.dtype, shape);
        let (leanings, impostors) = match &sweep.twin {
            Some((problem, numerics)) if twin => {
                let leaning = Leaning::new(output, (problem, numerics), stored.dtype, shape);
                let directions = 1 + usize::from(swapped);
                (vec![leaning.clone(); directions], impostors.judged_by(leaning, directions))
            }
            _ => (Vec::new(), impostors),
        };
        Self { values: in_order(&stored.values), dtype, judging, leanings, impostors, heat: None }
    }

    /// Limit, swapped and twin of one piece.
    fn look_at(
        &mut self,
        routing: &Routing,
        output: Output,
        piece: Piece,
        [times, shift]: [f64; 2],
        buffers: &Buffers,
    ) -> Result<()> {
        let no_radius = || Error::internal(format!("{output} has a truth and no radius"));
        let Piece { place, limit: Part { truth, radii }, swapped, twin } = piece;
        let mut bound = radii.into_iter().next().ok_or_else(no_radius)?;
        if times != 1.0 {
            bound *= times;
        }
        let twin = match twin {
            Some(Part { truth, radii }) => {
                let mut radii = radii.into_iter();
                let (random, mut systematic) = radii.next().zip(radii.next()).ok_or_else(no_radius)?;
                // What the squares of the random errors can shift their mean by.
                systematic.zip_mut_with(&random, |s, sigma| *s += shift * sigma);
                Some([truth, random, systematic])
            }
            None => None,
        };
        let of_twin = match &twin {
            Some([truth, random, systematic]) => {
                let [truth, random, systematic] =
                    [row_major(output, truth)?, row_major(output, random)?, row_major(output, systematic)?];
                Some(TwinPiece { truth, random, systematic })
            }
            None => None,
        };
        let of_swapped = swapped.as_ref().map(|part| row_major(output, &part.truth)).transpose()?;
        let (of_truth, of_bound) = (row_major(output, &truth)?, row_major(output, &bound)?);
        let numbers = Numbers { truth: of_truth, bound: of_bound, twin: of_twin, swapped: of_swapped };
        self.look(routing, output, place, &numbers)?;
        let gone = [truth, bound].into_iter().chain(twin.into_iter().flatten());
        gone.chain(swapped.map(|part| part.truth)).for_each(|array| buffers.give(array));
        Ok(())
    }

    fn look(&mut self, routing: &Routing, output: Output, place: usize, numbers: &Numbers<'_>) -> Result<()> {
        let Self { values, dtype, judging, leanings, impostors, heat } = self;
        let end = place + numbers.truth.len();
        let Some(values) = values.get(place..end) else {
            return Err(Error::shape(output.name(), &[end], &[values.len()], "the elements of the truth"));
        };
        let swapped: Vec<(&'static str, &[f64])> =
            numbers.swapped.map(|values| (SWAPPED, values)).into_iter().collect();
        let piece =
            impostors::Piece { truth: numbers.truth, bound: numbers.bound, twin: numbers.twin, others: &swapped };
        rayon::join(
            || judging.look(place, values, numbers.truth, numbers.bound),
            || {
                rayon::join(
                    || {
                        if let Some(twin) = &numbers.twin {
                            lean(leanings, values, twin, &swapped);
                        }
                    },
                    || impostors.look(&piece),
                )
            },
        );
        if matches!(output, Output::Ds | Output::Scores) {
            *heat = Some(by_token_and_expert(routing, values, numbers, *dtype));
        }
        Ok(())
    }

    fn finish(self) -> Found {
        const FAULTS: [&str; 2] = ["of a kernel that shrinks it to 0", "of gate and up swapped"];
        let biased = biases(&self.leanings).map(|(direction, bias)| {
            format!("{}% {} ({} deviations)", number(100.0 * bias.beta), FAULTS[direction], number(bias.z))
        });
        let biased = biased.collect();
        let mut judgement = self.judging.finish();
        if let Some(heat) = self.heat {
            judgement.heat = heat;
        }
        Found { judgement, biased, impostors: self.impostors.finish() }
    }
}

/// Where the errors of values by pair are; the number of a pair would say nothing.
fn by_token_and_expert(routing: &Routing, values: &[f64], numbers: &Numbers<'_>, dtype: DType) -> HeatMap {
    let mut map = HeatMap::new(["token", "expert"], [routing.tokens(), routing.experts()]);
    let pairs = routing.pair_token().iter().zip(routing.pair_expert());
    let numbers = values.iter().zip(numbers.truth).zip(numbers.bound);
    for ((token, expert), ((&value, &truth), &bound)) in pairs.zip(numbers) {
        if let Some((_, ratio)) = compare(value, truth, bound, dtype.largest()) {
            map.add([token.index(), expert.index()], ratio);
        }
    }
    map
}
