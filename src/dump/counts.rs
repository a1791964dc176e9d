//! Counts of tokens per expert, where a file has them: before and after token rounding.

use super::choice::ranking;
use std::collections::BTreeSet;

use super::container::Container;
use super::{Chosen, Dump};
use crate::error::{Error, Result};
use crate::routing::Routing;
use crate::routing::rounding::{Rule, TokenRounding};
use crate::shape::ExpertId;

/// The counts of a file.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    /// (E) pairs per expert in the routing used.
    pub expert_frequency: Option<Vec<i64>>,
    /// (E) pairs per expert of the top-K choice, before token rounding.
    pub topk_frequency: Option<Vec<i64>>,
}

impl Counts {
    pub fn read(container: &Container, e: usize) -> Result<Self> {
        let read = |name: &'static str| {
            let counts = container.integers(name)?;
            match &counts {
                Some(counts) if counts.len() != e => Err(Error::shape(name, &[e], &[counts.len()], "one per expert")),
                _ => Ok(counts),
            }
        };
        Ok(Self { expert_frequency: read("expert_frequency")?, topk_frequency: read("topk_frequency")? })
    }
}

impl Dump {
    /// Compares the file's counts with its routing and logits, and with the rules of token
    /// rounding: every count a multiple of the tile M, and less than M away from the top-K count.
    /// Returns what was found to hold, one line each.
    ///
    /// # Errors
    /// *Contract*: the first count that contradicts, by expert.
    pub fn check_counts(&self, choice: &Chosen) -> Result<Vec<String>> {
        let mut held = Vec::new();
        let experts = self.problem.e();
        let used: Vec<i64> =
            (0..experts).map(|expert| choice.routing.rows_of_expert(ExpertId(expert as u32)).len() as i64).collect();
        if let Some(stated) = &self.counts.expert_frequency {
            agree("expert_frequency", stated, &used, "the routing has")?;
            held.push("expert_frequency is that of the routing".into());
        }
        if let Some(stated) = &self.counts.topk_frequency {
            self.check_top_k(stated, &used, &mut held)?;
        }
        if let Some(rule) = &self.metadata.token_rounding {
            self.check_rounding(rule, &used, &choice.routing, &mut held)?;
        }
        Ok(held)
    }

    fn check_top_k(&self, stated: &[i64], used: &[i64], held: &mut Vec<String>) -> Result<()> {
        if self.problem.router_w().is_some() {
            agree("topk_frequency", stated, used, "the choice has")?;
            held.push("topk_frequency is that of the choice".into());
            return Ok(());
        }
        let (Some(logits), Some(k)) = (&self.logits, self.metadata.k) else { return Ok(()) };
        if k == 0 || k > logits.ncols() {
            return Err(Error::top_k(k, logits.ncols()));
        }
        // Equal logits at the boundary may go either way: a range per expert, and the sum.
        let (mut fewest, mut most) = (vec![0; logits.ncols()], vec![0; logits.ncols()]);
        for (row, values) in logits.outer_iter().enumerate() {
            if let Some((expert, value)) = values.iter().enumerate().find(|(_, l)| l.is_nan() || **l == f64::INFINITY) {
                return Err(Error::logit(row, expert, *value));
            }
            let ranked = ranking(values);
            let last = values[ranked[k - 1]];
            let contested = ranked.get(k).is_some_and(|&next| values[next] == last);
            for (expert, &value) in values.iter().enumerate() {
                most[expert] += i64::from(value >= last);
                fewest[expert] += i64::from(value > last || (value == last && !contested));
            }
        }
        for (expert, &count) in stated.iter().enumerate() {
            if count < fewest[expert] || count > most[expert] {
                let reason = format!(
                    "expert {expert} has {count}, but the top {k} of router_logits give {} to {}",
                    fewest[expert], most[expert]
                );
                return Err(Error::parse("tensor", "topk_frequency", reason));
            }
        }
        let (sum, routed) = (stated.iter().sum::<i64>(), (logits.nrows() * k) as i64);
        if sum != routed {
            return Err(Error::parse("tensor", "topk_frequency", format!("its sum is {sum}, but T·K is {routed}")));
        }
        held.push(format!("topk_frequency is that of the top {k} of router_logits"));
        Ok(())
    }

    fn check_rounding(&self, rule: &str, used: &[i64], routing: &Routing, held: &mut Vec<String>) -> Result<()> {
        let Some(tile) = self.metadata.tile else {
            return Err(Error::missing(
                "metadata `tile`",
                format!("`token_rounding` is {}", super::container::quoted(rule)),
            ));
        };
        let tile = i64::try_from(tile).ok().filter(|tile| *tile > 0);
        let Some(tile) = tile else {
            return Err(Error::parse("metadata", "tile", "a tile has at least one row"));
        };
        for (expert, &count) in used.iter().enumerate() {
            if count % tile != 0 {
                let reason = format!("expert {expert} has {count} pairs, no multiple of the tile {tile}");
                return Err(Error::parse("tensor", "expert_idx", reason));
            }
            if let Some(top_k) = &self.counts.topk_frequency
                && count.abs_diff(top_k[expert]) >= tile.unsigned_abs()
            {
                let reason = format!(
                    "expert {expert} has {count} pairs, a tile of {tile} or more away from its {} of the top-K choice",
                    top_k[expert]
                );
                return Err(Error::parse("tensor", "expert_idx", reason));
            }
        }
        let near = if self.counts.topk_frequency.is_some() { ", less than a tile from its top-K count" } else { "" };
        held.push(format!("every expert's count is a multiple of {tile}{near}"));
        held.extend(self.repeat_rounding(rule, tile as usize, routing));
        Ok(())
    }

    /// Rounds the file's logits by our own rule and says how the pairs compare. Rankings in another
    /// precision, equal logits and other options make honest differences, so this is no verdict.
    fn repeat_rounding(&self, rule: &str, tile: usize, routing: &Routing) -> Option<String> {
        let rule: Rule = rule.parse().ok().filter(|rule: &Rule| !rule.draws() && tile <= i32::MAX as usize)?;
        let (logits, k) = (self.logits.as_ref()?, self.metadata.k?);
        let (_, rounded) = TokenRounding { rule, ..TokenRounding::new(tile) }.route(logits.view(), k).ok()?;
        let set = |routing: &Routing| -> BTreeSet<_> {
            routing.pair_token().iter().copied().zip(routing.pair_expert().iter().copied()).collect()
        };
        let (ours, theirs) = (set(&rounded.routing), set(routing));
        Some(match theirs.difference(&ours).count() {
            0 if ours.len() == theirs.len() => format!("the pairs are those that {rule} makes of the logits"),
            other => format!("{other} of {} pairs are others than {rule} makes of the logits", theirs.len()),
        })
    }
}

fn agree(name: &'static str, stated: &[i64], found: &[i64], whose: &str) -> Result<()> {
    match stated.iter().zip(found).position(|(stated, found)| stated != found) {
        None => Ok(()),
        Some(expert) => {
            let reason = format!("expert {expert} has {}, but {whose} {}", stated[expert], found[expert]);
            Err(Error::parse("tensor", name, reason))
        }
    }
}
