use ndarray::Axis;

use super::*;
use crate::activation::Activation;
use crate::case::{Case, Load, Pairing};
use crate::engine::Record;
use crate::oracle::bound::numerics_of;
use crate::routing::Convention;
use crate::sonic::cpu::CpuEngine;

/// ds = Σ g·silu(h), and h is off by a rounding of mean 0 and deviation σ: on average silu(h) is off by
/// ½ silu″(h)σ². An engine whose sums do not round has that bias, though it is correct.
#[test]
fn what_the_curvature_of_an_activation_shifts_is_counted_as_systematic() {
    let case = Case::new("200,16,24,1,1".parse().unwrap()).with_pairing(Pairing::TopK);
    let problem = case.with_activation(Activation::Silu).problem::<f64>().unwrap();
    let Gating::Given { routing, .. } = problem.gating() else { panic!("pairs are given") };
    let numerics = numerics_of(DType::BF16, RoundingModel::Fused);
    let numerics = Numerics { accumulator: DType::F64.unit_roundoff(), score: DType::F64, ..numerics };
    let twin = Twin::new(&problem, routing, &numerics).unwrap();

    let g = problem.dout().dot(&problem.w2().index_axis(Axis(0), 0));
    let (h, sigma) = (&twin.truth[&Output::H], &twin.random[&Output::H]);
    let second = |h: f64| {
        let on = 1.0 / (1.0 + libm::exp(-h));
        on * (1.0 - on) * (2.0 + h * (1.0 - 2.0 * on))
    };
    let (mut shifts, mut counted) = (0.0, 0.0);
    for (pair, token) in routing.pair_token().iter().enumerate() {
        let row = routing.row_pair().iter().position(|&of_row| of_row as usize == pair).unwrap();
        let of_unit = |unit: usize| {
            let at = [row, unit];
            g[[token.index(), unit]] * 0.5 * second(h[at]) * sigma[at] * sigma[at]
        };
        shifts += (0..problem.n()).map(of_unit).sum::<f64>().abs();
        counted += twin.systematic[&Output::Ds][[pair]];
    }
    assert!(shifts <= counted, "{shifts:e} on average, {counted:e} counted");
    // And no more than the roundings themselves.
    assert!(counted < 0.01 * twin.random[&Output::Ds].sum(), "{counted:e}");
}

/// Every result's own, and what a router that stores its scores in the tensors' type joins.
#[test]
fn roundings_are_shared_as_the_table_says() {
    use Sharing::{All, Columns, First, None, Rows};
    let given = Case::new("5,8,6,3,2".parse().unwrap()).with_pairing(Pairing::TopK);
    let router = Pairing::Router { convention: Convention::SoftmaxOverTopK, load: Load::Uniform };
    let sharing = |case: &Case, rounding: RoundingModel, router: RouterRounding| {
        let problem = case.problem::<f64>().unwrap();
        let numerics = Numerics { router, ..numerics_of(DType::BF16, rounding) };
        use Output::{Db1, Db2, DrouterW, Ds, Dw1, Dw2, Dx, O};
        [O, Dx, Ds, Dw1, Db1, Dw2, Db2, DrouterW].map(|output| Sharing::of(output, &problem, &numerics))
    };
    let fused = [First, First, None, Rows(2), Columns(2), Columns(1), None, All];
    let eager = [First, First, None, First, First, First, First, All];
    let joined = [First, First, None, All, All, All, All, All];
    let behind = given.clone().with_pairing(router);
    for (case, router, of_fused, of_eager) in [
        (&given, RouterRounding::Score, fused, eager),
        (&given, RouterRounding::TensorType, fused, eager),
        (&behind, RouterRounding::Score, fused, eager),
        (&behind, RouterRounding::TensorType, joined, joined),
    ] {
        assert_eq!(sharing(case, RoundingModel::Fused, router), of_fused, "{:?}", case.pairing);
        assert_eq!(sharing(case, RoundingModel::Eager, router), of_eager, "{:?}", case.pairing);
    }
    let without_gate = given.with_activation(Activation::Relu);
    let of_relu = sharing(&without_gate, RoundingModel::Fused, RouterRounding::Score);
    assert_eq!(of_relu[3..5], [Rows(1), Columns(1)]);
}

fn layer() -> (Problem<'static, f64>, Twin, Numerics) {
    let case = Case::new("40,24,40,3,2".parse().unwrap()).with_pairing(Pairing::TopK).with_biases();
    let problem = case.problem::<f64>().unwrap();
    let Gating::Given { routing, .. } = problem.gating() else { panic!("pairs are given") };
    let numerics = numerics_of(DType::F16, RoundingModel::Fused);
    let twin = Twin::new(&problem, routing, &numerics).unwrap();
    (problem, twin, numerics)
}

