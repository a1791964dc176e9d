//! Every oracle of the whole layer in one sweep over its experts.
//!
//! Truth, bound, statistical twin and the result of an engine that takes gate for up come expert by expert,
//! meet the result of the file, and are gone: together they would be seven times the gradients of the
//! weights in f64.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use ndarray::{Array1, Array2, ArrayD, Axis};

use super::trial::is_result;
use crate::dump::Dump;
use crate::element::DType;
use crate::engine::{Numerics, Output, Stored};
use crate::error::{Error, Result};
use crate::oracle::bias::{Leaning, TwinPiece, twin_models};
use crate::oracle::bound::ball::Measure;
use crate::oracle::bound::{self, Model, Part, Parts, Pass};
use crate::oracle::impostors::{Impostors, Piece, biases, lean};
use crate::oracle::judge::{Judging, compare, in_order};
use crate::oracle::statistic::LIMIT;
use crate::oracle::{HeatMap, Judgement, vacuity};
use crate::problem::Problem;
use crate::report::number;
use crate::routing::Routing;

/// What takes gate for up, among impostors.
const SWAPPED: &str = "gate and up swapped";

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

        let mut limits = Pass::new(&model, &keep, &apart)?;
        let mut swapped = match problem.activation().gated() {
            true => Some(Pass::new(&swapped_model, &keep, &apart)?),
            false => None,
        };
        let mut twins = match &twin_models {
            Some(models) => Some(Pass::new(models, &keep_results, &apart)?),
            None => None,
        };
        while let Some((experts, of_limit)) = limits.next_experts() {
            let mut of_swapped = next(&mut swapped);
            let mut of_twin = next(&mut twins);
            for (index, (expert, parts)) in experts.zip(of_limit).enumerate() {
                for (output, part) in parts {
                    let place = place_of(output, problem, routing, expert);
                    let swapped = take(&mut of_swapped, index, output);
                    let twin = take(&mut of_twin, index, output);
                    bench.look_at_parts(output, place, [Some(part), swapped, twin], times, shift)?;
                }
            }
            if bench.fails() {
                (swapped, twins) = (None, None);
            }
        }
        let mut rest = limits.finish()?;
        let mut rest_of_swapped = swapped.map(Pass::finish).transpose()?;
        let mut rest_of_twins = twins.map(Pass::finish).transpose()?;
        for output in self.outputs {
            let part = |found: &mut bound::Found| {
                let truth = found.truths.remove(output)?;
                let radii = found.radii.iter_mut().filter_map(|radii| radii.remove(output));
                Some(Part { radii: radii.map(in_one_row).collect(), truth: in_one_row(truth) })
            };
            let parts = [Some(&mut rest), rest_of_swapped.as_mut(), rest_of_twins.as_mut()];
            let parts = parts.map(|found| found.and_then(part));
            if parts[0].is_some() {
                bench.look_at_parts(*output, 0, parts, times, shift)?;
            }
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

/// Where an expert's part of a result begins.
fn place_of(output: Output, problem: &Problem<'_, f64>, routing: &Routing, expert: usize) -> usize {
    let (d, n, width) = (problem.d(), problem.n(), problem.h_width());
    let row = routing.expert_offsets()[expert] as usize;
    match output {
        Output::Dw1 => expert * width * d,
        Output::Dw2 => expert * d * n,
        Output::H | Output::Dh => row * width,
        Output::A | Output::APrime => row * n,
        _ => row * d,
    }
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

    /// Limit, swapped and twin of one piece.
    fn look_at_parts(
        &mut self,
        output: Output,
        place: usize,
        [limit, swapped, twin]: [Option<Part>; 3],
        times: f64,
        shift: f64,
    ) -> Result<()> {
        let no_radius = || Error::internal(format!("{output} has a truth and no radius"));
        let Part { truth, radii } = limit.ok_or_else(no_radius)?;
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
        let twin = match &twin {
            Some([truth, random, systematic]) => {
                let [truth, random, systematic] =
                    [row_major(output, truth)?, row_major(output, random)?, row_major(output, systematic)?];
                Some(TwinPiece { truth, random, systematic })
            }
            None => None,
        };
        let swapped = swapped.as_ref().map(|part| row_major(output, &part.truth)).transpose()?;
        let numbers = Numbers { truth: row_major(output, &truth)?, bound: row_major(output, &bound)?, twin, swapped };
        self.look(output, place, &numbers)
    }

    fn look(&mut self, output: Output, place: usize, numbers: &Numbers<'_>) -> Result<()> {
        let sweep = self.sweep;
        let Some(stored) = sweep.dump.results.get(&output) else { return Ok(()) };
        let result = self.results.entry(output).or_insert_with(|| Before::new(sweep, output, stored, numbers));
        let end = place + numbers.truth.len();
        let Some(values) = result.values.get(place..end) else {
            let found = stored.values.shape();
            return Err(Error::shape(output.name(), &[end], found, "the elements of the truth"));
        };
        let swapped: Vec<(&'static str, &[f64])> =
            numbers.swapped.map(|values| (SWAPPED, values)).into_iter().collect();
        let Before { judging, leanings, impostors, .. } = result;
        let piece = Piece { truth: numbers.truth, bound: numbers.bound, twin: numbers.twin, others: &swapped };
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
            result.heat = Some(by_token_and_expert(sweep.routing, values, numbers, stored.dtype));
        }
        Ok(())
    }
}

fn row_major(output: Output, array: &Array2<f64>) -> Result<&[f64]> {
    array.as_slice().ok_or_else(|| Error::internal(format!("{output} is not in row-major order")))
}

/// One result before every oracle.
struct Before<'b> {
    values: Cow<'b, [f64]>,
    judging: Judging,
    /// Towards 0, and towards gate and up swapped.
    leanings: Vec<Leaning>,
    impostors: Impostors,
    heat: Option<HeatMap>,
}

impl<'b> Before<'b> {
    fn new(sweep: &Sweep<'_, '_>, output: Output, stored: &'b Stored, numbers: &Numbers<'_>) -> Self {
        let shape = stored.values.shape();
        let judging = Judging::new(output, stored.dtype, shape, sweep.dump.file_order(output));
        let impostors = Impostors::new(stored.dtype, shape);
        let (leanings, impostors) = match (&sweep.twin, &numbers.twin) {
            (Some((problem, numerics)), Some(_)) => {
                let leaning = Leaning::new(output, (problem, numerics), stored.dtype, shape);
                let directions = 1 + usize::from(numbers.swapped.is_some());
                (vec![leaning.clone(); directions], impostors.judged_by(leaning, directions))
            }
            _ => (Vec::new(), impostors),
        };
        Self { values: in_order(&stored.values), judging, leanings, impostors, heat: None }
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
