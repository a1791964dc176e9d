//! numpy's files: an array (`.npy`), several in one archive (`.npz`), or a directory of arrays.
//!
//! An archive has to be uncompressed (`np.savez`), so that what is read is never larger than the file.
//! Arrays without axes are the strings of the dump: `np.savez(path, x=x, …, router="given", K=2)`. numpy has
//! no bfloat16; `ml_dtypes` stores one as two opaque bytes, `V2`, and that is how they are read.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;

use super::archive;
use super::container::{Container, Entry, quoted};
use crate::error::{Error, Result};

const MAGIC: &[u8] = b"\x93NUMPY";

/// Whether a file that begins so is numpy's.
pub(super) fn is_array(start: &[u8]) -> bool {
    start.starts_with(MAGIC)
}

/// The arrays of an archive, whose bytes are given whole.
pub(super) fn of_archive(bytes: Vec<u8>) -> std::result::Result<Container, String> {
    let members = archive::members(&bytes)?;
    let named = members.into_iter().map(|(name, range)| {
        let name = name.strip_suffix(".npy").map(str::to_string);
        name.ok_or_else(|| "an archive holds .npy files and nothing else".to_string()).map(|name| (name, range))
    });
    let named = named.collect::<std::result::Result<Vec<_>, String>>()?;
    of_arrays(bytes, named)
}

/// The `.npy` files of a directory; other files are nobody's business.
pub(super) fn of_directory(path: &Path) -> Result<Container> {
    let listing = std::fs::read_dir(path).map_err(|source| Error::io(path, source))?;
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in listing {
        let file = entry.map_err(|source| Error::io(path, source))?.path();
        if file.extension().is_some_and(|extension| extension == "npy") {
            files.push(file);
        }
    }
    files.sort();
    let (mut bytes, mut named) = (Vec::new(), Vec::new());
    for file in files {
        let Some(name) = file.file_stem().and_then(|name| name.to_str()).map(str::to_string) else {
            return Err(Error::malformed(&file, "its name is no UTF-8 text"));
        };
        let start = bytes.len();
        let opened = File::open(&file).map_err(|source| Error::io(&file, source))?;
        let attributes = opened.metadata().map_err(|source| Error::io(&file, source))?;
        // A pipe or a device has no size that could bound what is read.
        if !attributes.is_file() {
            return Err(Error::malformed(&file, "this is no regular file"));
        }
        opened.take(attributes.len()).read_to_end(&mut bytes).map_err(|source| Error::io(&file, source))?;
        named.push((name, start..bytes.len()));
    }
    if named.is_empty() {
        return Err(Error::malformed(path, "this directory has no .npy file"));
    }
    of_arrays(bytes, named).map_err(|reason| Error::malformed(path, reason))
}

/// Arrays at their places in `bytes`.
fn of_arrays(bytes: Vec<u8>, arrays: Vec<(String, std::ops::Range<usize>)>) -> std::result::Result<Container, String> {
    let (mut tensors, mut strings) = (BTreeMap::new(), BTreeMap::new());
    let mut opaque = false;
    for (name, range) in arrays {
        let explain = |reason: String| format!("array {}: {reason}", quoted(&name));
        let start = range.start;
        let file = &bytes[range];
        let Header { descr, fortran, shape, length } = Header::read(file).map_err(explain)?;
        let data = &file[length..];
        let elements = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
        let elements = elements.ok_or_else(|| explain("its shape has more elements than any memory".into()))?;
        let size = element_size(&descr).ok_or_else(|| explain(unknown_type(&descr)))?;
        if elements.checked_mul(size) != Some(data.len()) {
            let reason =
                format!("shape {shape:?} of {} takes another size than its {} bytes", quoted(&descr), data.len());
            return Err(explain(reason));
        }
        if shape.is_empty() {
            let text = text_of(&descr, data).ok_or_else(|| explain(unknown_type(&descr)))?;
            if strings.insert(name.clone(), text).is_some() {
                return Err(explain("it is there twice".into()));
            }
            continue;
        }
        let dtype = tensor_type(&descr).ok_or_else(|| explain(unknown_type(&descr)))?;
        opaque |= descr.ends_with("V2");
        let range = start + length..start + file.len();
        let entry = Entry { dtype, shape, range, fortran, transposed: false };
        if tensors.insert(name.clone(), entry).is_some() {
            return Err(explain("it is there twice".into()));
        }
    }
    let mut container = Container::new(bytes, tensors, strings);
    if opaque {
        container.note("two-byte elements without a type (V2) are read as bfloat16, as ml_dtypes writes them");
    }
    Ok(container)
}

