//! Token rounding keeps its invariants, by the judgement of a certificate that shares no code with it.

mod rules;
mod scores;
mod statistics;
mod upstream;

use ndarray::{Array2, ArrayView2};
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use sonicmoe::routing::rounding::certificate::{Violation, certify};
use sonicmoe::routing::rounding::{Ranking, Rounded, Rule, TokenRounding, padding, ranking_scores};
use sonicmoe::routing::scores::softmax;
use sonicmoe::routing::{Choice, top_k};
use sonicmoe::{ExpertId, TokenId};

use super::{only, random};

/// How logits are distributed.
#[derive(Clone, Copy, Debug)]
enum Skew {
    /// No expert is preferred.
    Uniform,
    /// Expert e is preferred by −log(e + 1): frequencies as by Zipf's law.
    Zipf,
    /// Three values only, zeros of both signs among them.
    Tied,
    /// All logits of a token equal.
    Equal,
    /// So far apart that most probabilities underflow to 0.
    Distant,
    /// A third of the logits masked by −∞ (never expert 0).
    Masked,
}

/// Everything that rounding starts from.
#[derive(Debug)]
struct Start {
    logits: Array2<f32>,
    p: Array2<f32>,
    choice: Choice,
    tile: usize,
    seed: u64,
}

impl Start {
    fn new(skew: Skew, tokens: usize, experts: usize, k: usize, tile: usize, seed: u64) -> Self {
        let mut generator = ChaCha8Rng::seed_from_u64(seed);
        let mut logits = Array2::zeros((tokens, experts));
        for ((_, expert), logit) in logits.indexed_iter_mut() {
            let uniform = (generator.next_u32() >> 8) as f32 / (1 << 24) as f32;
            *logit = match skew {
                Skew::Uniform => 4.0 * uniform,
                Skew::Zipf => uniform - (expert as f32 + 1.0).ln(),
                Skew::Tied => [-0.0, 0.0, 1.0][(3.0 * uniform) as usize],
                Skew::Equal => 0.5,
                Skew::Distant => 1000.0 * uniform,
                Skew::Masked if expert > 0 && uniform < 1.0 / 3.0 => f32::NEG_INFINITY,
                Skew::Masked => uniform,
            };
        }
        let usable = |row: ndarray::ArrayView1<f32>| row.iter().filter(|logit| logit.is_finite()).count();
        let k = logits.rows().into_iter().map(usable).fold(k.min(experts), usize::min);
        let choice = top_k(logits.view(), k).expect("every row has K usable logits");
        let p = softmax(logits.view()).expect("every row has a usable logit");
        Self { logits, p, choice, tile, seed }
    }

    fn rounding(&self, rule: Rule, ranking: Ranking) -> TokenRounding {
        TokenRounding { tile: self.tile, rule, ranking, seed: self.seed }
    }

    fn round(&self, rule: Rule, ranking: Ranking) -> Rounded {
        self.rounding(rule, ranking).round(self.p.view(), &self.choice).expect("probabilities of this choice")
    }

    fn certify(&self, rule: Rule, ranking: Ranking, pairs: &[(TokenId, ExpertId)], capped: &[ExpertId]) -> Judged {
        let scores = scores_to_rank_by(self.p.view(), &self.choice, ranking);
        certify(scores.view(), self.choice.ids(), self.tile, rule, pairs, capped)
    }

    /// Every rule and ranking, judged.
    fn judge_all(&self) {
        for rule in Rule::ALL {
            for ranking in [Ranking::Renormalized, Ranking::Probability] {
                let rounded = self.round(rule, ranking);
                let judged = self.certify(rule, ranking, &rounded.pairs(), &rounded.capped);
                assert_eq!(judged, Ok(()), "{rule}, {ranking:?}");
                self.judge_report(&rounded);
            }
        }
    }

    /// What the result says of itself is what its pairs say.
    fn judge_report(&self, rounded: &Rounded) {
        let count = |pairs: &mut dyn Iterator<Item = ExpertId>| {
            let mut counts = vec![0; self.choice.experts()];
            pairs.for_each(|expert| counts[expert.index()] += 1);
            counts
        };
        assert_eq!(rounded.topk_frequency, count(&mut self.choice.ids().iter().copied()));
        assert_eq!(rounded.expert_frequency, count(&mut rounded.routing.pair_expert().iter().copied()));
        assert_eq!(padding(&rounded.expert_frequency, self.tile), 0, "no row of padding is left to compute");
        assert!(rounded.pairs().is_sorted(), "token by token, experts ascending");
    }
}

