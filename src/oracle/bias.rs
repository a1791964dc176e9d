//! Signed and directed bias: errors of one sign, which no element alone shows.
//!
//! With the result c, its truth r, and a direction w:
//!
//! | | direction w | β = ⟨c − r, w⟩ / ⟨w, w⟩ | says |
//! | --- | --- | --- | --- |
//! | signed | r | 0.015 for a result 1.5% too large | all numbers err to one side |
//! | directed | m − r, m a known wrong result | 0 for a correct engine, 1 for that fault | c errs towards m |
//!
//! Roundings do not know w, so ⟨c − r, w⟩ of a correct engine is a sum of errors of either sign. How
//! large may it be? Errors of two elements are **not** independent: all of o_t see the roundings of the
//! token's a. [`Twin`] therefore takes the error as two parts.
//!
//! *Roundings to the storage type* are random, of mean 0, with the standard deviation σ_i that the
//! [statistical twin](super::statistic) has for element i. Elements that may share a rounding form a
//! block, within which nothing is assumed (Minkowski: a deviation of a sum is at most the sum of the
//! deviations); blocks share none, so their squares add:
//!
//! ```text
//! deviation of ⟨c − r, w⟩  ≤  D = ( Σ_blocks (Σ_i∈block σ_i |w_i|)² )^½
//! ```
//!
//! *Everything else* (accumulators that may cut off instead of rounding, σ from an approximate exp, a
//! router in the score type, storage below the normal range, where small numbers all become 0) may err to
//! one side everywhere, and counts with its whole a-priori bound: S = Σ s_i |w_i|, where s is
//! [`bound::layer`] of the same engine with storage roundings of normal numbers left out, and besides u·σ_i,
//! what the squares of the random errors can shift their mean by.
//!
//! So z = (|⟨c − r, w⟩| − S) / D is at most λ = 6 for a correct engine. What is derived: S, and D for
//! blocks as `Sharing` lists them. What is assumed, as by the statistical twin: roundings of different
//! numbers are independent and of mean 0. That holds for **random data** and not, for example, where
//! all tokens are identical; then this module rejects correct engines, so it stands beside the bounds.

mod leaning;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use ndarray::ArrayD;
use rayon::prelude::*;

use super::bound::ball::Measure;
use super::bound::{self, Model};
use super::judge::in_order;
use super::statistic::LIMIT;
use crate::element::DType;
use crate::engine::{Numerics, Output, RoundingModel, RouterRounding, Stored};
use crate::error::{Error, Result};
use crate::problem::{Gating, Problem};
use crate::routing::Routing;
pub(crate) use leaning::{Leaning, TwinPiece};

/// A result nearer to the truth than this, relative to the largest number, is the truth.
const SAME: f64 = 1e-9;

/// Columns that a tile holds: [`Group::Columns`] and [`Group::Rows`] are of this width.
const TILE: usize = 16;

/// Which elements of a result may have a rounding to the storage type in common.
///
/// | result | fused | eager |
/// | --- | --- | --- |
/// | o, dx, dlogits (T, ·) | those of a token: a, y, dh, dx̃ of its pairs | the same |
/// | ds (R) | none: h of its own row | the same |
/// | dw1, db1 | gate and up of a unit of an expert: dh of one unit comes from h of that unit | those of an expert: s·dO of a row |
/// | dw2 | a unit of an expert: a′ of one unit | those of an expert |
/// | db2 | none | those of an expert |
/// | drouter_w, drouter_b | all: dlogits of a token reach every expert | the same |
///
/// Scores that a router stores in the tensors' type join all experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sharing {
    /// No two elements.
    None,
    /// Those of one index of the first axis: a token, an expert.
    First,
    /// Those of so many consecutive rows (the middle axis) of one expert.
    Rows(usize),
    /// Those of so many consecutive columns of one expert.
    Columns(usize),
    /// All.
    All,
}

