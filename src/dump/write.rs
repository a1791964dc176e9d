//! A run as a file that [`Dump::read`](super::Dump::read) reads back. The same run gives the same
//! bytes: tensors and strings have one order.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use half::{bf16, f16};
use ndarray::{ArrayD, ArrayView, Axis, Dimension, RemoveAxis};
use safetensors::tensor::Dtype;
use serde::Serialize;

use super::{GatingKind, Metadata};
use crate::element::{DType, Element};
use crate::engine::{Output, Results, Stored};
use crate::error::{Error, Result};
use crate::layout::GateLayout;
use crate::problem::{Gating, Problem};
use crate::routing::Routing;

/// Writes a problem, the routing that was used and the results as one safetensors file, each
/// tensor in its own type.
///
/// `metadata` gives what the problem does not know: `layout`, the order in which w1, b1, h and
/// their gradients are to be written (interleaved if `None`), and `producer`, `rounding_model` and
/// the like. Sizes, `router`, `activation` and `K` are the problem's.
///
/// # Errors
/// A file that cannot be written.
pub fn write<S: Element>(
    path: impl AsRef<Path>,
    problem: &Problem<'_, S>,
    routing: &Routing,
    results: &Results,
    metadata: &Metadata,
) -> Result<()> {
    let layout = metadata.layout.unwrap_or(GateLayout::InterleavedGateFirst);
    let gated = problem.activation().gated();
    let mut tensors = Tensors::of_inputs(problem, layout)?;
    tensors.pairs(routing);
    for (output, stored) in results {
        if *output == Output::Scores && problem.router_w().is_none() {
            continue;
        }
        let halves = matches!(output, Output::Dw1 | Output::Db1 | Output::H | Output::Dh);
        tensors.stored(output.name(), stored, (halves && gated).then_some(layout))?;
    }
    tensors.write(path.as_ref(), strings(problem, layout, metadata))
}

/// Writes what goes into a layer and nothing that comes out: a router's choice is an answer too.
///
/// `metadata` as for [`write`](write()).
///
/// # Errors
/// A file that cannot be written.
pub fn write_inputs<S: Element>(path: impl AsRef<Path>, problem: &Problem<'_, S>, metadata: &Metadata) -> Result<()> {
    let layout = metadata.layout.unwrap_or(GateLayout::InterleavedGateFirst);
    let mut tensors = Tensors::of_inputs(problem, layout)?;
    if let Gating::Given { routing, .. } = problem.gating() {
        tensors.pairs(routing);
    }
    tensors.write(path.as_ref(), strings(problem, layout, metadata))
}

/// The strings of a file: what the problem knows, then what the caller does.
fn strings<S: Element>(problem: &Problem<'_, S>, layout: GateLayout, metadata: &Metadata) -> BTreeMap<String, String> {
    let (kind, k) = match problem.gating() {
        Gating::Router(router) => (GatingKind::Router(router.convention), Some(router.k)),
        Gating::Given { .. } => (GatingKind::Given, metadata.k),
    };
    let metadata = Metadata {
        router: Some(kind),
        layout: problem.activation().gated().then_some(layout),
        activation: Some(problem.activation()),
        k,
        sizes: [("T", problem.t()), ("d", problem.d()), ("n", problem.n()), ("E", problem.e())].into(),
        ..metadata.clone()
    };
    metadata.to_strings()
}

struct Bytes {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

/// A tensor's line in the header.
#[derive(Serialize)]
struct Entry<'t> {
    dtype: Dtype,
    shape: &'t [usize],
    data_offsets: (usize, usize),
}

#[derive(Serialize)]
struct Header<'t> {
    #[serde(rename = "__metadata__")]
    strings: BTreeMap<String, String>,
    #[serde(flatten)]
    tensors: BTreeMap<&'static str, Entry<'t>>,
}