type Judged = Result<(), Vec<Violation>>;

/// The ranking scores once more, from their definition, for the certificate to judge by.
fn scores_to_rank_by(p: ArrayView2<f32>, choice: &Choice, ranking: Ranking) -> Array2<f32> {
    Array2::from_shape_fn(p.raw_dim(), |(token, expert)| {
        let p = p.row(token);
        let chosen = choice.ids();
        let chosen = chosen.row(token);
        let sum = chosen.iter().fold(0.0, |sum, chosen| sum + p[chosen.index()]);
        let chose = chosen.iter().any(|chosen| chosen.index() == expert);
        if chose && ranking == Ranking::Renormalized && sum > 0.0 { p[expert] / sum } else { p[expert] }
    })
}

/// Tiles of 1 to 257 rows with T below and above them.
fn start() -> impl Strategy<Value = Start> {
    let tile = prop_oneof![Just(1usize), 2usize..10, 10usize..=257, Just(128), Just(257)];
    let tokens = prop_oneof![0usize..12, 0usize..80, 80usize..600];
    start_with(tokens, tile)
}

fn start_with(
    tokens: impl Strategy<Value = usize>,
    tile: impl Strategy<Value = usize>,
) -> impl Strategy<Value = Start> {
    let skew =
        prop::sample::select(vec![Skew::Uniform, Skew::Zipf, Skew::Tied, Skew::Equal, Skew::Distant, Skew::Masked]);
    (skew, tokens, 1usize..12, 1usize..6, tile, any::<u64>())
        .prop_map(|(skew, tokens, experts, k, tile, seed)| Start::new(skew, tokens, experts, k, tile, seed))
}

fn rule() -> impl Strategy<Value = Rule> {
    prop::sample::select(Rule::ALL.to_vec())
}

/// Rules whose result follows from the counts.
fn rule_without_draws() -> impl Strategy<Value = Rule> {
    rule().prop_filter("a rule that draws", |rule| !rule.draws())
}

fn ranking() -> impl Strategy<Value = Ranking> {
    prop::sample::select(vec![Ranking::Renormalized, Ranking::Probability])
}

