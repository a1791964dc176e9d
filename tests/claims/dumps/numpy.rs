//! numpy's files are read as dumps: an archive, and a directory of arrays.

use super::arrays::{archive, array, npy, npz};
use super::edit::{File, data, save, save_directory};
use super::{check, outcome};
use sonicmoe::oracle::Verdict;

#[test]
fn an_archive_and_a_directory_say_what_the_safetensors_file_says() {
    for name in ["hf_olmoe_bf16", "hf_qwen3_f32"] {
        let file = File::of_data(name);
        let expected = check(&data(name)).unwrap();
        let archive = save(&format!("{name}_npz"), &npz(&file, |_| ()));
        let directory = save_directory(&format!("{name}_npy"), &npy(&file));
        for path in [archive, directory] {
            let checked = check(&path).unwrap();
            assert_eq!(checked.verdict, Verdict::Pass, "{}", checked.report());
            assert_eq!(checked.model(), expected.model());
            assert_eq!(checked.dump.results, expected.dump.results);
            assert_eq!(checked.dump.metadata, expected.dump.metadata);
            // numpy has no bfloat16, and the report says how it was read.
            assert_eq!(checked.report().contains("note: two-byte elements"), name == "hf_olmoe_bf16");
        }
    }
}

#[test]
fn an_array_with_its_first_axis_fastest_is_turned() {
    let file = File::of_data("hf_qwen3_f32");
    let mut arrays = npy(&file);
    let x = file.tensors.iter().find(|tensor| tensor.name == "x").unwrap();
    let (rows, columns) = (x.shape[0], x.shape[1]);
    let turned: Vec<u8> = (0..columns)
        .flat_map(|column| (0..rows).map(move |row| row * columns + column))
        .flat_map(|at| x.bytes[4 * at..4 * at + 4].to_vec())
        .collect();
    arrays.iter_mut().find(|(name, _)| name == "x.npy").unwrap().1 = array("<f4", true, &x.shape, &turned);
    let path = save_directory("fortran", &arrays);
    assert_eq!(outcome(&path).0, 0, "{}", outcome(&path).1);
}

#[test]
fn a_size_may_be_a_number_and_a_string_bytes() {
    let file = File::of_data("hf_qwen3_f32").without_string("K").without_string("activation");
    let mut arrays = npy(&file);
    arrays.push(("K.npy".into(), array("<i8", false, &[], &2i64.to_le_bytes())));
    arrays.push(("activation.npy".into(), array("|S6", false, &[], b"swiglu")));
    let path = save_directory("numbers", &arrays);
    assert_eq!(outcome(&path).0, 0, "{}", outcome(&path).1);
}

#[test]
fn arrays_that_are_none_are_refused_by_name() {
    let file = File::of_data("hf_qwen3_f32");
    let x = file.tensors.iter().find(|tensor| tensor.name == "x").unwrap().clone();
    let header = |length: usize| [b"\x93NUMPY\x02\x00", &(length as u32).to_le_bytes()[..]].concat();
    for (fault, other, says) in [
        ("big endian", array(">f4", false, &x.shape, &x.bytes), "`>f4`"),
        ("objects", array("|O", false, &x.shape, &x.bytes), "`|O`"),
        ("short", array("<f4", false, &x.shape, &x.bytes[4..]), "takes another size"),
        ("huge", array("<f4", false, &[1 << 40, 1 << 40], &x.bytes), "more elements than any memory"),
        ("no header", b"\x93NUMPY\x01".to_vec(), "cut off"),
        ("lying header", header(4_000_000_000), "claims 4000000000 bytes"),
        ("other version", b"\x93NUMPY\x07\x00aaaaaaaa".to_vec(), "version 7"),
        ("other magic", b"NUMPY".to_vec(), "does not begin"),
        ("python", [b"\x93NUMPY\x01\x00\x08\x00", &b"os.exit("[..]].concat(), "none of numpy's"),
    ] {
        let mut arrays = npy(&file);
        arrays.iter_mut().find(|(name, _)| name == "x.npy").unwrap().1 = other;
        let (code, said) = outcome(&save_directory("wrong_array", &arrays));
        assert!(code == 2 && said.contains(says) && said.contains("`x`"), "{fault}: {said}");
        assert_eq!(said.lines().count(), 1, "{fault}: {said}");
    }
    let (code, said) = outcome(&save("one_array", &array("<f4", false, &x.shape, &x.bytes)));
    assert!(code == 2 && said.contains("one array is no run"), "{said}");
    let (code, said) = outcome(&save_directory("no_arrays", &[("notes.txt".into(), Vec::new())]));
    assert!(code == 2 && said.contains("no .npy file"), "{said}");
}

#[test]
fn archives_that_are_none_are_refused() {
    let file = File::of_data("hf_qwen3_f32");
    let right = npz(&file, |_| ());
    let changed = |at: usize, value: u8| {
        let mut bytes = right.clone();
        bytes[at] = value;
        bytes
    };
    let end = right.len() - 22;
    let directory = u32::from_le_bytes(right[end + 16..end + 20].try_into().unwrap()) as usize;
    let twice = npy(&file).into_iter().take(1).cycle().take(2);
    for (fault, bytes, says) in [
        ("cut off", right[..right.len() - 1].to_vec(), "truncated"),
        ("compressed", changed(directory + 10, 8), "np.savez"),
        ("encrypted", changed(directory + 8, 1), "encrypted"),
        ("damaged", changed(directory - 1, right[directory - 1] ^ 1), "checksum"),
        ("outside", changed(end + 19, 0x7f), "outside"),
        ("several parts", changed(end + 4, 1), "parts"),
        ("other name", changed(30, b'!'), "another name"),
        ("twice", archive(twice), "twice"),
        ("text", archive([("notes.txt".to_string(), b"hello".to_vec())].into_iter()), ".npy files and nothing else"),
        ("empty", archive(std::iter::empty()), "`x`"),
    ] {
        let (code, said) = outcome(&save("wrong_archive", &bytes));
        assert!((code == 2 || fault == "empty") && said.contains(says), "{fault}: {code} {said}");
        assert_eq!(said.lines().count(), 1, "{fault}: {said}");
    }
}
