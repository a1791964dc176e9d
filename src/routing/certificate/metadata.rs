//! Do these index arrays put these pairs in expert order, stably, and back?

use std::collections::HashMap;

use super::Violation;
use crate::routing::Routing;
use crate::shape::{ExpertId, TokenId};

/// The index arrays of a routing, as [`Routing`] has them or as a device wrote them.
#[derive(Clone, Copy, Debug)]
pub struct RoutingArrays<'a> {
    /// (E + 1) where each expert's rows begin.
    pub expert_offsets: &'a [u32],
    /// (R) the token of each row.
    pub row_token: &'a [TokenId],
    /// (R) the pair at each row.
    pub row_pair: &'a [u32],
    /// (R) the row of each pair.
    pub pair_row: &'a [u32],
    /// (T + 1) where each token's entries in `token_rows` begin.
    pub token_offsets: &'a [u32],
    /// (R) the rows of each token.
    pub token_rows: &'a [u32],
}

impl<'a> From<&'a Routing> for RoutingArrays<'a> {
    fn from(routing: &'a Routing) -> Self {
        Self {
            expert_offsets: routing.expert_offsets(),
            row_token: routing.row_token(),
            row_pair: routing.row_pair(),
            pair_row: routing.pair_row(),
            token_offsets: routing.token_offsets(),
            token_rows: routing.token_rows(),
        }
    }
}

/// Judges `arrays` as the metadata of `pairs`: ids in range and no pair twice; counts and offsets;
/// a one-to-one map of pairs to rows with its inverse; and both orders stable, so that pairs of one
/// expert, and of one token, stay in the order in which they were given.
pub fn certify_metadata(
    tokens: usize,
    experts: usize,
    pairs: &[(TokenId, ExpertId)],
    arrays: RoutingArrays,
) -> Result<(), Vec<Violation>> {
    let RoutingArrays { expert_offsets, row_token, row_pair, pair_row, token_offsets, token_rows } = arrays;
    let routed = pairs.len();
    let mut violations = Vec::new();
    for (array, expected, found) in [
        ("expert_offsets", experts.saturating_add(1), expert_offsets.len()),
        ("row_token", routed, row_token.len()),
        ("row_pair", routed, row_pair.len()),
        ("pair_row", routed, pair_row.len()),
        ("token_offsets", tokens.saturating_add(1), token_offsets.len()),
        ("token_rows", routed, token_rows.len()),
    ] {
        if expected != found {
            violations.push(Violation::Length { array, expected, found });
        }
    }
    check_pairs(tokens, experts, pairs, &mut violations);
    check_one_to_one("row_pair", row_pair, routed, &mut violations);
    check_one_to_one("token_rows", token_rows, routed, &mut violations);
    // The rest indexes one array by another.
    if !violations.is_empty() {
        return Err(violations);
    }

    for (row, (&pair, &token)) in row_pair.iter().zip(row_token).enumerate() {
        let expected = pairs[pair as usize].0;
        if token != expected {
            violations.push(Violation::Entry { array: "row_token", at: row, expected: expected.0, found: token.0 });
        }
        let found = pair_row[pair as usize];
        if found as usize != row {
            let at = pair as usize;
            violations.push(Violation::Entry { array: "pair_row", at, expected: row as u32, found });
        }
    }
    let by_expert = Segments { array: "row_pair", offsets_name: "expert_offsets", what: "expert" };
    by_expert.check(expert_offsets, row_pair, |pair| pairs[pair as usize].1.index(), &mut violations);
    let token_pairs: Vec<u32> = token_rows.iter().map(|&row| row_pair[row as usize]).collect();
    let by_token = Segments { array: "token_rows", offsets_name: "token_offsets", what: "token" };
    by_token.check(token_offsets, &token_pairs, |pair| pairs[pair as usize].0.index(), &mut violations);
    if violations.is_empty() { Ok(()) } else { Err(violations) }
}

fn check_pairs(tokens: usize, experts: usize, pairs: &[(TokenId, ExpertId)], violations: &mut Vec<Violation>) {
    let mut first_of = HashMap::with_capacity(pairs.len());
    for (at, &(token, expert)) in pairs.iter().enumerate() {
        if token.index() >= tokens {
            violations.push(Violation::OutOfRange { array: "pair_token", at, id: token.0.into(), limit: tokens });
        }
        if expert.index() >= experts {
            violations.push(Violation::OutOfRange { array: "pair_expert", at, id: expert.0.into(), limit: experts });
        }
        if let Some(first) = first_of.insert((token, expert), at) {
            let (token, expert) = (token.index(), expert.index());
            violations.push(Violation::Duplicate { token, expert, first, second: at });
        }
    }
}

/// Every entry below `limit`, none twice.
fn check_one_to_one(array: &'static str, entries: &[u32], limit: usize, violations: &mut Vec<Violation>) {
    let mut first_at = vec![None; limit];
    for (at, &value) in entries.iter().enumerate() {
        match first_at.get_mut(value as usize) {
            None => violations.push(Violation::OutOfRange { array, at, id: value.into(), limit }),
            Some(place) => {
                if let Some(first) = place.replace(at) {
                    violations.push(Violation::NotOneToOne { array, value, first, second: at });
                }
            }
        }
    }
}

/// A list of pairs cut into one segment per expert, or per token.
struct Segments {
    array: &'static str,
    offsets_name: &'static str,
    what: &'static str,
}

impl Segments {
    /// Offsets give each owner as many entries as it has pairs, and these are its pairs, ascending.
    fn check(
        &self,
        offsets: &[u32],
        ordered_pairs: &[u32],
        owner: impl Fn(u32) -> usize,
        violations: &mut Vec<Violation>,
    ) {
        let Self { array, offsets_name, what } = *self;
        if offsets[0] != 0 {
            violations.push(Violation::Entry { array: offsets_name, at: 0, expected: 0, found: offsets[0] });
            return;
        }
        let mut counts = vec![0; offsets.len() - 1];
        for pair in 0..ordered_pairs.len() as u32 {
            counts[owner(pair)] += 1;
        }
        for (id, &pairs) in counts.iter().enumerate() {
            let [begin, end] = [offsets[id] as usize, offsets[id + 1] as usize];
            if begin.checked_add(pairs) != Some(end) {
                violations.push(Violation::Count { array: offsets_name, what, id, begin, end, pairs });
                return;
            }
            let segment = &ordered_pairs[begin..end];
            for (at, &pair) in segment.iter().enumerate() {
                if owner(pair) != id {
                    violations.push(Violation::Foreign { array, what, id, at: begin + at, pair, owner: owner(pair) });
                }
            }
            for neighbours in segment.windows(2) {
                if let &[first, second] = neighbours
                    && first > second
                {
                    violations.push(Violation::Unstable { array, what, id, first, second });
                }
            }
        }
    }
}
