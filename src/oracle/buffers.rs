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
        }
        Gating::Given { scores, .. } => {
            scores.iter().for_each(|score| score.to_f64().to_bits().hash(&mut hasher));
        }
    }
    hasher.finish()
}
