//! A planted bug is the one that its name says: the table of what oracles catch is about these faults.

use ndarray::{Array2, ArrayD};
use sonicmoe::case::{Case, Load, Pairing};
use sonicmoe::engine::{Outcome, Output};
use sonicmoe::sonic::cpu::CpuEngine;
use sonicmoe::{Convention, ExpertId, Gating, Mutant, Problem, Record, Router, run};

fn case() -> Case {
    let pairing = Pairing::Router { convention: Convention::SoftmaxOverTopK, load: Load::Uniform };
    Case::new("30,12,8,5,2".parse().unwrap()).with_pairing(pairing)
}

fn with(mutant: Option<Mutant>, problem: &Problem<'_, f64>) -> Outcome {
    run(&CpuEngine::<f64>::with_mutant(mutant), problem, Record::Intermediates).unwrap()
}

#[test]
fn dlogits_doubled_are_twice_the_right_ones() {
    let problem = case().problem::<f64>().unwrap();
    let [right, doubled] = [None, Some(Mutant::DlogitsDoubled)]
        .map(|mutant| with(mutant, &problem).results.remove(&Output::Dlogits).unwrap().values);
    assert!(right.iter().any(|&dlogit| dlogit != 0.0));
    assert_eq!(doubled, 2.0 * right);
}

#[test]
fn a_softmax_without_its_sum_gives_score_times_gradient_to_the_chosen_and_0_to_the_rest() {
    let problem = case().problem::<f64>().unwrap();
    let Outcome { routing, results, .. } = with(Some(Mutant::SoftmaxWithoutSum), &problem);
    let mut expected = ArrayD::zeros(vec![30, 5]);
    for (pair, (token, expert)) in routing.pair_token().iter().zip(routing.pair_expert()).enumerate() {
        let [score, gradient] = [Output::Scores, Output::Ds].map(|output| results[&output].values[[pair]]);
        expected[[token.index(), expert.index()]] = score * gradient;
    }
    assert_eq!(results[&Output::Dlogits].values, expected);
}

/// Every logit is the bias.
#[test]
fn ties_to_the_larger_id_choose_the_last_of_equal_experts() {
    let drawn = case().problem::<f64>().unwrap();
    let mut router = Router::new(Array2::zeros((5, 12)), 2, Convention::SoftmaxOverTopK);
    router.b = Some(ndarray::arr1(&[0.0, 1.0, 1.0, 1.0, 0.5]).into());
    let (w1, w2, x, dout) = (drawn.w1(), drawn.w2(), drawn.x(), drawn.dout());
    let problem = Problem::new(x, w1, w2, None, Gating::Router(router), drawn.activation(), dout).unwrap();
    for (mutant, chosen) in [(None, [1, 2]), (Some(Mutant::TieToLargerId), [3, 2])] {
        let routing = with(mutant, &problem).routing;
        let expected: Vec<ExpertId> = (0..30).flat_map(|_| chosen.map(ExpertId)).collect();
        assert_eq!(routing.pair_expert(), expected, "{mutant:?}");
    }
}
