//! A zip archive whose members are stored as they are, as `np.savez` writes it: the central directory, and
//! where each member's bytes lie. Nothing is copied, and nothing inflated.

use std::collections::BTreeSet;
use std::ops::Range;

use super::container::quoted;

const END: [u8; 4] = *b"PK\x05\x06";
const CENTRAL: [u8; 4] = *b"PK\x01\x02";
const LOCAL: [u8; 4] = *b"PK\x03\x04";

/// Whether a file that begins so is an archive.
pub(super) fn is_archive(start: &[u8]) -> bool {
    start.starts_with(&LOCAL) || start.starts_with(&END)
}

/// Every member's name, and where its bytes lie.
///
/// # Errors
/// An archive that is cut off, in several parts or beyond 4 GiB; a member that is compressed, encrypted,
/// there twice, damaged, or shares bytes with another.
pub(super) fn members(bytes: &[u8]) -> Result<Vec<(String, Range<usize>)>, String> {
    let (count, directory) = directory(bytes)?;
    let mut members = Vec::new();
    let mut names = BTreeSet::new();
    let mut rest = directory;
    for _ in 0..count {
        let (name, range, after) = member(bytes, rest)?;
        if !names.insert(name.clone()) {
            return Err(format!("{} is there twice", quoted(&name)));
        }
        members.push((name, range));
        rest = after;
    }
    let mut ranges: Vec<&Range<usize>> = members.iter().map(|(_, range)| range).collect();
    ranges.sort_by_key(|range| range.start);
    if ranges.windows(2).any(|pair| pair[1].start < pair[0].end) {
        return Err("two members share bytes".into());
    }
    Ok(members)
}

/// How many members there are, and the bytes of the central directory.
fn directory(bytes: &[u8]) -> Result<(usize, &[u8]), String> {
    // 22 bytes and a comment of up to 65,535.
    let from = bytes.len().saturating_sub(22 + 65_535);
    let end = bytes[from..].windows(4).rposition(|window| window == END).map(|place| from + place);
    let end = end.and_then(|end| bytes.get(end..)?.first_chunk::<22>());
    let end = end.ok_or("it has no end of a central directory: truncated, or no archive")?;
    let (count, size, start) = (u16_at(end, 10), u32_at(end, 12), u32_at(end, 16));
    if u16_at(end, 4) != 0 || u16_at(end, 6) != 0 || u16_at(end, 8) != count {
        return Err("it is one of several parts".into());
    }
    if count == usize::from(u16::MAX) || start == u32::MAX as usize || size == u32::MAX as usize {
        return Err("it is beyond 4 GiB; write safetensors or a directory of .npy files".into());
    }
    let directory = bytes.get(start..).and_then(|rest| rest.get(..size));
    Ok((count, directory.ok_or("its central directory lies outside the file")?))
}

/// The first member of the rest of a central directory: its name, its bytes, and what comes after.
fn member<'d>(bytes: &[u8], entry: &'d [u8]) -> Result<(String, Range<usize>, &'d [u8]), String> {
    let cut_off = || "its central directory is cut off".to_string();
    let head = entry.first_chunk::<46>().filter(|head| head.starts_with(&CENTRAL)).ok_or_else(cut_off)?;
    let (name_length, extra, comment) = (u16_at(head, 28), u16_at(head, 30), u16_at(head, 32));
    let name = entry[46..].get(..name_length).ok_or_else(cut_off)?;
    let after = entry[46 + name_length..].get(extra + comment..).ok_or_else(cut_off)?;
    let name = std::str::from_utf8(name).map_err(|_| "a member's name is no UTF-8 text".to_string())?;
    let of_member = |reason: &str| format!("member {}: {reason}", quoted(name));

    let (flags, method) = (u16_at(head, 8), u16_at(head, 10));
    let (checksum, packed, size, local) = (u32_at(head, 16), u32_at(head, 20), u32_at(head, 24), u32_at(head, 42));
    if flags & 1 != 0 {
        return Err(of_member("it is encrypted"));
    }
    if method != 0 {
        return Err(of_member("it is compressed; write with np.savez, not np.savez_compressed"));
    }
    if packed != size || [size, local].contains(&(u32::MAX as usize)) {
        return Err(of_member("its sizes disagree or are beyond 4 GiB"));
    }
    // The local header repeats the name and may have other extra fields.
    let outside = || of_member("it lies outside the file");
    let rest = bytes.get(local..).ok_or_else(outside)?;
    let head = rest.first_chunk::<30>().filter(|head| head.starts_with(&LOCAL)).ok_or_else(outside)?;
    let (local_name, local_extra) = (u16_at(head, 26), u16_at(head, 28));
    if rest[30..].get(..local_name) != Some(name.as_bytes()) {
        return Err(of_member("its own header has another name"));
    }
    let start = local + 30 + local_name + local_extra;
    let data = bytes.get(start..).and_then(|rest| rest.get(..size)).ok_or_else(outside)?;
    if crc32(data) as usize != checksum {
        return Err(of_member("its bytes do not have the checksum that the archive names"));
    }
    Ok((name.to_string(), start..start + size, after))
}

fn u16_at(bytes: &[u8], at: usize) -> usize {
    u16::from_le_bytes([bytes[at], bytes[at + 1]]).into()
}

fn u32_at(bytes: &[u8], at: usize) -> usize {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]) as usize
}

/// CRC-32 of zip: the reflected polynomial 0xEDB88320.
fn crc32(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0u32; 256];
        let mut byte = 0;
        while byte < 256 {
            let (mut value, mut bit) = (byte as u32, 0);
            while bit < 8 {
                value = if value & 1 == 1 { 0xEDB8_8320 ^ (value >> 1) } else { value >> 1 };
                bit += 1;
            }
            table[byte] = value;
            byte += 1;
        }
        table
    };
    !bytes.iter().fold(!0u32, |crc, &byte| TABLE[((crc ^ u32::from(byte)) & 0xFF) as usize] ^ (crc >> 8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_zip() {
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
        assert_eq!(crc32(b""), 0);
    }
}