impl Sharing {
    fn of(output: Output, problem: &Problem<'_, f64>, numerics: &Numerics) -> Self {
        let router = matches!(problem.gating(), Gating::Router(_));
        let stored_scores = router && numerics.router == RouterRounding::TensorType;
        let per_unit = problem.activation().h_width(1);
        match output {
            Output::O | Output::Dx | Output::Dlogits | Output::Logits => Self::First,
            Output::Ds => Self::None,
            Output::Dw1 | Output::Dw2 | Output::Db1 | Output::Db2 if stored_scores => Self::All,
            Output::Dw1 | Output::Dw2 | Output::Db1 | Output::Db2 if numerics.rounding == RoundingModel::Eager => {
                Self::First
            }
            Output::Dw1 => Self::Rows(per_unit),
            Output::Db1 => Self::Columns(per_unit),
            Output::Dw2 => Self::Columns(1),
            Output::Db2 => Self::None,
            _ => Self::All,
        }
    }

    /// How many blocks one index of the first axis has for itself; none where every element is one.
    fn blocks(self, [rows, columns]: [usize; 2]) -> usize {
        match self {
            Self::None => 0,
            Self::First | Self::All => 1,
            Self::Rows(height) => rows.div_ceil(height),
            Self::Columns(width) => columns.div_ceil(width),
        }
    }

    /// The block of element (j, k) of one index.
    fn block(self, [j, k]: [usize; 2]) -> usize {
        match self {
            Self::None | Self::First | Self::All => 0,
            Self::Rows(height) => j / height,
            Self::Columns(width) => k / width,
        }
    }
}

/// A part of a result that is looked at for itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Group {
    /// All of it.
    Whole,
    /// One index of the first axis: a token, or an expert.
    First(usize),
    /// Rows of every expert's matrix.
    Rows(Range<usize>),
    /// A tile of columns.
    Columns(Range<usize>),
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("all of it"),
            Self::First(index) => write!(f, "index {index}"),
            Self::Rows(rows) => write!(f, "rows {rows:?}"),
            Self::Columns(columns) => write!(f, "columns {columns:?}"),
        }
    }
}

/// A bias, and how far beyond what is systematic it lies.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bias {
    /// β = ⟨c − r, w⟩ / ⟨w, w⟩; 0 where w is 0, NaN where c holds a number that is none.
    pub beta: f64,
    /// z = (|⟨c − r, w⟩| − S) / D, 0 at least.
    pub z: f64,
}

impl Bias {
    /// Whether a correct engine may have it: z ≤ λ.
    pub fn passes(&self) -> bool {
        self.z <= LIMIT
    }
}

/// The layer as σ has it, and as s has it but for what σ can shift a mean by.
pub(crate) fn twin_models<'a, 'p>(
    problem: &'a Problem<'p, f64>,
    routing: &'a Routing,
    numerics: &Numerics,
) -> [Model<'a, 'p>; 2] {
    let exact_stores = Numerics { storage: DType::F64, ..*numerics };
    let random = Model::new(problem, routing, numerics, Measure::Deviation);
    let mut systematic = Model::new(problem, routing, &exact_stores, Measure::Worst);
    systematic.arithmetic = systematic.arithmetic.underflowing_as(&random.arithmetic);
    [random, systematic]
}

/// The truth of every result, with what a correct engine's errors are made of.
#[derive(Clone, Debug)]
pub struct Twin {
    truth: BTreeMap<Output, ArrayD<f64>>,
    /// σ.
    random: BTreeMap<Output, ArrayD<f64>>,
    /// s.
    systematic: BTreeMap<Output, ArrayD<f64>>,
    sharing: BTreeMap<Output, Sharing>,
}

impl Twin {
    /// Of the layer `problem` under `routing`, for engines of this arithmetic.
    ///
    /// # Errors
    /// As [`bound::layer`].
    pub fn new(problem: &Problem<'_, f64>, routing: &Routing, numerics: &Numerics) -> Result<Self> {
        Self::of(problem, routing, numerics, &|_| true)
    }

    /// The same for the results that `keep` names.
    ///
    /// # Errors
    /// As [`bound::layer`].
    pub fn of(
        problem: &Problem<'_, f64>,
        routing: &Routing,
        numerics: &Numerics,
        keep: bound::Keep<'_>,
    ) -> Result<Self> {
        let bound::Found { truths, radii } = bound::run(&twin_models(problem, routing, numerics), keep)?;
        let mut radii = radii.into_iter();
        let (random, mut systematic) = (radii.next().unwrap_or_default(), radii.next().unwrap_or_default());
        for (output, systematic) in &mut systematic {
            let Some(random) = random.get(output) else { continue };
            systematic.zip_mut_with(random, |s, sigma| *s += numerics.storage.unit_roundoff() * sigma);
        }
        let sharing = truths.keys().map(|&output| (output, Sharing::of(output, problem, numerics))).collect();
        Ok(Self { truth: truths, random, systematic, sharing })
    }

