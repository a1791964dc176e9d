//! The router of DeepSeek-V3: probabilities of their own, experts in groups, a bias that only chooses.
//!
//! ```text
//! p = σ(l)      c = p + b, b the selection bias      S = Σ p over the chosen + 1e-20
//! a group's score: its two largest c; the best groups stay, and of them the K experts of largest c
//! s = factor·p (/ S if renormalised)
//! dlogit = dp·p(1 − p) on the chosen, 0 elsewhere,  dp = factor·(g − Σ g·p/S)/S, or factor·g
//! ```
//!
//! Ties, of experts and of groups, go to the smaller id. The selection bias gets no gradient.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use ndarray::{Array2, ArrayView1, ArrayView2};
use rayon::prelude::*;

use super::Choice;
use super::scores::check_row;
use super::top_k::check_sizes;
use crate::element::Real;
use crate::error::{Error, Result};
use crate::mutant::Mutant;
use crate::shape::ExpertId;

/// What keeps a sum of probabilities from being 0.
const NO_ZERO: f64 = 1e-20;

/// The constants of a router with sigmoid probabilities and expert groups.
///
/// In text `grouped_sigmoid:groups=4,kept=2,renormalized=true,factor=2.5`:
///
/// ```
/// use sonicmoe::routing::GroupedSigmoid;
/// let router: GroupedSigmoid = "grouped_sigmoid:groups=4,kept=2,renormalized=true,factor=2.5".parse()?;
/// assert_eq!(router, GroupedSigmoid { groups: 4, kept: 2, renormalized: true, factor: 2.5 });
/// assert!(router.check(16, 4).is_ok());
/// assert!(router.check(16, 9).is_err()); // two groups of four hold eight
/// # Ok::<(), sonicmoe::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupedSigmoid {
    /// Groups that the experts fall into, each of E/groups consecutive ids.
    pub groups: usize,
    /// Groups that a token may choose from.
    pub kept: usize,
    /// Whether the chosen probabilities are divided by their sum.
    pub renormalized: bool,
    /// What every score is multiplied with.
    pub factor: f64,
}

impl Eq for GroupedSigmoid {}

impl Hash for GroupedSigmoid {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let Self { groups, kept, renormalized, factor } = *self;
        // −0 equals +0.
        (groups, kept, renormalized, (factor + 0.0).to_bits()).hash(state);
    }
}

impl GroupedSigmoid {
    /// The name of the convention.
    pub const NAME: &'static str = "grouped_sigmoid";

    /// Whether `experts` fall into the groups, and K of them fit into those that stay.
    ///
    /// # Errors
    /// No group, groups that do not divide E or have fewer than two experts, none or more groups kept
    /// than there are, K beyond the experts of the kept groups, or a factor that is not finite.
    pub fn check(&self, experts: usize, k: usize) -> Result<()> {
        let Self { groups, kept, renormalized: _, factor } = *self;
        if groups == 0 || !experts.is_multiple_of(groups) {
            return Err(Error::size("the number of expert groups", groups, format!("it must divide E = {experts}")));
        }
        let size = experts / groups;
        if size < 2 {
            return Err(Error::size(
                "the size of an expert group",
                size,
                "its score is the sum of its two best experts",
            ));
        }
        if kept == 0 || kept > groups {
            return Err(Error::size("the number of kept groups", kept, format!("there are {groups} groups")));
        }
        if k > kept * size {
            return Err(Error::size("K", k, format!("{kept} groups of {size} experts have only {}", kept * size)));
        }
        if factor.is_finite() { Ok(()) } else { Err(Error::not_finite("the scaling factor", &[], factor)) }
    }

    /// The scores of the chosen experts, from their logits.
    pub(super) fn scores<A: Real>(&self, logits: impl Iterator<Item = A> + Clone, scores: &mut [A]) {
        let (total, factor) = (self.total(logits.clone()), A::from_f64(self.factor));
        for (score, logit) in scores.iter_mut().zip(logits) {
            *score = sigmoid(logit).0 / total * factor;
        }
    }

