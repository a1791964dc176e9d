//! What the arithmetics that follow one expert through its kernels have in common: the rows that it reads,
//! the midpoints of its products, and memory.
//!
//! A midpoint is the truth in f64, whatever an engine rounds: engines of one rounding model but different
//! types, or bounds and deviations, differ in radii alone.

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;

use ndarray::{Array2, ArrayView1, ArrayView2};

use super::Model;
use super::ball::Arithmetic;
use super::buffers::Buffers;
use super::matrix::{Balls2, Operand, midpoint};
use crate::shape::ExpertId;

/// The six grouped products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Step {
    /// X W1ᵀ.
    Up,
    /// A W2ᵀ.
    Down,
    /// dO W2, or dY W2.
    DownBackward,
    /// dO_eᵀ A′, or dY_eᵀ A.
    DownWeight,
    /// dH W1.
    UpBackward,
    /// dHᵀ X_e.
    UpWeight,
}

/// One expert's, on its way.
#[derive(Debug)]
pub(crate) struct Midpoints<'b> {
    pub(super) buffers: &'b Buffers,
    /// The products so far, where more than one arithmetic is to read them.
    known: Option<RefCell<BTreeMap<Step, Array2<f64>>>>,
    x: OnceCell<Array2<f64>>,
    dout: OnceCell<Array2<f64>>,
}

impl<'b> Midpoints<'b> {
    /// For one arithmetic.
    pub(crate) fn new(buffers: &'b Buffers) -> Self {
        Self::shared_by(1, buffers)
    }

    /// For so many arithmetics.
    pub(super) fn shared_by(arithmetics: usize, buffers: &'b Buffers) -> Self {
        let known = (arithmetics > 1).then(RefCell::default);
        Self { buffers, known, x: OnceCell::new(), dout: OnceCell::new() }
    }

    /// X_e: the rows of x that the expert reads.
    pub(super) fn x(&self, model: &Model<'_, '_>, expert: ExpertId) -> ArrayView2<'_, f64> {
        self.x.get_or_init(|| model.gather(self.buffers, model.problem.x(), expert)).view()
    }

    /// dO_e.
    pub(super) fn dout(&self, model: &Model<'_, '_>, expert: ExpertId) -> ArrayView2<'_, f64> {
        self.dout.get_or_init(|| model.gather(self.buffers, model.problem.dout(), expert)).view()
    }

    fn of(&self, step: Step, compute: impl FnOnce() -> Array2<f64>) -> Array2<f64> {
        match &self.known {
            Some(known) => self.buffers.copy(known.borrow_mut().entry(step).or_insert_with(compute)),
            None => compute(),
        }
    }

    /// A·B (+ one row of addends), summed in any order in the accumulator.
    pub(super) fn product(
        &self,
        step: Step,
        arithmetic: &Arithmetic,
        a: Operand<'_>,
        b: Operand<'_>,
        addend: Option<ArrayView1<'_, f64>>,
    ) -> Balls2 {
        let mid = self.of(step, || midpoint(self.buffers, a, b, addend));
        arithmetic.matrix_product_about(self.buffers, mid, a, b, addend)
    }

    /// Balls to be written.
    pub(super) fn balls(&self, model: &Model<'_, '_>, dim: (usize, usize)) -> Balls2 {
        let rad = if model.has_radii() { self.buffers.wide.matrix(dim) } else { self.buffers.zeros(dim) };
        Balls2 { mid: self.buffers.wide.matrix(dim), rad }
    }

    /// A copy of numbers that engine and truth share.
    pub(crate) fn exact(&self, model: &Model<'_, '_>, numbers: ArrayView2<'_, f64>) -> Balls2 {
        let mut balls = self.balls(model, numbers.dim());
        balls.mid.assign(&numbers);
        if model.has_radii() {
            balls.rad.fill(0.0);
        }
        balls
    }

    /// Takes back the memory of balls that nobody reads any more.
    pub(crate) fn give(&self, model: &Model<'_, '_>, balls: Balls2) {
        model.give(self.buffers, balls);
    }
}

impl Drop for Midpoints<'_> {
    fn drop(&mut self) {
        let known = self.known.take().map(RefCell::into_inner).unwrap_or_default();
        known.into_values().chain(self.x.take()).chain(self.dout.take()).for_each(|array| self.buffers.give(array));
    }
}
