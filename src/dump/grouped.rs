//! Which experts a router may have chosen, and what a grouped sigmoid router compares.

use ndarray::{Array1, Array2, ArrayView1, Zip};

use super::choice::{CHOICES_OF_A_TOKEN, Logits, Source, optimal, ranking, refused, same_set, worse};
use crate::engine::{Numerics, RouterRounding};
use crate::error::Result;
use crate::problem::Router;
use crate::routing::{Convention, GroupedSigmoid};

/// How many experts, and inside which groups.
pub(super) struct Rule {
    pub k: usize,
    pub groups: Groups,
}

/// None where every expert may be chosen.
pub(super) struct Groups(Option<GroupedSigmoid>);

impl From<Convention> for Groups {
    fn from(convention: Convention) -> Self {
        match convention {
            Convention::GroupedSigmoid(groups) => Self(Some(groups)),
            _ => Self(None),
        }
    }
}

impl Rule {
    /// The choice by the values as they are, best first.
    pub fn exact(&self, values: ArrayView1<'_, f64>) -> Vec<usize> {
        let mut experts = match &self.groups.0 {
            None => ranking(values),
            Some(groups) => {
                let (scores, _) = group_scores(groups, values, Array1::zeros(values.len()).view());
                ranking(inside(groups, &ranking(scores.view())[..groups.kept], values).view())
            }
        };
        experts.truncate(self.k);
        experts
    }

    /// Every choice that is right for some values within the errors, the exact one first; `None` if there
    /// are too many to try.
    pub fn optimal(&self, values: ArrayView1<'_, f64>, error: ArrayView1<'_, f64>) -> Option<Vec<Vec<usize>>> {
        let Some(groups) = &self.groups.0 else { return optimal(&ranking(values), self.k, values, error) };
        let mut sets: Vec<Vec<usize>> = Vec::new();
        for kept in kept_groups(groups, values, error)? {
            let values = inside(groups, &kept, values);
            for set in optimal(&ranking(values.view()), self.k, values.view(), error)? {
                if !sets.iter().any(|other| same_set(other, &set)) {
                    sets.push(set);
                }
            }
        }
        (sets.len() <= CHOICES_OF_A_TOKEN).then_some(sets)
    }

    /// # Errors
    /// A choice that is right for no values within the errors.
    pub fn refuse_worse(
        &self,
        token: usize,
        ids: &[usize],
        values: ArrayView1<'_, f64>,
        error: ArrayView1<'_, f64>,
    ) -> Result<()> {
        let Some(groups) = &self.groups.0 else { return refused(token, ids, values, error) };
        let scores = group_scores(groups, values, error);
        let exact = ranking(scores.0.view())[..groups.kept].to_vec();
        let kept = kept_groups(groups, values, error).unwrap_or_else(|| vec![exact.clone()]);
        let explained = kept.iter().any(|kept| {
            let values = inside(groups, kept, values);
            ids.iter().all(|&id| values[id] > f64::NEG_INFINITY) && worse(ids, values.view(), error).is_none()
        });
        if explained { Ok(()) } else { refused(token, ids, inside(groups, &exact, values).view(), error) }
    }
}

/// σ(l) + bias, and how far the engine's own may lie from it: |σ′| ≤ 1/4, and the roundings of σ and of the
/// sum.
pub(super) fn with_selection_bias(
    router: &Router<'_, f64>,
    numerics: &Numerics,
    logits: &Array2<f64>,
    error: &Array2<f64>,
) -> Logits {
    let store = match numerics.router {
        RouterRounding::Score => numerics.score,
        RouterRounding::TensorType => numerics.storage,
    };
    let unit = store.unit_roundoff().max(numerics.accumulator);
    let mut compared = logits.mapv(|logit| 1.0 / (1.0 + (-logit).exp()));
    let mut error = error / 4.0;
    Zip::from(&mut error).and(&compared).for_each(|error, p| {
        *error += (numerics.function_ulps * numerics.accumulator + unit) * p;
    });
    if let Some(bias) = &router.selection_bias {
        compared += bias;
    }
    Zip::from(&mut error).and(&compared).for_each(|error, c| *error += unit * (c.abs() + *error));
    Logits { values: compared, error, source: Source::Logits }
}

/// Every set of groups that may stay, the exact one first.
fn kept_groups(
    groups: &GroupedSigmoid,
    values: ArrayView1<'_, f64>,
    error: ArrayView1<'_, f64>,
) -> Option<Vec<Vec<usize>>> {
    let (scores, errors) = group_scores(groups, values, error);
    optimal(&ranking(scores.view()), groups.kept, scores.view(), errors.view())
}

/// The sum of each group's two largest values, and its error.
fn group_scores(
    groups: &GroupedSigmoid,
    values: ArrayView1<'_, f64>,
    error: ArrayView1<'_, f64>,
) -> (Array1<f64>, Array1<f64>) {
    let size = values.len() / groups.groups;
    let two_largest = |group: usize, sign: f64| {
        let mut members: Vec<f64> =
            (group * size..(group + 1) * size).map(|expert| values[expert] + sign * error[expert]).collect();
        members.sort_unstable_by(|a, b| b.total_cmp(a));
        members[0] + members[1]
    };
    let scores = Array1::from_shape_fn(groups.groups, |group| two_largest(group, 0.0));
    let errors = Array1::from_shape_fn(groups.groups, |group| {
        let score = scores[group];
        (two_largest(group, 1.0) - score).max(score - two_largest(group, -1.0))
    });
    (scores, errors)
}

/// The values, −∞ outside the groups that stay.
fn inside(groups: &GroupedSigmoid, kept: &[usize], values: ArrayView1<'_, f64>) -> Array1<f64> {
    let size = values.len() / groups.groups;
    Array1::from_shape_fn(values.len(), |expert| {
        if kept.contains(&(expert / size)) { values[expert] } else { f64::NEG_INFINITY }
    })
}
