//! Is this the choice of the K largest logits?

use std::collections::BTreeSet;

use ndarray::{Array2, ArrayView1, ArrayView2};

use super::Violation;
use crate::element::Element;
use crate::routing::GroupedSigmoid;
use crate::shape::ExpertId;

/// Judges `ids` (T, K), experts by rank, as the choice of the `k` largest of `logits` (T, E):
/// distinct, in range, none left out that is larger than a chosen one, ranks in order, and every
/// tie won by the smaller id.
pub fn certify_choice<S: Element>(
    logits: ArrayView2<S>,
    k: usize,
    ids: ArrayView2<ExpertId>,
) -> Result<(), Vec<Violation>> {
    judge(logits, |_, _| 0.0, k, ids)
}

/// Judges `ids` as [`certify_choice`] does, but each logit is known only to ± its entry of
/// `within` (T, E): any choice passes that is the right one for some logits in these intervals.
///
/// For routers of lower precision than the logits at hand.
pub fn certify_choice_within<S: Element>(
    logits: ArrayView2<S>,
    within: ArrayView2<f64>,
    k: usize,
    ids: ArrayView2<ExpertId>,
) -> Result<(), Vec<Violation>> {
    if within.shape() != logits.shape() {
        let [expected, found] = [logits.len(), within.len()];
        return Err(vec![Violation::Length { array: "within", expected, found }]);
    }
    judge(logits, |token, expert| within[(token, expert)], k, ids)
}

/// Judges `ids` as the choice of a grouped sigmoid router: the K largest σ(l) + bias inside groups that may
/// stay, where σ(l) + bias is known to ± `error` of its largest magnitude, 1 + |bias|.
///
/// σ is computed here, in f64. Two groups whose scores are within their errors may stand for each other,
/// and so may two experts.
pub fn certify_grouped_choice<S: Element>(
    logits: ArrayView2<S>,
    bias: Option<ArrayView1<S>>,
    router: &GroupedSigmoid,
    error: f64,
    k: usize,
    ids: ArrayView2<ExpertId>,
) -> Result<(), Vec<Violation>> {
    let (tokens, experts) = logits.dim();
    if router.check(experts, k).is_err() || bias.is_some_and(|bias| bias.len() != experts) {
        return Err(vec![Violation::TopK { k, experts }]);
    }
    let size = experts / router.groups;
    let mut values = Array2::from_elem((tokens, experts), f64::NEG_INFINITY);
    let mut within = Array2::zeros((tokens, experts));
    for (token, logits) in logits.outer_iter().enumerate() {
        let known: Vec<Known> = (0..experts)
            .map(|expert| {
                let (logit, bias) = (logits[expert].to_f64(), bias.map_or(0.0, |bias| bias[expert].to_f64()));
                let (c, error) = (1.0 / (1.0 + (-logit).exp()) + bias, error * (1.0 + bias.abs()));
                Known { expert: ExpertId(expert as u32), logit: c, low: c - error, high: c + error }
            })
            .collect();
        let used = ids.outer_iter().nth(token).into_iter().flatten().map(|expert| expert.index() / size);
        for group in groups_that_may_stay(&known, router, used) {
            for expert in &known[group * size..(group + 1) * size] {
                let at = (token, expert.expert.index());
                (values[at], within[at]) = (expert.logit, expert.high - expert.logit);
            }
        }
        // What allows no choice is reported as such.
        for (expert, logit) in logits.iter().enumerate() {
            let logit = logit.to_f64();
            if logit.is_nan() || logit == f64::INFINITY {
                values[(token, expert)] = logit;
            }
        }
    }
    judge(values.view(), |token, expert| within[(token, expert)], k, ids)
}

/// The groups that stay: those in use and the hardest to leave out of the others, unless one that would
/// be left out surely comes before one in use, which is then left out.
fn groups_that_may_stay(
    experts: &[Known],
    router: &GroupedSigmoid,
    used: impl Iterator<Item = usize>,
) -> impl Iterator<Item = usize> {
    let size = experts.len() / router.groups;
    let two_largest = |mut values: Vec<f64>| {
        values.sort_unstable_by(|a, b| b.total_cmp(a));
        values[0] + values[1]
    };
    let mut groups: Vec<Known> = experts
        .chunks_exact(size)
        .enumerate()
        .map(|(group, members)| Known {
            expert: ExpertId(group as u32),
            logit: two_largest(members.iter().map(|expert| expert.logit).collect()),
            low: two_largest(members.iter().map(|expert| expert.low).collect()),
            high: two_largest(members.iter().map(|expert| expert.high).collect()),
        })
        .collect();
    let used: BTreeSet<usize> = used.collect();
    let is_used = |group: &Known| used.contains(&group.expert.index());
    groups.sort_by(|a, b| is_used(b).cmp(&is_used(a)).then(b.low.total_cmp(&a.low)).then(a.expert.cmp(&b.expert)));
    let left_out = groups.split_off(router.kept);
    let hardest = left_out.into_iter().reduce(Known::harder);
    let mut kept: Vec<usize> = groups
        .into_iter()
        .filter(|group| hardest.is_none_or(|hardest| group.may_precede(hardest)))
        .map(|group| group.expert.index())
        .collect();
    kept.sort_unstable();
    kept.into_iter()
}

