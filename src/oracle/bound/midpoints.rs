//! Midpoints of one expert's products, computed once for all arithmetics that follow the layer.
//!
//! A midpoint is the truth in f64, whatever an engine rounds: engines of one rounding model but different
//! types, or bounds and deviations, differ in radii alone.

use std::cell::RefCell;
use std::collections::BTreeMap;

use ndarray::{Array2, ArrayView1};

use super::ball::Arithmetic;
use super::matrix::{Balls2, Operand, midpoint};

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

/// The products so far, where more than one arithmetic is to read them.
#[derive(Debug, Default)]
pub(crate) struct Midpoints(Option<RefCell<BTreeMap<Step, Array2<f64>>>>);

impl Midpoints {
    /// For so many arithmetics.
    pub(super) fn shared_by(arithmetics: usize) -> Self {
        Self((arithmetics > 1).then(RefCell::default))
    }

    fn of(&self, step: Step, compute: impl FnOnce() -> Array2<f64>) -> Array2<f64> {
        match &self.0 {
            Some(known) => known.borrow_mut().entry(step).or_insert_with(compute).clone(),
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
        let mid = self.of(step, || midpoint(a, b, addend));
        arithmetic.matrix_product_about(mid, a, b, addend)
    }
}
