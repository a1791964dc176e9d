//! Results of kernels on their way to their judge: of experts, one after the other, or of tokens.

use std::ops::Range;

use ndarray::{Array2, Dimension};
use rayon::prelude::*;

use crate::engine::{Output, Results};
use crate::error::{Error, Result};
use crate::oracle::bound::buffers::Buffers;
use crate::oracle::bound::matrix::{Balls, Balls2};
use crate::oracle::bound::midpoints::Midpoints;
use crate::oracle::bound::{Keep, Model, place_of};
use crate::shape::ExpertId;

/// Tokens that one task adds up.
const TOKENS: usize = 64;

/// Some elements of one result of one kernel, one after the other in row-major order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelPiece<'k> {
    pub(crate) kernel: &'static str,
    pub(crate) output: Output,
    /// Of the whole result.
    pub(crate) shape: &'k [usize],
    /// Where the piece begins.
    pub(crate) place: usize,
    pub(crate) truth: &'k [f64],
    pub(crate) bound: &'k [f64],
}

/// Judges the results that are there and wanted.
pub(super) struct Bounds<'r, 'p> {
    model: &'r Model<'r, 'p>,
    results: &'r Results,
    wanted: Keep<'r>,
    judge: &'r mut dyn FnMut(&KernelPiece<'_>) -> Result<()>,
    pub(super) buffers: &'r Buffers,
    outcome: Result<()>,
}

impl<'r, 'p> Bounds<'r, 'p> {
    pub(super) fn new(
        model: &'r Model<'r, 'p>,
        results: &'r Results,
        wanted: Keep<'r>,
        judge: &'r mut dyn FnMut(&KernelPiece<'_>) -> Result<()>,
        buffers: &'r Buffers,
    ) -> Self {
        Self { model, results, wanted, judge, buffers, outcome: Ok(()) }
    }

    pub(super) fn finish(self) -> Result<()> {
        self.outcome
    }

    pub(super) fn wants(&self, outputs: &[Output]) -> bool {
        self.outcome.is_ok()
            && outputs.iter().any(|&output| self.results.contains_key(&output) && (self.wanted)(output))
    }

    /// A result as a whole.
    pub(super) fn push<D: Dimension>(&mut self, kernel: &'static str, output: Output, balls: Balls<D>) {
        let Balls { mid, rad } = balls;
        self.look(kernel, output, mid.shape(), 0, [mid.as_slice(), rad.as_slice()]);
    }

    fn look(
        &mut self,
        kernel: &'static str,
        output: Output,
        shape: &[usize],
        place: usize,
        numbers: [Option<&[f64]>; 2],
    ) {
        if !self.wants(&[output]) {
            return;
        }
        self.outcome = match numbers {
            [Some(truth), Some(bound)] => (self.judge)(&KernelPiece { kernel, output, shape, place, truth, bound }),
            _ => Err(Error::internal(format!("{output} is not in row-major order"))),
        };
    }

    /// Results by expert, a few experts for each thread at once, and what else `compute` gives of every expert
    /// with tokens. The gradients of an expert without are exact zeros.
    pub(super) fn each_expert<const N: usize, V: Send>(
        &mut self,
        kernel: &'static str,
        outputs: [Output; N],
        compute: impl Fn(&Midpoints<'_>, ExpertId) -> ([Balls2; N], V) + Sync,
    ) -> Vec<V> {
        let (model, buffers) = (self.model, self.buffers);
        let shapes = outputs.map(|output| output.shape(model.problem, model.routing.routed()));
        for (output, shape) in outputs.iter().zip(&shapes) {
            self.look(kernel, *output, shape, 0, [Some(&[]), Some(&[])]);
        }
        let mut others = Vec::new();
        let experts: Vec<ExpertId> = (0..model.routing.experts() as u32).map(ExpertId).collect();
        for experts in experts.chunks(2 * rayon::current_num_threads()) {
            let computed: Vec<Option<([Balls2; N], V)>> = experts
                .par_iter()
                .map(|&expert| {
                    let rows = model.routing.rows_of_expert(expert);
                    (!rows.is_empty()).then(|| compute(&Midpoints::new(buffers), expert))
                })
                .collect();
            for (&expert, computed) in experts.iter().zip(computed) {
                let Some((results, other)) = computed else {
                    for (output, shape) in outputs.iter().zip(&shapes) {
                        // Of results by row it has none.
                        if let [_, rows, columns] = shape[..] {
                            let zeros = Array2::zeros((rows, columns));
                            let place = place_of(*output, model.problem, model.routing, expert);
                            self.look(kernel, *output, shape, place, [zeros.as_slice(); 2]);
                        }
                    }
                    continue;
                };
                for ((output, shape), balls) in outputs.iter().zip(&shapes).zip(results) {
                    let place = place_of(*output, model.problem, model.routing, expert);
                    self.look(kernel, *output, shape, place, [balls.mid.as_slice(), balls.rad.as_slice()]);
                    model.give(buffers, balls);
                }
                others.push(other);
            }
        }
        others
    }

    /// A result by token, some tokens at once.
    pub(super) fn each_token(
        &mut self,
        kernel: &'static str,
        output: Output,
        compute: impl Fn(Range<usize>) -> Balls2 + Sync,
    ) {
        let (tokens, columns) = (self.model.problem.t(), self.model.problem.d());
        let shape = [tokens, columns];
        self.look(kernel, output, &shape, 0, [Some(&[]), Some(&[])]);
        let pieces: Vec<Range<usize>> =
            (0..tokens).step_by(TOKENS).map(|first| first..tokens.min(first + TOKENS)).collect();
        for pieces in pieces.chunks(4 * rayon::current_num_threads()) {
            let computed: Vec<Balls2> = pieces.par_iter().cloned().map(&compute).collect();
            for (piece, Balls2 { mid, rad }) in pieces.iter().zip(computed) {
                self.look(kernel, output, &shape, piece.start * columns, [mid.as_slice(), rad.as_slice()]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Record;
    use crate::case::{Case, Load, Pairing};
    use crate::oracle::kernel::each;
    use crate::sonic::cpu::CpuEngine;
    use crate::{Convention, Engine, Problem};

    /// Wherever the judge stops: at a result as a whole, of an expert, or of some tokens.
    #[test]
    fn nothing_is_judged_after_the_first_error_of_the_judge() {
        let pairing = Pairing::Router { convention: Convention::SoftmaxOverTopK, load: Load::Biased };
        let case = Case::new("20,12,10,4,2".parse().unwrap()).with_biases().with_pairing(pairing);
        let problem: Problem<'_, f32> = case.problem().unwrap();
        let engine = CpuEngine::<f32>::new();
        let outcome = crate::run(&engine, &problem, Record::Intermediates).unwrap();
        let (wide, numerics) = (problem.widen(), Engine::<f32>::numerics(&engine));
        let judged = |errors_at: usize| {
            let mut pieces = 0;
            let outcome = each(&wide, &outcome.routing, &outcome.results, &numerics, &|_| true, &mut |_| {
                pieces += 1;
                if pieces == errors_at { Err(Error::internal("the judge stops")) } else { Ok(()) }
            });
            (pieces, outcome.map_err(|error| error.to_string()))
        };
        let (all, outcome) = judged(usize::MAX);
        assert_eq!(outcome, Ok(()));
        for errors_at in 1..=all {
            let (pieces, outcome) = judged(errors_at);
            assert_eq!(pieces, errors_at);
            assert!(outcome.unwrap_err().contains("the judge stops"));
        }
    }
}