    /// dlogits of the chosen experts; each goes to `put` with its rank.
    pub(super) fn backward<A: Real>(
        &self,
        logits: impl Iterator<Item = A> + Clone,
        ds: &[A],
        mut put: impl FnMut(usize, A),
    ) {
        let (total, factor) = (self.total(logits.clone()), A::from_f64(self.factor));
        let mean = if self.renormalized {
            ds.iter().zip(logits.clone()).map(|(&g, logit)| g * (sigmoid(logit).0 / total)).sum()
        } else {
            A::zero()
        };
        for (rank, (&g, logit)) in ds.iter().zip(logits).enumerate() {
            let (p, rest) = sigmoid(logit);
            put(rank, factor * ((g - mean) / total) * (p * rest));
        }
    }

    /// S, or 1 where nothing is renormalised.
    fn total<A: Real>(&self, logits: impl Iterator<Item = A>) -> A {
        if !self.renormalized {
            return A::one();
        }
        let sum: A = logits.map(|logit| sigmoid(logit).0).sum();
        sum + A::from_f64(NO_ZERO)
    }
}

/// The K experts of each row of `logits` (T, E) by σ(l) + bias, inside the groups that stay.
///
/// A logit of −∞ is a probability of 0, no mask.
///
/// # Errors
/// What [`GroupedSigmoid::check`] refuses, a bias that is not (E) or not finite, K outside `1..=E`, a
/// logit that is NaN or +∞.
pub fn grouped_top_k<A: Real>(
    logits: ArrayView2<A>,
    bias: Option<ArrayView1<A>>,
    k: usize,
    router: &GroupedSigmoid,
) -> Result<Choice> {
    mutated(logits, bias, k, router, None)
}

/// [`grouped_top_k`] with a planted bug.
pub(crate) fn mutated<A: Real>(
    logits: ArrayView2<A>,
    bias: Option<ArrayView1<A>>,
    k: usize,
    router: &GroupedSigmoid,
    mutant: Option<Mutant>,
) -> Result<Choice> {
    let (tokens, experts) = logits.dim();
    check_sizes(tokens, experts, k)?;
    router.check(experts, k)?;
    if let Some(bias) = bias {
        check_bias(bias, experts)?;
    }
    let bias = if mutant == Some(Mutant::BiasNotChoosing) { None } else { bias };
    let mut ids = Array2::from_elem((tokens, k), ExpertId::default());
    let failure = ids
        .outer_iter_mut()
        .into_par_iter()
        .enumerate()
        .filter_map(|(token, mut chosen)| {
            let row = logits.row(token);
            if let Err(error) = check_row(token, row) {
                return Some((token, error));
            }
            let rank: Vec<A> = (0..experts)
                .map(|expert| sigmoid(row[expert]).0 + bias.map_or(A::zero(), |bias| bias[expert]))
                .collect();
            for (place, expert) in best_inside_groups(&rank, k, router, mutant).into_iter().enumerate() {
                chosen[place] = ExpertId(expert as u32);
            }
            None
        })
        .min_by_key(|&(token, _)| token);
    match failure {
        Some((_, error)) => Err(error),
        None => Choice::new(experts, ids),
    }
}

pub(crate) fn check_bias<A: Real>(bias: ArrayView1<A>, experts: usize) -> Result<()> {
    if bias.len() != experts {
        return Err(Error::shape("selection_bias", &[experts], &[bias.len()], "one entry per expert"));
    }
    match bias.iter().position(|value| !value.is_finite()) {
        Some(expert) => Err(Error::not_finite("selection_bias", &[expert], bias[expert].to_f64())),
        None => Ok(()),
    }
}

/// The K best of one token, best first.
fn best_inside_groups<A: Real>(c: &[A], k: usize, router: &GroupedSigmoid, mutant: Option<Mutant>) -> Vec<usize> {
    let size = c.len() / router.groups;
    let scores: Vec<A> = c
        .chunks_exact(size)
        .map(|group| {
            let (mut first, mut second) = (A::neg_infinity(), A::neg_infinity());
            for &value in group {
                if value > first {
                    (first, second) = (value, first);
                } else if value > second {
                    second = value;
                }
            }
            if mutant == Some(Mutant::GroupOfOne) { first } else { first + second }
        })
        .collect();
    let kept = if mutant == Some(Mutant::GroupsIgnored) { router.groups } else { router.kept };
    let larger_id = mutant == Some(Mutant::GroupTieToLargerId);
    let groups = descending(0..router.groups, &scores, kept, larger_id);
    descending(groups.into_iter().flat_map(|group| group * size..(group + 1) * size), c, k, larger_id)
}