fn unknown_type(descr: &str) -> String {
    format!(
        "elements of type {} are not read; use little-endian f8, f4, f2, V2 (bfloat16 of ml_dtypes) or integers, and \
         arrays without axes for strings and sizes",
        quoted(descr)
    )
}

/// Bytes of one element of a type that may be read.
fn element_size(descr: &str) -> Option<usize> {
    if let Some(characters) = descr.strip_prefix("<U") {
        return characters.parse::<usize>().ok()?.checked_mul(4);
    }
    if let Some(characters) = descr.strip_prefix("|S") {
        return characters.parse().ok();
    }
    match descr {
        "<f8" | "<i8" | "<u8" => Some(8),
        "<f4" | "<i4" | "<u4" => Some(4),
        "<f2" | "<V2" | "|V2" | "<i2" | "<u2" => Some(2),
        "|i1" | "|u1" | "|b1" => Some(1),
        _ => None,
    }
}

fn tensor_type(descr: &str) -> Option<Dtype> {
    Some(match descr {
        "<f8" => Dtype::F64,
        "<f4" => Dtype::F32,
        "<f2" => Dtype::F16,
        "<V2" | "|V2" => Dtype::BF16,
        "<i8" => Dtype::I64,
        "<u8" => Dtype::U64,
        "<i4" => Dtype::I32,
        "<u4" => Dtype::U32,
        "<i2" => Dtype::I16,
        "<u2" => Dtype::U16,
        "|i1" => Dtype::I8,
        "|u1" => Dtype::U8,
        _ => return None,
    })
}

/// An array without axes as text: a string, or a whole number.
fn text_of(descr: &str, data: &[u8]) -> Option<String> {
    if descr.starts_with("<U") {
        let characters = data.as_chunks::<4>().0.iter().map(|word| char::from_u32(u32::from_le_bytes(*word)));
        let text: String = characters.collect::<Option<_>>()?;
        return Some(text.trim_end_matches('\0').to_string());
    }
    if descr.starts_with("|S") {
        return std::str::from_utf8(data).ok().map(|text| text.trim_end_matches('\0').to_string());
    }
    let number = match descr {
        "<i8" => i64::from_le_bytes(data.try_into().ok()?),
        "<i4" => i32::from_le_bytes(data.try_into().ok()?).into(),
        "<u4" => u32::from_le_bytes(data.try_into().ok()?).into(),
        "<u8" => i64::try_from(u64::from_le_bytes(data.try_into().ok()?)).ok()?,
        _ => return None,
    };
    Some(number.to_string())
}

/// What an array says before its elements.
#[derive(Debug, PartialEq)]
struct Header {
    descr: String,
    /// The first axis varies fastest.
    fortran: bool,
    shape: Vec<usize>,
    /// Of magic, version and text together.
    length: usize,
}