/// What is known of one expert of a token: its logit lies in `low..=high`.
#[derive(Clone, Copy)]
struct Known {
    expert: ExpertId,
    logit: f64,
    low: f64,
    high: f64,
}

impl Known {
    /// Whether this one may rank before `other`.
    fn may_precede(self, other: Self) -> bool {
        self.high > other.low || (self.high == other.low && self.expert < other.expert)
    }

    /// Whichever is harder to rank before: its lowest possible logit is larger, or its id smaller.
    fn harder(self, other: Self) -> Self {
        if self.low > other.low || (self.low == other.low && self.expert < other.expert) { self } else { other }
    }
}

fn judge<S: Element>(
    logits: ArrayView2<S>,
    error: impl Fn(usize, usize) -> f64,
    k: usize,
    ids: ArrayView2<ExpertId>,
) -> Result<(), Vec<Violation>> {
    let (tokens, experts) = logits.dim();
    if k == 0 || k > experts {
        return Err(vec![Violation::TopK { k, experts }]);
    }
    if ids.dim() != (tokens, k) {
        return Err(vec![Violation::Length { array: "expert ids", expected: tokens * k, found: ids.len() }]);
    }
    let mut violations = Vec::new();
    let mut rank_of = vec![None; experts];
    for token in 0..tokens {
        let before = violations.len();
        let known = |expert: ExpertId| {
            let logit = logits[(token, expert.index())].to_f64();
            let error = error(token, expert.index());
            Known { expert, logit, low: logit - error, high: logit + error }
        };

        rank_of.fill(None);
        for (rank, &expert) in ids.row(token).iter().enumerate() {
            let pair = token * k + rank;
            if expert.index() >= experts {
                violations.push(Violation::OutOfRange {
                    array: "expert ids",
                    at: pair,
                    id: expert.0.into(),
                    limit: experts,
                });
            } else if let Some(first) = rank_of[expert.index()].replace(rank) {
                let first = token * k + first;
                violations.push(Violation::Duplicate { token, expert: expert.index(), first, second: pair });
            } else if known(expert).logit == f64::NEG_INFINITY {
                violations.push(Violation::Masked { token, rank, expert: expert.0 });
            }
        }
        for expert in 0..experts {
            let (logit, error) = (logits[(token, expert)].to_f64(), error(token, expert));
            if logit.is_nan() || logit == f64::INFINITY {
                violations.push(Violation::Number { array: "router_logits", token, expert, value: logit });
            }
            if !(0.0..f64::INFINITY).contains(&error) {
                violations.push(Violation::Number { array: "within", token, expert, value: error });
            }
        }
        // An order cannot be judged among ids or numbers that are none.
        if violations.len() > before {
            continue;
        }

        // Intervals admit a descending order exactly if each may precede all that come after it:
        // walk up from the last rank beside the hardest one met so far, beginning with the experts
        // that were left out.
        let mut hardest = (0..experts)
            .filter(|&expert| rank_of[expert].is_none())
            .map(|expert| known(ExpertId(expert as u32)))
            .reduce(Known::harder);
        for (rank, &expert) in ids.row(token).iter().enumerate().rev() {
            let this = known(expert);
            if let Some(other) = hardest.filter(|&other| !this.may_precede(other)) {
                violations.push(match rank_of[other.expert.index()] {
                    None => Violation::LeftOut {
                        token,
                        rank,
                        chosen: this.expert.0,
                        chosen_logit: this.logit,
                        left_out: other.expert.0,
                        left_out_logit: other.logit,
                    },
                    Some(_) => Violation::RankOrder {
                        token,
                        rank,
                        earlier: this.expert.0,
                        earlier_logit: this.logit,
                        later: other.expert.0,
                        later_logit: other.logit,
                    },
                });
            }
            hardest = hardest.map(|other| other.harder(this)).or(Some(this));
        }
    }
    if violations.is_empty() { Ok(()) } else { Err(violations) }
}