/// Scores that a router stores in the tensors' type join all experts.
fn behind_a_router_in_the_tensors_type() -> (Problem<'static, f64>, Twin, Numerics) {
    let pairing = Pairing::Router { convention: Convention::SoftmaxOverTopK, load: Load::Uniform };
    let case = Case::new("40,24,40,3,2".parse().unwrap()).with_pairing(pairing).with_biases();
    let problem = case.problem::<f64>().unwrap();
    let outcome = crate::engine::run(&CpuEngine::<f64>::new(), &problem, Record::Results).unwrap();
    let numerics = Numerics { router: RouterRounding::TensorType, ..numerics_of(DType::F16, RoundingModel::Fused) };
    let twin = Twin::new(&problem, &outcome.routing, &numerics).unwrap();
    (problem, twin, numerics)
}

#[test]
fn every_index_tile_of_rows_and_tile_of_columns_is_a_group() {
    let (_, twin, _) = layer();
    let groups = |output: Output| -> Vec<Group> {
        let stored = Stored { dtype: DType::F16, values: twin.truth[&output].clone() };
        twin.signed(output, &stored).unwrap().into_iter().map(|(group, _)| group).collect()
    };
    let first = |count: usize| (0..count).map(Group::First);
    let columns = |tiles: [Range<usize>; 2]| tiles.map(Group::Columns);
    let rows = [0..16, 16..32, 32..48, 48..64, 64..80].map(Group::Rows);
    let of =
        |parts: &[&[Group]]| [&[Group::Whole][..]].iter().chain(parts).copied().flatten().cloned().collect::<Vec<_>>();
    assert_eq!(groups(Output::Ds), [Group::Whole]);
    let tokens: Vec<Group> = first(40).collect();
    assert_eq!(groups(Output::O), of(&[&tokens, &columns([0..16, 16..24])]));
    let experts: Vec<Group> = first(3).collect();
    assert_eq!(groups(Output::Dw1), of(&[&experts, &columns([0..16, 16..24]), &rows]));
}

/// A result looked at piece by piece leans as the whole does: towards a result that is wrong by so much, past
/// elements at which that is no number, and not at all towards the truth.
#[test]
fn a_result_in_pieces_leans_as_the_whole_of_it() {
    let joined = behind_a_router_in_the_tensors_type();
    for (problem, twin, numerics) in [layer(), joined] {
        for output in [Output::Dw1, Output::Dw2, Output::O, Output::Ds, Output::Db1] {
            leans_in_pieces_as_a_whole(output, &problem, &twin, &numerics);
        }
    }
}