impl Header {
    fn read(file: &[u8]) -> std::result::Result<Self, String> {
        let rest = file.strip_prefix(MAGIC).ok_or("it does not begin as an .npy file")?;
        let (start, length) = match rest {
            [1, _, low, high, ..] => (10, u16::from_le_bytes([*low, *high]) as usize),
            [2 | 3, _, a, b, c, d, ..] => (12, u32::from_le_bytes([*a, *b, *c, *d]) as usize),
            [1..=3, ..] | [] => return Err("its header is cut off".into()),
            [version, ..] => return Err(format!("version {version} of the format is not read")),
        };
        let text = file.get(start..).and_then(|rest| rest.get(..length));
        let text = text.ok_or_else(|| format!("its header claims {length} bytes, the file has {}", file.len()))?;
        let text = std::str::from_utf8(text).map_err(|error| format!("its header is no UTF-8 text: {error}"))?;
        let parsed = Literal { rest: text }.header();
        let (descr, fortran, shape) =
            parsed.ok_or_else(|| format!("its header {} is none of numpy's", quoted(text)))?;
        Ok(Self { descr, fortran, shape, length: start + length })
    }
}

/// A reader of the one Python literal that numpy writes:
/// `{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }`.
struct Literal<'t> {
    rest: &'t str,
}

impl Literal<'_> {
    fn header(mut self) -> Option<(String, bool, Vec<usize>)> {
        let (mut descr, mut fortran, mut shape) = (None, None, None);
        self.take("{")?;
        while !self.takes("}") {
            let key = self.string()?;
            self.take(":")?;
            let first = match key.as_str() {
                "descr" => descr.replace(self.string()?).is_none(),
                "fortran_order" => fortran.replace(self.truth()?).is_none(),
                "shape" => shape.replace(self.tuple()?).is_none(),
                _ => return None,
            };
            if !first {
                return None;
            }
            if !self.takes(",") {
                self.take("}")?;
                break;
            }
        }
        self.rest.trim().is_empty().then_some((descr?, fortran?, shape?))
    }

    fn takes(&mut self, token: &str) -> bool {
        self.take(token).is_some()
    }

    fn take(&mut self, token: &str) -> Option<()> {
        self.rest = self.rest.trim_start().strip_prefix(token)?;
        Some(())
    }

    /// Text in either quote, without escapes.
    fn string(&mut self) -> Option<String> {
        let rest = self.rest.trim_start();
        let quote = rest.chars().next().filter(|quote| matches!(quote, '\'' | '"'))?;
        let (text, rest) = rest[1..].split_once(quote)?;
        self.rest = rest;
        Some(text.to_string())
    }

    fn truth(&mut self) -> Option<bool> {
        if self.takes("True") { Some(true) } else { self.take("False").map(|()| false) }
    }

    fn tuple(&mut self) -> Option<Vec<usize>> {
        self.take("(")?;
        let mut sizes = Vec::new();
        while !self.takes(")") {
            let rest = self.rest.trim_start();
            let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            sizes.push(rest[..digits].parse().ok()?);
            // Python 2 wrote long integers so.
            self.rest = rest[digits..].trim_start_matches('L');
            if !self.takes(",") {
                self.take(")")?;
                break;
            }
        }
        Some(sizes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Option<(String, bool, Vec<usize>)> {
        Literal { rest: text }.header()
    }

    #[test]
    fn headers_as_numpy_writes_them_are_read() {
        let header = |descr: &str, fortran, shape: &[usize]| Some((descr.to_string(), fortran, shape.to_vec()));
        assert_eq!(
            parsed("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }   \n"),
            header("<f4", false, &[3, 4])
        );
        assert_eq!(parsed("{'descr': '<V2', 'fortran_order': True, 'shape': (7,), }"), header("<V2", true, &[7]));
        assert_eq!(parsed("{\"shape\":(),\"fortran_order\":False,\"descr\":\"<U5\"}"), header("<U5", false, &[]));
        assert_eq!(
            parsed("{'descr': '<f4', 'fortran_order': False, 'shape': (3L, 4L)}"),
            header("<f4", false, &[3, 4])
        );
    }

    #[test]
    fn other_literals_are_refused() {
        for text in [
            "",
            "{",
            "{}",
            "{'descr': '<f4', 'fortran_order': False}",
            "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}",
            "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}",
            "{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999999,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} and more",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (1 2)}",
            "{'dé'",
        ] {
            assert_eq!(parsed(text), None, "{text}");
        }
    }
}
