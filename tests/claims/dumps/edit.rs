//! Safetensors files as values that a test can change, without the code under test.

use std::path::{Path, PathBuf};

use half::bf16;
use serde_json::{Map, Value, json};

#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

#[derive(Clone)]
pub struct File {
    pub strings: Map<String, Value>,
    pub tensors: Vec<Tensor>,
}

impl File {
    pub fn of_data(name: &str) -> Self {
        Self::read(&data(name))
    }

    pub fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut table: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
        let strings = table.remove("__metadata__").unwrap();
        let tensors = table.into_iter().map(|(name, info)| {
            let at = |place: usize| 8 + header + info["data_offsets"][place].as_u64().unwrap() as usize;
            Tensor {
                name,
                dtype: info["dtype"].as_str().unwrap().into(),
                shape: info["shape"].as_array().unwrap().iter().map(|size| size.as_u64().unwrap() as usize).collect(),
                bytes: bytes[at(0)..at(1)].to_vec(),
            }
        });
        Self { strings: strings.as_object().unwrap().clone(), tensors: tensors.collect() }
    }

    pub fn with_string(mut self, key: &str, value: &str) -> Self {
        self.strings.insert(key.into(), value.into());
        self
    }

    pub fn without_string(mut self, key: &str) -> Self {
        self.strings.remove(key).unwrap();
        self
    }

    pub fn without(mut self, name: &str) -> Self {
        self.tensors.remove(self.position(name));
        self
    }

    fn position(&self, name: &str) -> usize {
        self.tensors.iter().position(|tensor| tensor.name == name).unwrap()
    }

    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        let position = self.position(name);
        &mut self.tensors[position]
    }

    /// Changes the values of one tensor.
    pub fn edit(mut self, name: &str, change: impl FnOnce(&mut Vec<f64>)) -> Self {
        let tensor = self.tensor(name);
        let mut values = tensor.values();
        change(&mut values);
        tensor.set(&values);
        self
    }

    /// The header's table, with offsets in the order of the tensors.
    pub fn table(&self) -> Map<String, Value> {
        let mut table = Map::new();
        table.insert("__metadata__".into(), Value::Object(self.strings.clone()));
        let mut start = 0;
        for Tensor { name, dtype, shape, bytes } in &self.tensors {
            let end = start + bytes.len();
            table.insert(name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] }));
            start = end;
        }
        table
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        self.to_bytes_with(&serde_json::to_string(&self.table()).unwrap())
    }

    /// The file with another header before the same bytes.
    pub fn to_bytes_with(&self, header: &str) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.bytes());
        bytes.extend(self.tensors.iter().flat_map(|tensor| tensor.bytes.iter()));
        bytes
    }

    pub fn save(&self, name: &str) -> PathBuf {
        save(name, &self.to_bytes())
    }
}

impl Tensor {
    pub fn values(&self) -> Vec<f64> {
        match self.dtype.as_str() {
            "F64" => self.bytes.as_chunks().0.iter().map(|word| f64::from_le_bytes(*word)).collect(),
            "F32" => self.bytes.as_chunks().0.iter().map(|word| f64::from(f32::from_le_bytes(*word))).collect(),
            "BF16" => self.bytes.as_chunks().0.iter().map(|word| f64::from(bf16::from_le_bytes(*word))).collect(),
            "I32" => self.bytes.as_chunks().0.iter().map(|word| f64::from(i32::from_le_bytes(*word))).collect(),
            other => panic!("{}: {other}", self.name),
        }
    }

    pub fn set(&mut self, values: &[f64]) {
        self.bytes = match self.dtype.as_str() {
            "F64" => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            "F32" => values.iter().flat_map(|value| (*value as f32).to_le_bytes()).collect(),
            "BF16" => values.iter().flat_map(|value| bf16::from_f64(*value).to_le_bytes()).collect(),
            "I32" => values.iter().flat_map(|value| (*value as i32).to_le_bytes()).collect(),
            other => panic!("{}: {other}", self.name),
        };
    }
}

pub fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name).with_extension("safetensors")
}

/// A directory of files, and of nothing that stood there before; of two with one name the last stays.
pub fn save_directory(name: &str, files: &[(String, Vec<u8>)]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    for (name, bytes) in files {
        std::fs::write(folder.join(name), bytes).unwrap();
    }
    folder
}

pub fn save(name: &str, bytes: &[u8]) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.safetensors"));
    std::fs::write(&path, bytes).unwrap();
    path
}
