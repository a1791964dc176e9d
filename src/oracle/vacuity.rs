//! Vacuity: wrong results in the place of a right one. A check that lets one pass could not have failed.
//!
//! | impostor | a fault like it |
//! | --- | --- |
//! | zeros | a kernel that was never launched |
//! | a constant | a buffer filled once |
//! | the sign flipped | a subtraction the wrong way round |
//! | rows shifted by one | an index that is off by one |
//! | the previous case's output | a stale buffer |
//! | gate and up swapped | the other layout of w1 |
//!
//! Results are drawn at unit scale for this reason: at 0.02, as SonicMoE's own tests have it, SwiGLU is
//! so nearly bilinear that a swapped gate stays within every elementwise bound.

use std::borrow::Cow;
use std::collections::BTreeMap;

use ndarray::{ArrayD, Axis, Slice, concatenate};

use super::bound::ball::Measure;
use super::bound::{self, Model};
use super::impostors::{CONSTANT, FLIPPED, Impostors, Piece, ZEROS};
use super::judge::{Bounded, in_order};
use super::verdict::Verdict;
use crate::element::DType;
use crate::engine::{Numerics, Output, Stored};
use crate::error::{Error, Result};
use crate::problem::Problem;
use crate::routing::Routing;

/// A wrong result, and what it is.
pub type Impostor<'a> = (&'static str, &'a ArrayD<f64>);

