//! numpy's files are read as dumps: an archive, and a directory of arrays.

use super::edit::{File, data, save, save_directory};
use super::{check, outcome};
use sonicmoe::oracle::Verdict;

/// Arrays in the form of `np.save`, by file name; strings as arrays without axes.
pub fn npy(file: &File) -> Vec<(String, Vec<u8>)> {
    let tensors = file.tensors.iter().map(|tensor| {
        let descr = match tensor.dtype.as_str() {
            "F64" => "<f8",
            "F32" => "<f4",
            "F16" => "<f2",
            "BF16" => "<V2",
            "I64" => "<i8",
            "I32" => "<i4",
            "U8" => "|u1",
            other => other,
        };
        (format!("{}.npy", tensor.name), array(descr, false, &tensor.shape, &tensor.bytes))
    });
    let strings = file.strings.iter().map(|(key, value)| {
        let text = value.as_str().unwrap();
        let bytes: Vec<u8> = text.chars().flat_map(|c| u32::from(c).to_le_bytes()).collect();
        (format!("{key}.npy"), array(&format!("<U{}", text.chars().count()), false, &[], &bytes))
    });
    tensors.chain(strings).collect()
}

/// One array as `np.save` writes it: the header filled up so that the numbers stand at a multiple of 64.
pub fn array(descr: &str, fortran: bool, shape: &[usize], bytes: &[u8]) -> Vec<u8> {
    let sizes: String = shape.iter().map(|size| format!("{size}, ")).collect();
    let sizes = if shape.len() > 1 { sizes.trim_end_matches(", ") } else { sizes.trim_end() };
    let order = if fortran { "True" } else { "False" };
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': ({sizes}), }}");
    while !(10 + header.len() + 1).is_multiple_of(64) {
        header.push(' ');
    }
    header.push('\n');
    let length = (header.len() as u16).to_le_bytes();
    [b"\x93NUMPY\x01\x00", &length[..], header.as_bytes(), bytes].concat()
}

/// The archive of `np.savez`, each array changed first: members stored, local headers with zip64 fields.
pub fn npz(file: &File, mut change: impl FnMut(&mut Vec<u8>)) -> Vec<u8> {
    let members = npy(file).into_iter().map(|(name, mut array)| {
        change(&mut array);
        (name, array)
    });
    archive(members)
}

pub fn archive(members: impl Iterator<Item = (String, Vec<u8>)>) -> Vec<u8> {
    let (mut bytes, mut directory, mut count) = (Vec::new(), Vec::new(), 0u16);
    for (name, array) in members {
        let (start, size, checksum) = (bytes.len() as u32, array.len() as u32, crc32(&array));
        let name_length = (name.len() as u16).to_le_bytes();
        // Version, flags, method, time and date.
        let common = [45u8, 0, 0, 0, 0, 0, 0, 0, 33, 0];
        bytes
            .extend([b"PK\x03\x04", &common[..], &checksum.to_le_bytes(), &[0xff; 8], &name_length, &[20, 0]].concat());
        bytes.extend([name.as_bytes(), &[1, 0, 16, 0]].concat());
        bytes.extend([u64::from(size).to_le_bytes(), u64::from(size).to_le_bytes()].concat());
        bytes.extend(&array);
        directory.extend([b"PK\x01\x02", &[45u8, 3][..], &common, &checksum.to_le_bytes()].concat());
        directory.extend([size.to_le_bytes(), size.to_le_bytes()].concat());
        directory.extend([&name_length[..], &[0; 8], &[0; 4], &start.to_le_bytes(), name.as_bytes()].concat());
        count += 1;
    }
    let (start, size) = (bytes.len() as u32, directory.len() as u32);
    bytes.extend(directory);
    let counts = [count.to_le_bytes(), count.to_le_bytes()].concat();
    bytes.extend([b"PK\x05\x06", &[0u8; 4][..], &counts, &size.to_le_bytes(), &start.to_le_bytes(), &[0, 0]].concat());
    bytes
}

/// Bit by bit, unlike the reader's table.
fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0xEDB8_8320 } else { crc >> 1 };
        }
    }
    !crc
}

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
