//! One pass over a layer: scores, the kernels by expert, then what the router does with their results.

use ndarray::Array2;
use std::ops::Range;

use super::ball::{Ball, Measure};
use super::buffers::Buffers;
use super::layer::{Found, Keep, Kernels, OfLayer, Parts};
use super::matrix::{Balls1, Balls2};
use super::{Model, add_router_part, check_routing, router};
use crate::engine::{Numerics, Output};
use crate::error::Result;
use crate::oracle::judge::Bounded;
use crate::problem::{Gating, Problem};
use crate::routing::Routing;

/// Truth and radii of the results that `keep` names, for several arithmetics of one rounding model.
pub(crate) fn propagate_all(
    problem: &Problem<'_, f64>,
    routing: &Routing,
    arithmetics: &[(Numerics, Measure)],
    keep: Keep<'_>,
) -> Result<Found> {
    let models: Vec<Model<'_, '_>> =
        arithmetics.iter().map(|(numerics, measure)| Model::new(problem, routing, numerics, *measure)).collect();
    run(&models, keep)
}

/// The same as `models` have them: of one problem, routing and rounding model.
pub(crate) fn run(models: &[Model<'_, '_>], keep: Keep<'_>) -> Result<Found> {
    Ok(whole(models, keep)?.finish(models))
}

/// All of a layer at once.
pub(super) fn whole(models: &[Model<'_, '_>], keep: Keep<'_>) -> Result<Whole> {
    let buffers = Buffers::default();
    let mut pass = Pass::new(models, keep, &|_| false, &buffers)?;
    while pass.next_experts().is_some() {}
    pass.whole()
}

/// A layer on its way, as several models of one problem, routing and rounding model have it.
pub(crate) struct Pass<'m, 'a, 'p> {
    models: &'m [Model<'a, 'p>],
    keep: Keep<'m>,
    logits: Vec<Option<Balls2>>,
    /// By pair.
    scores: Vec<Vec<Ball>>,
    kernels: Kernels<'m, 'a, 'p>,
    /// Experts that are still to come.
    experts: Range<usize>,
}

impl<'m, 'a, 'p> Pass<'m, 'a, 'p> {
    /// What `keep` names is computed, and of that what `apart` names and comes [in parts](super::in_parts)
    /// is handed out part by part, in memory of `buffers`.
    ///
    /// # Errors
    /// A routing that does not fit the problem.
    pub(crate) fn new(
        models: &'m [Model<'a, 'p>],
        keep: Keep<'m>,
        apart: Keep<'m>,
        buffers: &'m Buffers,
    ) -> Result<Self> {
        let (mut logits, mut scores) = (Vec::new(), Vec::new());
        for model in models {
            check_routing(model.problem, model.routing)?;
            match model.problem.gating() {
                Gating::Router(of_layer) => {
                    let of_model = router::logits(model, of_layer);
                    scores.push(router::scores(model, of_layer, &of_model));
                    logits.push(Some(of_model));
                }
                Gating::Given { scores: given, .. } => {
                    scores.push(given.iter().copied().map(Ball::exact).collect());
                    logits.push(None);
                }
            }
        }
        let by_row = models.iter().zip(&scores).map(|(model, scores)| model.routing.to_rows(scores)).collect();
        let experts = 0..models.first().map_or(0, |model| model.routing.experts());
        let kernels = Kernels::new(models, by_row, [keep, apart], buffers);
        Ok(Self { models, keep, logits, scores, kernels, experts })
    }

    /// The next experts, one for each thread, with what they give apart; none when all were there.
    pub(crate) fn next_experts(&mut self) -> Option<(Range<usize>, Vec<Parts>)> {
        let at_once = rayon::current_num_threads();
        let from = self.experts.start;
        let next = from..self.experts.end.min(from + at_once);
        self.experts.start = next.end;
        (!next.is_empty()).then(|| (next.clone(), self.kernels.experts(next)))
    }

    /// What there is of the layer besides, when all experts were there.
    ///
    /// # Errors
    /// None, unless a promise of this crate is broken.
    pub(crate) fn finish(self) -> Result<Found> {
        let models = self.models;
        Ok(self.whole()?.finish(models))
    }

