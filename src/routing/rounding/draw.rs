//! The draws of the random rules: a counter-based generator, so that a draw depends on nothing but
//! (seed, expert) and a device can repeat it.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::shape::ExpertId;

/// A number in [0, 1), the draw of `expert` under `seed`: ⌊w / 2¹¹⌋ · 2⁻⁵³, where w is the first
/// 64 bits (words 0 and 1, low word first) of a block of ChaCha8.
///
/// The block, word by word: 0–3 the constant "expand 32-byte k"; 4–11 the key, of which words 4
/// and 5 are the low and the high half of `seed` and the others 0; 12 and 13 the block counter, 0;
/// 14 the expert; 15 is 0. Eight rounds (four times a column and a diagonal round), then the input
/// block is added.
pub fn draw(seed: u64, expert: ExpertId) -> f64 {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let mut generator = ChaCha8Rng::from_seed(key);
    generator.set_stream(expert.0.into());
    (generator.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}
