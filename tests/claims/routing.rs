//! Choice of experts, scores, metadata and certificates.

mod choice;
mod conventions;
mod metadata;
mod rounding;
mod scores;

use ndarray::{Array2, ArrayView2};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use sonicmoe::ExpertId;
use sonicmoe::routing::certificate::Violation;

/// `cases` random cases; failing seeds are kept beside the others of this module.
fn random(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct("proptest-regressions/routing.txt"))),
        ..ProptestConfig::default()
    }
}

/// Logits (T, E) and a K that every row allows: continuous ones, or few values with many ties,
/// ±0 and masks among them (never more than E − K in a row).
fn logits_and_k(tokens: usize, experts: usize) -> impl Strategy<Value = (Array2<f32>, usize)> {
    let tied = prop_oneof![
        8 => prop::sample::select(vec![-1.0f32, -0.0, 0.0, 0.5, 0.50390625, 2.0]),
        1 => Just(f32::NEG_INFINITY),
    ];
    let value = |tied: bool, strategy: BoxedStrategy<f32>| if tied { strategy } else { (-8.0f32..8.0).boxed() };
    (0..=tokens, 1..=experts, any::<bool>())
        .prop_flat_map(move |(t, e, ties)| {
            let values = prop::collection::vec(value(ties, tied.clone().boxed()), t * e);
            (values, Just((t, e)), 0.0..1.0f64)
        })
        .prop_map(|(values, shape, share)| {
            let logits = Array2::from_shape_vec(shape, values).expect("T·E values");
            let usable = logits
                .rows()
                .into_iter()
                .map(|row| row.iter().filter(|&&logit| logit > f32::NEG_INFINITY).count())
                .min()
                .unwrap_or(shape.1);
            (logits, usable, share)
        })
        .prop_filter("a row of masks only allows no K", |&(_, usable, _)| usable > 0)
        .prop_map(|(logits, usable, share)| {
            let k = 1 + ((usable - 1) as f64 * share).round() as usize;
            (logits, k)
        })
}

fn experts<const K: usize>(rows: &[[u32; K]]) -> Array2<ExpertId> {
    Array2::from_shape_fn((rows.len(), K), |(token, rank)| ExpertId(rows[token][rank]))
}

fn raw(ids: ArrayView2<ExpertId>) -> Vec<Vec<u32>> {
    ids.rows().into_iter().map(|row| row.iter().map(|expert| expert.0).collect()).collect()
}

/// The one violation that a planted fault makes.
#[track_caller]
fn only<V: std::fmt::Debug>(judged: Result<(), Vec<V>>) -> V {
    let mut violations = judged.expect_err("a planted fault must be found");
    assert_eq!(violations.len(), 1, "one fault, one violation: {violations:?}");
    violations.remove(0)
}

#[track_caller]
fn all(judged: Result<(), Vec<Violation>>) -> Vec<Violation> {
    judged.expect_err("a planted fault must be found")
}
