//! Where a [`Mutant`] takes hold of the layer: what a kernel reads, or what it has written, is changed
//! beside the kernel, whose own lines stay those of the method. Here is what is read; what is written,
//! in [`written`].
//!
//! Without a mutant every function here hands on what it was given.

mod clamped;
mod grouped;
mod written;

use std::borrow::Cow;
use std::ops::Range;

use ndarray::{Array3, ArrayView2, ArrayView3, Axis, CowArray, Ix2, Ix3, s};

use super::intermediate::Intermediate;
use super::roundings::{RoundingPoint, Roundings};
use crate::activation::{Activation, Gelu};
use crate::element::{Element, Real};
use crate::engine::Output;
use crate::layout::GateLayout;
use crate::mutant::{Mutant, TILE};
use crate::routing::{Convention, GroupedSigmoid, Routing};
use crate::shape::{ExpertId, TokenId};

/// A run's planted bug, if it has one.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::sonic) struct Fault(pub(super) Option<Mutant>);

impl Fault {
    /// No planted bug.
    pub(in crate::sonic) const NONE: Self = Self(None);

    /// The method's rounding points, but for the one that the mutant flips.
    pub(super) fn roundings(self) -> Roundings {
        let point = match self.0 {
            Some(Mutant::StorageSumOfO) => RoundingPoint::PartialO,
            Some(Mutant::HUnrounded) => RoundingPoint::H,
            Some(Mutant::AUnrounded) => RoundingPoint::A,
            Some(Mutant::YUnrounded) => RoundingPoint::Y,
            Some(Mutant::DhUnrounded) => RoundingPoint::Dh,
            Some(Mutant::APrimeUnrounded) => RoundingPoint::APrime,
            Some(Mutant::DxExpandedUnrounded) => RoundingPoint::DxExpanded,
            Some(Mutant::PreActivationRounded) => RoundingPoint::PreActivation,
            Some(Mutant::ScoredYRounded) => RoundingPoint::ScoredY,
            Some(Mutant::GRounded) => RoundingPoint::G,
            Some(Mutant::RecomputedARounded) => RoundingPoint::RecomputedA,
            Some(Mutant::DaRounded) => RoundingPoint::DA,
            Some(Mutant::DsRounded) => RoundingPoint::Ds,
            Some(Mutant::ScoresStored) => RoundingPoint::Scores,
            _ => return Roundings::FUSED,
        };
        Roundings::FUSED.flipped(point)
    }

