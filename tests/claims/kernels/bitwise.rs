//! What the bits depend on: rounding points, and neither threads nor repetition nor strides.

use half::{bf16, f16};
use ndarray::{Array2, s};
use sonicmoe::case::{Case, Load, Pairing};
use sonicmoe::engine::Output;
use sonicmoe::sonic::cpu::{CpuEngine, RoundingPoint, Roundings};
use sonicmoe::{Biases, Convention, Element, Engine, Gating, Problem, Real, Record, Router, run};

use super::{assert_same_bits, case, changed, results};

/// Which results see it if a rounding point is left out, or one is added.
///
/// Recorded intermediates have the storage type either way, so a tensor that is no longer rounded
/// shows in what was computed from it.
#[test]
fn every_rounding_point_changes_the_results_behind_it_and_no_other() {
    use Output::*;
    let router = Pairing::Router { convention: Convention::TopKOverSoftmax, load: Load::Biased };
    let case = case("96,40,48,5,2").with_biases().with_pairing(router).with_seed(11);
    let problem = case.problem::<bf16>().unwrap();
    let fused = results::<bf16, f32>(&problem);
    let behind_dlogits = vec![Dlogits, DrouterW, DrouterB, Dx];
    let behind_ds = [vec![Ds], behind_dlogits.clone()].concat();
    let behind_dh = vec![DxExpanded, Dx, Dw1, Db1];
    for point in RoundingPoint::ALL {
        let expected: Vec<Output> = match point {
            RoundingPoint::PreActivation => vec![A, Y, O],
            RoundingPoint::H => [vec![Dh, APrime, Dw2], behind_dh.clone(), behind_ds.clone()].concat(),
            RoundingPoint::A => vec![Y, O],
            RoundingPoint::Y | RoundingPoint::ScoredY | RoundingPoint::PartialO => vec![O],
            RoundingPoint::G => [vec![Dh], behind_dh.clone(), behind_ds.clone()].concat(),
            RoundingPoint::RecomputedA => [vec![APrime, Dw2], behind_ds.clone()].concat(),
            RoundingPoint::DA => [vec![Dh], behind_dh.clone()].concat(),
            RoundingPoint::Dh => behind_dh.clone(),
            RoundingPoint::APrime => vec![Dw2],
            RoundingPoint::Ds => behind_ds.clone(),
            RoundingPoint::DxExpanded | RoundingPoint::ExpertDx | RoundingPoint::RouterDx => vec![Dx],
            // This convention takes the whole softmax from the logits again: dlogits do not read s.
            RoundingPoint::Scores => [vec![Scores, O, Dh, APrime, Dw2, Db2], behind_dh.clone()].concat(),
            RoundingPoint::Dlogits => behind_dlogits.clone(),
            RoundingPoint::Logits => {
                [vec![Logits, Scores, O, Dh, APrime, Dw2, Db2], behind_dh.clone(), behind_dlogits.clone()].concat()
            }
        };
        let engine = CpuEngine::<f32>::with_roundings(Roundings::FUSED.flipped(point));
        let outcome = run(&engine, &problem, Record::Intermediates).unwrap();
        let found = changed(&fused, &outcome.results);
        if point == RoundingPoint::Logits {
            // Rounded logits may also choose other experts, which changes the rest.
            assert!(expected.iter().all(|output| found.contains(output)), "{point:?} changed only {found:?}");
            continue;
        }
        assert_eq!(found, expected.into_iter().collect(), "{point:?}");
    }
}

#[test]
fn storage_as_wide_as_the_accumulator_has_no_rounding_points() {
    let problem = case("20,24,16,4,2").with_biases().problem::<f32>().unwrap();
    let fused = results::<f32, f32>(&problem);
    for point in RoundingPoint::ALL {
        let engine = CpuEngine::<f32>::with_roundings(Roundings::FUSED.flipped(point));
        let outcome = run(&engine, &problem, Record::Intermediates).unwrap();
        assert_same_bits(&fused, &outcome.results, &format!("{point:?}"));
    }
}

