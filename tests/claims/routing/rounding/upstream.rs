//! A routing that SonicMoE's own token rounding made on a GPU (tests/data/sonic_rounding_a.safetensors).

use ndarray::Array2;
use safetensors::SafeTensors;
use sonicmoe::routing::rounding::certificate::certify;
use sonicmoe::routing::rounding::scores::{KeptScores, forward};
use sonicmoe::routing::rounding::{Ranking, Rule, TokenRounding};
use sonicmoe::routing::scores::softmax;
use sonicmoe::routing::{Routing, top_k};
use sonicmoe::{DType, ExpertId, TokenId};

use super::scores_to_rank_by;

struct File {
    logits: Array2<f32>,
    pairs: Vec<(TokenId, ExpertId)>,
    scores: Vec<f32>,
    topk_frequency: Vec<usize>,
    expert_frequency: Vec<usize>,
}

fn read() -> File {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/sonic_rounding_a.safetensors");
    let bytes = std::fs::read(path).expect("the dump is part of the repository");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let words = |name: &str| -> Vec<[u8; 4]> {
        let tensor = tensors.tensor(name).expect(name);
        tensor.data().chunks_exact(4).map(|word| [word[0], word[1], word[2], word[3]]).collect()
    };
    let ids = |name: &str| words(name).into_iter().map(u32::from_le_bytes);
    let floats = |name: &str| words(name).into_iter().map(f32::from_le_bytes).collect::<Vec<_>>();
    File {
        logits: Array2::from_shape_vec((1024, 8), floats("router_logits")).expect("(T, E)"),
        pairs: ids("token_idx").map(TokenId).zip(ids("expert_idx").map(ExpertId)).collect(),
        scores: floats("scores"),
        topk_frequency: ids("topk_frequency").map(|f| f as usize).collect(),
        expert_frequency: ids("expert_frequency").map(|f| f as usize).collect(),
    }
}

#[test]
fn the_certificate_accepts_what_sonicmoe_made() -> sonicmoe::Result<()> {
    let File { logits, pairs, .. } = read();
    let choice = top_k(logits.view(), 2)?;
    let p = softmax(logits.view())?;
    let ranked_by = |ranking| scores_to_rank_by(p.view(), &choice, ranking);
    for rule in [Rule::Nearest, Rule::NearestHalfToEven] {
        let judged = certify(ranked_by(Ranking::Renormalized).view(), choice.ids(), 128, rule, &pairs, &[]);
        assert_eq!(judged, Ok(()), "{rule}");
    }
    for rule in [Rule::Up, Rule::Down] {
        assert!(certify(ranked_by(Ranking::Renormalized).view(), choice.ids(), 128, rule, &pairs, &[]).is_err());
    }
    Ok(())
}

#[test]
fn nearest_reproduces_all_pairs_that_sonicmoe_kept() -> sonicmoe::Result<()> {
    let File { logits, mut pairs, topk_frequency, expert_frequency, .. } = read();
    let (_, rounded) = TokenRounding::new(128).route(logits.view(), 2)?;
    assert_eq!(rounded.topk_frequency, topk_frequency);
    assert_eq!(rounded.expert_frequency, expert_frequency);
    assert_eq!(rounded.capped, []);
    pairs.sort_unstable();
    assert_eq!(pairs.len(), 2048);
    assert_eq!(rounded.pairs(), pairs);
    Ok(())
}

#[test]
fn raw_scores_are_those_that_sonicmoe_wrote() -> sonicmoe::Result<()> {
    let File { logits, pairs, scores, .. } = read();
    let choice = top_k(logits.view(), 2)?;
    let routing = Routing::new(1024, 8, pairs)?;
    let truth = forward(logits.mapv(f64::from).view(), &choice, &routing, KeptScores::Raw)?;
    for ((&written, truth), &token) in scores.iter().zip(truth).zip(routing.pair_token()) {
        // Exponents are rounded once, in numerator and denominator; exp errs by an ulp in each, a
        // sum of 8 terms by 8 roundoffs, and there is one division.
        let row = logits.row(token.index());
        let spread = row.fold(f32::MIN, |a, &b| a.max(b)) - row.fold(f32::MAX, |a, &b| a.min(b));
        let allowed = 1.01 * (2.0 * f64::from(spread) + 4.0 + 8.0 + 1.0) * DType::F32.unit_roundoff() * truth;
        assert!((f64::from(written) - truth).abs() <= allowed, "token {token}: {written} for {truth}");
    }
    Ok(())
}