    /// Given scores, as all kernels read them.
    pub(super) fn given<S: Element>(self, scores: &[S::Score]) -> Cow<'_, [S::Score]> {
        match self.0 {
            Some(Mutant::ScoresStored) => {
                let mut scores = scores.to_vec();
                self.roundings().apply::<S, S::Score>(RoundingPoint::Scores, &mut scores);
                Cow::Owned(scores)
            }
            _ => Cow::Borrowed(scores),
        }
    }

    /// The convention that the router computes.
    pub(super) fn convention(self, asked: Convention) -> Convention {
        match (self.0, asked) {
            (Some(Mutant::RawProbabilities), _) => Convention::TopKOverSoftmax,
            (Some(Mutant::Renormalized), Convention::SoftmaxOverTopK) => Convention::TopKOverSoftmaxRenormalized,
            (Some(Mutant::Renormalized), Convention::TopKOverSoftmaxRenormalized) => Convention::SoftmaxOverTopK,
            (Some(Mutant::FactorMissing), Convention::GroupedSigmoid(router)) => {
                Convention::GroupedSigmoid(GroupedSigmoid { factor: 1.0, ..router })
            }
            (Some(Mutant::RenormalizationMissing), Convention::GroupedSigmoid(router)) => {
                Convention::GroupedSigmoid(GroupedSigmoid { renormalized: false, ..router })
            }
            _ => asked,
        }
    }

    /// The activation that kernels 1 and 4 compute.
    pub(super) fn activation(self, asked: Activation) -> Activation {
        match (self.0, asked) {
            (Some(Mutant::GeluForSilu), Activation::SwiGlu) => Activation::GeGlu(Gelu::Exact),
            _ => asked,
        }
    }

    /// w1 as kernel 1 reads it.
    pub(super) fn w1_of_h<'w, S: Element>(self, w1: ArrayView3<'w, S>) -> CowArray<'w, S, Ix3> {
        if self.0 == Some(Mutant::TermTailOfUp) {
            let tail = tail(w1.len_of(Axis(2)));
            return without(w1, |w1| w1.slice_mut(s![.., .., tail]).fill(S::default()));
        }
        self.reordered(w1)
    }

    /// w1 as kernel 6 reads it.
    pub(super) fn w1_of_dx<'w, S: Element>(self, w1: ArrayView3<'w, S>) -> CowArray<'w, S, Ix3> {
        if self.0 == Some(Mutant::DxFromGate) {
            return without(w1, |w1| w1.slice_mut(s![.., 1..;2, ..]).fill(S::default()));
        }
        self.reordered(w1)
    }

    /// w2 as kernel 4 reads it.
    pub(super) fn w2_of_dh<'w, S: Element>(self, w2: ArrayView3<'w, S>) -> CowArray<'w, S, Ix3> {
        if self.0 == Some(Mutant::TermTailOfDown) {
            let tail = tail(w2.len_of(Axis(1)));
            return without(w2, |w2| w2.slice_mut(s![.., tail, ..]).fill(S::default()));
        }
        w2.into()
    }

    /// b1 as kernel 1 reads it.
    pub(super) fn b1_of_h<'b, S: Element>(self, b1: Option<ArrayView2<'b, S>>) -> Option<CowArray<'b, S, Ix2>> {
        match (self.0, self.order(b1.as_ref().map_or(0, |b1| b1.ncols()))) {
            (Some(Mutant::B1Missing), _) => None,
            (_, Some(order)) => b1.map(|b1| b1.select(Axis(1), &order).into()),
            (_, None) => b1.map(CowArray::from),
        }
    }

    /// b2 as kernel 2 reads it.
    pub(super) fn b2_of_y<'b, S>(self, b2: Option<ArrayView2<'b, S>>) -> Option<ArrayView2<'b, S>> {
        if self.0 == Some(Mutant::B2Missing) { None } else { b2 }
    }

    /// b2 as ds reads it.
    pub(super) fn b2_of_ds<'b, S>(self, b2: Option<ArrayView2<'b, S>>) -> Option<ArrayView2<'b, S>> {
        if self.0 == Some(Mutant::B2MissingInDs) { None } else { b2 }
    }

    /// The scores by row, as kernel 3 reads them.
    pub(super) fn scores_of_o<'s, A: Real>(self, scores: &'s [A], routing: &Routing) -> Cow<'s, [A]> {
        let each = |change: fn(f64) -> f64| scores.iter().map(|&s| A::from_f64(change(Element::to_f64(s)))).collect();
        match self.0 {
            Some(Mutant::ScoresOff) => each(|s| 1.01 * s),
            Some(Mutant::ScoreTwiceInO) => each(|s| s * s),
            Some(Mutant::RowLost) => {
                let mut scores = scores.to_vec();
                scores[middle_row(routing)] = A::zero();
                scores.into()
            }
            Some(Mutant::ScoresSwapped) => {
                let mut scores = scores.to_vec();
                if let Some([a, b]) = two_rows_of_a_token(routing) {
                    scores.swap(a, b);
                }
                scores.into()
            }
            _ => scores.into(),
        }
    }

    /// The scores by row, as db2 reads them.
    pub(super) fn scores_of_db2<'s, A: Real>(self, scores: &'s [A]) -> Cow<'s, [A]> {
        if self.0 == Some(Mutant::Db2Unweighted) { vec![A::one(); scores.len()].into() } else { scores.into() }
    }

    /// A row's score as it enters dA and a′.
    pub(super) fn scores_of_backward<A: Real>(self, score: A) -> [A; 2] {
        match self.0 {
            Some(Mutant::ScoreMissingInDa) => [A::one(), score],
            Some(Mutant::ScoreTwiceInDa) => [score * score, score],
            Some(Mutant::ScoreMissingInDw2) => [score, A::one()],
            _ => [score, score],
        }
    }

    /// The rows that a weight gradient sums over: dh or a′.
    pub(super) fn summed<'t, S: Element, A: Real>(
        self,
        output: Output,
        rows: &'t Intermediate<S, A>,
        routing: &Routing,
    ) -> Cow<'t, Intermediate<S, A>> {
        let lost: Vec<usize> = match (self.0, output) {
            (Some(Mutant::RowTailOfWeights), _) => row_tails(routing).flatten().collect(),
            (Some(Mutant::TokenMissingInDw1), Output::Dw1) => vec![middle_row(routing)],
            _ => return Cow::Borrowed(rows),
        };
        let mut rows = rows.clone();
        match &mut rows {
            Intermediate::Rounded(values) => lost.iter().for_each(|&row| values.row_mut(row).fill(S::default())),
            Intermediate::Unrounded(values) => lost.iter().for_each(|&row| values.row_mut(row).fill(A::zero())),
        }
        Cow::Owned(rows)
    }

    /// w1 in the order in which its rows are taken.
    fn reordered<'w, S: Element>(self, w1: ArrayView3<'w, S>) -> CowArray<'w, S, Ix3> {
        match self.order(w1.len_of(Axis(1))) {
            Some(order) => w1.select(Axis(1), &order).into(),
            None => w1.into(),
        }
    }

    /// `order[i]` is the row that is taken for row i of w1.
    fn order(self, rows: usize) -> Option<Vec<usize>> {
        let n = rows / 2;
        let of = |layout: GateLayout| (0..rows).map(move |row| layout.row_of_interleaved(row, n)).collect();
        match self.0? {
            _ if !rows.is_multiple_of(2) => None,
            Mutant::GateUpSwapped => Some((0..rows).map(|row| row ^ 1).collect()),
            Mutant::ConcatenatedGateFirst => Some(of(GateLayout::ConcatenatedGateFirst)),
            Mutant::ConcatenatedUpFirst => Some(of(GateLayout::ConcatenatedUpFirst)),
            _ => None,
        }
    }
}