fn same_bits_for_any_number_of_threads<S: Element, A: Real>(case: &Case) {
    let problem = case.problem::<S>().unwrap();
    let with_threads = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| results::<S, A>(&problem))
    };
    let one = with_threads(1);
    for threads in [2, 3, 7] {
        assert_same_bits(&one, &with_threads(threads), &format!("{case} in {}, {threads} threads", S::DTYPE));
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let router = Pairing::Router { convention: Convention::SoftmaxOverTopK, load: Load::Zipf };
    let case = case("300,530,280,3,2").with_biases().with_pairing(router);
    same_bits_for_any_number_of_threads::<f32, f32>(&case);
    same_bits_for_any_number_of_threads::<bf16, f32>(&case);
    same_bits_for_any_number_of_threads::<f16, f64>(&case);
}

#[test]
fn backward_twice_on_one_forward_and_forward_again_give_the_same_bits() {
    let problem = case("40,24,20,4,2").with_biases().problem::<bf16>().unwrap();
    let engine = CpuEngine::<f32>::new();
    let forward = engine.forward(&problem, Record::Results).unwrap();
    let backward = || {
        let gradients = forward.pass.backward(problem.dout(), Record::Results).unwrap().gradients;
        (gradients.dx, gradients.dw1, gradients.dw2, gradients.db1, gradients.db2, gradients.ds)
    };
    assert_eq!(backward(), backward());
    assert_same_bits(&results::<bf16, f32>(&problem), &results::<bf16, f32>(&problem), "the same problem again");
}

/// Every tensor as a view that is not contiguous: every other column of a wider one, reversed, or
/// with its axes exchanged.
#[test]
fn strided_tensors_give_the_bits_of_contiguous_ones() {
    fn check<S: Element, A: Real>() {
        let router = Pairing::Router { convention: Convention::SoftmaxOverTopK, load: Load::Biased };
        let problem = case("33,16,16,8,2").with_biases().with_pairing(router).problem::<S>().unwrap();
        let Gating::Router(layer) = problem.gating() else { panic!("the case has a router") };

        let spread = |tensor: ndarray::ArrayView2<S>| {
            let mut wide = Array2::from_elem((tensor.nrows(), 2 * tensor.ncols() + 3), S::from_f64(f64::NAN));
            wide.slice_mut(s![.., 1..=2 * tensor.ncols() - 1; 2]).assign(&tensor);
            wide
        };
        let (x, b1, b2, w_r) =
            (spread(problem.x()), spread(problem.b1().unwrap()), spread(problem.b2().unwrap()), spread(layer.w.view()));
        let every_other = |columns: usize| s![.., 1..=2 * columns - 1; 2];
        let exchange = |w: ndarray::ArrayView3<S>| w.permuted_axes([0, 2, 1]).as_standard_layout().into_owned();
        let (w1, w2) = (exchange(problem.w1()), exchange(problem.w2()));
        let mut dout = problem.dout().to_owned();
        dout.invert_axis(ndarray::Axis(0));
        dout.invert_axis(ndarray::Axis(1));
        let dout = dout.as_standard_layout().into_owned();
        let strided = Problem::new(
            x.slice(every_other(16)),
            w1.view().permuted_axes([0, 2, 1]),
            w2.view().permuted_axes([0, 2, 1]),
            Some(Biases { b1: b1.slice(every_other(32)).into(), b2: b2.slice(every_other(16)).into() }),
            Gating::Router(Router {
                w: w_r.slice(every_other(16)).into(),
                b: layer.b.as_ref().map(|b| b.view().into()),
                ..layer.view()
            }),
            problem.activation(),
            dout.slice(s![..;-1, ..;-1]),
        )
        .unwrap();
        assert_eq!(strided.dout(), problem.dout());
        assert!(!strided.x().is_standard_layout() && !strided.w1().is_standard_layout());
        assert_same_bits(&results::<S, A>(&problem), &results::<S, A>(&strided), S::DTYPE.name());
    }
    check::<f64, f64>();
    check::<f32, f32>();
    check::<bf16, f32>();
    check::<f16, f32>();
}