/// The `count` ids of largest value: larger first, then the smaller id, or with a planted bug the larger.
fn descending<A: Real>(ids: impl Iterator<Item = usize>, values: &[A], count: usize, larger_id: bool) -> Vec<usize> {
    let mut ids: Vec<usize> = ids.collect();
    // Values are numbers.
    ids.sort_unstable_by(|&a, &b| {
        let by_id = if larger_id { b.cmp(&a) } else { a.cmp(&b) };
        values[b].partial_cmp(&values[a]).unwrap_or(std::cmp::Ordering::Equal).then(by_id)
    });
    ids.truncate(count);
    ids
}

/// σ(l) and 1 − σ(l) = σ(−l), by one exponential of a number ≤ 0.
fn sigmoid<A: Real>(logit: A) -> (A, A) {
    let tail = (-logit.abs()).exp();
    let large = (A::one() + tail).recip();
    let small = tail * large;
    if logit < A::zero() { (small, large) } else { (large, small) }
}

impl fmt::Display for GroupedSigmoid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { groups, kept, renormalized, factor } = self;
        let text = format!("{}:groups={groups},kept={kept},renormalized={renormalized},factor={factor}", Self::NAME);
        f.pad(&text)
    }
}

impl FromStr for GroupedSigmoid {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = |reason: &str| {
            let form = format!("{}:groups=4,kept=2,renormalized=true,factor=2.5", Self::NAME);
            Error::parse("router", text, format!("{reason}; its form is {form}"))
        };
        let constants = text.strip_prefix(Self::NAME).and_then(|rest| rest.strip_prefix(':'));
        let constants = constants.ok_or_else(|| wrong("it has no constants"))?;
        let (mut groups, mut kept, mut renormalized, mut factor) = (None, None, None, None);
        for part in constants.split(',') {
            let (key, value) = part.split_once('=').ok_or_else(|| wrong("a constant has no value"))?;
            let known = match key {
                "groups" => value.parse().map(|value| groups = Some(value)).is_ok(),
                "kept" => value.parse().map(|value| kept = Some(value)).is_ok(),
                "renormalized" => value.parse().map(|value| renormalized = Some(value)).is_ok(),
                "factor" => value.parse().map(|value| factor = Some(value)).is_ok(),
                _ => false,
            };
            if !known {
                return Err(wrong("a constant is unknown or its value no number"));
            }
        }
        match (groups, kept, renormalized, factor) {
            (Some(groups), Some(kept), Some(renormalized), Some(factor)) => {
                Ok(Self { groups, kept, renormalized, factor })
            }
            _ => Err(wrong("a constant is missing")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{arr1, arr2};
    use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

    const FOUR_GROUPS: GroupedSigmoid = GroupedSigmoid { groups: 4, kept: 2, renormalized: true, factor: 2.5 };

    fn chosen(logits: &[f64], bias: Option<&[f64]>, k: usize, router: &GroupedSigmoid) -> Vec<u32> {
        let logits = ArrayView2::from_shape((1, logits.len()), logits).unwrap();
        let choice = grouped_top_k(logits, bias.map(ArrayView1::from), k, router).unwrap();
        choice.ids().iter().map(|expert| expert.0).collect()
    }

    #[test]
    fn the_best_expert_is_passed_over_where_its_group_does_not_stay() {
        // Expert 0 is the best, but its group's second is the worst.
        let logits = [3.0, -9.0, 1.0, 1.0, 0.9, 0.9, -1.0, -1.0];
        assert_eq!(chosen(&logits, None, 3, &FOUR_GROUPS), [2, 3, 4]);
        let one_group = GroupedSigmoid { groups: 1, kept: 1, ..FOUR_GROUPS };
        assert_eq!(chosen(&logits, None, 3, &one_group), [0, 2, 3]);
    }

    #[test]
    fn ties_of_groups_and_of_experts_go_to_the_smaller_id() {
        assert_eq!(chosen(&[0.5; 8], None, 4, &FOUR_GROUPS), [0, 1, 2, 3]);
        let logits = [0.0, 0.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0];
        assert_eq!(chosen(&logits, None, 3, &FOUR_GROUPS), [3, 4, 2]);
        // With the bug planted, to the larger: of groups, then of experts.
        let larger = best_inside_groups(&logits, 3, &FOUR_GROUPS, Some(Mutant::GroupTieToLargerId));
        assert_eq!(larger, [7, 4, 6]);
    }

    #[test]
    fn equal_routers_have_one_hash_and_different_ones_have_others() {
        let hash = |router: GroupedSigmoid| BuildHasherDefault::<DefaultHasher>::default().hash_one(router);
        let of_zero = |factor| hash(GroupedSigmoid { factor, ..FOUR_GROUPS });
        assert_eq!(of_zero(0.0), of_zero(-0.0));
        let changed = [
            GroupedSigmoid { groups: 2, ..FOUR_GROUPS },
            GroupedSigmoid { kept: 1, ..FOUR_GROUPS },
            GroupedSigmoid { renormalized: false, ..FOUR_GROUPS },
            GroupedSigmoid { factor: 1.0, ..FOUR_GROUPS },
        ];
        assert!(changed.into_iter().all(|router| hash(router) != hash(FOUR_GROUPS)));
    }

    #[test]
    fn the_selection_bias_chooses_and_does_not_score() {
        let (logits, bias) = (arr2(&[[1.0, 0.9, 0.0, 0.1]]), arr1(&[0.0, 0.0, 2.0, 2.0]));
        let router = GroupedSigmoid { groups: 2, kept: 1, renormalized: false, factor: 2.0 };
        let choice = grouped_top_k(logits.view(), Some(bias.view()), 1, &router).unwrap();
        assert_eq!(choice.ids()[[0, 0]], ExpertId(3));
        let mut score = [0.0];
        router.scores([0.1].into_iter(), &mut score);
        assert!((score[0] - 2.0 / (1.0 + (-0.1f64).exp())).abs() < 1e-15);
    }

    #[test]
    fn routers_that_cannot_choose_are_refused() {
        let with = |groups, kept| GroupedSigmoid { groups, kept, ..FOUR_GROUPS };
        for (router, k, reason) in [
            (with(0, 1), 1, "must divide"),
            (with(3, 1), 1, "must divide"),
            (with(8, 1), 1, "two best"),
            (with(4, 0), 1, "kept groups"),
            (with(4, 5), 1, "kept groups"),
            (with(4, 2), 5, "have only 4"),
            (GroupedSigmoid { factor: f64::NAN, ..FOUR_GROUPS }, 1, "factor"),
        ] {
            let error = router.check(8, k).unwrap_err().to_string();
            assert!(error.contains(reason), "{router}: {error}");
        }
        assert!(grouped_top_k(arr2(&[[f64::NAN, 0.0]]).view(), None, 1, &with(1, 1)).is_err());
        let bias = arr1(&[0.0, f64::INFINITY, 1.0, f64::NAN]);
        let error = grouped_top_k(arr2(&[[0.0; 4]]).view(), Some(bias.view()), 1, &with(1, 1)).unwrap_err();
        assert!(error.to_string().contains("`selection_bias` holds inf at [1]"), "{error}");
        let bias = arr1(&[0.0; 3]);
        let error = grouped_top_k(arr2(&[[0.0; 4]]).view(), Some(bias.view()), 1, &with(1, 1)).unwrap_err();
        assert!(error.to_string().contains("`selection_bias` has shape [3], expected [4]"), "{error}");
    }

    #[test]
    fn masked_logits_give_no_nan_and_no_choice_of_a_masked_group_over_another() {
        let logits = [f64::NEG_INFINITY; 8];
        assert_eq!(chosen(&logits, None, 4, &FOUR_GROUPS), [0, 1, 2, 3]);
        let mut scores = [1.0; 2];
        FOUR_GROUPS.scores([f64::NEG_INFINITY; 2].into_iter(), &mut scores);
        assert_eq!(scores, [0.0, 0.0]);
        FOUR_GROUPS.backward([f64::NEG_INFINITY; 2].into_iter(), &[1.0, 2.0], |_, dlogit| assert_eq!(dlogit, 0.0));
    }

    #[test]
    fn a_text_gives_its_router_back() {
        assert_eq!(FOUR_GROUPS.to_string().parse::<GroupedSigmoid>().unwrap(), FOUR_GROUPS);
        for text in ["grouped_sigmoid", "grouped_sigmoid:groups=4", "grouped_sigmoid:groups=x,kept=1", "softmax"] {
            assert!(text.parse::<GroupedSigmoid>().is_err(), "{text}");
        }
    }
}