fn leans_in_pieces_as_a_whole(output: Output, problem: &Problem<'_, f64>, twin: &Twin, numerics: &Numerics) {
    let truth = &twin.truth[&output];
    let mut wrong = truth.mapv(|truth| 1.5 * truth + 0.25);
    let mut values = truth.mapv(|truth| DType::F16.round(truth * 1.03));
    let in_pieces = |values: &ArrayD<f64>, wrong: &ArrayD<f64>| {
        let mut leaning = Leaning::new(output, (problem, numerics), DType::F16, truth.shape());
        let first = if truth.ndim() == 1 { truth.len() } else { truth.len() / truth.shape()[0] };
        let [values, wrong, truth, random, systematic] =
            [values, wrong, truth, &twin.random[&output], &twin.systematic[&output]].map(|array| in_order(array));
        // Pieces of whole indices of the first axis; a vector is one.
        for piece in (0..truth.len()).step_by(first).map(|from| from..from + first) {
            let part = |of: &Cow<'_, [f64]>| of[piece.clone()].to_vec();
            let (truth, random, systematic) = (part(&truth), part(&random), part(&systematic));
            let twin = TwinPiece { truth: &truth, random: &random, systematic: &systematic };
            leaning.look(&values[piece.clone()], &twin, |at| wrong[piece.start + at]);
        }
        leaning.bias()
    };
    let directed = |values: &ArrayD<f64>, wrong: &ArrayD<f64>| {
        twin.directed(output, &Stored { dtype: DType::F16, values: values.clone() }, wrong).unwrap()
    };
    let same = |values: &ArrayD<f64>, wrong: &ArrayD<f64>| -> Option<Bias> {
        let (found, whole) = (in_pieces(values, wrong), directed(values, wrong));
        match (found, whole) {
            (Some(found), Some(whole)) => {
                let off = |a: f64, b: f64| (a - b).abs() > 1e-9 * b.abs();
                let differ = off(found.beta, whole.beta) || off(found.z, whole.z);
                assert!(!differ, "{output}: {found:?} in pieces, {whole:?} as a whole");
            }
            _ => assert_eq!(found, whole, "{output}"),
        }
        whole
    };
    let leaning = same(&values, &wrong).unwrap();
    assert!(leaning.beta > 0.01 && leaning.beta < 0.06, "{output}: {leaning:?}");
    assert_eq!(same(&values, truth), None);
    assert_eq!(same(&values, &truth.mapv(|truth| truth * (1.0 + 0.5 * SAME))), None);
    // Towards twice the truth it leans as the truth itself says, which is summed in another way.
    let signed = twin.signed(output, &Stored { dtype: DType::F16, values: values.clone() }).unwrap();
    let towards = same(&values, &truth.mapv(|truth| 2.0 * truth)).unwrap();
    let (Group::Whole, whole) = &signed[0] else { panic!("the whole comes first") };
    assert!((towards.beta - whole.beta).abs() < 1e-9 * whole.beta.abs(), "{output}: {towards:?}, {whole:?}");
    assert!((towards.z - whole.z).abs() < 1e-9 * whole.z, "{output}: {towards:?}, {whole:?}");
    for (at, off) in [(0, 1.0), (0, -1.0), (truth.len() - 1, 1.0), (truth.len() - 1, -1.0)] {
        let mut one = truth.clone();
        one.as_slice_mut().unwrap()[at] += off;
        assert!(same(&values, &one).is_some(), "{output}: only element {at} is wrong, by {off}");
    }
    // Left out is what is no number, or no longer wrong.
    let mut without = wrong.clone();
    for (at, value) in [(0, f64::NAN), (3, f64::INFINITY), (7, f64::NEG_INFINITY)] {
        wrong.as_slice_mut().unwrap()[at] = value;
        without.as_slice_mut().unwrap()[at] = in_order(truth)[at];
    }
    assert_eq!(same(&values, &wrong), directed(&values, &without), "{output}");
    // A value that is no number leans beyond everything.
    values.as_slice_mut().unwrap()[5] = f64::NAN;
    let of_nan = in_pieces(&values, &without).unwrap();
    assert!(of_nan.beta.is_nan() && of_nan.z == f64::INFINITY && !of_nan.passes(), "{output}: {of_nan:?}");
    assert!(!directed(&values, &without).unwrap().passes());
}

/// Of zeros nothing is wrong but what is not 0.
#[test]
fn towards_zeros_zeros_have_no_direction() {
    let (problem, _, numerics) = layer();
    let Gating::Given { routing, .. } = problem.gating() else { panic!("pairs are given") };
    let mut leaning = Leaning::new(Output::Db1, (&problem, &numerics), DType::F16, &[2, 2]);
    let zeros = TwinPiece { truth: &[0.0; 4], random: &[0.0; 4], systematic: &[0.0; 4] };
    leaning.look(&[0.0; 4], &zeros, |_| 0.0);
    assert_eq!(leaning.bias(), None);
    let (x, w1, w2) = (problem.x().to_owned(), problem.w1().to_owned(), problem.w2().to_owned());
    let gating = Gating::Given { routing: routing.clone(), scores: vec![0.5; routing.routed()] };
    let nothing = problem.dout().mapv(|_| 0.0);
    let problem = Problem::new(x, w1, w2, None, gating, problem.activation(), nothing).unwrap();
    let twin = Twin::new(&problem, routing, &numerics).unwrap();
    let zeros = twin.truth[&Output::Dw1].clone();
    let stored = Stored { dtype: DType::F16, values: zeros.clone() };
    assert_eq!(twin.directed(Output::Dw1, &stored, &zeros).unwrap(), None);
}

/// β = Σ(c − r)w / Σw² and z = (|Σ(c − r)w| − Σs|w|) / D over what no correct engine has beyond the range:
/// |r| + 6σ + s ≤ the largest number.
#[test]
fn only_elements_that_stay_within_the_range_count() {
    let (problem, _, numerics) = layer();
    let most = DType::F16.largest();
    let bias = |truth: [f64; 3], random: [f64; 3], systematic: [f64; 3]| {
        let mut leaning = Leaning::new(Output::Ds, (&problem, &numerics), DType::F16, &[3]);
        let values = [truth[0] + 2.0, truth[1] + 3.0, truth[2] + 30.0];
        let piece = TwinPiece { truth: &truth, random: &random, systematic: &systematic };
        leaning.look(&values, &piece, |at| truth[at] + [1.0, -1.0, 1.0][at]);
        leaning.bias().unwrap()
    };
    let within = bias([1.0, -2.0, most - 6.0 * 0.5 - 1.0], [0.5, 0.25, 0.5], [0.5, 0.25, 1.0]);
    // Σ(c − r)w = 2 − 3 + 30, Σw² = 3, S = 0.5 + 0.25 + 1, D² = 0.5² + 0.25² + 0.5².
    assert_eq!((within.beta, within.z), (29.0 / 3.0, 27.25 / 0.75));
    let left_out = bias([1.0, -2.0, most - 6.0 * 0.5 - 0.5], [0.5, 0.25, 0.5], [0.5, 0.25, 1.0]);
    assert_eq!((left_out.beta, left_out.z), (-1.0 / 2.0, 0.25 / 0.3125f64.sqrt()));
    assert!(Bias { beta: 1.0, z: LIMIT }.passes() && !Bias { beta: 1.0, z: LIMIT.next_up() }.passes());
    let negative = bias([1.0, -2.0, 0.5 - most], [0.5, 0.25, 0.5], [0.5, 0.25, 1.0]);
    assert_eq!(negative, left_out);
}

