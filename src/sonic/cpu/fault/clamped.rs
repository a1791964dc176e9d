//! The activation of gpt-oss, taken wrong.

use super::Fault;
use crate::activation::Activation;
use crate::element::Real;
use crate::mutant::Mutant;

/// (u + lift)·g·σ(steepness·g) with g and u clamped.
#[derive(Clone, Copy)]
struct Formula {
    gate: [f64; 2],
    up: [f64; 2],
    steepness: f64,
    lift: f64,
    /// Whether gradients pass beyond the clamps.
    passes: bool,
}

/// Of gpt-oss.
const RIGHT: Formula =
    Formula { gate: [f64::NEG_INFINITY, 7.0], up: [-7.0, 7.0], steepness: 1.702, lift: 1.0, passes: false };

const FREE: [f64; 2] = [f64::NEG_INFINITY, f64::INFINITY];

impl Fault {
    /// a of one row of gpt-oss, h interleaved, and ∂a/∂h where it is asked for.
    pub(in crate::sonic::cpu) fn clamped<A: Real>(
        self,
        activation: Activation,
        h: &[A],
        a: &mut [A],
        mut partials: Option<&mut [A]>,
    ) {
        let formula = match self.0 {
            _ if activation != Activation::GptOss => return,
            Some(Mutant::GateUnclamped) => Formula { gate: FREE, ..RIGHT },
            Some(Mutant::GateClampedBelow) => Formula { gate: RIGHT.up, ..RIGHT },
            Some(Mutant::UpUnclamped) => Formula { up: FREE, ..RIGHT },
            Some(Mutant::UpClampedAbove) => Formula { up: RIGHT.gate, ..RIGHT },
            Some(Mutant::GradientBeyondClamp) => Formula { passes: true, ..RIGHT },
            Some(Mutant::UpNotLifted) => Formula { lift: 0.0, ..RIGHT },
            Some(Mutant::SteepnessMissing) => Formula { steepness: 1.0, ..RIGHT },
            _ => return,
        };
        for (unit, (a, h)) in a.iter_mut().zip(h.chunks_exact(2)).enumerate() {
            let (value, slopes) = formula.of_unit(h[0], h[1]);
            *a = value;
            if let Some(partials) = &mut partials {
                partials[2 * unit..2 * unit + 2].copy_from_slice(&slopes);
            }
        }
    }
}

impl Formula {
    fn of_unit<A: Real>(self, gate: A, up: A) -> (A, [A; 2]) {
        let Self { gate: gate_limits, up: up_limits, steepness, lift, passes } = self;
        let (g, of_gate) = clamp(gate, gate_limits, passes);
        let (u, of_up) = clamp(up, up_limits, passes);
        let steepness = A::from_f64(steepness);
        let sigma = (A::one() + (-steepness * g).exp()).recip();
        let (opened, lifted) = (g * sigma, u + A::from_f64(lift));
        let slope = sigma * (A::one() + steepness * g * (A::one() - sigma));
        (opened * lifted, [lifted * slope * of_gate, opened * of_up])
    }
}

/// x within its limits, and whether its gradient passes: 1 or 0.
fn clamp<A: Real>(x: A, [low, high]: [f64; 2], passes: bool) -> (A, A) {
    let clamped = x.max(A::from_f64(low)).min(A::from_f64(high));
    (clamped, if passes || clamped == x { A::one() } else { A::zero() })
}
