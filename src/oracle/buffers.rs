//! Buffers: what a kernel leaves unwritten, and what it writes that is not its own.
//!
//! For implementations that write into given memory. Every result is poisoned before the run, once with
//! NaN and once with a finite number; where the two runs differ, an element was left as it was. Red
//! zones lie on both sides of every result and are compared as bytes. Inputs are hashed before and
//! after. (The CUDA engine has the same in device memory, `sonic::gpu::device::Guards`; Rust engines
//! that return their results cannot stray.)

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::element::Element;
use crate::engine::Output;
use crate::error::Result;
use crate::problem::{Gating, Problem};

/// Elements on each side of a result.
const RED_ZONE: usize = 256;

/// What lies in a result before it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Poison {
    /// A number that no sum hides.
    Nan,
    /// A number that looks like a result: comparisons with NaN are false, and hide it from careless
    /// code.
    Finite,
}

impl Poison {
    fn value<S: Element>(self) -> S {
        S::from_f64(match self {
            Self::Nan => f64::NAN,
            Self::Finite => 1.0,
        })
    }
}

/// Memory for one result, with red zones on both sides.
#[derive(Clone, Debug)]
pub struct Guarded<S> {
    output: Output,
    memory: Vec<S>,
}

impl<S: Element> Guarded<S> {
    /// Poisoned memory for `length` elements.
    pub fn new(output: Output, length: usize, poison: Poison) -> Self {
        let zone = S::from_f64(-7.0);
        let mut memory = vec![zone; length + 2 * RED_ZONE];
        memory[RED_ZONE..RED_ZONE + length].fill(poison.value());
        Self { output, memory }
    }

    /// What a kernel may write.
    pub fn payload_mut(&mut self) -> &mut [S] {
        let end = self.memory.len() - RED_ZONE;
        &mut self.memory[RED_ZONE..end]
    }

    /// What it wrote.
    pub fn payload(&self) -> &[S] {
        &self.memory[RED_ZONE..self.memory.len() - RED_ZONE]
    }

    /// The first element of the payload, as unsafe code sees it: red zones lie before and behind.
    pub fn as_mut_ptr(&mut self) -> *mut S {
        self.memory.as_mut_ptr().wrapping_add(RED_ZONE)
    }

    fn strays(&self) -> Option<Violation> {
        let zone = S::from_f64(-7.0).to_f64().to_bits();
        let length = self.payload().len();
        let strayed = |at: &usize| self.memory[*at].to_f64().to_bits() != zone;
        let places = (0..RED_ZONE).chain(RED_ZONE + length..self.memory.len());
        places
            .into_iter()
            .find(strayed)
            .map(|at| Violation::Stray { output: self.output, at: at as i64 - RED_ZONE as i64 })
    }
}

/// What is wrong with how a kernel treats memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// An element outside a result was written.
    Stray {
        /// The result beside it.
        output: Output,
        /// Its place: negative before the first element.
        at: i64,
    },
    /// An element depends on what lay there before.
    Unwritten {
        /// The result.
        output: Output,
        /// The first such element, flat.
        at: usize,
    },
    /// An input changed.
    InputChanged,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stray { output, at } => write!(f, "wrote outside {output}, at element {at}"),
            Self::Unwritten { output, at } => write!(f, "{output} keeps at {at} what lay there before"),
            Self::InputChanged => f.write_str("an input changed"),
        }
    }
}

/// Runs `write` twice on poisoned memory for results of these lengths, and says what it did wrong.
///
/// # Errors
/// What `write` returns.
pub fn examine<S: Element>(
    problem: &Problem<'_, S>,
    lengths: &[(Output, usize)],
    mut write: impl FnMut(&mut [Guarded<S>]) -> Result<()>,
) -> Result<Vec<Violation>> {
    let before = fingerprint(problem);
    let mut violations = Vec::new();
    let mut runs = Vec::new();
    for poison in [Poison::Nan, Poison::Finite] {
        let mut results: Vec<_> =
            lengths.iter().map(|&(output, length)| Guarded::new(output, length, poison)).collect();
        write(&mut results)?;
        violations.extend(results.iter().filter_map(Guarded::strays));
        runs.push(results);
    }
    if let [nan, finite] = &runs[..] {
        for (nan, finite) in nan.iter().zip(finite) {
            let same = |(one, two): (&S, &S)| one.to_f64().to_bits() == two.to_f64().to_bits();
            let differing = nan.payload().iter().zip(finite.payload()).position(|pair| !same(pair));
            violations.extend(differing.map(|at| Violation::Unwritten { output: nan.output, at }));
        }
    }
    if fingerprint(problem) != before {
        violations.push(Violation::InputChanged);
    }
    violations.dedup();
    Ok(violations)
}

