//! The bounds of fixed layers, as they were. That they are sound and sharp is claimed elsewhere, of random layers,
//! and within what is random there: here every element's radius is compared, so that none moves by mistake.

use std::collections::BTreeMap;

use ndarray::ArrayD;
use sonicmoe::case::campaign::{Fixed, case};
use sonicmoe::case::table::edge_cases;
use sonicmoe::oracle::statistic;

use super::*;
use crate::kept::{Kept, Tolerance};

/// Every model, type and rounding, in turn.
fn arithmetics() -> Vec<Numerics> {
    use RoundingModel::{Eager, Fused};
    use RouterRounding::{Score, TensorType};
    let flushing = |numerics: Numerics| Numerics { flushes_denormals: true, ..numerics };
    vec![
        numerics(DType::BF16, Fused, Score),
        numerics(DType::F16, Eager, TensorType),
        Numerics { function_ulps: 16.0, ..numerics(DType::F32, Fused, Score) },
        flushing(numerics(DType::F16, Fused, TensorType)),
        Numerics { function_ulps: 1.0, ..numerics(DType::BF16, Eager, Score) },
        flushing(numerics(DType::F32, Eager, Score)),
        numerics(DType::BF16, Fused, TensorType),
        // Sums in f64, as the reference has them.
        Numerics { accumulator: DType::F64.unit_roundoff(), ..numerics(DType::BF16, Fused, Score) },
    ]
}

/// Numbers of unit size, of many sizes, near underflow and near overflow, in turn.
const NUMBERS: [Numbers; 5] = [
    UNIT,
    Numbers { exponents: [0; 4], binades: 6 },
    Numbers { exponents: [-30, -9, 4, -12], binades: 1 },
    Numbers { exponents: [2, 1, 0, -100], binades: 0 },
    Numbers { exponents: [7, 4, 9, 6], binades: 3 },
];

/// Small layers of every kind: those of the table, and drawn ones. Two whose sums of magnitudes are in f32, and
/// one whose logits a router in the tensors' type may have off by more than 1.
fn layers() -> Vec<(Case, Numerics, Numbers)> {
    let rows = edge_cases().into_iter().map(|row| row.case);
    let drawn = (0..70).map(|index| case(41, index, LIMITS, Fixed::default()));
    let small = rows.chain(drawn).filter(|case| case.shape.t * case.shape.d * case.shape.n <= 1 << 16);
    let arithmetics = arithmetics().into_iter().cycle().zip(NUMBERS.into_iter().cycle());
    let mut layers: Vec<_> =
        small.zip(arithmetics).map(|(case, (numerics, numbers))| (case, numerics, numbers)).collect();
    let bf16 = |router| numerics(DType::BF16, RoundingModel::Fused, router);
    for shape in ["150,136,96,2,2", "300,128,64,3,1"] {
        let case = Case::new(shape.parse().unwrap()).with_biases();
        layers.push((case, bf16(RouterRounding::Score), UNIT));
    }
    for convention in [Convention::SoftmaxOverTopK, Convention::TopKOverSoftmax] {
        let pairing = Pairing::Router { convention, load: Load::Biased };
        let case = Case::new("20,16,8,5,2".parse().unwrap()).with_pairing(pairing);
        layers.push((case, bf16(RouterRounding::TensorType), Numbers { exponents: [9, -9, 0, 0], binades: 0 }));
    }
    layers
}

/// What can be kept of an array of radii or numbers: how many are 0 and how many infinite, and of the others the
/// mean of log₂, weighted by their places. One that moves by 10⁻⁴ moves that of ten thousand by 10⁻⁸.
fn of_all(numbers: &ArrayD<f64>) -> [f64; 3] {
    let (mut zeros, mut infinite, mut sum, mut weights) = (0.0, 0.0, 0.0, 0.0);
    for (place, number) in numbers.iter().enumerate() {
        let weight = 1.0 + (0.618_033_988_749_895 * place as f64).fract();
        match number.abs() {
            0.0 => zeros += weight,
            number if !number.is_finite() => infinite += weight,
            number => {
                sum += weight * libm::log2(number);
                weights += weight;
            }
        }
    }
    [zeros, infinite, if weights == 0.0 { 0.0 } else { sum / weights }]
}

#[test]
fn every_radius_is_what_it_was() {
    let mut found = Kept::default();
    for (index, (case, numerics, numbers)) in layers().into_iter().enumerate() {
        let (problem, routing) = problem_of(&case, &numerics, numbers);
        let bounds = bound::layer(&problem, &routing, &numerics).unwrap();
        let deviations = statistic::deviations(&problem, &routing, &numerics).unwrap();
        // An engine that errs by one rounding in every result.
        let results: Results = bounds
            .iter()
            .map(|(&output, bounded)| {
                let of_scores = [Output::Scores, Output::Logits, Output::Ds, Output::Dlogits].contains(&output);
                let of_router = of_scores && numerics.router == RouterRounding::Score;
                let dtype = if of_router { numerics.score } else { numerics.storage };
                (output, Stored { dtype, values: bounded.truth.mapv(|truth| dtype.round(truth)) })
            })
            .collect();
        let twin = Twin::new(&problem, &routing, &numerics).unwrap();
        let of_kernels = kernel::kernels(&problem, &routing, &results, &numerics).unwrap();
        let of_kernels: BTreeMap<Output, ArrayD<f64>> =
            of_kernels.into_iter().map(|kernel| (kernel.output, kernel.bounded.bound)).collect();
        for (output, bounded) in &bounds {
            let mut keep = |what: &str, numbers: &ArrayD<f64>| {
                found.keep(format!("{index} {what} of {output}"), of_all(numbers));
            };
            keep("bound", &bounded.bound);
            keep("deviation", &deviations[output].bound);
            let off = Stored { values: bounded.truth.mapv(|truth| 1.01 * truth), ..results[output].clone() };
            let biases = twin.signed(*output, &off).unwrap().into_iter().flat_map(|(_, bias)| [bias.beta, bias.z]);
            keep("bias", &biases.collect::<ndarray::Array1<f64>>().into_dyn());
            if let Some(of_kernel) = of_kernels.get(output) {
                keep("kernel", of_kernel);
            }
        }
        if index % 5 == 0 && problem.t() > 0 {
            let (shared, _) = shared_expert(&problem, 5, &numerics, case.seed);
            for (output, bounded) in bound::layer_beside(&problem, &shared, &routing, &numerics).unwrap() {
                found.keep(format!("{index} bound beside of {output}"), of_all(&bounded.bound));
            }
        }
    }
    found.compare("bounds.kept", Tolerance(1e-8));
}
