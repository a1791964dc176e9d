//! The container: a file, or numpy's directory, as named tensors and strings, before any of them means
//! anything.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use half::{bf16, f16};
use ndarray::{ArrayD, IxDyn, ShapeBuilder};
use rayon::prelude::*;
use safetensors::tensor::{Dtype, SafeTensorError, SafeTensors};
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use super::{archive, numpy};
use crate::element::{DType, Element};
use crate::engine::Stored;
use crate::error::{Error, Result};

/// A file's tensors and strings. Memory is that of the file, whatever its header claims.
#[derive(Debug)]
pub(super) struct Container {
    bytes: Vec<u8>,
    tensors: BTreeMap<String, Entry>,
    strings: BTreeMap<String, String>,
    notes: Vec<String>,
}

/// One tensor.
#[derive(Debug)]
pub(super) struct Entry {
    pub dtype: Dtype,
    /// As the file has it.
    pub shape: Vec<usize>,
    pub range: Range<usize>,
    /// Whether the first axis varies fastest.
    pub fortran: bool,
    /// Whether the last two axes are read the other way round.
    pub transposed: bool,
}

impl Container {
    /// A container of tensors that lie in `bytes`.
    pub fn new(bytes: Vec<u8>, tensors: BTreeMap<String, Entry>, strings: BTreeMap<String, String>) -> Self {
        Self { bytes, tensors, strings, notes: Vec::new() }
    }