#[derive(Default)]
struct Tensors(BTreeMap<&'static str, Bytes>);

impl Tensors {
    fn of_inputs<S: Element>(problem: &Problem<'_, S>, layout: GateLayout) -> Result<Self> {
        let gated = problem.activation().gated();
        let mut tensors = Self::default();
        tensors.floats("x", problem.x());
        tensors.floats("w2", problem.w2());
        tensors.floats("dout", problem.dout());
        tensors.rows("w1", problem.w1(), layout, gated)?;
        if let (Some(b1), Some(b2)) = (problem.b1(), problem.b2()) {
            tensors.rows("b1", b1, layout, gated)?;
            tensors.floats("b2", b2);
        }
        match problem.gating() {
            Gating::Router(router) => {
                tensors.floats("router_w", router.w.view());
                if let Some(b) = &router.b {
                    tensors.floats("router_b", b.view());
                }
                if let Some(bias) = &router.selection_bias {
                    tensors.floats("selection_bias", bias.view());
                }
            }
            Gating::Given { scores, .. } => tensors.floats("scores", ndarray::ArrayView1::from(scores)),
        }
        Ok(tensors)
    }

    fn pairs(&mut self, routing: &Routing) {
        self.integers("token_idx", routing.pair_token().iter().map(|token| token.0));
        self.integers("expert_idx", routing.pair_expert().iter().map(|expert| expert.0));
    }

    fn floats<S: Element, D: Dimension>(&mut self, name: &'static str, values: ArrayView<'_, S, D>) {
        let data = encode(S::DTYPE, values.iter().map(|value| value.to_f64()));
        self.0.insert(name, Bytes { dtype: format(S::DTYPE), shape: values.shape().to_vec(), data });
    }

    /// A tensor with gate and up along axis 1, in the file's order.
    fn rows<S: Element, D: Dimension + RemoveAxis>(
        &mut self,
        name: &'static str,
        values: ArrayView<'_, S, D>,
        layout: GateLayout,
        gated: bool,
    ) -> Result<()> {
        if gated {
            let values = layout.from_interleaved(name, values)?;
            self.floats(name, values.view());
        } else {
            self.floats(name, values);
        }
        Ok(())
    }

    fn integers(&mut self, name: &'static str, values: impl ExactSizeIterator<Item = u32>) {
        let shape = vec![values.len()];
        // Ids are below 2³¹: a routing with more is refused.
        let data = values.flat_map(|value| (value as i32).to_le_bytes()).collect();
        self.0.insert(name, Bytes { dtype: Dtype::I32, shape, data });
    }

    fn stored(&mut self, name: &'static str, stored: &Stored, layout: Option<GateLayout>) -> Result<()> {
        let values: ArrayD<f64> = match layout {
            Some(layout) if stored.values.len_of(Axis(1)) > 0 => layout.from_interleaved(name, stored.values.view())?,
            _ => stored.values.clone(),
        };
        let data = encode(stored.dtype, values.iter().copied());
        self.0.insert(name, Bytes { dtype: format(stored.dtype), shape: values.shape().to_vec(), data });
        Ok(())
    }

    /// 8 bytes of length, a JSON header filled up to 8 bytes, the tensors: the wider types first, so
    /// that each is aligned, then by name.
    fn write(self, path: &Path, strings: BTreeMap<String, String>) -> Result<()> {
        let mut ordered: Vec<(&'static str, &Bytes)> = self.0.iter().map(|(name, bytes)| (*name, bytes)).collect();
        ordered.sort_by_key(|(name, bytes)| (std::cmp::Reverse(bytes.dtype.bitsize()), *name));
        let mut end = 0;
        let tensors = ordered.iter().map(|(name, bytes)| {
            let start = end;
            end += bytes.data.len();
            (*name, Entry { dtype: bytes.dtype, shape: &bytes.shape, data_offsets: (start, end) })
        });
        let header = Header { strings, tensors: tensors.collect() };
        let mut header =
            serde_json::to_vec(&header).map_err(|error| Error::internal(format!("{}: {error}", path.display())))?;
        header.resize(header.len().next_multiple_of(8), b' ');
        let write = || {
            let mut file = BufWriter::new(File::create(path)?);
            file.write_all(&(header.len() as u64).to_le_bytes())?;
            file.write_all(&header)?;
            ordered.iter().try_for_each(|(_, bytes)| file.write_all(&bytes.data))?;
            file.flush()
        };
        write().map_err(|source| Error::io(path, source))
    }
}

fn format(dtype: DType) -> Dtype {
    match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::BF16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
    }
}

fn encode(dtype: DType, values: impl Iterator<Item = f64>) -> Vec<u8> {
    match dtype {
        DType::F64 => values.flat_map(f64::to_le_bytes).collect(),
        DType::F32 => values.flat_map(|value| (value as f32).to_le_bytes()).collect(),
        DType::BF16 => values.flat_map(|value| <bf16 as Element>::from_f64(value).to_le_bytes()).collect(),
        DType::F16 => values.flat_map(|value| <f16 as Element>::from_f64(value).to_le_bytes()).collect(),
    }
}
