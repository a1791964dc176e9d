//! Metamorphic laws: what is known of two runs without knowing the truth of either.
//!
//! They run on problems of the exact regime, where no sum rounds: then a changed order of tokens or
//! experts, a scaled dout, a pair without a score leave or move values bit for bit, whatever the order
//! of summation. Only a weight gradient of two parts is a sum of two stored numbers: there the law
//! holds within one rounding of each of the three.
//!
//! | law | equality |
//! | --- | --- |
//! | another problem in between, backward again on one forward | the same bits |
//! | tokens and pairs in reverse order | o, dx, ds move with them; weight gradients stay |
//! | experts relabelled | weight gradients move with them; o, dx, ds stay |
//! | dout / 4 | every gradient / 4 |
//! | pairs of score 0 | as if the pairs were not there |
//! | dout = its part on even tokens + its part on odd ones | dx, ds of each part; dW adds |
//! | T split in two | o, dx, ds of each part; dW adds |

use ndarray::{Array2, ArrayD, Axis};

use super::claim::{Claim, Finding, Section};
use super::exact::applies;
use crate::element::Element;
use crate::engine::{Engine, Forward, Output, Record, Results, run};
use crate::error::{Error, Result};
use crate::problem::{Biases, Gating, Problem};
use crate::routing::Routing;
use crate::shape::{ExpertId, TokenId};

const PER_TOKEN: [Output; 2] = [Output::O, Output::Dx];
const PER_EXPERT: [Output; 4] = [Output::Dw1, Output::Dw2, Output::Db1, Output::Db2];

/// One finding per law. `problem` is drawn at [`Scale::Exact`](crate::case::Scale::Exact), with two tokens or
/// more.
///
/// An engine of other rounding points than the method's gets the laws that hold for any: those of
/// repetition.
///
/// # Errors
/// What the engine returns, or a problem with a router.
pub fn laws<S: Element>(engine: &dyn Engine<S>, problem: &Problem<'_, S>) -> Result<Vec<Finding>> {
    let Gating::Given { routing, scores } = problem.gating() else {
        return Err(Error::parse("laws' problem", "a router", "give the routing: laws change it pair by pair"));
    };
    let base = run(engine, problem, Record::Results)?.results;
    let bench = Bench { engine, problem, routing, scores, base };
    let mut findings = vec![
        bench.finding(0, "a pass is not disturbed by another problem in between", bench.interleaved()?),
        bench.finding(1, "backward gives the same bits again on one forward", bench.backward_again()?),
    ];
    if applies(engine) {
        findings.push(bench.finding(2, "tokens and pairs in reverse order", bench.tokens_reversed()?));
        findings.push(bench.finding(3, "experts relabelled", bench.experts_relabelled()?));
        findings.push(bench.finding(4, "dout / 4 makes every gradient a quarter", bench.dout_scaled()?));
        findings.push(bench.finding(5, "a score of 0 removes its pair", bench.zero_scores()?));
        findings.push(bench.finding(6, "linear in dout", bench.dout_in_two()?));
        findings.push(bench.finding(7, "T split in two adds the weight gradients", bench.tokens_in_two()?));
    }
    Ok(findings)
}

struct Bench<'a, 'p, S: Element> {
    engine: &'a dyn Engine<S>,
    problem: &'a Problem<'p, S>,
    routing: &'a Routing,
    scores: &'a [S::Score],
    base: Results,
}

/// What a law does to one problem: everything else stays.
struct Change<S: Element> {
    x: Array2<S>,
    dout: Array2<S>,
    routing: Routing,
    scores: Vec<S::Score>,
    experts: Vec<usize>,
}

impl<S: Element> Bench<'_, '_, S> {
    fn finding(&self, place: usize, subject: &'static str, broken: Vec<String>) -> Finding {
        let claim = Claim { section: Section::Laws, place, subject: subject.into() };
        Finding::exact(claim, self.base.len() as u64, &broken)
    }

