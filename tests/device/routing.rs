//! From logits to a routing on the device: the bits of the CPU path for ids, scores, counts, offsets
//! and every decision of token rounding, and certificates that call neither.

use std::sync::Arc;

use ndarray::Array2;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use sonicmoe::routing::certificate::{RoutingArrays, certify_choice, certify_metadata};
use sonicmoe::routing::rounding::scores::{self as kept_scores, KeptScores};
use sonicmoe::routing::rounding::{Ranking, Rule, TokenRounding, certificate, ranking_scores};
use sonicmoe::routing::{Choice, Convention, Routing, scores, top_k};
use sonicmoe::sonic::gpu::device::{Device, Guards};
use sonicmoe::sonic::gpu::{ChoicePlan, DeviceChoice};
use sonicmoe::{ExpertId, TokenId};

use crate::engine_or_skip;

/// How the logits of a case are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Draw {
    /// Uniform in ±4.
    Uniform,
    /// Few values, so that most comparisons are ties.
    Ties,
    /// +0 and −0 only.
    Zeros,
    /// Falling with the expert, as popularity does.
    Zipf,
    /// So far apart that most p underflow.
    Wide,
    /// One expert above all others, for every token.
    OneTakesAll,
    /// A random part of each row, up to E − K experts, is −∞.
    Masked,
    /// Exactly K experts of each row are above −∞.
    BarelyMasked,
    /// Later tokens want the second half of the experts more and more.
    Rising,
    /// The tokens that a bound is estimated from want the second half of the experts, and others the first.
    Misleading,
}

impl Draw {
    const ALL: [Self; 10] = [
        Self::Uniform,
        Self::Ties,
        Self::Zeros,
        Self::Zipf,
        Self::Wide,
        Self::OneTakesAll,
        Self::Masked,
        Self::BarelyMasked,
        Self::Rising,
        Self::Misleading,
    ];

    pub fn logits(self, random: &mut ChaCha8Rng, plan: &ChoicePlan) -> Array2<f32> {
        let ChoicePlan { tokens, experts, k, .. } = *plan;
        let mut logits = Array2::from_shape_fn((tokens, experts), |(token, expert)| {
            let unit = random.random::<f32>() * 8.0 - 4.0;
            match self {
                Self::Uniform | Self::Masked | Self::BarelyMasked => unit,
                Self::Ties => unit.round() / 2.0,
                Self::Zeros => {
                    if unit > 0.0 {
                        0.0
                    } else {
                        -0.0
                    }
                }
                Self::Zipf => unit / 2.0 - ((1 + expert) as f32).ln(),
                Self::Wide => unit * 60.0,
                Self::Rising if expert < experts / 2 => unit,
                Self::Rising => unit + 8.0 * token as f32 / tokens as f32,
                Self::Misleading => {
                    let sampled = token.is_multiple_of(tokens.div_ceil(1024));
                    unit + if sampled == (expert >= experts / 2) { 5.0 } else { 0.0 }
                }
                Self::OneTakesAll => {
                    if expert == experts / 2 {
                        30.0 + unit
                    } else {
                        unit
                    }
                }
            }
        });
        if matches!(self, Self::Masked | Self::BarelyMasked) {
            for mut row in logits.rows_mut() {
                let masked = if self == Self::Masked { random.random_range(0..=experts - k) } else { experts - k };
                let first = random.random_range(0..experts);
                (0..masked).for_each(|at| row[(first + at) % experts] = f32::NEG_INFINITY);
            }
        }
        logits
    }
}

#[derive(Clone, Copy, Debug)]
struct Drawn {
    plan: ChoicePlan,
    draw: Draw,
    seed: u64,
}

