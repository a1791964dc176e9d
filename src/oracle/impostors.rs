//! Wrong results that try to pass, piece by piece.

use super::bias::{Leaning, TwinPiece};
use super::judge::compare;
use crate::element::DType;

/// An impostor nearer to the truth than this, relative to the largest number, is the truth.
const SAME: f64 = 1e-9;

pub(super) const ZEROS: &str = "zeros";
pub(super) const CONSTANT: &str = "a constant";
pub(super) const FLIPPED: &str = "the sign flipped";
const SHIFTED: &str = "rows shifted by one";

/// Some indices of a result's first axis, numbers in row-major order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<'p> {
    pub(crate) truth: &'p [f64],
    pub(crate) bound: &'p [f64],
    /// By which bias is judged, if it is.
    pub(crate) twin: Option<TwinPiece<'p>>,
    /// Known wrong results, the same ones in every piece.
    pub(crate) others: &'p [(&'static str, &'p [f64])],
}

impl Piece<'_> {
    /// Places `from` to `to`; of what is shifted against them nothing is known.
    fn part(&self, from: usize, to: usize) -> Piece<'_> {
        let twin = self.twin.map(|TwinPiece { truth, random, systematic }| TwinPiece {
            truth: &truth[from..to],
            random: &random[from..to],
            systematic: &systematic[from..to],
        });
        Piece { truth: &self.truth[from..to], bound: &self.bound[from..to], twin, others: &[] }
    }

    /// What a correct engine's errors may lean towards: a kernel that shrinks its result to 0, and the known
    /// wrong results.
    fn directions(&self) -> usize {
        1 + self.others.len()
    }
}

/// The impostors of one result.
pub(crate) struct Impostors {
    dtype: DType,
    /// Indices of the first axis, and elements of one.
    first: usize,
    of_first: usize,
    candidates: Vec<Candidate>,
    /// The bias of the right result, of which nothing has been seen yet.
    unbiased: Vec<Leaning>,
    /// The value of the constant: the root mean square of the first piece that is not 0.
    pub(super) constant: Option<f64>,
    /// The largest |truth|.
    scale: f64,
    /// The truth of the first index.
    head: Vec<f64>,
    /// The last index seen, while rows shifted by one may pass.
    last: Option<Last>,
}

/// One index, kept until the next is there.
struct Last {
    truth: Vec<f64>,
    bound: Vec<f64>,
    twin: Option<[Vec<f64>; 3]>,
    others: Vec<(&'static str, Vec<f64>)>,
}

/// One wrong result.
struct Candidate {
    name: &'static str,
    /// Whether it has been within the bound throughout.
    within: bool,
    /// How far it is from the truth.
    farthest: f64,
    /// Its biases, by direction.
    leanings: Vec<Leaning>,
}

impl Impostors {
    /// Of a result of this shape, stored in `dtype`, which bias does not judge.
    pub(crate) fn new(dtype: DType, shape: &[usize]) -> Self {
        let first = shape.first().copied().unwrap_or(1);
        let of_first = shape.iter().skip(1).product();
        let (candidates, unbiased, head) = (Vec::new(), Vec::new(), Vec::new());
        Self { dtype, first, of_first, candidates, unbiased, constant: None, scale: 0.0, head, last: None }
    }

    /// The same where bias judges; `leaning` has seen nothing yet.
    pub(crate) fn judged_by(self, leaning: Leaning, directions: usize) -> Self {
        Self { unbiased: vec![leaning; directions], ..self }
    }

    /// Looks at the next indices. Most impostors fail within a few elements, and then cost nothing.
    pub(crate) fn look(&mut self, piece: &Piece<'_>) {
        if self.candidates.is_empty() {
            self.begin(piece);
        }
        if piece.truth.is_empty() || !self.candidates.iter().any(|candidate| candidate.within) {
            return;
        }
        let truth = piece.truth;
        self.scale = truth.iter().fold(self.scale, |largest, value| largest.max(value.abs()));
        if self.constant.is_none() {
            let rms = (truth.iter().map(|value| value * value).sum::<f64>() / truth.len() as f64).sqrt();
            self.constant = (rms > 0.0).then_some(rms);
        }
        if self.head.is_empty() {
            self.head = truth[..self.of_first].to_vec();
        }
        let constant = self.constant.unwrap_or(1.0);
        let mut candidates = std::mem::take(&mut self.candidates);
        for candidate in candidates.iter_mut().filter(|candidate| candidate.within) {
            match candidate.name {
                ZEROS => candidate.try_on(self.dtype, piece, piece.others, |_| 0.0),
                CONSTANT => candidate.try_on(self.dtype, piece, piece.others, |_| constant),
                FLIPPED => candidate.try_on(self.dtype, piece, piece.others, |at| -truth[at]),
                SHIFTED => self.shift(candidate, piece),
                other => match piece.others.iter().find(|(name, _)| *name == other) {
                    Some((_, values)) => candidate.try_on(self.dtype, piece, piece.others, |at| values[at]),
                    None => candidate.within = false,
                },
            }
        }
        self.candidates = candidates;
    }

