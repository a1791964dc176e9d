//! Which known fault fits a wrong run.
//!
//! Every applicable [`Mutant`] gives, in f64 and under the run's own routing, a wrong result m beside the
//! truth r. A run c that has this fault is near m, and the difference from r is along m − r:
//!
//! ```text
//! β = ⟨c − r, m − r⟩ / ‖m − r‖² ≈ 1,   z of β beyond λ,   ‖c − m‖ small against ‖c − r‖
//! ```
//!
//! All results of the run take part: a fault that would change dx too explains no file whose dx is right.

use ndarray::ArrayD;
use rayon::prelude::*;

use crate::engine::{Numerics, Output, Record, Results, Stored, run};
use crate::error::Result;
use crate::mutant::{Class, Mutant};
use crate::oracle::bias::{Bias, Twin};
use crate::oracle::statistic::LIMIT;
use crate::problem::{Gating, Problem};
use crate::routing::Routing;
use crate::sonic::cpu::CpuEngine;

/// A cause has to leave less than this share of the error unexplained.
const UNEXPLAINED: f64 = 0.5;

/// And to be as large as the error, within this: |β − 1|.
const OFF: f64 = 0.25;

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// What this mutant does.
    Known(Mutant),
    /// All numbers of one result are too large by this share (too small, where it is negative).
    Scaled(Output, f64),
}

/// How a fault fits one result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fit {
    /// The result.
    pub output: Output,
    /// β and its z.
    pub bias: Bias,
}

/// A fault that fits, the best first.
#[derive(Clone, Debug, PartialEq)]
pub struct Cause {
    /// What is wrong.
    pub fault: Fault,
    /// The results that the fault changes.
    pub fits: Vec<Fit>,
    /// ‖c − m‖ / ‖c − r‖ over all results, each in units of ‖r‖: 0 if all of the error is explained.
    pub unexplained: f64,
}

/// The known faults that fit `results`, the best first.
///
/// # Errors
/// A routing that does not fit the problem, or results of the wrong shape.
pub fn explain(
    problem: &Problem<'static, f64>,
    routing: &Routing,
    results: &Results,
    numerics: &Numerics,
) -> Result<Vec<Cause>> {
    let twin = Twin::new(problem, routing, numerics)?;
    let judged: Vec<(Output, &Stored, &ArrayD<f64>)> = Output::RESULTS
        .into_iter()
        .filter_map(|output| Some((output, results.get(&output)?, twin.truth(output)?)))
        .collect();
    let tried = Mutant::ALL.par_iter().filter(|mutant| {
        // What rounds differently errs within the roundings themselves, and has no direction in f64.
        mutant.class() != Class::Precision && mutant.equivalent(problem, routing).is_none()
    });
    let known: Vec<Option<Cause>> = tried
        .map(|&mutant| {
            let engine = CpuEngine::<f64>::with_mutant(Some(mutant));
            let engine = match problem.gating() {
                Gating::Router(_) => engine.with_choice(routing)?,
                Gating::Given { .. } => engine,
            };
            let wrong = run(&engine, problem, Record::Results)?.results;
            let (mut fits, mut left, mut error) = (Vec::new(), 0.0, 0.0);
            for &(output, stored, truth) in &judged {
                let Some(wrong) = wrong.get(&output).map(|wrong| &wrong.values) else { return Ok(None) };
                left += distance(&stored.values, wrong, truth);
                error += distance(&stored.values, truth, truth);
                if let Some(bias) = twin.directed(output, stored, wrong)? {
                    fits.push(Fit { output, bias });
                } else if differs_in_kind(wrong, truth) {
                    fits.push(Fit { output, bias: Bias { beta: f64::NAN, z: f64::INFINITY } });
                }
            }
            Ok(fitting(Fault::Known(mutant), fits, share(left, error)))
        })
        .collect::<Result<_>>()?;
    let mut causes: Vec<Cause> = known.into_iter().flatten().collect();
    for &(output, stored, truth) in &judged {
        let error: f64 = judged.iter().map(|(_, stored, truth)| distance(&stored.values, truth, truth)).sum();
        let Some(&(_, bias)) = twin.signed(output, stored)?.first() else { continue };
        let scaled = truth.mapv(|truth| (1.0 + bias.beta) * truth);
        let left = error - distance(&stored.values, truth, truth) + distance(&stored.values, &scaled, truth);
        let unexplained = share(left, error);
        if bias.z > LIMIT && unexplained < UNEXPLAINED {
            let fits = vec![Fit { output, bias }];
            causes.push(Cause { fault: Fault::Scaled(output, bias.beta), fits, unexplained });
        }
    }
    causes.sort_by(|a, b| a.unexplained.total_cmp(&b.unexplained));
    Ok(causes)
}

/// The cause, if it is one: beyond λ in the result that shows it best, as large as the error in all that
/// show it, and with little left.
fn fitting(fault: Fault, fits: Vec<Fit>, unexplained: f64) -> Option<Cause> {
    let visible = |fit: &&Fit| fit.bias.z > LIMIT;
    let seen = fits.iter().any(|fit| visible(&fit));
    let as_large = fits.iter().filter(visible).all(|fit| fit.bias.beta.is_nan() || (fit.bias.beta - 1.0).abs() < OFF);
    (seen && as_large && unexplained < UNEXPLAINED).then_some(Cause { fault, fits, unexplained })
}

/// Whether one of them is no number where the other is.
fn differs_in_kind(a: &ArrayD<f64>, b: &ArrayD<f64>) -> bool {
    a.shape() == b.shape() && a.iter().zip(b).any(|(a, b)| a.is_finite() != b.is_finite())
}

/// ‖c − m‖² in units of ‖r‖²; two numbers that are none are equal, one alone is at no distance.
fn distance(c: &ArrayD<f64>, m: &ArrayD<f64>, r: &ArrayD<f64>) -> f64 {
    if c.shape() != m.shape() {
        return f64::INFINITY;
    }
    let unit: f64 = r.iter().map(|r| r * r).sum();
    let of_pair = |c: f64, m: f64| match (c.is_finite(), m.is_finite()) {
        (true, true) => (c - m) * (c - m),
        (false, false) => 0.0,
        _ => f64::INFINITY,
    };
    c.iter().zip(m).map(|(&c, &m)| of_pair(c, m)).sum::<f64>() / if unit > 0.0 { unit } else { 1.0 }
}

/// √(left / error): nothing is left of an infinite error that became finite.
fn share(left: f64, error: f64) -> f64 {
    if left.is_infinite() { f64::INFINITY } else { (left / error).sqrt() }
}
