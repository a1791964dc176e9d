//! Reading a file takes memory by its size, whatever it claims, and so does checking it.
//!
//! A binary of its own, with one test: the counter sees the whole process.

#[allow(dead_code)]
#[path = "../claims/dumps/arrays.rs"]
mod arrays;
#[path = "../claims/dumps/content.rs"]
mod content;
#[path = "../memory/counting.rs"]
mod counting;
#[allow(dead_code)]
#[path = "../claims/dumps/edit.rs"]
mod edit;

use std::path::Path;
use std::sync::atomic::Ordering;

use counting::{LIVE, PEAK};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sonicmoe::case::{Case, Pairing};
use sonicmoe::cli::check::{CheckArgs, check_file};
use sonicmoe::dump::{Dump, Metadata, Overrides, write};
use sonicmoe::sonic::cpu::CpuEngine;
use sonicmoe::{Problem, Record, run};

/// Bytes live at once for each byte of the file: the file, read into a list that doubles (2); a tensor in
/// f64, 4 times as large as in a 2-byte type, and an input once more while it is turned into our order (8);
/// an id of 4 bytes as 8, as 4, and in the routing's arrays (2 at most: ids are few beside numbers).
const TIMES: isize = 2 + 8 + 2;

/// The header's table, its strings, and the message of an error.
const AND: isize = 256 << 10;

/// What a check has live for each number of the layer, beside what was read: of each result truth and bound, the
/// result of the swapped layer, truth, deviation and systematic part of the twin, and of one expert at a time
/// the same again with the operands of its products; between kernels what was recorded, its truth and
/// bound. In numbers of 8 bytes.
const NUMBERS: isize = 24;

/// Pictures of errors, one for each result and each thread.
const PICTURES: isize = 2 << 20;

/// Most bytes live at once while `task` runs.
fn peak<V>(task: impl FnOnce() -> V) -> (V, isize) {
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let value = task();
    (value, PEAK.load(Ordering::Relaxed) - before)
}

/// Numbers of a layer: inputs, what passes between the kernels, results.
fn numbers_of(problem: &Problem<'_, f64>) -> isize {
    let [t, d, n, e, width, r] =
        [problem.t(), problem.d(), problem.n(), problem.e(), problem.h_width(), problem.routed()];
    let numbers = 2 * e * d * (width + n) + r * (2 * width + 2 * n + 2 * d) + 4 * t * (d + e) + 4 * e * d;
    numbers as isize
}

fn right_files(path: &Path) -> [Vec<u8>; 2] {
    let base = Case::new("40,48,32,8,2".parse().unwrap());
    [base.clone().with_biases(), base.with_pairing(Pairing::TopK)].map(|case| {
        let problem = case.problem::<half::bf16>().unwrap();
        let outcome = run(&CpuEngine::<f32>::new(), &problem, Record::Intermediates).unwrap();
        write(path, &problem, &outcome.routing, &outcome.results, &Metadata::default()).unwrap();
        std::fs::read(path).unwrap()
    })
}

#[test]
fn a_reader_and_a_check_take_memory_by_the_size_of_the_file_whatever_it_claims() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("memory_of_a_reader.safetensors");
    let files = right_files(&path);
    // The pool's threads are there before anything is counted.
    check_file(&path, &CheckArgs::default()).unwrap();
    reading_broken_forms(&path, &files);
    checking_hostile_contents(&path, &files);
}

fn reading_broken_forms(path: &Path, files: &[Vec<u8>]) {
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
        std::fs::write(path, &bytes).unwrap();
        let (dump, peak) = peak(|| Dump::read(path, &Overrides::default()));
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

/// In the form of safetensors, of `.npz` and of a directory of `.npy`.
fn checking_hostile_contents(path: &Path, files: &[Vec<u8>]) {
    let random = &mut ChaCha8Rng::seed_from_u64(2);
    let (mut judged, mut refused) = (0, 0);
    let [mut most_read, mut most_checked] = [0.0f64; 2];
    for round in 0..240 {
        std::fs::write(path, &files[round % 2]).unwrap();
        let mut file = edit::File::read(path);
        (0..round % 3).for_each(|_| content::change(&mut file, random));
        let (saved, size) = match round % 4 {
            2 => {
                let bytes = arrays::npz(&file, |_| ());
                (edit::save("memory_of_a_check", &bytes), bytes.len())
            }
            3 => {
                let arrays = arrays::npy(&file);
                let size = arrays.iter().map(|(_, bytes)| bytes.len()).sum();
                (edit::save_directory("memory_of_a_check", &arrays), size)
            }
            _ => {
                let bytes = file.to_bytes();
                (edit::save("memory_of_a_check", &bytes), bytes.len())
            }
        };
        let (dump, of_reading) = peak(|| Dump::read(&saved, &Overrides::default()));
        let of_file = TIMES * size as isize + AND;
        assert!(of_reading <= of_file, "round {round}: {of_reading} bytes to read {size}");
        let of_layer = dump.as_ref().map_or(0, |dump| 8 * NUMBERS * numbers_of(&dump.problem) + PICTURES);
        drop(dump);
        let (checked, of_check) = peak(|| check_file(&saved, &CheckArgs::default()));
        assert!(of_check <= of_file + of_layer, "round {round}: {of_check} bytes to check {size}, of {of_layer}");
        most_read = most_read.max(of_reading as f64 / size as f64);
        match checked {
            Ok(_) => {
                judged += 1;
                most_checked = most_checked.max((of_check - of_file).max(0) as f64 / of_layer as f64);
            }
            Err(_) => refused += 1,
        }
    }
    println!(
        "{judged} files judged and {refused} refused; at most {most_read:.1} bytes live for a byte read, and \
         {most_checked:.2} of what a check may take"
    );
    assert!(judged >= 80 && refused >= 40, "{judged} judged, {refused} refused");
}
