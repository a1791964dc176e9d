//! Reading a file takes memory by its size, whatever it claims.
//!
//! A binary of its own, with one test: the counter sees the whole process.

#[path = "../memory/counting.rs"]
mod counting;

use std::path::Path;
use std::sync::atomic::Ordering;

use counting::{LIVE, PEAK};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sonicmoe::case::{Case, Pairing};
use sonicmoe::dump::{Dump, Metadata, Overrides, write};
use sonicmoe::sonic::cpu::CpuEngine;
use sonicmoe::{Record, run};

/// Bytes live at once for each byte of the file: the file, read into a list that doubles (2); a tensor in
/// f64, 4 times as large as in a 2-byte type, and an input once more while it is turned into our order (8);
/// an id of 4 bytes as 8, as 4, and in the routing's arrays (2 at most: ids are few beside numbers).
const TIMES: isize = 2 + 8 + 2;

/// The header's table, its strings, and the message of an error.
const AND: isize = 256 << 10;

#[test]
fn a_reader_takes_memory_by_the_size_of_the_file_whatever_it_claims() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("memory_of_a_reader.safetensors");
    let base = Case::new("40,48,32,8,2".parse().unwrap());
    let files = [base.clone().with_biases(), base.with_pairing(Pairing::TopK)].map(|case| {
        let problem = case.problem::<half::bf16>().unwrap();
        let outcome = run(&CpuEngine::<f32>::new(), &problem, Record::Intermediates).unwrap();
        write(&path, &problem, &outcome.routing, &outcome.results, &Metadata::default()).unwrap();
        std::fs::read(&path).unwrap()
    });
    let random = &mut ChaCha8Rng::seed_from_u64(1);
    let (mut read, mut refused, mut most) = (0, 0, 0.0f64);
    for round in 0..400 {
        let mut bytes = files[round % 2].clone();
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        match round % 5 {
            0 => {}
            1 => bytes.truncate(random.random_range(0..bytes.len())),
            2 => bytes[..8].copy_from_slice(&random.random::<u64>().to_le_bytes()),
            3 => (0..3)
                .for_each(|_| bytes[random.random_range(8..header)] = b"0123456789[],:"[random.random_range(0..14)]),
            _ => bytes[random.random_range(8..header)] = random.random(),
        }
        std::fs::write(&path, &bytes).unwrap();
        let before = LIVE.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        let dump = Dump::read(&path, &Overrides::default());
        let peak = PEAK.load(Ordering::Relaxed) - before;
        assert!(peak <= TIMES * bytes.len() as isize + AND, "round {round}: {peak} bytes for {}", bytes.len());
        if dump.is_ok() {
            read += 1;
            most = most.max(peak as f64 / bytes.len() as f64);
        } else {
            refused += 1;
        }
    }
    println!("{read} files read and {refused} refused; at most {most:.1} bytes live for a byte of the file");
    // One in five is unchanged, and one in five too short.
    assert!(read >= 80 && refused >= 80, "{read} read, {refused} refused");
}