    fn begin(&mut self, piece: &Piece<'_>) {
        let shifted = (self.first > 1).then_some(SHIFTED);
        let names =
            [ZEROS, CONSTANT, FLIPPED].into_iter().chain(shifted).chain(piece.others.iter().map(|(name, _)| *name));
        debug_assert!(self.unbiased.is_empty() || self.unbiased.len() == piece.directions());
        let leanings = &self.unbiased;
        let candidate = |name| Candidate { name, within: true, farthest: 0.0, leanings: leanings.clone() };
        self.candidates = names.map(candidate).collect();
    }

    /// Row i of the impostor is row i + 1 of the truth.
    fn shift(&mut self, candidate: &mut Candidate, piece: &Piece<'_>) {
        let (row, truth) = (self.of_first, piece.truth);
        if let Some(last) = self.last.take() {
            candidate.follow(self.dtype, &last, &truth[..row]);
            if !candidate.within {
                return;
            }
        }
        let before_last = truth.len() - row;
        let others: Vec<(&'static str, &[f64])> =
            piece.others.iter().map(|(name, values)| (*name, &values[..before_last])).collect();
        candidate.try_on(self.dtype, &piece.part(0, before_last), &others, |at| truth[at + row]);
        if candidate.within {
            let kept = |values: &[f64]| values[before_last..].to_vec();
            self.last = Some(Last {
                truth: kept(truth),
                bound: kept(piece.bound),
                twin: piece.twin.map(|twin| [twin.truth, twin.random, twin.systematic].map(kept)),
                others: piece.others.iter().map(|(name, values)| (*name, kept(values))).collect(),
            });
        }
    }

    /// Those that pass: within the bound throughout, unbiased, and not the truth.
    pub(crate) fn finish(mut self) -> Vec<&'static str> {
        let (last, dtype, scale) = (self.last.take(), self.dtype, self.scale);
        let shifted = self.candidates.iter_mut().find(|candidate| candidate.name == SHIFTED);
        if let (Some(last), Some(shifted)) = (last, shifted) {
            shifted.follow(dtype, &last, &self.head);
        }
        let passing = self.candidates.into_iter().filter(|candidate| {
            candidate.within && candidate.farthest > SAME * scale && biases(&candidate.leanings).next().is_none()
        });
        passing.map(|candidate| candidate.name).collect()
    }
}

impl Candidate {
    /// Whether these values, once stored, are within the bound, and where they lean to.
    fn try_on(
        &mut self,
        dtype: DType,
        piece: &Piece<'_>,
        others: &[(&'static str, &[f64])],
        value: impl Fn(usize) -> f64 + Sync,
    ) {
        let mut farthest = self.farthest;
        self.within = piece.truth.iter().zip(piece.bound).enumerate().all(|(at, (&truth, &bound))| {
            let value = value(at);
            farthest = farthest.max((value - truth).abs());
            compare(dtype.round(value), truth, bound, dtype.largest()).is_none_or(|(error, _)| error <= bound)
        });
        self.farthest = farthest;
        if let (true, Some(twin)) = (self.within, &piece.twin) {
            let stored: Vec<f64> = (0..piece.truth.len()).map(|at| dtype.round(value(at))).collect();
            lean(&mut self.leanings, &stored, twin, others);
        }
    }

    /// The same for one index whose values are `next`.
    fn follow(&mut self, dtype: DType, last: &Last, next: &[f64]) {
        let twin = last.twin.as_ref().map(|[truth, random, systematic]| TwinPiece { truth, random, systematic });
        let others: Vec<(&'static str, &[f64])> =
            last.others.iter().map(|(name, values)| (*name, values.as_slice())).collect();
        let piece = Piece { truth: &last.truth, bound: &last.bound, twin, others: &[] };
        self.try_on(dtype, &piece, &others, |at| next[at]);
    }
}

/// Looks for bias in a piece: towards 0, and towards each of `others`.
pub(crate) fn lean(leanings: &mut [Leaning], values: &[f64], twin: &TwinPiece<'_>, others: &[(&'static str, &[f64])]) {
    let Some((to_zero, to_others)) = leanings.split_first_mut() else { return };
    to_zero.look(values, twin, |_| 0.0);
    for (leaning, (_, wrong)) in to_others.iter_mut().zip(others) {
        leaning.look(values, twin, |at| wrong[at]);
    }
}

/// The biases that a correct engine does not have, by direction.
pub(crate) fn biases(leanings: &[Leaning]) -> impl Iterator<Item = (usize, super::bias::Bias)> {
    let each = leanings.iter().enumerate().filter_map(|(direction, leaning)| Some((direction, leaning.bias()?)));
    each.filter(|(_, bias)| !bias.passes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{Case, Pairing};
    use crate::engine::{Output, RoundingModel};
    use crate::oracle::bound::numerics_of;

    /// Three rows of two, and a bound that some impostors are within.
    fn passing(bound: [f64; 6], ends: &[usize]) -> Vec<&'static str> {
        passing_in(1.0, bound, ends)
    }

    /// The same in some unit.
    fn passing_in(unit: f64, bound: [f64; 6], ends: &[usize]) -> Vec<&'static str> {
        let of = |shape: &[usize], deviation| passing_of(shape, unit, bound, ends, deviation);
        let passing = of(&[3, 2], None);
        assert_eq!(of(&[3, 2], Some(10.0)), passing, "a bias that deviations explain rejects nothing");
        for shape in [&[3, 2, 1][..], &[3, 1, 2]] {
            assert_eq!(of(shape, None), passing, "{shape:?}");
        }
        passing
    }