proptest! {
    #![proptest_config(random(400))]

    #[test]
    fn every_rounding_is_certified(start in start()) {
        start.judge_all();
    }

    #[test]
    fn the_ranking_scores_are_the_defined_ones(start in start(), ranking in ranking()) {
        let found = ranking_scores(start.p.view(), &start.choice, ranking)?;
        prop_assert_eq!(found, scores_to_rank_by(start.p.view(), &start.choice, ranking));
    }

    #[test]
    fn tiles_of_one_token_change_nothing(mut start in start(), rule in rule(), ranking in ranking()) {
        start.tile = 1;
        let mut chosen: Vec<_> =
            start.choice.ids().indexed_iter().map(|((token, _), &expert)| (TokenId(token as u32), expert)).collect();
        chosen.sort_unstable();
        prop_assert_eq!(start.round(rule, ranking).pairs(), chosen);
    }

    #[test]
    fn rounding_is_a_function_of_its_arguments_on_any_number_of_threads(start in start(), rule in rule()) {
        let [one, three] = [1, 3].map(|threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            pool.install(|| start.round(rule, Ranking::Renormalized))
        });
        prop_assert_eq!(&one, &three);
        let reseeded = Start { seed: start.seed ^ 1, ..start };
        let other = reseeded.round(rule, Ranking::Renormalized);
        prop_assert!(rule.draws() || other == one, "only random rules read the seed");
    }

    /// One pair more, less, or another, anywhere: counts and rankings leave no freedom.
    #[test]
    fn a_changed_pair_is_found(
        start in start(), rule in rule(), ranking in ranking(),
        change in 0usize..4, at in any::<prop::sample::Index>(), to in any::<prop::sample::Index>()
    ) {
        prop_assume!(start.tile > 1);
        let rounded = start.round(rule, ranking);
        let mut pairs = rounded.pairs();
        let absent: Vec<_> = (0..start.choice.tokens() * start.choice.experts())
            .map(|at| (TokenId((at / start.choice.experts()) as u32), ExpertId((at % start.choice.experts()) as u32)))
            .filter(|pair| pairs.binary_search(pair).is_err())
            .collect();
        match change {
            0 if !pairs.is_empty() => { pairs.swap_remove(at.index(pairs.len())); }
            1 if !absent.is_empty() => pairs.push(absent[at.index(absent.len())]),
            2 if !pairs.is_empty() => pairs.push(pairs[at.index(pairs.len())]),
            3 if !pairs.is_empty() => {
                // Another token for the same expert.
                let at = at.index(pairs.len());
                let same_expert: Vec<_> = absent.into_iter().filter(|pair| pair.1 == pairs[at].1).collect();
                prop_assume!(!same_expert.is_empty());
                pairs[at] = same_expert[to.index(same_expert.len())];
            }
            _ => return Err(TestCaseError::reject("nothing to change")),
        }
        prop_assert!(start.certify(rule, ranking, &pairs, &rounded.capped).is_err());
    }

    /// The other multiple, kept correctly from the ranking, is found by rules that do not draw.
    #[test]
    fn the_other_multiple_is_found(
        start in start_with(64usize..300, 2usize..64), rule in rule_without_draws(), at in any::<prop::sample::Index>()
    ) {
        let rounded = start.round(rule, Ranking::Renormalized);
        let [down, up] = [Rule::Down, Rule::Up].map(|rule| start.round(rule, Ranking::Renormalized));
        let movable: Vec<_> = (0..start.choice.experts())
            .filter(|&expert| down.expert_frequency[expert] != up.expert_frequency[expert])
            .collect();
        prop_assume!(!movable.is_empty());
        let expert = movable[at.index(movable.len())];
        let other = if rounded.expert_frequency[expert] == up.expert_frequency[expert] { down } else { up };
        let of = |rounded: &Rounded, same: bool| -> Vec<_> {
            rounded.pairs().into_iter().filter(|pair| (pair.1.index() == expert) == same).collect()
        };
        let pairs = [of(&rounded, false), of(&other, true)].concat();
        prop_assert!(start.certify(rule, Ranking::Renormalized, &pairs, &rounded.capped).is_err());
    }

    #[test]
    fn a_wrong_list_of_capped_experts_is_found(
        start in start(), rule in rule_without_draws(), at in any::<prop::sample::Index>()
    ) {
        let rounded = start.round(rule, Ranking::Renormalized);
        let mut capped = rounded.capped.clone();
        let expert = ExpertId(at.index(start.choice.experts()) as u32);
        match capped.binary_search(&expert) {
            Ok(place) => { capped.remove(place); }
            Err(place) => capped.insert(place, expert),
        }
        prop_assert!(start.certify(rule, Ranking::Renormalized, &rounded.pairs(), &capped).is_err());
    }
}

#[test]
fn padding_is_what_lacks_to_the_next_multiple_of_the_tile() {
    for (frequency, tile, rows) in
        [(vec![5, 8, 0], 4, 3), (vec![1, 257, 128], 128, 254), (vec![3, 4], 1, 0), (vec![3], 0, 0)]
    {
        assert_eq!(padding(&frequency, tile), rows, "{frequency:?} in tiles of {tile}");
    }
}

/// An expert's only chooser has all of its score, the token that would fill its tile none: by scores it surely
/// goes up. Where the scores at stake are none, surely down.
#[test]
fn scores_of_nothing_leave_a_rule_by_scores_no_choice() {
    let ids = ndarray::array![[ExpertId(0)], [ExpertId(1)]];
    let judged = |p: Array2<f64>, pairs: &[[u32; 2]]| {
        let pairs: Vec<_> = pairs.iter().map(|&[token, expert]| (TokenId(token), ExpertId(expert))).collect();
        certify(p.view(), ids.view(), 2, Rule::StochasticByScores, &pairs, &[])
    };
    let (all, none) = ([[0, 0], [0, 1], [1, 0], [1, 1]], []);
    let at_stake = ndarray::array![[0.5, 0.0], [0.0, 0.5]];
    assert_eq!(judged(at_stake.clone(), &all), Ok(()));
    assert!(judged(at_stake, &none).is_err());
    let to_add = ndarray::array![[0.0, 0.5], [0.5, 0.0]];
    assert_eq!(judged(to_add.clone(), &none), Ok(()));
    assert!(judged(to_add, &all).is_err());
    let either = ndarray::array![[0.5, 0.5], [0.5, 0.5]];
    assert!(judged(either.clone(), &none).is_ok() && judged(either, &all).is_ok());
}

