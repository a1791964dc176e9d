//! What an engine gives that takes gate for up.

use ndarray::Axis;
use sonicmoe::engine::{Outcome, Output};
use sonicmoe::problem::{Biases, Gating, Problem};
use sonicmoe::{Element, Engine, Record, run};

/// The results of `engine` with gate rows of w1 (and b1) for up rows; those of dw1 and db1 stand where
/// the right layer has them.
pub fn with_gate_and_up_swapped<S: Element>(engine: &dyn Engine<S>, problem: &Problem<'_, S>) -> Outcome {
    let order: Vec<usize> = (0..problem.h_width()).map(|row| row ^ 1).collect();
    let biases = problem
        .biases()
        .map(|biases| Biases { b1: biases.b1.select(Axis(1), &order).into(), b2: biases.b2.view().into() });
    let swapped = Problem::new(
        problem.x(),
        problem.w1().select(Axis(1), &order),
        problem.w2(),
        biases,
        Gating::borrowed(problem.gating()),
        problem.activation(),
        problem.dout(),
    )
    .unwrap();
    let mut outcome = run(engine, &swapped, Record::Results).unwrap();
    for output in [Output::Dw1, Output::Db1] {
        if let Some(rows) = outcome.results.get_mut(&output) {
            rows.values = rows.values.select(Axis(1), &order).as_standard_layout().into_owned();
        }
    }
    outcome
}