    /// The same as rows of some shape, where bias judges or does not.
    fn passing_of(
        shape: &[usize],
        unit: f64,
        bound: [f64; 6],
        ends: &[usize],
        deviation: Option<f64>,
    ) -> Vec<&'static str> {
        let (truth, swapped) = ([1.0, -2.0, 1.5, -1.0, 0.5, -1.5], [1.0, -2.0, 1.25, -1.0, 0.5, -1.5]);
        let [truth, swapped, bound] = [truth, swapped, bound].map(|numbers| numbers.map(|number| number * unit));
        let mut impostors = Impostors::new(DType::F32, shape);
        if deviation.is_some() {
            impostors = impostors.judged_by(leaning(Output::O, shape), 2);
        }
        let random = [deviation.unwrap_or(0.0) * unit; 6];
        for ends in ends.windows(2) {
            let piece = ends[0]..ends[1];
            let (truth, bound) = (&truth[piece.clone()], &bound[piece.clone()]);
            let (random, systematic) = (&random[piece.clone()], &[0.0; 6][piece.clone()]);
            let twin = deviation.is_some().then_some(TwinPiece { truth, random, systematic });
            impostors.look(&Piece { truth, bound, twin, others: &[("swapped", &swapped[piece.clone()])] });
        }
        impostors.finish()
    }

    /// Nothing seen yet of a result of a small layer with given pairs.
    fn leaning(output: Output, shape: &[usize]) -> Leaning {
        let problem = Case::new("3,8,2,2,1".parse().unwrap()).with_pairing(Pairing::TopK).problem::<f64>().unwrap();
        let numerics = numerics_of(DType::F32, RoundingModel::Fused);
        Leaning::new(output, (&problem, &numerics), DType::F32, shape)
    }

