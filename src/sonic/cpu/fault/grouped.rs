//! DeepSeek-V3's router, taken wrong: what its scores and its gradients become. Faults of its choice stand
//! beside the choice, in [`grouped::mutated`](crate::routing::grouped::mutated).

use ndarray::{Array2, ArrayView1, ArrayView2};

use super::Fault;
use crate::element::Real;
use crate::mutant::Mutant;
use crate::routing::{Choice, Convention};

impl Fault {
    /// Scores by pair that were computed from `logits` and the router's selection bias.
    pub(in crate::sonic::cpu) fn router_scores<V: Real>(
        self,
        convention: Convention,
        logits: ArrayView2<'_, V>,
        bias: Option<ArrayView1<'_, V>>,
        choice: &Choice,
        scores: &mut [V],
    ) {
        let (Some(Mutant::BiasInWeights), Convention::GroupedSigmoid(router), Some(bias)) = (self.0, convention, bias)
        else {
            return;
        };
        for (token, (scores, chosen)) in scores.chunks_exact_mut(choice.k()).zip(choice.ids().outer_iter()).enumerate()
        {
            for (score, &expert) in scores.iter_mut().zip(chosen) {
                *score = sigmoid(logits[[token, expert.index()]]) + bias[expert.index()];
            }
            let total: V = if router.renormalized { scores.iter().copied().sum() } else { V::one() };
            scores.iter_mut().for_each(|score| *score = *score / total * V::from_f64(router.factor));
        }
    }

    /// dlogits (T, E) were computed from `logits` and ds by pair.
    pub(in crate::sonic::cpu) fn router_gradient<V: Real>(
        self,
        convention: Convention,
        logits: ArrayView2<'_, V>,
        choice: &Choice,
        ds: &[V],
        dlogits: &mut Array2<V>,
    ) {
        let Convention::GroupedSigmoid(router) = convention else { return };
        if !matches!(self.0, Some(Mutant::SigmoidSlopeMissing | Mutant::TotalHeldFixed)) {
            return;
        }
        let factor = V::from_f64(router.factor);
        for ((token, chosen), ds) in choice.ids().outer_iter().enumerate().zip(ds.chunks_exact(choice.k())) {
            let p = |expert: usize| sigmoid(logits[[token, expert]]);
            let total: V = chosen.iter().map(|expert| p(expert.index())).sum();
            for (expert, &ds) in chosen.iter().zip(ds) {
                let (p, dlogit) = (p(expert.index()), &mut dlogits[[token, expert.index()]]);
                match self.0 {
                    Some(Mutant::SigmoidSlopeMissing) => *dlogit = *dlogit / (p * (V::one() - p)),
                    _ => *dlogit = factor * ds / total * p * (V::one() - p),
                }
            }
        }
    }
}

fn sigmoid<V: Real>(logit: V) -> V {
    (V::one() + (-logit).exp()).recip()
}