impl Drawn {
    /// Case `index`: small sizes around the kernels' widths.
    fn of(index: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(index);
        let mut pick = |from: &[usize]| from[random.random_range(0..from.len())];
        let experts = pick(&[1, 2, 3, 4, 7, 8, 16, 31, 33, 64, 127, 128, 129, 192, 256, 257, 300, 512, 513, 1000]);
        let tokens = pick(&[0, 1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65, 100, 129, 300, 1025]);
        let k = pick(&[1, 1, 2, 2, 3, 4, 6, 8, 8, 10, 16, 31, 32, 33, 64]).min(experts);
        let k = if pick(&[0, 0, 0, 0, 0, 1]) == 1 { experts.min(64) } else { k };
        let tile = pick(&[1, 2, 3, 8, 16, 33, 64, 128]);
        let convention = Convention::ALL[pick(&[0, 1, 2])];
        let rounding = TokenRounding {
            tile,
            rule: Rule::ALL[pick(&[0, 1, 2, 3, 4, 5, 6])],
            ranking: [Ranking::Renormalized, Ranking::Probability][pick(&[0, 1])],
            seed: index.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        };
        let rounding = (pick(&[0, 1, 1]) == 1).then(|| (rounding, KeptScores::ALL[pick(&[0, 1, 2])]));
        let draw = Draw::ALL[pick(&[0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9])];
        Self { plan: ChoicePlan { tokens, experts, k, convention, rounding }, draw, seed: index }
    }
}

/// What the CPU path makes of the same logits.
pub struct Expected {
    pub choice: Choice,
    pub routing: Routing,
    pub scores: Vec<f32>,
    pub capped: Vec<ExpertId>,
}

pub fn expected(plan: &ChoicePlan, logits: &Array2<f32>) -> sonicmoe::Result<Expected> {
    let choice = top_k(logits.view(), plan.k)?;
    Ok(match plan.rounding {
        None => Expected {
            routing: choice.routing(),
            scores: scores::forward(logits.view(), &choice, plan.convention)?,
            capped: Vec::new(),
            choice,
        },
        Some((rounding, semantics)) => {
            let rounded = rounding.round(scores::softmax(logits.view())?.view(), &choice)?;
            let scores = kept_scores::forward(logits.view(), &choice, &rounded.routing, semantics)?;
            Expected { routing: rounded.routing, scores, capped: rounded.capped, choice }
        }
    })
}