    fn whole(self) -> Result<Whole> {
        let Self { models, keep, logits, scores, kernels, .. } = self;
        let mut found = Found::default();
        let of_kernels = kernels.finish(&mut found)?;
        let mut of_tokens = Vec::new();
        for (lane, OfLayer { o, dx, ds }) in of_kernels.into_iter().enumerate() {
            let model = &models[lane];
            let mut put = |output: Output, bounded: Bounded| {
                if keep(output) {
                    found.truths.entry(output).or_insert(bounded.truth);
                    found.radii[lane].insert(output, bounded.bound);
                }
            };
            let ds = model.routing.to_pairs(&ds);
            let mut dx_of_router = None;
            if let (Gating::Router(router), Some(logits)) = (model.problem.gating(), &logits[lane]) {
                let dlogits = router::dlogits(model, router, logits, &scores[lane], &ds);
                dx_of_router = dx.is_some().then(|| router::dx(model, router, &dlogits));
                if keep(Output::DrouterW) {
                    put(Output::DrouterW, router::w_gradient(model, &dlogits).bounded());
                }
                if router.b.is_some() {
                    put(Output::DrouterB, router::b_gradient(model, &dlogits).bounded());
                }
                put(Output::Dlogits, dlogits.bounded());
                put(Output::Logits, logits.clone().bounded());
                put(Output::Scores, Balls1::from_balls(scores[lane].iter().copied()).bounded());
            }
            put(Output::Ds, Balls1::from_balls(ds).bounded());
            of_tokens.push(OfTokens { o, dx_of_experts: dx, dx_of_router });
        }
        Ok(Whole { found, of_tokens })
    }
}

/// The results of a layer, but for o and dx as their parts, one of each arithmetic.
pub(super) struct Whole {
    pub(super) found: Found,
    pub(super) of_tokens: Vec<OfTokens>,
}

/// What is asked for of o and dx.
pub(super) struct OfTokens {
    pub(super) o: Option<Balls2>,
    pub(super) dx_of_experts: Option<Balls2>,
    pub(super) dx_of_router: Option<Balls2>,
}

impl Whole {
    /// o and dx put together.
    fn finish(self, models: &[Model<'_, '_>]) -> Found {
        let Self { mut found, of_tokens } = self;
        for ((model, of_tokens), radii) in models.iter().zip(of_tokens).zip(&mut found.radii) {
            let OfTokens { o, dx_of_experts, dx_of_router } = of_tokens;
            let dx = match (dx_of_experts, dx_of_router) {
                (Some(experts), Some(router)) => Some(add_router_part(model, experts, router.operand())),
                (experts, _) => experts,
            };
            for (output, balls) in [(Output::O, o), (Output::Dx, dx)] {
                let Some(Balls2 { mid, rad }) = balls else { continue };
                found.truths.entry(output).or_insert_with(|| Array2::into_dyn(mid));
                radii.insert(output, rad.into_dyn());
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{Case, Pairing};
    use crate::element::DType;
    use crate::engine::RoundingModel;
    use crate::oracle::bound::{in_parts, numerics_of};
    use std::collections::BTreeMap;

    /// Parts of experts with and without tokens, one after the other, are the whole result.
    #[test]
    fn what_is_handed_out_is_what_the_whole_has() {
        let case = Case::new("33,24,16,7,2".parse().unwrap()).with_biases();
        let case = case.with_pairing(Pairing::Counts(vec![0, 17, 1, 33, 0, 5, 0]));
        let problem = case.problem::<f64>().unwrap();
        let Gating::Given { routing, .. } = problem.gating() else { panic!("pairs are given") };
        for rounding in [RoundingModel::Fused, RoundingModel::Eager] {
            let numerics = numerics_of(DType::BF16, rounding);
            let models =
                [Measure::Worst, Measure::Deviation].map(|measure| Model::new(&problem, routing, &numerics, measure));
            let whole = run(&models, &|_| true).unwrap();
            let buffers = Buffers::default();
            let mut pass = Pass::new(&models, &|_| true, &|_| true, &buffers).unwrap();
            let mut parts: BTreeMap<Output, [Vec<f64>; 3]> = BTreeMap::new();
            while let Some((_, experts)) = pass.next_experts() {
                for (output, part) in experts.into_iter().flatten() {
                    let numbers = parts.entry(output).or_default();
                    numbers[0].extend(&part.truth);
                    numbers[1].extend(&part.radii[0]);
                    numbers[2].extend(&part.radii[1]);
                }
            }
            let rest = pass.finish().unwrap();
            assert!(
                parts.len() >= 7 && whole.truths.keys().all(|output| in_parts(*output) == parts.contains_key(output))
            );
            for (output, truth) in &whole.truths {
                let radii = [&whole.radii[0][output], &whole.radii[1][output]];
                match parts.get(output) {
                    Some(numbers) => {
                        let all = [truth, radii[0], radii[1]].map(|array| array.iter().copied().collect::<Vec<_>>());
                        assert_eq!(numbers, &all, "{output}, {rounding:?}");
                    }
                    None => assert_eq!(
                        (&rest.truths[output], &rest.radii[0][output], &rest.radii[1][output]),
                        (truth, radii[0], radii[1]),
                        "{output}, {rounding:?}"
                    ),
                }
            }
        }
    }
}