/// A hash of the bits of all inputs.
pub fn fingerprint<S: Element>(problem: &Problem<'_, S>) -> u64 {
    let mut hasher = DefaultHasher::new();
    let mut add =
        |values: &mut dyn Iterator<Item = &S>| values.for_each(|value| value.to_f64().to_bits().hash(&mut hasher));
    add(&mut problem.x().iter());
    add(&mut problem.w1().iter());
    add(&mut problem.w2().iter());
    add(&mut problem.dout().iter());
    if let Some(biases) = problem.biases() {
        add(&mut biases.b1.iter());
        add(&mut biases.b2.iter());
    }
    match problem.gating() {
        Gating::Router(router) => {
            add(&mut router.w.iter());
            router.b.iter().for_each(|b| add(&mut b.iter()));
            router.selection_bias.iter().for_each(|bias| add(&mut bias.iter()));
        }
        Gating::Given { scores, .. } => {
            scores.iter().for_each(|score| score.to_f64().to_bits().hash(&mut hasher));
        }
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{Case, Load, Pairing};
    use crate::problem::Biases;
    use crate::routing::{Convention, GroupedSigmoid};
    use ndarray::{CowArray, Dimension};

    /// The tensor with the last bit of its last number turned, if it is the `target` among those counted.
    fn turned<D: Dimension>(
        tensor: &CowArray<'_, f64, D>,
        counted: &mut usize,
        target: usize,
    ) -> CowArray<'static, f64, D> {
        let mut values = tensor.to_owned();
        if *counted == target {
            let last = values.iter_mut().last().unwrap();
            *last = f64::from_bits(last.to_bits() ^ 1);
        }
        *counted += 1;
        values.into()
    }

    /// The problem with one bit of one input turned, and how many inputs there are.
    fn with_one_turned(problem: &Problem<'_, f64>, target: usize) -> (Problem<'static, f64>, usize) {
        let mut counted = 0;
        let x = turned(&problem.x().into(), &mut counted, target);
        let w1 = turned(&problem.w1().into(), &mut counted, target);
        let w2 = turned(&problem.w2().into(), &mut counted, target);
        let dout = turned(&problem.dout().into(), &mut counted, target);
        let biases = problem.biases().map(|Biases { b1, b2 }| Biases {
            b1: turned(b1, &mut counted, target),
            b2: turned(b2, &mut counted, target),
        });
        let gating = match problem.gating() {
            Gating::Router(router) => {
                let mut of_router = router.map(|value| value);
                of_router.w = turned(&router.w, &mut counted, target);
                of_router.b = router.b.as_ref().map(|b| turned(b, &mut counted, target));
                let bias = router.selection_bias.as_ref();
                of_router.selection_bias = bias.map(|bias| turned(bias, &mut counted, target));
                Gating::Router(of_router)
            }
            Gating::Given { routing, scores } => {
                let scores = turned(&ndarray::ArrayView1::from(&scores[..]).into(), &mut counted, target);
                Gating::Given { routing: routing.clone(), scores: scores.to_vec() }
            }
        };
        (Problem::new(x, w1, w2, biases, gating, problem.activation(), dout).unwrap(), counted)
    }

    #[test]
    fn a_kernel_may_write_the_elements_of_its_result_and_no_other() {
        for length in [0, 1, 5] {
            for poison in [Poison::Nan, Poison::Finite] {
                let mut guarded = Guarded::<f64>::new(Output::O, length, poison);
                assert_eq!((guarded.payload().len(), guarded.payload_mut().len()), (length, length));
                let poisoned = |value: &f64| value.is_nan() == (poison == Poison::Nan);
                assert!(guarded.payload_mut().iter().all(poisoned));
                guarded.payload_mut().fill(2.0);
                assert!(guarded.payload().iter().all(|&value| value == 2.0) && guarded.strays().is_none());
            }
        }
    }

    #[test]
    fn one_bit_of_any_input_changes_the_fingerprint() {
        let groups = GroupedSigmoid { groups: 2, kept: 1, renormalized: true, factor: 1.0 };
        let router = Pairing::Router { convention: Convention::GroupedSigmoid(groups), load: Load::Biased };
        for (pairing, inputs) in [(router, 9), (Pairing::TopK, 7)] {
            let case = Case::new("5,8,4,4,2".parse().unwrap()).with_biases().with_pairing(pairing);
            let problem = case.problem::<f64>().unwrap();
            let (same, counted) = with_one_turned(&problem, inputs);
            assert_eq!((fingerprint(&same), counted), (fingerprint(&problem), inputs));
            for target in 0..inputs {
                let (changed, _) = with_one_turned(&problem, target);
                assert_ne!(fingerprint(&changed), fingerprint(&problem), "input {target}");
            }
        }
    }
}
