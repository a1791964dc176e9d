//! What stochastic rules promise over many seeds.

use sonicmoe::routing::rounding::{Ranking, Rule};

use super::{Skew, Start};

const SEEDS: u64 = 10_000;

/// Means of the count and of the kept score sum over [`SEEDS`] seeds, for each expert, beside what
/// the top-K choice has.
fn means(start: &mut Start, rule: Rule, mut each: impl FnMut(usize, Expectation)) {
    let scores = super::scores_to_rank_by(start.p.view(), &start.choice, Ranking::Renormalized);
    let score_sum = |pairs: &[(sonicmoe::TokenId, sonicmoe::ExpertId)]| {
        let mut sums = vec![0.0; start.choice.experts()];
        pairs.iter().for_each(|&(t, e)| sums[e.index()] += f64::from(scores[(t.index(), e.index())]));
        sums
    };
    let sums_of = |rule| score_sum(&start.round(rule, Ranking::Renormalized).pairs());
    let [low, high] = [Rule::Down, Rule::Up].map(|rule| {
        let rounded = start.round(rule, Ranking::Renormalized);
        assert!(rounded.capped.is_empty(), "hi ≤ T in this test");
        (rounded.expert_frequency, sums_of(rule))
    });
    let chosen: Vec<_> =
        start.choice.ids().indexed_iter().map(|((t, _), &e)| (sonicmoe::TokenId(t as u32), e)).collect();
    let chosen_sums = score_sum(&chosen);
    let frequency = start.round(Rule::Down, Ranking::Renormalized).topk_frequency;

    let mut ups = vec![0u64; start.choice.experts()];
    // 80 tokens are too few to share among threads.
    let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a thread");
    one_thread.install(|| {
        for seed in 0..SEEDS {
            start.seed = seed;
            let rounded = start.round(rule, Ranking::Renormalized);
            for (expert, &count) in rounded.expert_frequency.iter().enumerate() {
                ups[expert] += u64::from(count != low.0[expert]);
            }
        }
    });
    for (expert, ups) in ups.into_iter().enumerate() {
        let share = ups as f64 / SEEDS as f64;
        let between = |low: f64, high: f64| low + share * (high - low);
        each(
            expert,
            Expectation {
                counts: [low.0[expert] as f64, frequency[expert] as f64, high.0[expert] as f64],
                mean_count: between(low.0[expert] as f64, high.0[expert] as f64),
                sums: [low.1[expert], chosen_sums[expert], high.1[expert]],
                mean_sum: between(low.1[expert], high.1[expert]),
            },
        );
    }
}

/// Of one expert: at lo, at f and at hi; and the mean over the seeds.
struct Expectation {
    counts: [f64; 3],
    mean_count: f64,
    sums: [f64; 3],
    mean_sum: f64,
}

/// Five standard deviations of the mean of a variable that is `low` or `high` with mean `middle`.
fn five_deviations([low, middle, high]: [f64; 3]) -> f64 {
    5.0 * ((middle - low) * (high - middle) / SEEDS as f64).sqrt()
}

#[test]
fn stochastic_by_frequency_keeps_f_tokens_in_the_mean() {
    let mut moved = 0;
    for (skew, tile) in [(Skew::Uniform, 8), (Skew::Zipf, 16), (Skew::Tied, 5)] {
        let mut start = Start::new(skew, 80, 6, 2, tile, 7);
        means(&mut start, Rule::StochasticByFrequency, |expert, Expectation { counts, mean_count, .. }| {
            let (error, allowed) = ((mean_count - counts[1]).abs(), five_deviations(counts));
            assert!(error <= allowed, "{skew:?}, expert {expert}: mean {mean_count} for f = {}", counts[1]);
            moved += usize::from(counts[0] != counts[1]);
        });
    }
    assert!(moved >= 12, "most of the 18 counts were no multiples, or nothing was tested");
}

#[test]
fn stochastic_by_scores_keeps_the_score_sum_in_the_mean() {
    let (mut moved, mut biased) = (0, 0);
    for (skew, tile) in [(Skew::Uniform, 8), (Skew::Zipf, 16), (Skew::Tied, 5)] {
        let mut start = Start::new(skew, 80, 6, 2, tile, 7);
        means(&mut start, Rule::StochasticByScores, |expert, Expectation { counts, mean_count, sums, mean_sum }| {
            let (error, allowed) = ((mean_sum - sums[1]).abs(), five_deviations(sums) + 1e-12);
            assert!(error <= allowed, "{skew:?}, expert {expert}: mean {mean_sum} for Σs = {}", sums[1]);
            moved += usize::from(counts[0] != counts[1]);
            biased += usize::from((mean_count - counts[1]).abs() > five_deviations(counts));
        });
    }
    assert!(moved >= 12, "most of the 18 counts were no multiples, or nothing was tested");
    assert!(biased >= 6, "by scores is another rule than by frequency: the mean count is not f");
}
