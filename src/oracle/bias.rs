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
//! router in the score type) may err to one side everywhere, and counts with its whole a-priori bound:
//! S = Σ s_i |w_i|, where s is [`bound::layer`] of the same engine with storage roundings left out, and
//! besides u·σ_i, what the squares of the random errors can shift their mean by.
//!
//! So z = (|⟨c − r, w⟩| − S) / D is at most λ = 6 for a correct engine. What is derived: S, and D for
//! blocks as `Sharing` lists them. What is assumed, as by the statistical twin: roundings of different
//! numbers are independent and of mean 0. That holds for **random data** and not, for example, where
//! all tokens are identical; then this module rejects correct engines, so it stands beside the bounds.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use ndarray::ArrayD;

use super::bound;
use super::judge::Bounded;
use super::statistic::{self, LIMIT};
use crate::element::DType;
use crate::engine::{Numerics, Output, RoundingModel, RouterRounding, Stored};
use crate::error::{Error, Result};
use crate::problem::{Gating, Problem};
use crate::routing::Routing;

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

    /// How many blocks a result of this shape has; none where every element is one.
    fn blocks(self, [first, rows, columns]: [usize; 3]) -> usize {
        match self {
            Self::None => 0,
            Self::First => first,
            Self::Rows(height) => first * rows.div_ceil(height),
            Self::Columns(width) => first * columns.div_ceil(width),
            Self::All => 1,
        }
    }

    /// The block of element (i, j, k).
    fn block(self, [i, j, k]: [usize; 3], [_, rows, columns]: [usize; 3]) -> usize {
        match self {
            Self::None => (i * rows + j) * columns + k,
            Self::First => i,
            Self::Rows(height) => i * rows.div_ceil(height) + j / height,
            Self::Columns(width) => i * columns.div_ceil(width) + k / width,
            Self::All => 0,
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

/// The truth of every result, with what a correct engine's errors are made of.
#[derive(Clone, Debug)]
pub struct Twin {
    /// Truth, and σ as its bound.
    random: BTreeMap<Output, Bounded>,
    /// Truth, and s as its bound.
    systematic: BTreeMap<Output, Bounded>,
    sharing: BTreeMap<Output, Sharing>,
}

impl Twin {
    /// Of the layer `problem` under `routing`, for engines of this arithmetic.
    ///
    /// # Errors
    /// As [`bound::layer`].
    pub fn new(problem: &Problem<'_, f64>, routing: &Routing, numerics: &Numerics) -> Result<Self> {
        let random = statistic::deviations(problem, routing, numerics)?;
        let exact_stores = Numerics { storage: DType::F64, ..*numerics };
        let mut systematic = bound::layer(problem, routing, &exact_stores)?;
        for (output, Bounded { bound, .. }) in &mut systematic {
            let Some(random) = random.get(output) else { continue };
            bound.zip_mut_with(&random.bound, |s, sigma| *s += numerics.storage.unit_roundoff() * sigma);
        }
        let sharing = random.keys().map(|&output| (output, Sharing::of(output, problem, numerics))).collect();
        Ok(Self { random, systematic, sharing })
    }

    /// The truth of one result.
    pub fn truth(&self, output: Output) -> Option<&ArrayD<f64>> {
        self.random.get(&output).map(|bounded| &bounded.truth)
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
        Ok(groups.into_iter().map(|(group, ranges)| (group, errors.along(&errors.truth, ranges))).collect())
    }

    /// The bias of a result towards `wrong`, a known wrong result; none without a truth, and none
    /// where `wrong` is the truth. Elements at which `wrong` is no number are left out.
    ///
    /// # Errors
    /// A result of another shape than its truth. A `wrong` of another shape has no direction.
    pub fn directed(&self, output: Output, stored: &Stored, wrong: &ArrayD<f64>) -> Result<Option<Bias>> {
        let Some(errors) = self.errors(output, stored)? else { return Ok(None) };
        let truth = &self.random[&output].truth;
        if wrong.shape() != truth.shape() {
            return Ok(None);
        }
        let away: Vec<f64> = wrong.iter().zip(truth).map(|(m, r)| if m.is_finite() { m - r } else { 0.0 }).collect();
        let largest = |values: &[f64]| values.iter().fold(0.0f64, |largest, value| largest.max(value.abs()));
        if largest(&away) <= SAME * largest(&errors.truth) {
            return Ok(None);
        }
        let [first, rows, columns] = errors.shape;
        Ok(Some(errors.along(&away, [0..first, 0..rows, 0..columns])))
    }

    fn errors<'t>(&'t self, output: Output, stored: &'t Stored) -> Result<Option<Errors<'t>>> {
        let (Some(random), Some(systematic)) = (self.random.get(&output), self.systematic.get(&output)) else {
            return Ok(None);
        };
        if stored.values.shape() != random.truth.shape() {
            let expected = random.truth.shape();
            return Err(Error::shape(output.name(), expected, stored.values.shape(), "the shape of the truth"));
        }
        let shape = match *random.truth.shape() {
            [first] => [first, 1, 1],
            [first, columns] => [first, 1, columns],
            [first, rows, columns] => [first, rows, columns],
            _ => return Err(Error::internal(format!("{output} has more than three axes"))),
        };
        let in_order = |values: &'t ArrayD<f64>| match values.as_slice() {
            Some(values) => Cow::Borrowed(values),
            None => Cow::Owned(values.iter().copied().collect()),
        };
        Ok(Some(Errors {
            shape,
            sharing: self.sharing[&output],
            largest: stored.dtype.largest(),
            values: in_order(&stored.values),
            truth: in_order(&random.truth),
            deviation: in_order(&random.bound),
            systematic: in_order(&systematic.bound),
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

impl Errors<'_> {
    /// The bias of a part along w.
    fn along(&self, w: &[f64], [first, rows, columns]: [Range<usize>; 3]) -> Bias {
        let [_, height, width] = self.shape;
        let (mut along, mut square, mut systematic, mut variance) = (0.0, 0.0, 0.0, 0.0);
        let mut blocks = vec![0.0; self.sharing.blocks(self.shape)];
        for i in first {
            for j in rows.clone() {
                for k in columns.clone() {
                    let at = (i * height + j) * width + k;
                    let (truth, deviation, most) = (self.truth[at], self.deviation[at], self.systematic[at]);
                    let within_range = truth.abs() + LIMIT * deviation + most <= self.largest;
                    if !within_range || w[at] == 0.0 {
                        continue;
                    }
                    along += (self.values[at] - truth) * w[at];
                    square += w[at] * w[at];
                    systematic += most * w[at].abs();
                    let spread = deviation * w[at].abs();
                    match self.sharing {
                        Sharing::None => variance += spread * spread,
                        _ => blocks[self.sharing.block([i, j, k], self.shape)] += spread,
                    }
                }
            }
        }
        if !along.is_finite() {
            return Bias { beta: f64::NAN, z: f64::INFINITY };
        }
        variance += blocks.iter().map(|block| block * block).sum::<f64>();
        let beyond = (along.abs() - systematic).max(0.0);
        Bias {
            beta: if square == 0.0 { 0.0 } else { along / square },
            z: if beyond == 0.0 { 0.0 } else { beyond / variance.sqrt() },
        }
    }
}