#[test]
fn a_result_of_another_shape_is_refused_and_a_direction_of_another_shape_is_none() {
    let (_, twin, _) = layer();
    let truth = &twin.truth[&Output::O];
    let stored = |values: ArrayD<f64>| Stored { dtype: DType::F16, values };
    let other = ArrayD::zeros(vec![24, 40]);
    for refused in [
        twin.signed(Output::O, &stored(other.clone())).map(|_| ()),
        twin.directed(Output::O, &stored(other.clone()), truth).map(|_| ()),
    ] {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("`o` has shape [24, 40], expected [40, 24]"), "{error}");
    }
    assert_eq!(twin.directed(Output::O, &stored(truth.clone()), &other).unwrap(), None);
}

/// D² = Σ (Σ σ|w|)², the inner sums over roundings that elements share: by hand, for matrices of more rows than
/// one task looks at.
#[test]
fn deviations_are_joined_over_all_rows_of_a_matrix() {
    let (given, behind) = (layer(), behind_a_router_in_the_tensors_type());
    let shape = [3, 150, 6];
    let number = |at: usize, factor: f64| libm::sin(factor * (at + 1) as f64);
    let count = shape.iter().product();
    let truth: Vec<f64> = (0..count).map(|at| number(at, 1.3)).collect();
    let (random, wrong): (Vec<f64>, Vec<f64>) =
        (0..count).map(|at| (0.25 + number(at, 0.7).abs(), truth[at] + number(at, 2.1))).unzip();
    let values: Vec<f64> = (0..count).map(|at| truth[at] + 0.5 * (wrong[at] - truth[at])).collect();
    for ((problem, _, numerics), output) in [
        (&given, Output::Ds),
        (&given, Output::Dw1),
        (&given, Output::Dw2),
        (&given, Output::O),
        (&behind, Output::Dw1),
    ] {
        let sharing = Sharing::of(output, problem, numerics);
        let mut joined = std::collections::BTreeMap::<[usize; 3], f64>::new();
        let mut squares = 0.0;
        for (at, (i, j, k)) in ndarray::indices(shape).into_iter().enumerate() {
            let w = wrong[at] - truth[at];
            squares += w * w;
            let block = match sharing {
                Sharing::None => [i, j, k],
                Sharing::First => [i, 0, 0],
                Sharing::All => [0; 3],
                Sharing::Rows(height) => [i, j / height, 0],
                Sharing::Columns(width) => [i, 0, k / width],
            };
            *joined.entry(block).or_default() += random[at] * w.abs();
        }
        let deviation = joined.values().map(|block| block * block).sum::<f64>().sqrt();
        let mut leaning = Leaning::new(output, (problem, numerics), DType::F16, &shape);
        let twin = TwinPiece { truth: &truth, random: &random, systematic: &vec![0.0; count] };
        leaning.look(&values, &twin, |at| wrong[at]);
        let bias = leaning.bias().unwrap();
        let z = 0.5 * squares / deviation;
        assert!((bias.beta - 0.5).abs() < 1e-12 && (bias.z - z).abs() < 1e-9 * z, "{output}: {bias:?}, {z}");
    }
}

/// All below zero: their size is their magnitude.
#[test]
fn what_differs_from_negative_numbers_by_roundings_is_no_direction() {
    let (problem, _, numerics) = layer();
    for (off, none) in [(0.5 * SAME, true), (2.0 * SAME, false)] {
        let mut leaning = Leaning::new(Output::Ds, (&problem, &numerics), DType::F16, &[2]);
        let twin = TwinPiece { truth: &[-4.0, -2.0], random: &[1.0; 2], systematic: &[0.0; 2] };
        leaning.look(&[-4.0, -2.0], &twin, |at| twin.truth[at] * (1.0 + off));
        assert_eq!(leaning.bias().is_none(), none, "{off}");
    }
}
