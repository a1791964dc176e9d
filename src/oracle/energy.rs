//! Energy difference: 1 − 2⟨c, r⟩ / (‖c‖² + ‖r‖²), a coarse screen over a whole result c with truth r.
//!
//! It is 0 for c = r, 1 for orthogonal results and for c = 0, 2 for c = −r, and the same as
//! ‖c − r‖² / (‖c‖² + ‖r‖²), which is how it is computed: without cancellation. Since it squares, a
//! relative error ε of all elements shows as ε²/2 and one wrong row of m as 1/(2m): published suites
//! that allow 10⁻³ accept a scale error of 4.5%. So it never judges alone; its merit is that one
//! number of one pass says whether a result is of another kind altogether.

use crate::engine::Stored;
use crate::oracle::judge::Bounded;

/// 1 − 2⟨c, r⟩ / (‖c‖² + ‖r‖²) for the pairs (c, r): 0 where both are 0, NaN where a number is none.
///
/// ```
/// use sonicmoe::oracle::energy::difference;
/// assert_eq!(difference([(2.0, 2.0), (-1.0, -1.0)]), 0.0);
/// assert_eq!(difference([(0.0, 3.0)]), 1.0);
/// assert_eq!(difference([(-3.0, 3.0)]), 2.0);
/// ```
pub fn difference(pairs: impl IntoIterator<Item = (f64, f64)>) -> f64 {
    let (mut error, mut energy) = (0.0, 0.0);
    for (c, r) in pairs {
        error += (c - r) * (c - r);
        energy += c * c + r * r;
    }
    if energy == 0.0 { 0.0 } else { error / energy }
}

/// A result's energy difference, and the most that a correct engine's may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Screen {
    /// 1 − 2⟨c, r⟩ / (‖c‖² + ‖r‖²) over the elements that may be judged.
    pub difference: f64,
    /// With D = ‖bound‖ ≥ ‖c − r‖, and ‖c‖ ≥ ‖r‖ − D: D² / ((‖r‖ − D)² + ‖r‖²), or D²/‖r‖² from D = ‖r‖ on.
    pub limit: f64,
}

impl Screen {
    /// Whether the result may be right.
    pub fn passes(&self) -> bool {
        self.difference <= self.limit
    }
}