/// The first entry in which two arrays differ.
fn same<T: Copy + PartialEq + std::fmt::Debug>(what: &str, device: &[T], host: &[T]) -> Result<(), String> {
    if device.len() < host.len() {
        return Err(format!("{what} has {} entries on the device, {} on the host", device.len(), host.len()));
    }
    match device.iter().zip(host).position(|(device, host)| device != host) {
        None => Ok(()),
        Some(at) => Err(format!("{what}[{at}] is {:?} on the device, {:?} on the host", device[at], host[at])),
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Runs the choice and compares everything with the CPU path, bit by bit, and with the certificates.
fn compare(device: &Arc<Device>, plan: ChoicePlan, logits: &Array2<f32>) -> Result<(), String> {
    let text = |error: sonicmoe::Error| error.to_string();
    let mut on_device = DeviceChoice::new(device, plan, Guards::NAN).map_err(text)?;
    on_device.logits_mut().upload(logits.as_slice().unwrap()).map_err(text)?;
    on_device.choose(None).map_err(text)?;
    on_device.check().map_err(text)?;
    on_device.check_red_zones().map_err(text)?;
    agrees(&on_device, logits)
}

/// The last run of `on_device` against the CPU path and the certificates.
pub fn agrees(on_device: &DeviceChoice, logits: &Array2<f32>) -> Result<(), String> {
    let text = |error: sonicmoe::Error| error.to_string();
    let plan = *on_device.plan();
    let Expected { choice, routing, scores, capped } = expected(&plan, logits).map_err(text)?;
    let ids: Vec<u32> = choice.ids().iter().map(|id| id.0).collect();
    same("ids (t·K + rank)", &on_device.choice().download().map_err(text)?, &ids)?;
    let on_host = on_device.host_choice().map_err(text)?;
    certify_choice(logits.view(), plan.k, on_host.ids())
        .map_err(|violations| format!("no best choice: {}", violations[0]))?;
    let f: Vec<u32> = choice.routing().tokens_per_expert().iter().map(|&f| f as u32).collect();
    same("f", &on_device.topk_frequency().download().map_err(text)?, &f)?;

    let found = on_device.routing();
    let r = routing.routed();
    let expert_offsets = found.expert_offsets().download().map_err(text)?;
    same("expert_offsets", &expert_offsets, routing.expert_offsets())?;
    if found.used().map_err(text)? != r || found.routed() != plan.rows() {
        return Err(format!("{} of {} rows in use, not {r} of {}", found.used().unwrap(), found.routed(), plan.rows()));
    }
    let row_token = found.row_token().download().map_err(text)?;
    let token_offsets = found.token_offsets().download().map_err(text)?;
    let token_rows = found.token_rows().download().map_err(text)?;
    let tokens: Vec<u32> = routing.row_token().iter().map(|token| token.0).collect();
    same("row_token", &row_token, &tokens)?;
    same("token_offsets", &token_offsets, routing.token_offsets())?;
    same("token_rows", &token_rows, routing.token_rows())?;
    let experts: Vec<u32> = routing.pair_expert().iter().map(|expert| expert.0).collect();
    let pair_expert = on_device.pair_expert().download().map_err(text)?;
    same("pair_expert", &pair_expert, &experts)?;
    let mut order: Vec<u32> = (0..plan.experts as u32).collect();
    let counts = routing.tokens_per_expert();
    order.sort_by_key(|&expert| std::cmp::Reverse(counts[expert as usize]));
    same("expert_order", &found.expert_order().download().map_err(text)?, &order)?;
    let by_row = found.scores().download().map_err(text)?;
    same("scores (bits, by row)", &bits(&by_row), &bits(&routing.to_rows(&scores)))?;
    // What is reserved beyond R keeps the poison that was laid there.
    for (what, beyond) in
        [("row_token", &row_token[r..]), ("token_rows", &token_rows[r..]), ("pair_expert", &pair_expert[r..])]
    {
        if let Some(at) = beyond.iter().position(|&entry| entry != u32::MAX) {
            return Err(format!("{what}[{}] beyond R = {r} was written: {}", r + at, beyond[at]));
        }
    }
    if let Some(at) = by_row[r..].iter().position(|score| score.to_bits() != u32::MAX) {
        return Err(format!("scores[{}] beyond R = {r} was written: {}", r + at, by_row[r + at]));
    }

    let pairs: Vec<(TokenId, ExpertId)> = (0..plan.tokens)
        .flat_map(|token| token_offsets[token]..token_offsets[token + 1])
        .zip(&pair_expert)
        .map(|(pair, &expert)| (TokenId(row_token[token_rows[pair as usize] as usize]), ExpertId(expert)))
        .collect();
    let mut row_pair = vec![0; r];
    token_rows[..r].iter().enumerate().for_each(|(pair, &row)| row_pair[row as usize] = pair as u32);
    let row_token: Vec<TokenId> = row_token[..r].iter().copied().map(TokenId).collect();
    let arrays = RoutingArrays {
        expert_offsets: &expert_offsets,
        row_token: &row_token,
        row_pair: &row_pair,
        pair_row: &token_rows[..r],
        token_offsets: &token_offsets,
        token_rows: &token_rows[..r],
    };
    certify_metadata(plan.tokens, plan.experts, &pairs, arrays).map_err(|violations| violations[0].to_string())?;

    if let Some((TokenRounding { tile, rule, ranking, .. }, _)) = plan.rounding {
        let flags = on_device.capped().map_or_else(|| Ok(Vec::new()), |capped| capped.download()).map_err(text)?;
        let found: Vec<ExpertId> =
            (0..).map(ExpertId).zip(&flags).filter(|(_, flag)| **flag == 1).map(|(e, _)| e).collect();
        same("capped", &found, &capped)?;
        if found.len() != capped.len() {
            return Err(format!("{} experts capped on the device, {} on the host", found.len(), capped.len()));
        }
        let p = scores::softmax(logits.view()).map_err(text)?;
        let ranks = ranking_scores(p.view(), &choice, ranking).map_err(text)?;
        certificate::certify(ranks.view(), on_host.ids(), tile, rule, &pairs, &found)
            .map_err(|violations| violations[0].to_string())?;
    }
    Ok(())
}

fn judge_all(device: &Arc<Device>, cases: impl ParallelIterator<Item = Drawn>) {
    let failures: Vec<String> = cases
        .filter_map(|drawn| {
            let mut random = ChaCha8Rng::seed_from_u64(drawn.seed ^ 0x5eed);
            let logits = drawn.draw.logits(&mut random, &drawn.plan);
            compare(device, drawn.plan, &logits).err().map(|failure| format!("{drawn:?}: {failure}"))
        })
        .collect();
    assert!(
        failures.is_empty(),
        "{} fail; the first ten:\n{}",
        failures.len(),
        failures[..failures.len().min(10)].join("\n")
    );
}

/// `SONICMOE_DEVICE_ROUTINGS` cases, 2,400 unless set.
#[test]
fn routings_have_the_bits_of_the_cpu_path() {
    let engine = engine_or_skip!();
    let cases = std::env::var("SONICMOE_DEVICE_ROUTINGS").ok().and_then(|count| count.parse().ok()).unwrap_or(2400u64);
    judge_all(engine.device(), (0..cases).into_par_iter().map(Drawn::of));
    eprintln!("{cases} routings");
}

#[test]
fn every_rule_and_semantics_at_every_edge() {
    let engine = engine_or_skip!();
    let edges = [
        // T, E, K, M
        (0, 8, 2, 4),
        (1, 1, 1, 1),
        (5, 1, 1, 4),
        (100, 8, 8, 128),
        (3, 257, 3, 2),
        (64, 4096, 64, 8),
        (700, 16, 2, 128),
        (129, 4, 4, 16),
    ];
    let plans = edges.into_iter().flat_map(|(tokens, experts, k, tile)| {
        Rule::ALL.into_iter().flat_map(move |rule| {
            KeptScores::ALL.into_iter().map(move |semantics| {
                let rounding = TokenRounding { rule, seed: 7, ..TokenRounding::new(tile) };
                let convention = Convention::TopKOverSoftmax;
                ChoicePlan { tokens, experts, k, convention, rounding: Some((rounding, semantics)) }
            })
        })
    });
    let cases: Vec<Drawn> = plans
        .flat_map(|plan| [Draw::Uniform, Draw::Ties, Draw::OneTakesAll].map(|draw| Drawn { plan, draw, seed: 11 }))
        .collect();
    judge_all(engine.device(), cases.into_par_iter());
}

/// Sizes of real layers: several blocks in every kernel.
#[test]
fn large_routings_have_the_bits_of_the_cpu_path() {
    let engine = engine_or_skip!();
    let plan = |tokens, experts, k, rounding: Option<Rule>| ChoicePlan {
        tokens,
        experts,
        k,
        convention: Convention::SoftmaxOverTopK,
        rounding: rounding.map(|rule| (TokenRounding { rule, seed: 3, ..TokenRounding::new(128) }, KeptScores::Raw)),
    };
    let plans = [
        plan(32768, 128, 8, None),
        plan(32768, 512, 10, None),
        plan(8192, 512, 10, Some(Rule::Nearest)),
        plan(8192, 64, 8, Some(Rule::StochasticByScores)),
        plan(65536, 16, 2, Some(Rule::StochasticByScores)),
        plan(65536, 16, 2, Some(Rule::Balance)),
    ];
    let cases: Vec<Drawn> = plans
        .into_iter()
        .flat_map(|plan| [Draw::Uniform, Draw::Zipf].map(|draw| Drawn { plan, draw, seed: 5 }))
        .collect();
    judge_all(engine.device(), cases.into_par_iter());
}

/// Enough tokens that bounds are estimated: ones that hold, that too few tokens reach, and that more reach than
/// there is room for; and ties at the cut.
#[test]
fn roundings_have_the_bits_of_the_cpu_path_wherever_the_estimated_bound_falls() {
    let engine = engine_or_skip!();
    let shapes = [(2050, 3, 1), (5000, 40, 3), (20_000, 129, 8)];
    let cases = shapes.into_iter().flat_map(|(tokens, experts, k)| {
        let rules = [Rule::Nearest, Rule::Up, Rule::StochasticByScores];
        rules.into_iter().zip([128, 7, 1000]).enumerate().flat_map(move |(i, (rule, tile))| {
            let ranking = if i == 0 { Ranking::Renormalized } else { Ranking::Probability };
            let rounding = TokenRounding { rule, ranking, seed: 5, ..TokenRounding::new(tile) };
            let rounding = Some((rounding, KeptScores::ALL[i]));
            let plan = ChoicePlan { tokens, experts, k, convention: Convention::SoftmaxOverTopK, rounding };
            Draw::ALL.into_iter().map(move |draw| Drawn { plan, draw, seed: tokens as u64 })
        })
    });
    judge_all(engine.device(), cases.collect::<Vec<_>>().into_par_iter());
}

/// More tokens than a block has bits for in its shared memory.
#[test]
fn roundings_of_two_million_tokens_have_the_bits_of_the_cpu_path() {
    let engine = engine_or_skip!();
    let cases = [(Rule::Nearest, Draw::Uniform), (Rule::StochasticByScores, Draw::Ties)].map(|(rule, draw)| {
        let rounding = Some((TokenRounding { rule, ..TokenRounding::new(128) }, KeptScores::Raw));
        let plan =
            ChoicePlan { tokens: 2_000_000, experts: 3, k: 1, convention: Convention::TopKOverSoftmax, rounding };
        Drawn { plan, draw, seed: 1 }
    });
    judge_all(engine.device(), cases.into_par_iter());
}

/// Every rule and semantics in small cases, for a sanitizer, under which nothing larger ends:
/// `compute-sanitizer --tool racecheck device --ignored --exact routing::small_routings_for_a_sanitizer`.
/// It is how a word of bits was found that one warp cleared after another had set one of them: all other
/// tests passed.
#[test]
#[ignore = "for compute-sanitizer; the kernels are judged elsewhere"]
fn small_routings_for_a_sanitizer() {
    let engine = engine_or_skip!();
    for (tokens, experts, k, tile) in [(300, 40, 3, 16), (65, 129, 10, 2), (64, 7, 7, 64)] {
        for (i, rule) in Rule::ALL.into_iter().enumerate() {
            let rounding = TokenRounding { rule, seed: 7, ..TokenRounding::new(tile) };
            let rounding = Some((rounding, KeptScores::ALL[i % 3]));
            let plan = ChoicePlan { tokens, experts, k, convention: Convention::ALL[i % 3], rounding };
            for (plan, draw) in [(plan, Draw::Uniform), (ChoicePlan { rounding: None, ..plan }, Draw::Ties)] {
                let logits = draw.logits(&mut ChaCha8Rng::seed_from_u64(3), &plan);
                compare(engine.device(), plan, &logits)
                    .unwrap_or_else(|failure| panic!("{plan:?}, {draw:?}: {failure}"));
            }
        }
    }
}

#[test]
fn a_row_that_allows_no_choice_is_named_and_gets_safe_ids_and_finite_scores() {
    let engine = engine_or_skip!();
    let device = engine.device();
    let rounding = TokenRounding { rule: Rule::Up, ..TokenRounding::new(4) };
    for experts in [5, 8, 130, 400, 1030] {
        for rounding in [None].into_iter().chain(KeptScores::ALL.map(|scores| Some((rounding, scores)))) {
            let convention = Convention::TopKOverSoftmaxRenormalized;
            let plan = ChoicePlan { tokens: 40, experts, k: 3, convention, rounding };
            let mut random = ChaCha8Rng::seed_from_u64(experts as u64);
            let good = Draw::Uniform.logits(&mut random, &plan);
            let mut on_device = DeviceChoice::new(device, plan, Guards::NAN).unwrap();
            let mut spoil = |rows: &[(usize, usize, f32)]| {
                let mut bad = good.clone();
                for &(row, expert, value) in rows {
                    match value == f32::NEG_INFINITY {
                        // All but two.
                        true => (2..experts).for_each(|at| bad[[row, (expert + at) % experts]] = value),
                        false => bad[[row, expert]] = value,
                    }
                }
                let host = top_k(bad.view(), plan.k).unwrap_err().to_string();
                on_device.logits_mut().upload(bad.as_slice().unwrap()).unwrap();
                on_device.choose(None).unwrap();
                assert_eq!(on_device.check().unwrap_err().to_string(), host, "E = {experts}, {rounding:?}, {rows:?}");
                on_device.check_red_zones().unwrap();
                let ids = on_device.choice().download().unwrap();
                for (row, ids) in ids.chunks(plan.k).enumerate() {
                    let safe = ids.iter().enumerate().all(|(at, id)| *id < experts as u32 && !ids[..at].contains(id));
                    assert!(safe, "E = {experts}, {rows:?}: row {row} has ids {ids:?}");
                }
                let routing = on_device.routing();
                let used = routing.used().unwrap();
                assert!(used <= plan.rows());
                assert!(routing.scores().download().unwrap()[..used].iter().all(|score| score.is_finite()), "{rows:?}");
                let tokens = routing.row_token().download().unwrap();
                assert!(tokens[..used].iter().all(|&token| token < 40), "E = {experts}, {rounding:?}, {rows:?}");
            };
            spoil(&[(7, experts - 1, f32::NAN)]);
            spoil(&[(39, 0, -f32::NAN)]);
            spoil(&[(0, 2, f32::INFINITY)]);
            spoil(&[(21, 3, f32::NEG_INFINITY)]);
            // The smallest row, whichever block comes first.
            spoil(&[(33, 1, f32::NAN), (12, 4, f32::NEG_INFINITY), (38, 0, f32::INFINITY)]);
            // And good logits again: the status is that of the last run.
            on_device.logits_mut().upload(good.as_slice().unwrap()).unwrap();
            on_device.choose(None).unwrap();
            on_device.check().unwrap();
            compare(device, plan, &good).unwrap_or_else(|failure| panic!("E = {experts}, {rounding:?}: {failure}"));
        }
    }
}

#[test]
fn sizes_beyond_the_kernels_are_refused_by_name() {
    let engine = engine_or_skip!();
    let refused = |tokens, experts, k, tile: Option<usize>| {
        let rounding = tile.map(|tile| (TokenRounding::new(tile), KeptScores::Raw));
        let plan = ChoicePlan { tokens, experts, k, convention: Convention::SoftmaxOverTopK, rounding };
        DeviceChoice::new(engine.device(), plan, Guards::NONE).err().expect("a refusal").to_string()
    };
    assert!(refused(4, 4097, 2, None).contains("E is 4097"));
    assert!(refused(4, 100, 65, None).contains("K is 65"));
    assert!(refused(4, 3, 4, None).contains("K = 4"));
    assert!(refused(4, 3, 0, None).contains("K = 0"));
    assert!(refused(4, 3, 1, Some(0)).contains("M is 0"));
}
