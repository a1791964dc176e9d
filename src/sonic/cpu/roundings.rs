//! The points at which a run rounds to the type of its tensors, as a value.
//!
//! The fused model of the method is one such value. Every other one is a fault, or another model,
//! that checks have to notice: a claim "h is rounded here" means little if nothing changes without.

use crate::element::{Element, Real};

/// A number between two steps of the layer, which is or is not rounded to the storage type.
///
/// What a kernel writes for the user (o, dx, dw1, dw2, db1, db2) has the storage type, and so
/// always is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RoundingPoint {
    /// x W1ᵀ + b1 as the activation of kernel 1 reads it (h is its rounded copy).
    PreActivation,
    /// h, as kernel 1 writes it.
    H,
    /// a, as kernel 1 writes it.
    A,
    /// y, as kernel 2 writes it.
    Y,
    /// s·y, each term of the sum in kernel 3.
    ScoredY,
    /// Each partial sum of o, in kernel 3.
    PartialO,
    /// G = dout W2, inside kernel 4.
    G,
    /// A recomputed from h, inside kernel 4.
    RecomputedA,
    /// dA = s·G, inside kernel 4.
    DA,
    /// dh, as kernel 4 writes it.
    Dh,
    /// a′ = s·A, as kernel 4 writes it.
    APrime,
    /// ds, as kernel 4 writes it (always in the score type; here: in the type of the tensors).
    Ds,
    /// dx̃, as kernel 6 writes it.
    DxExpanded,
    /// The experts' part of dx, before the router's is added.
    ExpertDx,
    /// The logits, before the choice.
    Logits,
    /// The scores that a router gives.
    Scores,
    /// dlogits, before the router's gradients.
    Dlogits,
    /// The router's part of dx, before it is added.
    RouterDx,
}

impl RoundingPoint {
    /// Every point.
    pub const ALL: [Self; 18] = [
        Self::PreActivation,
        Self::H,
        Self::A,
        Self::Y,
        Self::ScoredY,
        Self::PartialO,
        Self::G,
        Self::RecomputedA,
        Self::DA,
        Self::Dh,
        Self::APrime,
        Self::Ds,
        Self::DxExpanded,
        Self::ExpertDx,
        Self::Logits,
        Self::Scores,
        Self::Dlogits,
        Self::RouterDx,
    ];
}

/// Where a run rounds to the storage type.
///
/// ```
/// use sonicmoe::sonic::cpu::{RoundingPoint, Roundings};
/// let fused = Roundings::FUSED;
/// assert!(fused.rounds(RoundingPoint::H) && !fused.rounds(RoundingPoint::G));
/// assert!(!fused.flipped(RoundingPoint::H).rounds(RoundingPoint::H));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Roundings(u32);

impl Roundings {
    /// SonicMoE's points: each kernel rounds its result once, and nothing inside.
    pub const FUSED: Self = Self::at(&[
        RoundingPoint::H,
        RoundingPoint::A,
        RoundingPoint::Y,
        RoundingPoint::Dh,
        RoundingPoint::APrime,
        RoundingPoint::DxExpanded,
        RoundingPoint::ExpertDx,
    ]);

    /// Rounds at these points and at no other.
    pub const fn at(points: &[RoundingPoint]) -> Self {
        let (mut bits, mut next) = (0, 0);
        while next < points.len() {
            bits |= 1 << points[next] as u32;
            next += 1;
        }
        Self(bits)
    }

    /// Whether it rounds at `point`.
    pub const fn rounds(self, point: RoundingPoint) -> bool {
        self.0 & 1 << point as u32 != 0
    }

    /// The same but for `point`: a rounding left out where there was one, else one too many.
    pub const fn flipped(self, point: RoundingPoint) -> Self {
        Self(self.0 ^ 1 << point as u32)
    }

    /// Rounds `values` to the storage type, if it rounds at `point`.
    pub(super) fn apply<S: Element, A: Real>(self, point: RoundingPoint, values: &mut [A]) {
        if self.rounds(point) {
            values.iter_mut().for_each(|value| *value = A::widen(value.store::<S>()));
        }
    }
}

impl Default for Roundings {
    fn default() -> Self {
        Self::FUSED
    }
}
