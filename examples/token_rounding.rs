//! Rounds the routing of random tokens, and prints how many tokens each expert has before and after
//! and how much padding that saves.
//!
//! ```text
//! cargo run --release --example token_rounding -- [RULE] [T] [E] [K] [M]
//! ```

use ndarray::Array2;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sonicmoe::routing::rounding::{Rule, TokenRounding, padding};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let rule: Rule = arguments.next().map_or(Ok(Rule::default()), |text| text.parse())?;
    let mut size = |default: usize| arguments.next().map_or(Ok(default), |text| text.parse());
    let [tokens, experts, k, tile] = [size(8192)?, size(64)?, size(4)?, size(128)?];

    // Some experts are more popular than others, as in a trained router.
    let mut generator = ChaCha8Rng::seed_from_u64(1);
    let popularity: Vec<f32> = (0..experts).map(|_| generator.random_range(-1.0..1.0)).collect();
    let logits = Array2::from_shape_simple_fn((tokens, experts), || generator.random_range(-2.0f32..2.0))
        + ndarray::ArrayView1::from(&popularity);

    let rounding = TokenRounding { rule, seed: 1, ..TokenRounding::new(tile) };
    let (choice, rounded) = rounding.route(logits.view(), k)?;

    println!("{tokens} tokens, {experts} experts, top {k}, tiles of {tile}, rule {rule}\n");
    println!("expert  top-K  rounded");
    for (expert, (before, after)) in rounded.topk_frequency.iter().zip(&rounded.expert_frequency).enumerate() {
        println!("{expert:6}  {before:5}  {after:7}");
    }
    let (before, after) = (tokens * choice.k(), rounded.routing.routed());
    let saved = padding(&rounded.topk_frequency, tile);
    println!("\npairs: {before} by top-K, {after} rounded; capped experts: {}", rounded.capped.len());
    println!(
        "rows of padding: {saved} by top-K ({:.1}% of all rows computed), {} rounded",
        100.0 * saved as f64 / (before + saved).max(1) as f64,
        padding(&rounded.expert_frequency, tile),
    );
    Ok(())
}
