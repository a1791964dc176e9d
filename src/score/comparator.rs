//! What published suites accept, by their own formulas.
//!
//! c is the result, r the reference, all elements of one output; an output that is not accepted fails
//! the suite. Suites that compare with plain bf16 code are given that: this crate's layer with a
//! rounding at every point where op-by-op code has one. The others compare with a reference of higher
//! precision, and are given the f64 truth, which can only help them.
//!
//! | suite | accepts | r |
//! | --- | --- | --- |
//! | SonicMoE, `tests/moe_test.py` | \|c − r\| ≤ atol + 2·10⁻²\|r\| everywhere, atol 1.4·10⁻² for o, 2·10⁻² for gradients | f64 (its PyTorch layer under autocast to f32) |
//! | PyTorch, `torch.testing.assert_close` in bf16 | \|c − r\| ≤ 10⁻⁵ + 1.6·10⁻²\|r\| everywhere | bf16 |
//! | KernelBench, `torch.allclose` | \|c − r\| ≤ 10⁻² + 10⁻²\|r\| everywhere | bf16 |
//! | Liger, bf16 tests of its SwiGLU and MoE | \|c − r\| ≤ 10⁻¹ + 10⁻²\|r\| everywhere | bf16 |
//! | DeepGEMM, `calc_diff` | 1 − 2⟨c, r⟩/(‖c‖² + ‖r‖²) < 10⁻³, or 10⁻⁵ | f64 |
//! | FlashAttention | max\|c − r\| ≤ 2·max\|p − r\|, p the bf16 code | f64 |
//! | CUTLASS profiler, `relatively_equal` | c = r, or \|c − r\| < ε(\|c\| + \|r\|); < ε·floor where one of them is 0 or both together are below the floor; ε = 0.05, floor = 2⁻⁸ | f64 |
//! | FlashInfer, `check_accuracy` of its fused MoE | all finite, and \|c − r\| ≤ 0.1 + 0.85\|r\| for 80% of the elements | f64 |
//!
//! A NaN is never close to anything.

use ndarray::ArrayD;

use crate::engine::Output;
use crate::oracle::energy;

/// A published suite's way to compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Comparator {
    /// SonicMoE's own test.
    SonicMoe,
    /// `torch.testing.assert_close` with its defaults for bf16.
    AssertClose,
    /// KernelBench.
    KernelBench,
    /// Liger.
    Liger,
    /// DeepGEMM's difference, at 10⁻³.
    DeepGemmCoarse,
    /// The same at 10⁻⁵.
    DeepGemmFine,
    /// FlashAttention's twice the error of plain code.
    FlashAttention,
    /// The CUTLASS profiler.
    Cutlass,
    /// FlashInfer's fused MoE.
    FlashInfer,
}

/// One output with what it is compared with.
#[derive(Clone, Copy, Debug)]
pub struct Compared<'r> {
    /// Which output.
    pub output: Output,
    /// c.
    pub values: &'r ArrayD<f64>,
    /// The f64 truth.
    pub truth: &'r ArrayD<f64>,
    /// What plain bf16 code gives.
    pub plain: &'r ArrayD<f64>,
}