/// The impostors that pass for `bounded`: zeros, a constant, the sign flipped, rows shifted by one, and
/// those of `others` that have its shape and are not the truth. `dtype` is the type that the result is
/// stored in. One passes if it is within the bound and `other_oracles` accept it too.
///
/// ```
/// use ndarray::arr2;
/// use sonicmoe::DType;
/// use sonicmoe::engine::Output;
/// use sonicmoe::oracle::{Bounded, vacuity};
///
/// let truth = arr2(&[[1.0, -2.0], [3.0, 0.5]]).into_dyn();
/// let wide = Bounded { bound: truth.mapv(|_| 3.5), truth };
/// assert_eq!(vacuity::passing(Output::O, DType::F32, &wide, &[], |_| Ok(true))?, ["zeros", "rows shifted by one"]);
/// # Ok::<(), sonicmoe::Error>(())
/// ```
///
/// # Errors
/// A bound of another shape than its truth.
pub fn passing(
    output: Output,
    dtype: DType,
    bounded: &Bounded,
    others: &[Impostor<'_>],
    other_oracles: impl Fn(&Stored) -> Result<bool>,
) -> Result<Vec<&'static str>> {
    let truth = &bounded.truth;
    if bounded.bound.shape() != truth.shape() {
        let (truth, bound) = (truth.shape(), bounded.bound.shape());
        return Err(Error::internal(format!("{output}: truth of {truth:?}, bound of {bound:?}")));
    }
    let others: Vec<(&'static str, Cow<'_, [f64]>)> = others
        .iter()
        .filter(|(_, values)| values.shape() == truth.shape())
        .map(|(name, values)| (*name, in_order(values)))
        .collect();
    let others: Vec<(&'static str, &[f64])> = others.iter().map(|(name, values)| (*name, &**values)).collect();
    let (in_rows, bound) = (in_order(truth), in_order(&bounded.bound));
    let mut impostors = Impostors::new(dtype, truth.shape());
    impostors.look(&Piece { truth: &in_rows, bound: &bound, twin: None, others: &others });
    let constant = impostors.constant.unwrap_or(1.0);
    let mut passing = Vec::new();
    for name in impostors.finish() {
        let values = match others.iter().find(|(other, _)| *other == name) {
            Some((_, values)) => ArrayD::from_shape_vec(truth.raw_dim(), values.to_vec()).unwrap_or_default(),
            None if name == ZEROS => ArrayD::zeros(truth.raw_dim()),
            None if name == CONSTANT => ArrayD::from_elem(truth.raw_dim(), constant),
            None if name == FLIPPED => truth.mapv(|value| -value),
            None => shifted_by_one(truth),
        };
        if other_oracles(&Stored { dtype, values: values.mapv_into(|value| dtype.round(value)) })? {
            passing.push(name);
        }
    }
    Ok(passing)
}

/// Vacuous if an impostor passes, else a pass.
pub fn verdict(passing: &[&'static str]) -> Verdict {
    if passing.is_empty() { Verdict::Pass } else { Verdict::Vacuous }
}

fn shifted_by_one(truth: &ArrayD<f64>) -> ArrayD<f64> {
    let tail = truth.slice_axis(Axis(0), Slice::from(1..));
    let head = truth.slice_axis(Axis(0), Slice::from(..1));
    concatenate(Axis(0), &[tail, head]).unwrap_or_else(|_| truth.clone())
}

/// What an engine computes that takes gate rows for up rows and the other way round: results of the
/// layer, rows of gate and up where the right layer has them. Empty without a gate.
///
/// `shared` is the layer beside it, if there is one, as [`bound::layer_beside`] takes it; without it only
/// what `keep` names is computed.
///
/// # Errors
/// As [`bound::layer`].
pub fn gate_and_up_swapped(
    problem: &Problem<'_, f64>,
    shared: Option<&Problem<'_, f64>>,
    routing: &Routing,
    numerics: &Numerics,
    keep: bound::Keep<'_>,
) -> Result<BTreeMap<Output, ArrayD<f64>>> {
    if !problem.activation().gated() {
        return Ok(BTreeMap::new());
    }
    match shared {
        None => {
            let model = Model::new(problem, routing, numerics, Measure::Midpoint).taking_gate_for_up();
            Ok(bound::run(&[model], keep)?.truths)
        }
        Some(shared) => {
            let bounds = bound::swapped_beside(problem, shared, routing, numerics)?;
            Ok(bounds.into_iter().map(|(output, Bounded { truth, .. })| (output, truth)).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{arr1, arr2};

    fn passing_under(bound: f64, others: &[Impostor<'_>]) -> Vec<&'static str> {
        let truth = arr2(&[[1.0, -2.0], [3.0, 0.5]]).into_dyn();
        let bounded = Bounded { bound: truth.mapv(|_| bound), truth };
        passing(Output::O, DType::F32, &bounded, others, |_| Ok(true)).unwrap()
    }

    #[test]
    fn a_wide_bound_lets_impostors_pass_and_a_narrow_one_none() {
        assert_eq!(verdict(&passing_under(0.01, &[])), Verdict::Pass);
        assert_eq!(passing_under(3.5, &[]), ["zeros", "rows shifted by one"]);
        assert_eq!(verdict(&passing_under(3.5, &[])), Verdict::Vacuous);
    }

    #[test]
    fn a_stale_output_passes_only_where_the_bound_is_wide_and_only_if_it_has_the_shape() {
        let stale = arr2(&[[2.0, -1.0], [2.0, 1.5]]).into_dyn();
        let other_shape = arr2(&[[2.0, -1.0]]).into_dyn();
        let others = [("the previous case's output", &stale), ("of another case", &other_shape)];
        assert!(passing_under(0.9, &others).is_empty());
        assert_eq!(passing_under(1.1, &others), ["the previous case's output"]);
    }

    #[test]
    fn the_other_oracles_see_the_constant_that_passes() {
        for (truth, constant) in [([0.0, 0.0], 1.0), ([3.0, -3.0], 3.0)] {
            let bounded = Bounded { truth: arr1(&truth).into_dyn(), bound: arr1(&[8.0; 2]).into_dyn() };
            let mut seen = std::cell::RefCell::new(Vec::new());
            passing(Output::Ds, DType::F32, &bounded, &[], |stored| {
                seen.borrow_mut().push(stored.values.clone());
                Ok(true)
            })
            .unwrap();
            let expected = arr1(&[constant; 2]).into_dyn();
            assert!(seen.get_mut().contains(&expected), "{seen:?}");
        }
    }

    #[test]
    fn a_bound_of_another_shape_than_its_truth_is_refused() {
        let bounded = Bounded { truth: arr2(&[[1.0, 2.0]]).into_dyn(), bound: arr2(&[[1.0], [2.0]]).into_dyn() };
        let error = passing(Output::O, DType::F32, &bounded, &[], |_| Ok(true)).unwrap_err().to_string();
        assert!(error.contains("o: truth of [1, 2], bound of [2, 1]"), "{error}");
    }

    #[test]
    fn an_impostor_that_another_oracle_sees_does_not_pass() {
        let truth = arr2(&[[1.0, -2.0], [3.0, 0.5]]).into_dyn();
        let bounded = Bounded { bound: truth.mapv(|_| 3.5), truth };
        let not_zero = |stored: &Stored| Ok(stored.values.iter().any(|&value| value != 0.0));
        let left = passing(Output::O, DType::F32, &bounded, &[], not_zero).unwrap();
        assert_eq!(left, ["rows shifted by one"]);
    }

    /// Other oracles see what an impostor would hand out, rounded as it would be stored.
    #[test]
    fn other_oracles_see_the_numbers_of_each_impostor() {
        let truth = arr2(&[[1.0, -2.0], [3.0, 0.5], [1.5, 2.5]]).into_dyn();
        let stale = arr2(&[[2.0, -1.0], [2.0, 1.5], [1.0, 1.0 + 1e-9]]).into_dyn();
        let bounded = Bounded { bound: truth.mapv(|_| 100.0), truth: truth.clone() };
        let seen = std::cell::RefCell::new(Vec::new());
        let look = |stored: &Stored| {
            assert_eq!(stored.dtype, DType::F32);
            seen.borrow_mut().push(stored.values.clone());
            Ok(true)
        };
        let names = passing(Output::O, DType::F32, &bounded, &[("stale", &stale)], look).unwrap();
        let constant = |value: f64| truth.mapv(|_| value);
        let expected = |name: &str| match name {
            ZEROS => constant(0.0),
            FLIPPED => truth.mapv(|value| -value),
            "stale" => stale.mapv(|value| DType::F32.round(value)),
            "rows shifted by one" => arr2(&[[3.0, 0.5], [1.5, 2.5], [1.0, -2.0]]).into_dyn(),
            // The root mean square of the truth.
            CONSTANT => constant(DType::F32.round((22.75f64 / 6.0).sqrt())),
            other => panic!("{other}"),
        };
        assert_eq!(names.len(), 5, "{names:?}");
        for (name, values) in names.iter().zip(&*seen.borrow()) {
            assert_eq!(values, expected(name), "{name}");
        }
    }

    #[test]
    fn without_a_gate_there_is_none_to_swap() {
        let case = crate::case::Case::new("5,8,4,3,2".parse().unwrap()).with_pairing(crate::case::Pairing::TopK);
        let swapped = |activation| {
            let problem = case.clone().with_activation(activation).problem::<f64>().unwrap();
            let crate::Gating::Given { routing, .. } = problem.gating() else { panic!("given pairs") };
            let numerics = crate::engine::Engine::<f64>::numerics(&crate::sonic::cpu::CpuEngine::<f64>::new());
            gate_and_up_swapped(&problem, None, routing, &numerics, &|_| true).unwrap()
        };
        assert!(swapped(crate::Activation::Relu).is_empty());
        assert!(swapped(crate::Activation::SwiGlu).contains_key(&Output::Dw1));
    }

    #[test]
    fn the_truth_itself_is_no_impostor() {
        let zeros = ArrayD::zeros(vec![3, 2]);
        let bounded = Bounded { truth: zeros.clone(), bound: zeros.clone() };
        let itself = [("the previous case's output", &zeros)];
        assert!(passing(Output::Dw1, DType::BF16, &bounded, &itself, |_| Ok(true)).unwrap().is_empty());
    }
}
