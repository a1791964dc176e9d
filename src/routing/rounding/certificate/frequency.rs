//! Does an expert have the one of its two multiples that the rule prescribes?

use super::{Expert, Violation};
use crate::routing::rounding::Rule;

/// What the rule allows an expert.
enum Verdict {
    Lower(&'static str),
    Upper(&'static str),
    Either,
}

/// Judges a count that is one of the two multiples around f. `moved` is the sum of the changes of
/// the experts before.
pub(super) fn judge(expert: &Expert, tokens: usize, tile: usize, rule: Rule, moved: i128) -> Option<Violation> {
    let &Expert { id, frequency, count, capped, .. } = expert;
    let above = frequency % tile;
    if above == 0 {
        return capped
            .then_some(Violation::NotCapped { expert: id, reason: "its count was a multiple of the tile before" });
    }
    let lower = frequency - above;
    // As far as it matters: a multiple that does not fit a usize is beyond T.
    let upper = lower.saturating_add(tile);
    let verdict = match rule {
        Rule::Up => Verdict::Upper("always up"),
        Rule::Down => Verdict::Lower("always down"),
        Rule::Nearest | Rule::NearestHalfToEven => nearest(above, tile, lower, rule),
        Rule::Balance => balanced(above, tile, moved),
        Rule::StochasticByFrequency => Verdict::Either,
        Rule::StochasticByScores => by_scores(expert, lower, upper),
    };

    if capped {
        let reason = match verdict {
            _ if upper <= tokens => "it has room for the larger multiple",
            _ if count != lower => "it does not have the smaller multiple",
            Verdict::Lower(_) => "the rule chooses the smaller multiple",
            Verdict::Upper(_) | Verdict::Either => return None,
        };
        return Some(Violation::NotCapped { expert: id, reason });
    }
    let wrong = |expected, reason| Violation::Rule { expert: id, rule, frequency, count, expected, reason };
    match verdict {
        Verdict::Lower(reason) if count != lower => Some(wrong(lower, reason)),
        Verdict::Upper(_) if upper > tokens => Some(wrong(lower, "the expert is capped and must be listed")),
        Verdict::Upper(reason) if count != upper => Some(wrong(upper, reason)),
        _ => None,
    }
}

/// By the distance: twice the rest beyond lo against M.
fn nearest(above: usize, tile: usize, lower: usize, rule: Rule) -> Verdict {
    let twice = 2 * above as u128;
    if twice > tile as u128 {
        Verdict::Upper("the nearer multiple")
    } else if twice < tile as u128 {
        Verdict::Lower("the nearer multiple")
    } else if rule == Rule::NearestHalfToEven && lower / tile % 2 == 1 {
        Verdict::Upper("a tie goes to the even multiple")
    } else {
        Verdict::Lower("a tie goes down, or to the even multiple")
    }
}

/// The smaller running sum of changes, down where both are as small.
fn balanced(above: usize, tile: usize, moved: i128) -> Verdict {
    let if_lower = moved - above as i128;
    let if_upper = if_lower + tile as i128;
    if if_upper.unsigned_abs() < if_lower.unsigned_abs() {
        Verdict::Upper("it leaves the smaller sum of changes")
    } else {
        Verdict::Lower("it leaves the smaller sum of changes, or a tie")
    }
}

/// hi has probability 0 if the choosers at stake score 0, and 1 if those to be added do and the
/// choosers do not. Sums in another order may differ by their roundoff, so the second needs more.
fn by_scores(expert: &Expert, lower: usize, upper: usize) -> Verdict {
    let Expert { ranked, frequency, .. } = expert;
    let sum = |range: std::ops::Range<usize>| ranked[range].iter().map(|(key, _)| key.score).sum::<f64>();
    let reach = upper.min(ranked.len());
    let [kept, at_stake, added] = [sum(0..lower), sum(lower..*frequency), sum(*frequency..reach)];
    let roundoff = reach as f64 * f64::EPSILON * (kept + at_stake + added);
    if at_stake == 0.0 {
        Verdict::Lower("the scores at stake are 0")
    } else if added == 0.0 && at_stake > 2.0 * roundoff {
        Verdict::Upper("the scores to be added are 0")
    } else {
        Verdict::Either
    }
}