    /// Adds what a reader of the report should know.
    pub fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }

    /// Bytes of the file.
    pub fn size(&self) -> usize {
        self.bytes.len()
    }

    /// What a reader of the report should know.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Reads a safetensors file and checks its structure: every byte of it belongs to the header or to
    /// exactly one tensor, every name is there once. Or reads numpy's files.
    pub fn open(path: &Path) -> Result<Self> {
        if path.is_dir() {
            return numpy::of_directory(path);
        }
        let mut file = File::open(path).map_err(|source| Error::io(path, source))?;
        let attributes = file.metadata().map_err(|source| Error::io(path, source))?;
        // A pipe or a device has no size that could bound what is read.
        if !attributes.is_file() {
            return Err(Error::malformed(path, "this is no regular file"));
        }
        let size = attributes.len();
        let mut length = [0; 8];
        if size < 8 {
            return Err(Error::malformed(
                path,
                format!("a safetensors file has at least 8 bytes, this one has {size}"),
            ));
        }
        file.read_exact(&mut length).map_err(|source| Error::io(path, source))?;
        if numpy::is_array(&length) {
            return Err(Error::malformed(path, "one array is no run; give the directory with all of them, or an .npz"));
        }
        if archive::is_archive(&length) {
            let mut bytes = length.to_vec();
            file.take(size - 8).read_to_end(&mut bytes).map_err(|source| Error::io(path, source))?;
            return numpy::of_archive(bytes).map_err(|reason| Error::malformed(path, reason));
        }
        let header = u64::from_le_bytes(length);
        if header > size - 8 {
            let reason = format!("its header claims {header} bytes, but only {} follow", size - 8);
            return Err(Error::malformed(path, reason));
        }
        let mut bytes = length.to_vec();
        file.take(size - 8).read_to_end(&mut bytes).map_err(|source| Error::io(path, source))?;
        Self::parse(bytes).map_err(|reason| Error::malformed(path, reason))
    }

    fn parse(bytes: Vec<u8>) -> std::result::Result<Self, String> {
        let (header, metadata) = SafeTensors::read_metadata(&bytes).map_err(|error| explain(&error, bytes.len()))?;
        let start = 8 + header;
        // The parser behind `read_metadata` keeps the last of two entries with one name.
        let mut keys = serde_json::Deserializer::from_slice(&bytes[8..start]);
        keys.deserialize_map(UniqueKeys).map_err(|error| format!("its header is wrong: {error}"))?;
        let strings = metadata.metadata().iter().flatten().map(|(key, value)| (key.clone(), value.clone())).collect();
        let tensors = metadata
            .tensors()
            .into_iter()
            .map(|(name, info)| {
                let range = start + info.data_offsets.0..start + info.data_offsets.1;
                (name, Entry { dtype: info.dtype, shape: info.shape.clone(), range, fortran: false, transposed: false })
            })
            .collect();
        Ok(Self::new(bytes, tensors, strings))
    }

    /// Every tensor's name, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The shape of a tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|entry| entry.shape.as_slice())
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Adds a string, unless the file says it itself.
    pub fn say(&mut self, key: &str, value: impl fmt::Display) {
        self.strings.entry(key.to_string()).or_insert_with(|| value.to_string());
    }

    /// Has the last two axes of a tensor read the other way round.
    ///
    /// # Errors
    /// A tensor of fewer axes.
    pub fn transpose(&mut self, name: &str) -> Result<()> {
        let Some(entry) = self.tensors.get_mut(name) else { return Ok(()) };
        if entry.shape.len() < 2 {
            return Err(Error::parse("tensor", name, format!("it has shape {:?}, expected a matrix", entry.shape)));
        }
        entry.transposed = !entry.transposed;
        Ok(())
    }

    /// The strings of the header.
    pub fn strings(&self) -> &BTreeMap<String, String> {
        &self.strings
    }

    /// Gives the tensor `theirs` the name `ours`.
    pub fn rename(&mut self, ours: &str, theirs: &str) -> Result<()> {
        if self.tensors.contains_key(ours) {
            let reason = format!("the file has a tensor `{ours}` already, so `{theirs}` cannot take its name");
            return Err(Error::parse("--map", format!("{ours}={theirs}"), reason));
        }
        let Some(entry) = self.tensors.remove(theirs) else {
            let reason = format!("the file has no tensor `{theirs}`; it has {}", list(self.names()));
            return Err(Error::parse("--map", format!("{ours}={theirs}"), reason));
        };
        self.tensors.insert(ours.to_string(), entry);
        Ok(())
    }

    /// A tensor of a floating-point type, widened exactly.
    ///
    /// # Errors
    /// A tensor of any other type, by name.
    pub fn floats(&self, name: &str) -> Result<Option<Stored>> {
        let Some(entry) = self.tensors.get(name) else { return Ok(None) };
        let bytes = &self.bytes[entry.range.clone()];
        let (dtype, values): (_, Vec<f64>) = match entry.dtype {
            Dtype::F64 => (DType::F64, widen(bytes, f64::from_le_bytes)),
            Dtype::F32 => (DType::F32, widen(bytes, |word| f64::from(f32::from_le_bytes(word)))),
            Dtype::BF16 => (DType::BF16, widen(bytes, |word| Element::to_f64(bf16::from_le_bytes(word)))),
            Dtype::F16 => (DType::F16, widen(bytes, |word| Element::to_f64(f16::from_le_bytes(word)))),
            other => {
                let reason = format!("it holds {other}; F64, F32, BF16 and F16 are read");
                return Err(Error::parse("tensor", name, reason));
            }
        };
        let shape = IxDyn(&entry.shape);
        let mut values = ArrayD::from_shape_vec(shape.set_f(entry.fortran), values)
            .map_err(|error| Error::parse("tensor", name, format!("no array of shape {:?}: {error}", entry.shape)))?;
        if entry.transposed {
            let axes = values.ndim();
            values.swap_axes(axes - 2, axes - 1);
        }
        if !values.is_standard_layout() {
            values = values.as_standard_layout().into_owned();
        }
        Ok(Some(Stored { dtype, values }))
    }

    /// A vector of integers.
    ///
    /// # Errors
    /// A tensor of any other type or of another number of axes, by name.
    pub fn integers(&self, name: &str) -> Result<Option<Vec<i64>>> {
        let Some(entry) = self.tensors.get(name) else { return Ok(None) };
        let bytes = &self.bytes[entry.range.clone()];
        let [length] = entry.shape[..] else {
            return Err(Error::parse("tensor", name, format!("it has shape {:?}, but is a vector", entry.shape)));
        };
        let values: Vec<i64> = match entry.dtype {
            Dtype::I64 => widen(bytes, i64::from_le_bytes),
            // An id beyond i64 is out of every range; it must not come back as a negative one.
            Dtype::U64 => widen(bytes, |word| i64::try_from(u64::from_le_bytes(word)).unwrap_or(i64::MAX)),
            Dtype::I32 => widen(bytes, |word| i64::from(i32::from_le_bytes(word))),
            Dtype::U32 => widen(bytes, |word| i64::from(u32::from_le_bytes(word))),
            Dtype::I16 => widen(bytes, |word| i64::from(i16::from_le_bytes(word))),
            Dtype::U16 => widen(bytes, |word| i64::from(u16::from_le_bytes(word))),
            Dtype::I8 => widen(bytes, |word| i64::from(i8::from_le_bytes(word))),
            Dtype::U8 => widen(bytes, |word| i64::from(u8::from_le_bytes(word))),
            other => return Err(Error::parse("tensor", name, format!("it holds {other}; integers are read"))),
        };
        debug_assert_eq!(values.len(), length);
        Ok(Some(values))
    }
}