/// 0/0 would be NaN.
#[test]
fn chosen_scores_of_nothing_are_renormalized_to_nothing() {
    let p = ndarray::array![[0.0f32, 0.0, 1.0], [0.5, 0.25, 0.25]];
    let choice = Choice::new(3, ndarray::array![[ExpertId(0), ExpertId(1)], [ExpertId(0), ExpertId(1)]]).unwrap();
    let ranked = ranking_scores(p.view(), &choice, Ranking::Renormalized).unwrap();
    assert_eq!(ranked, ndarray::array![[0.0, 0.0, 1.0], [0.5 / 0.75, 0.25 / 0.75, 0.25]]);
}

/// What no rounding can be judged from is named, before any expert is judged.
#[test]
fn the_certificate_names_what_cannot_be_judged() {
    let p = ndarray::array![[0.25f64, 0.75], [0.5, 0.5]];
    let ids = ndarray::array![[ExpertId(1)], [ExpertId(0)]];
    let pairs = [(TokenId(0), ExpertId(1)), (TokenId(1), ExpertId(0))];
    let judge = |p: &Array2<f64>, ids: &Array2<ExpertId>, pairs: &[_], capped: &[ExpertId]| {
        certify(p.view(), ids.view(), 1, Rule::Nearest, pairs, capped)
    };
    assert_eq!(judge(&p, &ids, &pairs, &[]), Ok(()));
    for wrong in [-0.25, f64::INFINITY, f64::NAN] {
        let mut p = p.clone();
        p[[1, 0]] = wrong;
        let found = only(judge(&p, &ids, &pairs, &[]));
        assert!(matches!(found, Violation::Score { token: 1, expert: 0, value } if value.to_bits() == wrong.to_bits()));
    }
    let beyond = |what, at, id| Violation::OutOfRange { what, at, id, limit: 2 };
    let of_choice = ndarray::array![[ExpertId(1)], [ExpertId(2)]];
    assert_eq!(only(judge(&p, &of_choice, &pairs, &[])), beyond("expert of choice", 1, 2));
    for (pair, violation) in [
        ((TokenId(0), ExpertId(9)), beyond("expert of pair", 1, 9)),
        ((TokenId(2), ExpertId(0)), beyond("token of pair", 1, 2)),
        (pairs[0], Violation::Duplicate { token: TokenId(0), expert: ExpertId(1) }),
    ] {
        assert_eq!(only(judge(&p, &ids, &[pairs[0], pair], &[])), violation);
    }
    assert_eq!(only(judge(&p, &ids, &pairs, &[ExpertId(2)])), beyond("capped expert", 0, 2));
    let reason = "the list does not ascend";
    for capped in [[1, 0], [1, 1]].map(|capped| capped.map(ExpertId)) {
        assert_eq!(only(judge(&p, &ids, &pairs, &capped)), Violation::NotCapped { expert: capped[1], reason });
    }
    let size = |what, expected, found| Violation::Size { what, expected, found };
    assert_eq!(only(certify(p.view(), ids.view(), 0, Rule::Nearest, &pairs, &[])), size("M", 1, 0));
    let one_token = ndarray::array![[ExpertId(1)]];
    assert_eq!(only(judge(&p, &one_token, &pairs, &[])), size("T of the choice", 2, 1));
}

proptest! {
    #![proptest_config(random(120_000))]

    /// The long run: 120,000 random routings, each rounded by 7 rules under 2 rankings, 1.68 million
    /// results judged, in about four minutes of one core. `cargo test --test claims long_run -- --ignored`
    #[test]
    #[ignore = "minutes: the long run"]
    fn long_run_of_certified_roundings(start in start()) {
        start.judge_all();
    }
}