    fn pairs(&self) -> impl DoubleEndedIterator<Item = (TokenId, ExpertId)> + '_ {
        self.routing.pair_token().iter().copied().zip(self.routing.pair_expert().iter().copied())
    }

    fn unchanged(&self) -> Change<S> {
        Change {
            x: self.problem.x().to_owned(),
            dout: self.problem.dout().to_owned(),
            routing: self.routing.clone(),
            scores: self.scores.to_vec(),
            experts: (0..self.problem.e()).collect(),
        }
    }

    fn problem(&self, change: Change<S>) -> Result<Problem<'_, S>> {
        let Change { x, dout, routing, scores, experts } = change;
        let p = self.problem;
        let biases = p.b1().zip(p.b2()).map(|(b1, b2)| Biases {
            b1: b1.select(Axis(0), &experts).into(),
            b2: b2.select(Axis(0), &experts).into(),
        });
        let (w1, w2) = (p.w1().select(Axis(0), &experts), p.w2().select(Axis(0), &experts));
        Problem::new(x, w1, w2, biases, Gating::Given { routing, scores }, p.activation(), dout)
    }

    fn run(&self, change: Change<S>) -> Result<Results> {
        Ok(run(self.engine, &self.problem(change)?, Record::Results)?.results)
    }

    fn interleaved(&self) -> Result<Vec<String>> {
        let other = self.problem(self.reversed()?)?;
        let Forward { o, pass, .. } = self.engine.forward(self.problem, Record::Results)?;
        run(self.engine, &other, Record::Results)?;
        let mut results = pass.backward(self.problem.dout(), Record::Results)?.results();
        results.insert(Output::O, crate::engine::Stored::of(&o));
        Ok(differing(&self.base, &results, f64::to_bits))
    }

    fn backward_again(&self) -> Result<Vec<String>> {
        let pass = self.engine.forward(self.problem, Record::Results)?.pass;
        let other = self.problem.dout().mapv(|value| S::from_f64(-2.0 * value.to_f64()));
        let first = pass.backward(self.problem.dout(), Record::Results)?.results();
        pass.backward(other.view(), Record::Results)?;
        let again = pass.backward(self.problem.dout(), Record::Results)?.results();
        Ok(differing(&first, &again, f64::to_bits))
    }

    fn reversed(&self) -> Result<Change<S>> {
        let last = self.problem.t().saturating_sub(1) as u32;
        let pairs = self.pairs().rev().map(|(token, expert)| (TokenId(last - token.0), expert));
        let order: Vec<usize> = (0..self.problem.t()).rev().collect();
        Ok(Change {
            x: self.problem.x().select(Axis(0), &order),
            dout: self.problem.dout().select(Axis(0), &order),
            routing: Routing::new(self.problem.t(), self.problem.e(), pairs)?,
            scores: self.scores.iter().rev().copied().collect(),
            experts: (0..self.problem.e()).collect(),
        })
    }

    fn tokens_reversed(&self) -> Result<Vec<String>> {
        let mut found = self.run(self.reversed()?)?;
        for output in [Output::O, Output::Dx, Output::Ds] {
            if let Some(stored) = found.get_mut(&output) {
                stored.values.invert_axis(Axis(0));
            }
        }
        Ok(differing(&self.base, &found, value))
    }

    fn experts_relabelled(&self) -> Result<Vec<String>> {
        let last = self.problem.e() as u32 - 1;
        let pairs = self.pairs().map(|(token, expert)| (token, ExpertId(last - expert.0)));
        let routing = Routing::new(self.problem.t(), self.problem.e(), pairs)?;
        let experts = (0..self.problem.e()).rev().collect();
        let mut found = self.run(Change { routing, experts, ..self.unchanged() })?;
        for output in PER_EXPERT {
            if let Some(stored) = found.get_mut(&output) {
                stored.values.invert_axis(Axis(0));
            }
        }
        Ok(differing(&self.base, &found, value))
    }

    fn dout_scaled(&self) -> Result<Vec<String>> {
        let dout = self.problem.dout().mapv(|value| S::from_f64(value.to_f64() / 4.0));
        let mut found = self.run(Change { dout, ..self.unchanged() })?;
        for (_, stored) in found.iter_mut().filter(|(output, _)| **output != Output::O) {
            stored.values *= 4.0;
        }
        Ok(differing(&self.base, &found, value))
    }

    /// Every third pair.
    fn zero_scores(&self) -> Result<Vec<String>> {
        let stays: Vec<bool> = (0..self.routing.routed()).map(|pair| pair % 3 != 1).collect();
        let silent = self.scores.iter().zip(&stays).map(|(&score, &stays)| if stays { score } else { zero::<S>() });
        let mut silent = self.run(Change { scores: silent.collect(), ..self.unchanged() })?;
        let pairs = self.pairs().zip(&stays).filter(|(_, stays)| **stays).map(|(pair, _)| pair);
        let routing = Routing::new(self.problem.t(), self.problem.e(), pairs)?;
        let scores = self.scores.iter().zip(&stays).filter(|(_, stays)| **stays).map(|(&score, _)| score).collect();
        let removed = self.run(Change { routing, scores, ..self.unchanged() })?;
        if let Some(ds) = silent.get_mut(&Output::Ds) {
            let kept: Vec<usize> = (0..stays.len()).filter(|&pair| stays[pair]).collect();
            ds.values = ds.values.select(Axis(0), &kept);
        }
        Ok(differing(&removed, &silent, value))
    }

    fn dout_in_two(&self) -> Result<Vec<String>> {
        let part = |parity: usize| {
            let mut dout = self.problem.dout().to_owned();
            dout.outer_iter_mut().skip(1 - parity).step_by(2).for_each(|mut row| row.fill(S::from_f64(0.0)));
            self.run(Change { dout, ..self.unchanged() })
        };
        let parts = [part(0)?, part(1)?];
        let mut broken = self.weights_add(&parts);
        let of_token = |token: usize| &parts[token % 2];
        let mut merged = Results::new();
        for output in [Output::Dx, Output::Ds] {
            let mut stored = self.base[&output].clone();
            for (row, mut values) in stored.values.outer_iter_mut().enumerate() {
                let token = if output == Output::Ds { self.routing.pair_token()[row].index() } else { row };
                values.assign(&of_token(token)[&output].values.index_axis(Axis(0), row));
            }
            merged.insert(output, stored);
        }
        broken.extend(differing(&merged, &self.base, value));
        Ok(broken)
    }

    fn tokens_in_two(&self) -> Result<Vec<String>> {
        let middle = self.problem.t() / 2;
        let part = |tokens: std::ops::Range<usize>| {
            let within = |token: TokenId| tokens.contains(&token.index());
            let pairs = self.pairs().filter(|(token, _)| within(*token));
            let pairs = pairs.map(|(token, expert)| (TokenId(token.0 - tokens.start as u32), expert));
            let scores = self.routing.pair_token().iter().zip(self.scores).filter(|(token, _)| within(**token));
            let order: Vec<usize> = tokens.clone().collect();
            self.run(Change {
                x: self.problem.x().select(Axis(0), &order),
                dout: self.problem.dout().select(Axis(0), &order),
                routing: Routing::new(order.len(), self.problem.e(), pairs)?,
                scores: scores.map(|(_, &score)| score).collect(),
                experts: (0..self.problem.e()).collect(),
            })
        };
        let parts = [part(0..middle)?, part(middle..self.problem.t())?];
        let mut broken = self.weights_add(&parts);
        let mut merged = Results::new();
        for output in PER_TOKEN {
            let mut stored = self.base[&output].clone();
            for (token, mut values) in stored.values.outer_iter_mut().enumerate() {
                let (part, first) = if token < middle { (&parts[0], 0) } else { (&parts[1], middle) };
                values.assign(&part[&output].values.index_axis(Axis(0), token - first));
            }
            merged.insert(output, stored);
        }
        let mut next = parts.each_ref().map(|part| part[&Output::Ds].values.iter());
        let mut ds = self.base[&Output::Ds].clone();
        for (value, token) in ds.values.iter_mut().zip(self.routing.pair_token()) {
            *value = next[usize::from(token.index() >= middle)].next().copied().unwrap_or(f64::NAN);
        }
        merged.insert(Output::Ds, ds);
        broken.extend(differing(&merged, &self.base, value));
        Ok(broken)
    }

    /// |dW − dW′ − dW″| ≤ u(|dW| + |dW′| + |dW″|): each was rounded once from an exact number.
    fn weights_add(&self, parts: &[Results; 2]) -> Vec<String> {
        let u = S::DTYPE.unit_roundoff();
        let mut broken = Vec::new();
        for output in PER_EXPERT {
            let Some(whole) = self.base.get(&output) else { continue };
            let [one, two] = parts.each_ref().map(|part| &part[&output].values);
            for (((at, &whole), &one), &two) in whole.values.indexed_iter().zip(one).zip(two) {
                let off = (whole - one - two).abs();
                let within = off <= u * (whole.abs() + one.abs() + two.abs());
                if !within {
                    broken.push(format!("{output} at {at:?}: {one:e} and {two:e} add to {whole:e}"));
                }
            }
        }
        broken
    }
}

fn zero<S: Element>() -> S::Score {
    Element::from_f64(0.0)
}

/// −0 and +0 are one value.
fn value(value: f64) -> u64 {
    (value + 0.0).to_bits()
}

/// The results of `expected` that `found` has otherwise, o only where both have it.
fn differing(expected: &Results, found: &Results, identity: impl Fn(f64) -> u64) -> Vec<String> {
    let same = |one: &ArrayD<f64>, two: &ArrayD<f64>| {
        one.shape() == two.shape() && one.iter().zip(two).all(|(&one, &two)| identity(one) == identity(two))
    };
    let both = expected.iter().filter_map(|(output, stored)| Some((output, stored, found.get(output)?)));
    both.filter(|(_, one, two)| !same(&one.values, &two.values))
        .map(|(output, ..)| format!("{output} differs"))
        .collect()
}
