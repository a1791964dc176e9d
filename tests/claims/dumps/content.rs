//! Hostile content in a file whose form is right: sizes and types fit their bytes, so that what reads it goes on
//! to the numbers.

use rand::Rng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand_chacha::ChaCha8Rng;

use super::edit::File;

/// Numbers that arithmetic stumbles over, and that f32 has.
const WILD: [f64; 10] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, 3e38, -3e38, 1e-45, 1e-38, -1.0];

/// One change of content.
pub fn change(file: &mut File, random: &mut ChaCha8Rng) {
    let results: Vec<usize> = places(file, |name| name.starts_with("grad.") || is_result(name));
    let inputs: Vec<usize> = places(file, |name| !(name.starts_with("grad.") || is_result(name) || is_ids(name)));
    let ids: Vec<usize> = places(file, is_ids);
    match random.random_range(0..14) {
        // Results and inputs: one wild number, or nothing else.
        0..3 => numbers(file, &results, random, |numbers, random| fill(numbers, random)),
        3..5 => numbers(file, &inputs, random, |numbers, random| fill(numbers, random)),
        // So large that products overflow, so small that they underflow; a scale is no fault by itself.
        5..7 => {
            let factor = *[1e-45, 1e-38, 1e-20, 1e-3, 1e12, 1e30].choose(random).unwrap();
            let of = if random.random_bool(0.3) { &results } else { &inputs };
            numbers(file, of, random, |numbers, _| numbers.iter_mut().for_each(|number| *number *= factor));
        }
        // The right numbers in the wrong places.
        7 => numbers(file, &results, random, |numbers, random| numbers.shuffle(random)),
        8 => {
            let of = if random.random_bool(0.5) { &results } else { &inputs };
            if let Some(&at) = of.choose(random) {
                file.tensors[at].shape.shuffle(random);
            }
        }
        // Ids out of range, negative, the same pair twice, another order of pairs.
        9..11 => numbers(file, &ids, random, |ids, random| {
            let wild = *[-1.0, 4.0, 5.0, 2147483647.0, -2147483648.0].choose(random).unwrap();
            match (random.random_range(0..4), ids.len()) {
                (_, 0) => {}
                (0, length) => ids[random.random_range(0..length)] = wild,
                (1, _) => {
                    let first = ids[0];
                    ids.fill(first);
                }
                (2, _) => ids.reverse(),
                _ => ids.shuffle(random),
            }
        }),
        // Another type of the same width.
        11 => {
            let at = random.random_range(0..file.tensors.len());
            let dtype = &mut file.tensors[at].dtype;
            let other = match dtype.as_str() {
                "F32" => *["I32", "U32"].choose(random).unwrap(),
                "I32" | "U32" => *["F32", "U32", "I32"].choose(random).unwrap(),
                "BF16" => "F16",
                "F64" => "I64",
                _ => return,
            };
            *dtype = other.into();
        }
        // No tokens, no experts, more experts for a token than there are.
        12 => match random.random_range(0..3) {
            0 => empty_axis(file, &["x", "dout", "o", "dx", "token_idx", "expert_idx", "scores", "ds", "logits"]),
            1 => empty_axis(file, &["w1", "w2", "b1", "b2", "dw1", "dw2", "db1", "db2", "router_w", "drouter_w"]),
            _ => drop(file.strings.insert("K".into(), random.random_range(0..9).to_string().into())),
        },
        // Something required is missing.
        _ => {
            if random.random_bool(0.7) && !results.is_empty() {
                file.tensors.remove(*results.choose(random).unwrap());
            } else if let Some(key) = file.strings.keys().cloned().collect::<Vec<_>>().choose(random) {
                file.strings.remove(key);
            }
        }
    }
}

fn is_result(name: &str) -> bool {
    const OTHERS: [&str; 10] = ["o", "ds", "dlogits", "h", "a", "y", "a_prime", "dx_expanded", "logits", "dh"];
    OTHERS.contains(&name) || (name.starts_with('d') && name != "dout")
}

fn is_ids(name: &str) -> bool {
    ["token_idx", "expert_idx"].contains(&name)
}

fn places(file: &File, wanted: impl Fn(&str) -> bool) -> Vec<usize> {
    (0..file.tensors.len()).filter(|&at| wanted(&file.tensors[at].name)).collect()
}

/// Changes the numbers of one of these tensors, or in one case of eight of all.
fn numbers(
    file: &mut File,
    places: &[usize],
    random: &mut ChaCha8Rng,
    change: impl Fn(&mut Vec<f64>, &mut ChaCha8Rng),
) {
    let all = random.random_bool(0.125);
    let Some(&one) = places.choose(random) else { return };
    for &at in places.iter().filter(|&&at| all || at == one) {
        let tensor = &mut file.tensors[at];
        if ["F64", "F32", "BF16", "I32"].contains(&tensor.dtype.as_str()) {
            let mut numbers = tensor.values();
            change(&mut numbers, random);
            tensor.set(&numbers);
        }
    }
}

fn fill(numbers: &mut [f64], random: &mut ChaCha8Rng) {
    let value = *WILD.choose(random).unwrap();
    let one = random.random_bool(0.5);
    let place = random.random_range(0..numbers.len().max(1));
    numbers.iter_mut().enumerate().filter(|(at, _)| !one || *at == place).for_each(|(_, number)| *number = value);
}

fn empty_axis(file: &mut File, names: &[&str]) {
    for tensor in file.tensors.iter_mut().filter(|tensor| names.contains(&tensor.name.as_str())) {
        tensor.bytes.clear();
        if let Some(first) = tensor.shape.first_mut() {
            *first = 0;
        }
    }
    for key in ["T", "E"] {
        file.strings.remove(key);
    }
}