/// What lies past the last whole tile.
fn tail(length: usize) -> Range<usize> {
    length / TILE * TILE..length
}

/// Rows past each expert's last whole tile.
fn row_tails(routing: &Routing) -> impl Iterator<Item = Range<usize>> + '_ {
    (0..routing.experts()).map(|expert| {
        let rows = routing.rows_of_expert(ExpertId(expert as u32));
        rows.start + tail(rows.len()).start..rows.end
    })
}

/// A row in the middle of the expert with most of them.
fn middle_row(routing: &Routing) -> usize {
    let all = (0..routing.experts()).map(|expert| routing.rows_of_expert(ExpertId(expert as u32)));
    all.max_by_key(|rows| rows.len()).map_or(0, |rows| rows.start + rows.len() / 2)
}

/// The row before, if it belongs to the same expert.
fn neighbour(routing: &Routing, row: usize) -> Option<usize> {
    let expert = |row: usize| routing.pair_expert()[routing.row_pair()[row] as usize];
    row.checked_sub(1).filter(|&before| expert(before) == expert(row))
}

/// Two rows of one token, from the middle token on.
fn two_rows_of_a_token(routing: &Routing) -> Option<[usize; 2]> {
    let tokens = routing.tokens();
    (0..tokens).map(|step| (tokens / 2 + step) % tokens).find_map(|token| {
        match routing.rows_of_token(TokenId(token as u32)) {
            [a, b, ..] => Some([*a as usize, *b as usize]),
            _ => None,
        }
    })
}

fn without<'w, S: Element>(w: ArrayView3<'w, S>, change: impl FnOnce(&mut Array3<S>)) -> CowArray<'w, S, Ix3> {
    let mut w = w.to_owned();
    change(&mut w);
    w.into()
}