    /// The truth of one result.
    pub fn truth(&self, output: Output) -> Option<&ArrayD<f64>> {
        self.truth.get(&output)
    }

    /// The signed bias of a result: as a whole, and by token or expert, by rows of an expert's
    /// matrix, by tile of columns. Results without a truth have none.
    ///
    /// # Errors
    /// A result of another shape than its truth.
    pub fn signed(&self, output: Output, stored: &Stored) -> Result<Vec<(Group, Bias)>> {
        let Some(errors) = self.errors(output, stored)? else { return Ok(Vec::new()) };
        let [first, rows, columns] = errors.shape;
        let tiles = |length: usize| (0..length).step_by(TILE).map(move |from| from..length.min(from + TILE));
        let mut groups = vec![(Group::Whole, [0..first, 0..rows, 0..columns])];
        if columns > 1 {
            groups.extend((0..first).map(|index| (Group::First(index), [index..index + 1, 0..rows, 0..columns])));
            groups.extend(tiles(columns).map(|tile| (Group::Columns(tile.clone()), [0..first, 0..rows, tile])));
        }
        if rows > 1 {
            groups.extend(tiles(rows).map(|tile| (Group::Rows(tile.clone()), [0..first, tile, 0..columns])));
        }
        Ok(groups.into_iter().map(|(group, ranges)| (group, errors.along(|at| errors.truth[at], ranges))).collect())
    }

    /// The bias of a result towards `wrong`, a known wrong result; none without a truth, and none
    /// where `wrong` is the truth. Elements at which `wrong` is no number are left out.
    ///
    /// # Errors
    /// A result of another shape than its truth. A `wrong` of another shape has no direction.
    pub fn directed(&self, output: Output, stored: &Stored, wrong: &ArrayD<f64>) -> Result<Option<Bias>> {
        let Some(errors) = self.errors(output, stored)? else { return Ok(None) };
        if wrong.shape() != self.truth[&output].shape() {
            return Ok(None);
        }
        let wrong = in_order(wrong);
        let away = |at: usize| if wrong[at].is_finite() { wrong[at] - errors.truth[at] } else { 0.0 };
        let largest = |value: &(dyn Fn(usize) -> f64 + Sync)| {
            (0..wrong.len()).into_par_iter().map(|at| value(at).abs()).reduce(|| 0.0, f64::max)
        };
        if largest(&away) <= SAME * largest(&|at| errors.truth[at]) {
            return Ok(None);
        }
        Ok(Some(errors.along_all(away).bias()))
    }

    fn errors<'t>(&'t self, output: Output, stored: &'t Stored) -> Result<Option<Errors<'t>>> {
        let (Some(truth), Some(random), Some(systematic)) =
            (self.truth.get(&output), self.random.get(&output), self.systematic.get(&output))
        else {
            return Ok(None);
        };
        if stored.values.shape() != truth.shape() {
            let expected = truth.shape();
            return Err(Error::shape(output.name(), expected, stored.values.shape(), "the shape of the truth"));
        }
        let shape = match *truth.shape() {
            [first] => [first, 1, 1],
            [first, columns] => [first, 1, columns],
            [first, rows, columns] => [first, rows, columns],
            _ => return Err(Error::internal(format!("{output} has more than three axes"))),
        };
        Ok(Some(Errors {
            shape,
            sharing: self.sharing[&output],
            largest: stored.dtype.largest(),
            values: in_order(&stored.values),
            truth: in_order(truth),
            deviation: in_order(random),
            systematic: in_order(systematic),
        }))
    }
}

/// One result beside its twin, as (first, rows, columns).
struct Errors<'t> {
    shape: [usize; 3],
    sharing: Sharing,
    /// Of the stored type: what may lie beyond it is not judged.
    largest: f64,
    values: Cow<'t, [f64]>,
    truth: Cow<'t, [f64]>,
    deviation: Cow<'t, [f64]>,
    systematic: Cow<'t, [f64]>,
}