/// Screens one result. Elements whose truth or bound lies beyond the range of the stored type are
/// left out, as [`judge`](super::judge()) leaves them out; shapes that differ fail.
pub fn screen(stored: &Stored, bounded: &Bounded) -> Screen {
    let Bounded { truth, bound } = bounded;
    if stored.values.shape() != truth.shape() || bound.shape() != truth.shape() {
        return Screen { difference: f64::NAN, limit: 0.0 };
    }
    let largest = stored.dtype.largest();
    let judged = || {
        let all = stored.values.iter().zip(truth).zip(bound);
        all.filter(|((_, truth), bound)| truth.abs() + **bound <= largest)
    };
    let difference = difference(judged().map(|((&c, &r), _)| (c, r)));
    let squares = judged().fold([0.0; 2], |[r, d], ((_, truth), bound)| [r + truth * truth, d + bound * bound]);
    let [r, d] = squares.map(f64::sqrt);
    let limit = match r {
        0.0 => f64::from(d > 0.0),
        r => d * d / ((r - d).max(0.0).powi(2) + r * r),
    };
    // Sums of squares, in f64, of at most 2³² terms.
    Screen { difference, limit: limit * (1.0 + 1e-6) }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use ndarray::ArrayD;

    use super::*;
    use crate::case::Case;
    use crate::element::DType;
    use crate::engine::{Engine, Record, run};
    use crate::oracle::bound;
    use crate::sonic::cpu::CpuEngine;

    fn screened(change: impl Fn(&mut ArrayD<f64>)) -> Vec<bool> {
        let problem = Case::new("67,40,24,5,2".parse().unwrap()).with_biases().problem::<bf16>().unwrap();
        let engine = CpuEngine::<f32>::new();
        let outcome = run(&engine, &problem, Record::Results).unwrap();
        let numerics = Engine::<bf16>::numerics(&engine);
        let bounds = bound::layer(&problem.widen(), &outcome.routing, &numerics).unwrap();
        let mut results = outcome.results;
        results
            .iter_mut()
            .map(|(output, stored)| {
                change(&mut stored.values);
                screen(stored, &bounds[output]).passes()
            })
            .collect()
    }

    #[test]
    fn a_correct_engine_passes_in_every_result() {
        assert!(screened(|_| ()).into_iter().all(|passes| passes));
    }

    #[test]
    fn results_of_another_kind_fail_in_every_output() {
        assert!(!screened(|values| values.fill(0.0)).into_iter().any(|passes| passes), "zeros");
        assert!(!screened(|values| values.mapv_inplace(|v| -v)).into_iter().any(|passes| passes), "the sign");
        let nan = |values: &mut ArrayD<f64>| *values.iter_mut().next().unwrap() = f64::NAN;
        assert!(!screened(nan).into_iter().any(|passes| passes), "one NaN");
    }

    fn of_constants(value: f64, bound: f64) -> Screen {
        let all = |value| ArrayD::from_elem(vec![3], value);
        screen(&Stored { dtype: DType::F32, values: all(value) }, &Bounded { truth: all(0.0), bound: all(bound) })
    }

    #[test]
    fn where_the_truth_is_zero_only_zeros_pass_unless_the_bound_leaves_room() {
        assert_eq!(of_constants(0.0, 0.0), Screen { difference: 0.0, limit: 0.0 });
        assert!(of_constants(0.0, 0.0).passes() && !of_constants(1e-30, 0.0).passes());
        assert_eq!(of_constants(1e-30, 0.0), Screen { difference: 1.0, limit: 0.0 });
        for bound in [2.0, 1e-9] {
            assert!(of_constants(0.0, bound).passes() && of_constants(0.5 * bound, bound).passes());
        }
    }

    /// 1 − 2⟨c, r⟩ / (‖c‖² + ‖r‖²), and what it may be at most.
    #[test]
    fn a_difference_and_its_limit_are_those_of_the_formulas() {
        let of = |values: &[f64]| ArrayD::from_shape_vec(vec![values.len()], values.to_vec()).unwrap();
        let screened = |c: &[f64], r: &[f64], bound: &[f64]| {
            screen(&Stored { dtype: DType::F16, values: of(c) }, &Bounded { truth: of(r), bound: of(bound) })
        };
        let close = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-12, "{found} for {expected}");
        // ⟨c, r⟩ = 10, ‖c‖² = 13, ‖r‖² = 9, ‖bound‖ = 1.
        let Screen { difference, limit } = screened(&[2.0, 3.0, 0.0], &[2.0, 2.0, 1.0], &[0.6, 0.0, 0.8]);
        close(difference, 1.0 - 20.0 / 22.0);
        close(limit, 1.0 / (4.0 + 9.0) * (1.0 + 1e-6));
        // ‖bound‖ = 6 of ‖r‖ = 3: nothing is known of ‖c‖.
        close(screened(&[2.0, 3.0, 0.0], &[2.0, 2.0, 1.0], &[6.0, 0.0, 0.0]).limit, 4.0 * (1.0 + 1e-6));
        // What may be the largest number of the type is judged, and what may be beyond it is not.
        let largest = DType::F16.largest();
        close(
            screened(&[1.0, 0.0], &[1.0, largest - 8.0], &[0.0, 8.0]).difference,
            1.0 - 2.0 / (2.0 + (largest - 8.0).powi(2)),
        );
        close(screened(&[1.0, 0.0], &[1.0, largest - 8.0], &[0.0, 9.0]).difference, 0.0);
        close(screened(&[1.0, 0.0], &[1.0, 8.0 - largest], &[0.0, 9.0]).difference, 0.0);
    }

    #[test]
    fn a_result_of_another_shape_fails() {
        let values = |length| ArrayD::from_elem(vec![length], 1.0);
        let stored = Stored { dtype: DType::F32, values: values(2) };
        for (truth, bound) in [(3, 3), (3, 2), (2, 3)] {
            let screen = screen(&stored, &Bounded { truth: values(truth), bound: values(bound) });
            assert!(screen.difference.is_nan() && screen.limit == 0.0 && !screen.passes());
        }
        assert!(screen(&stored, &Bounded { truth: values(2), bound: values(2) }).passes());
    }

    #[test]
    fn it_is_coarse_a_scale_error_of_one_percent_passes() {
        assert!(screened(|values| values.mapv_inplace(|v| 1.01 * v)).into_iter().any(|passes| passes));
    }
}