fn widen<const BYTES: usize, V: Send>(bytes: &[u8], value: impl Fn([u8; BYTES]) -> V + Sync) -> Vec<V> {
    bytes.as_chunks::<BYTES>().0.par_iter().with_min_len(1 << 16).map(|word| value(*word)).collect()
}

/// Names from a file, made safe for one line of a message and kept short.
pub(super) fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    const SHOWN: usize = 12;
    let names: Vec<_> = names.collect();
    let mut text = names.iter().take(SHOWN).map(|name| quoted(name)).collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN {
        text += &format!(" and {} more", names.len() - SHOWN);
    }
    if text.is_empty() { "none".into() } else { text }
}

/// Text from a file, made safe for one line of a message and kept short.
pub(super) fn quoted(text: &str) -> String {
    const SHOWN: usize = 60;
    let mut escaped: String = text.chars().take(SHOWN).flat_map(char::escape_debug).collect();
    if text.chars().nth(SHOWN).is_some() {
        escaped.push('…');
    }
    format!("`{escaped}`")
}

fn explain(error: &SafeTensorError, size: usize) -> String {
    match error {
        SafeTensorError::InvalidHeader(error) => format!("its header is no UTF-8 text: {error}"),
        SafeTensorError::InvalidHeaderDeserialization(error) => {
            format!("its header is no table of tensors: {}", quoted(&error.to_string()))
        }
        SafeTensorError::HeaderTooLarge => "its header is larger than the 100 MB that the format allows".into(),
        SafeTensorError::InvalidOffset(name) => {
            format!("the bytes of tensor {} overlap another's or leave a gap before it", quoted(name))
        }
        SafeTensorError::TensorInvalidInfo => "a tensor's shape and type do not fit the bytes that it names".into(),
        SafeTensorError::ValidationOverflow => "a tensor's shape has more elements than any memory".into(),
        SafeTensorError::MetadataIncompleteBuffer => {
            format!("its tensors do not end where the file ends, at byte {size}: truncated, or something was appended")
        }
        other => other.to_string(),
    }
}

/// Walks a JSON object and refuses the second of two equal keys.
struct UniqueKeys;

impl<'de> Visitor<'de> for UniqueKeys {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table of tensors")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> std::result::Result<(), M::Error> {
        let mut seen = BTreeSet::new();
        while let Some(key) = map.next_key::<String>()? {
            map.next_value::<IgnoredAny>()?;
            if seen.contains(&key) {
                return Err(M::Error::custom(format!("{} is there twice", quoted(&key))));
            }
            seen.insert(key);
        }
        Ok(())
    }
}
