//! Directed bias of a result that nobody holds whole.

use super::{Along, Bias, Errors, SAME, Sharing};
use crate::element::DType;
use crate::engine::{Numerics, Output};
use crate::problem::Problem;

/// A piece of a result's twin: whole indices of its first axis, in row-major order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TwinPiece<'t> {
    /// r.
    pub(crate) truth: &'t [f64],
    /// σ.
    pub(crate) random: &'t [f64],
    /// s, with what σ can shift a mean by.
    pub(crate) systematic: &'t [f64],
}

/// The directed bias of one result, piece by piece.
#[derive(Clone, Debug)]
pub(crate) struct Leaning {
    sharing: Sharing,
    /// Rows and columns of one index of the first axis.
    of_first: [usize; 2],
    largest: f64,
    sums: Along,
    /// The largest |w| and the largest |r|.
    away: f64,
    size: f64,
}

impl Leaning {
    /// Of a result of this shape of at most three axes, stored in `dtype`.
    pub(crate) fn new(
        output: Output,
        (problem, numerics): (&Problem<'_, f64>, &Numerics),
        dtype: DType,
        shape: &[usize],
    ) -> Self {
        let of_first = match *shape {
            [] | [_] => [1, 1],
            [_, columns] => [1, columns],
            [_, ref rows @ .., columns] => [rows.iter().product(), columns],
        };
        let (sums, largest) = (Along::default(), dtype.largest());
        Self { sharing: Sharing::of(output, problem, numerics), of_first, largest, sums, away: 0.0, size: 0.0 }
    }

    /// Looks at a piece of the result, along `wrong` − r by place of the piece.
    pub(crate) fn look(&mut self, values: &[f64], twin: &TwinPiece<'_>, wrong: impl Fn(usize) -> f64 + Sync) {
        let [rows, columns] = self.of_first;
        let away = |at: usize| {
            let wrong = wrong(at);
            if wrong.is_finite() { wrong - twin.truth[at] } else { 0.0 }
        };
        for at in 0..twin.truth.len() {
            self.away = self.away.max(away(at).abs());
            self.size = self.size.max(twin.truth[at].abs());
        }
        let errors = Errors {
            shape: [values.len() / (rows * columns).max(1), rows, columns],
            sharing: self.sharing,
            largest: self.largest,
            values: values.into(),
            truth: twin.truth.into(),
            deviation: twin.random.into(),
            systematic: twin.systematic.into(),
        };
        self.sums.add(errors.along_all(away));
    }

    /// The bias of all pieces; none where `wrong` was the truth throughout.
    pub(crate) fn bias(&self) -> Option<Bias> {
        (self.away > SAME * self.size).then(|| self.sums.bias())
    }
}