/// The sums of one index of the first axis, or of several.
#[derive(Clone, Copy, Debug, Default)]
struct Along {
    along: f64,
    square: f64,
    systematic: f64,
    /// Of the blocks within the indices.
    variance: f64,
    /// Σ σ|w| of the one block that holds all indices.
    open: f64,
}

impl Errors<'_> {
    /// The bias of a part along w, by place.
    fn along(&self, w: impl Fn(usize) -> f64 + Sync, [first, rows, columns]: [Range<usize>; 3]) -> Bias {
        let one = |i: usize| self.closed(self.of_rows(&w, i, rows.clone(), columns.clone()));
        let each: Vec<Along> = first.into_par_iter().map(one).collect();
        let mut all = Along::default();
        // In order, whatever the number of threads.
        each.into_iter().for_each(|one| all.add(one));
        all.bias()
    }

    /// All columns of every index along w.
    fn along_all(&self, w: impl Fn(usize) -> f64 + Sync) -> Along {
        /// Rows of one matrix that a task looks at.
        const ROWS: usize = 64;
        let [first, height, width] = self.shape;
        let pieces = height.div_ceil(ROWS);
        let each: Vec<(Along, Vec<f64>)> = (0..first * pieces)
            .into_par_iter()
            .map(|piece| {
                let from = piece % pieces * ROWS;
                self.of_rows(&w, piece / pieces, from..height.min(from + ROWS), 0..width)
            })
            .collect();
        let mut all = Along::default();
        for of_index in each.chunks(pieces.max(1)) {
            let mut sums = Along::default();
            let mut blocks = vec![0.0; self.sharing.blocks([height, width])];
            for (of_piece, spread) in of_index {
                sums.add(*of_piece);
                blocks.iter_mut().zip(spread).for_each(|(block, spread)| *block += spread);
            }
            all.add(self.closed((sums, blocks)));
        }
        all
    }

    /// Some rows of one index, and Σ σ|w| by block.
    fn of_rows(
        &self,
        w: &(impl Fn(usize) -> f64 + Sync),
        i: usize,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> (Along, Vec<f64>) {
        let [_, height, width] = self.shape;
        let (values, truths, deviations, systematic) =
            (&*self.values, &*self.truth, &*self.deviation, &*self.systematic);
        let mut sums = Along::default();
        let mut blocks = vec![0.0; self.sharing.blocks([height, width])];
        for j in rows {
            for k in columns.clone() {
                let at = (i * height + j) * width + k;
                let (truth, deviation, most) = (truths[at], deviations[at], systematic[at]);
                let within_range = truth.abs() + LIMIT * deviation + most <= self.largest;
                let w = w(at);
                if !within_range || w == 0.0 {
                    continue;
                }
                sums.along += (values[at] - truth) * w;
                sums.square += w * w;
                sums.systematic += most * w.abs();
                let spread = deviation * w.abs();
                match self.sharing {
                    Sharing::None => sums.variance += spread * spread,
                    _ => blocks[self.sharing.block([j, k])] += spread,
                }
            }
        }
        (sums, blocks)
    }

    /// The sums of one index, all of whose rows were there.
    fn closed(&self, (mut sums, blocks): (Along, Vec<f64>)) -> Along {
        match self.sharing {
            Sharing::All => sums.open = blocks.iter().sum(),
            _ => sums.variance += blocks.iter().map(|block| block * block).sum::<f64>(),
        }
        sums
    }
}

impl Along {
    fn add(&mut self, other: Self) {
        self.along += other.along;
        self.square += other.square;
        self.systematic += other.systematic;
        self.variance += other.variance;
        self.open += other.open;
    }

    fn bias(&self) -> Bias {
        if !self.along.is_finite() {
            return Bias { beta: f64::NAN, z: f64::INFINITY };
        }
        let variance = self.variance + self.open * self.open;
        let beyond = (self.along.abs() - self.systematic).max(0.0);
        Bias {
            beta: if self.square == 0.0 { 0.0 } else { self.along / self.square },
            z: if beyond == 0.0 { 0.0 } else { beyond / variance.sqrt() },
        }
    }
}
