//! numpy's files, written without numpy and without the code under test.

use super::edit::File;

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