impl Comparator {
    /// Every comparator.
    pub const ALL: [Self; 9] = [
        Self::SonicMoe,
        Self::AssertClose,
        Self::KernelBench,
        Self::Liger,
        Self::DeepGemmCoarse,
        Self::DeepGemmFine,
        Self::FlashAttention,
        Self::Cutlass,
        Self::FlashInfer,
    ];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::SonicMoe => "SonicMoE",
            Self::AssertClose => "assert_close",
            Self::KernelBench => "KernelBench",
            Self::Liger => "Liger",
            Self::DeepGemmCoarse => "DeepGEMM 1e-3",
            Self::DeepGemmFine => "DeepGEMM 1e-5",
            Self::FlashAttention => "FlashAttention",
            Self::Cutlass => "CUTLASS",
            Self::FlashInfer => "FlashInfer",
        }
    }

    /// Whether the suite accepts this output.
    pub fn accepts(self, compared: Compared<'_>) -> bool {
        let Compared { output, values, truth, plain } = compared;
        let to_truth = || values.iter().copied().zip(truth.iter().copied());
        let to_plain = || values.iter().copied().zip(plain.iter().copied());
        match self {
            Self::SonicMoe => {
                let atol = if output == Output::O { 1.4e-2 } else { 2e-2 };
                to_truth().all(close(atol, 2e-2))
            }
            Self::AssertClose => to_plain().all(close(1e-5, 1.6e-2)),
            Self::KernelBench => to_plain().all(close(1e-2, 1e-2)),
            Self::Liger => to_plain().all(close(1e-1, 1e-2)),
            Self::DeepGemmCoarse => energy::difference(to_truth()) < 1e-3,
            Self::DeepGemmFine => energy::difference(to_truth()) < 1e-5,
            Self::FlashAttention => {
                let most = |values: &ArrayD<f64>| {
                    let errors = values.iter().zip(truth).map(|(value, truth)| (value - truth).abs());
                    errors.fold(0.0, |most: f64, error| if error.is_nan() { f64::INFINITY } else { most.max(error) })
                };
                most(values) <= 2.0 * most(plain)
            }
            Self::Cutlass => to_truth().all(|(c, r)| {
                let (epsilon, floor) = (0.05, 1.0 / 256.0);
                let (error, magnitude) = ((c - r).abs(), c.abs() + r.abs());
                let near_zero = c == 0.0 || r == 0.0 || magnitude < floor;
                c == r || error < epsilon * if near_zero { floor } else { magnitude }
            }),
            Self::FlashInfer => {
                let all = to_truth().count() as f64;
                let matching = to_truth().filter(|&pair| close(0.1, 0.85)(pair)).count() as f64;
                values.iter().all(|value| value.is_finite()) && matching >= 0.8 * all
            }
        }
    }
}

/// |c − r| ≤ atol + rtol·|r|.
fn close(atol: f64, rtol: f64) -> impl Fn((f64, f64)) -> bool {
    move |(c, r)| (c - r).abs() <= atol + rtol * r.abs()
}

#[cfg(test)]
mod tests {
    use ndarray::arr1;

    use super::*;

    fn accepting(values: &[f64], truth: &[f64]) -> Vec<Comparator> {
        let [values, truth] = [values, truth].map(|values| arr1(values).into_dyn());
        // Plain code that is off by 2⁻⁹.
        let plain = truth.mapv(|truth| truth * (1.0 + 1.0 / 512.0));
        let compared = Compared { output: Output::O, values: &values, truth: &truth, plain: &plain };
        Comparator::ALL.into_iter().filter(|comparator| comparator.accepts(compared)).collect()
    }

    #[test]
    fn every_comparator_accepts_the_truth_and_none_a_nan() {
        assert_eq!(accepting(&[1.0, -2.0, 0.0], &[1.0, -2.0, 0.0]), Comparator::ALL);
        assert_eq!(accepting(&[f64::NAN, -2.0], &[1.0, -2.0]), []);
    }

    #[test]
    fn zeros_pass_absolute_tolerances_at_upstream_s_scale() {
        use Comparator::{FlashInfer, KernelBench, Liger, SonicMoe};
        assert_eq!(accepting(&[0.0; 3], &[6e-4, -3e-4, 1e-4]), [SonicMoe, KernelBench, Liger, FlashInfer]);
    }

    #[test]
    fn a_scale_error_of_four_percent_passes_the_energy_difference_at_1e_3() {
        let truth = [1.0, -0.5, 2.0];
        let found = accepting(&truth.map(|truth| 1.04 * truth), &truth);
        assert!(found.contains(&Comparator::DeepGemmCoarse) && !found.contains(&Comparator::DeepGemmFine));
    }
}