    /// Both are within the bound; whether they may lean so far is asked towards 0 and towards each other result.
    #[test]
    fn an_impostor_that_leans_farther_than_deviations_explain_does_not_pass() {
        let of = |truth: [f64; 4], others: &[(&'static str, &[f64])], deviation: f64| {
            let unbiased = leaning(Output::Ds, &[4]);
            let mut impostors = Impostors::new(DType::F32, &[4]).judged_by(unbiased, 1 + others.len());
            let twin = TwinPiece { truth: &truth, random: &[deviation; 4], systematic: &[0.0; 4] };
            impostors.look(&Piece { truth: &truth, bound: &[1.5; 4], twin: Some(twin), others });
            impostors.finish()
        };
        for (deviation, passes) in [(1.0, true), (1e-3, false)] {
            // The zeros lean to 0 alone.
            assert_eq!(of([1.0; 4], &[], deviation).contains(&ZEROS), passes, "{deviation}");
            // Half above numbers whose sum is 0 leans to nothing but itself.
            let truth = [1.0, -2.0, 2.0, -1.0];
            let others: &[(&'static str, &[f64])] = &[("half above", &truth.map(|number| number + 0.5))];
            assert_eq!(of(truth, others, deviation).contains(&"half above"), passes, "{deviation}");
        }
        // Every element counts, the first and the last too: 5 deviations are not beyond the limit, 500 are.
        for at in 0..4 {
            let truth = [1.0, -2.0, 2.0, -1.0];
            let mut above = truth;
            above[at] += 0.5;
            let others: &[(&'static str, &[f64])] = &[("half above", &above)];
            for (deviation, passes) in [(0.1, true), (1e-3, false)] {
                assert_eq!(of(truth, others, deviation).contains(&"half above"), passes, "{at}: {deviation}");
            }
        }
    }

    /// Where there is no root mean square but 0, the constant is 1.
    #[test]
    fn beside_zeros_the_constant_is_one() {
        for (bound, passes) in [(1.0, true), (0.75, false)] {
            let mut impostors = Impostors::new(DType::F32, &[1, 2]);
            impostors.look(&Piece { truth: &[0.0; 2], bound: &[bound; 2], twin: None, others: &[] });
            assert_eq!(impostors.finish().contains(&CONSTANT), passes, "{bound}");
        }
    }

    #[test]
    fn impostors_pass_piece_by_piece_as_they_pass_at_once() {
        // The last row shifts into the first.
        let (shifts, not_around) = ([0.5, 1.0, 1.0, 0.5, 0.5, 0.5], [0.5, 1.0, 1.0, 0.5, 0.25, 0.5]);
        // The first row does not take the second's place.
        let not_first = [0.5, 0.25, 1.0, 0.5, 0.5, 0.5];
        for ends in [&[0, 6][..], &[0, 2, 6], &[0, 2, 2, 4, 6]] {
            assert_eq!(passing([2.0; 6], ends), [ZEROS, SHIFTED, "swapped"], "{ends:?}");
            // An element that may be beyond the range decides nothing.
            let beyond = [2.0, 2.0, f64::INFINITY, 2.0, 2.0, 2.0];
            assert_eq!(passing(beyond, ends), [ZEROS, SHIFTED, "swapped"], "{ends:?}");
            assert_eq!(passing(shifts, ends), [SHIFTED, "swapped"], "{ends:?}");
            assert_eq!(passing(not_around, ends), ["swapped"], "{ends:?}");
            assert_eq!(passing(not_first, ends), ["swapped"], "{ends:?}");
            assert_eq!(passing([0.125; 6], ends), [""; 0], "{ends:?}");
            for unit in [-60.0, 60.0].map(libm::exp2) {
                assert_eq!(passing_in(unit, [2.0; 6], ends), [ZEROS, SHIFTED, "swapped"], "{ends:?} by {unit}");
                assert_eq!(passing_in(unit, [0.125; 6], ends), [""; 0], "{ends:?} by {unit}");
            }
        }
    }

    /// What is off by roundings of f64 is the truth.
    #[test]
    fn a_known_wrong_result_that_is_the_truth_but_for_roundings_does_not_pass() {
        for (off, passes) in [(1e-12, false), (1e-6, true)] {
            let truth = [1e-3, -2e-3];
            let other = truth.map(|value| value * (1.0 + off));
            let mut impostors = Impostors::new(DType::F64, &[1, 2]);
            impostors.look(&Piece { truth: &truth, bound: &[1e-5; 2], twin: None, others: &[("other", &other)] });
            assert_eq!(impostors.finish().contains(&"other"), passes, "{off}");
        }
    }

    /// A constant of 0 would be the zeros.
    #[test]
    fn the_constant_is_the_root_mean_square_of_the_first_piece_that_is_not_0() {
        let mut impostors = Impostors::new(DType::F32, &[4, 2]);
        for (truth, constant) in [([0.0, 0.0], None), ([0.5, -0.5], Some(0.5)), ([6.0, -8.0], Some(0.5))] {
            impostors.look(&Piece { truth: &truth, bound: &[9.0; 2], twin: None, others: &[] });
            assert_eq!(impostors.constant, constant);
        }
    }

    #[test]
    fn a_known_wrong_result_that_a_piece_does_not_have_does_not_pass() {
        let others: &[(&'static str, &[f64])] = &[("swapped", &[1.5, 2.5])];
        for (second, passes) in [(others, true), (&[], false)] {
            let mut impostors = Impostors::new(DType::F32, &[2, 2]);
            for others in [others, second] {
                impostors.look(&Piece { truth: &[1.0, 2.0], bound: &[0.75; 2], twin: None, others });
            }
            assert_eq!(impostors.finish().contains(&"swapped"), passes);
        }
    }
}
