//! Each primitive of the tape alone, swept after everything it has not asked to keep is gone.

use ndarray::{Array2, array};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use sonicmoe::reference::tape::{Indices, Role, Tape, Var};

use super::{STEP, U, central_difference, uniform};

type Operation = fn(&mut Tape<'_, f64>, &[Var]) -> Var;

/// ⟨seed, operation(inputs)⟩.
fn loss(operation: Operation, inputs: &[Array2<f64>], seed: &Array2<f64>) -> f64 {
    let mut tape = Tape::new();
    let vars: Vec<Var> = inputs.iter().map(|input| tape.leaf("input", input.view(), Role::Activation)).collect();
    let result = operation(&mut tape, &vars);
    (&tape.value(result) * seed).sum()
}

/// Compares the derivative in every element of every input with a central difference.
fn check(name: &str, operation: Operation, inputs: &[Array2<f64>]) {
    let mut tape = Tape::new();
    let vars: Vec<Var> = inputs.iter().map(|input| tape.leaf("input", input.view(), Role::Activation)).collect();
    let result = operation(&mut tape, &vars);
    let seed = uniform(&mut ChaCha8Rng::seed_from_u64(7), tape.shape(result));
    // Inputs reach 2 and at most 3 are summed, so no result is above 12, nor was any number on the
    // way to it; each is the work of at most 16 roundings, and the final sum adds one per element.
    let elements = seed.len() as f64;
    let error = (16.0 + elements) * U * 12.0 * elements;
    tape.release();
    let mut sweep = tape.backward(result, seed.clone(), &[]);
    for (which, &var) in vars.iter().enumerate() {
        let gradient = sweep.take(var);
        assert!(gradient.iter().any(|g| g.abs() > 1e-3), "{name}: no gradient to compare");
        for (at, &value) in inputs[which].indexed_iter() {
            let mut displaced = inputs.to_vec();
            let (difference, tolerance) = central_difference(
                |displacement| {
                    displaced[which][at] = value + displacement;
                    loss(operation, &displaced, &seed)
                },
                error,
            );
            assert!(
                approx::abs_diff_eq!(gradient[at], difference, epsilon = tolerance),
                "{name}, input {which} {at:?}: {} but central difference {difference} ± {tolerance:.1e}",
                gradient[at]
            );
        }
    }
}

fn random(seed: u64, shape: (usize, usize)) -> Array2<f64> {
    uniform(&mut ChaCha8Rng::seed_from_u64(seed), shape)
}

fn list(numbers: &[usize]) -> Indices {
    numbers.into()
}

#[test]
fn products_and_sums_of_matrices_have_their_derivatives() {
    check("product", |tape, v| tape.product(v[0], v[1]), &[random(0, (4, 3)), random(1, (2, 3))]);
    check("add", |tape, v| tape.add(v[0], v[1]), &[random(2, (2, 3)), random(3, (2, 3))]);
    check("add a matrix to itself", |tape, v| tape.add(v[0], v[0]), &[random(4, (2, 3))]);
    check("add_row", |tape, v| tape.add_row(v[0], v[1]), &[random(5, (4, 3)), random(6, (1, 3))]);
    check("shift_rows", |tape, v| tape.shift_rows(v[0], &array![[0.5], [-1.0]]), &[random(7, (2, 3))]);
    check("row_sums", |tape, v| tape.row_sums(v[0]), &[random(8, (4, 3))]);
}

#[test]
fn products_and_quotients_by_element_have_their_derivatives() {
    let divisor = |seed, shape| random(seed, shape).mapv(|v| if v < 0.0 { v - 1.0 } else { v + 1.0 });
    check("mul", |tape, v| tape.mul(v[0], v[1]), &[random(0, (2, 3)), random(1, (2, 3))]);
    check("square", |tape, v| tape.mul(v[0], v[0]), &[random(2, (2, 3))]);
    check("div", |tape, v| tape.div(v[0], v[1]), &[random(3, (2, 3)), divisor(4, (2, 3))]);
    check("scale", |tape, v| tape.scale(v[0], -1.75), &[random(5, (2, 3))]);
    check("scale_rows", |tape, v| tape.scale_rows(v[0], v[1]), &[random(6, (4, 3)), random(7, (4, 1))]);
    check("divide_rows", |tape, v| tape.divide_rows(v[0], v[1]), &[random(8, (4, 3)), divisor(9, (4, 1))]);
}

#[test]
fn functions_of_one_element_have_their_derivatives() {
    check("exp", |tape, v| tape.exp(v[0]), &[random(0, (3, 4))]);
    check("sigmoid", |tape, v| tape.sigmoid(v[0]), &[random(1, (3, 4)) * 2.0]);
    check("erfc", |tape, v| tape.erfc(v[0]), &[random(2, (3, 4)) * 2.0]);
    let away_from_0 = random(3, (3, 4)).mapv(|v| v + v.signum() * 2.0 * STEP);
    check("relu", |tape, v| tape.relu(v[0]), &[away_from_0]);
}

#[test]
fn selections_have_their_derivatives() {
    check("columns", |tape, v| tape.columns(v[0], 1, 2), &[random(0, (2, 6))]);
    check("pick", |tape, v| tape.pick(v[0], &list(&[2, 0, 2, 2]), &list(&[1, 0, 1, 2])), &[random(1, (3, 3))]);
    check("gather_rows", |tape, v| tape.gather_rows(v[0], &list(&[2, 0, 2])), &[random(2, (3, 2))]);
    check(
        "scatter_add_rows",
        |tape, v| tape.scatter_add_rows((4, 2), &[(v[0], list(&[3, 0, 3])), (v[1], list(&[0, 2]))]),
        &[random(3, (3, 2)), random(4, (2, 2))],
    );
}

#[test]
fn a_checkpoint_has_the_derivative_of_what_it_recomputes_and_keeps_its_input_alone() {
    fn function(tape: &mut Tape<'_, f64>, v: Var) -> Var {
        let sigmoid = tape.sigmoid(v);
        tape.mul(sigmoid, v)
    }
    check("checkpoint", |tape, v| tape.checkpoint(v[0], function), &[random(0, (3, 4))]);

    let input = random(1, (3, 4));
    let kept = |checkpointed: bool| {
        let mut tape = Tape::new();
        let v = tape.leaf("input", input.view(), Role::Activation);
        let _ = if checkpointed { tape.checkpoint(v, function) } else { function(&mut tape, v) };
        tape.release();
        tape.ledger().activations()
    };
    assert_eq!(kept(true), 12 * size_of::<f64>());
    assert_eq!(kept(false), 2 * 12 * size_of::<f64>());
}

#[test]
#[should_panic(expected = "was released")]
fn a_value_that_no_derivative_reads_is_gone() {
    let (a, b) = (random(0, (2, 2)), random(1, (2, 2)));
    let mut tape = Tape::new();
    let (a, b) = (tape.leaf("a", a.view(), Role::Activation), tape.leaf("b", b.view(), Role::Activation));
    let sum = tape.add(a, b);
    tape.release();
    tape.value(sum);
}

#[test]
fn a_watched_matrix_gets_its_gradient_and_one_without_any_gets_zero() {
    let a = array![[1.0, -2.0]];
    let mut tape = Tape::<f64>::new();
    let leaf = tape.leaf("a", a.view(), Role::Activation);
    let unused = tape.leaf("unused", a.view(), Role::Activation);
    let double = tape.scale(leaf, 2.0);
    let square = tape.mul(double, double);
    tape.release();
    let mut sweep = tape.backward(square, array![[1.0, 1.0]], &[double]);
    assert_eq!(sweep.take(double), array![[4.0, -8.0]]);
    assert_eq!(sweep.take(leaf), array![[8.0, -16.0]]);
    assert!(sweep.take(unused).iter().all(|g| g.to_bits() == 0));
}
