//! A run as a file that [`Dump::read`](super::Dump::read) reads back.

use std::collections::HashMap;
use std::path::Path;

use half::{bf16, f16};
use ndarray::{ArrayD, ArrayView, Axis, Dimension, RemoveAxis};
use safetensors::tensor::{Dtype, TensorView, serialize};

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
    let path = path.as_ref();
    let gated = problem.activation().gated();
    let layout = metadata.layout.unwrap_or(GateLayout::InterleavedGateFirst);
    let mut tensors = Tensors::default();
    tensors.floats("x", problem.x());
    tensors.floats("w2", problem.w2());
    tensors.floats("dout", problem.dout());
    tensors.rows("w1", problem.w1(), layout, gated)?;
    if let (Some(b1), Some(b2)) = (problem.b1(), problem.b2()) {
        tensors.rows("b1", b1, layout, gated)?;
        tensors.floats("b2", b2);
    }
    let (kind, k) = match problem.gating() {
        Gating::Router(router) => {
            tensors.floats("router_w", router.w.view());
            if let Some(b) = &router.b {
                tensors.floats("router_b", b.view());
            }
            (GatingKind::Router(router.convention), Some(router.k))
        }
        Gating::Given { scores, .. } => {
            tensors.floats("scores", ndarray::ArrayView1::from(scores));
            (GatingKind::Given, metadata.k)
        }
    };
    tensors.integers("token_idx", routing.pair_token().iter().map(|token| token.0));
    tensors.integers("expert_idx", routing.pair_expert().iter().map(|expert| expert.0));
    for (output, stored) in results {
        let given_scores = *output == Output::Scores && kind == GatingKind::Given;
        if given_scores {
            continue;
        }
        let halves = matches!(output, Output::Dw1 | Output::Db1 | Output::H | Output::Dh);
        tensors.stored(output.name(), stored, (halves && gated).then_some(layout))?;
    }
    let metadata = Metadata {
        router: Some(kind),
        layout: gated.then_some(layout),
        activation: Some(problem.activation()),
        k,
        sizes: [("T", problem.t()), ("d", problem.d()), ("n", problem.n()), ("E", problem.e())].into(),
        ..metadata.clone()
    };
    tensors.write(path, metadata)
}

struct Bytes {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

#[derive(Default)]
struct Tensors(HashMap<&'static str, Bytes>);

impl Tensors {
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

    fn write(self, path: &Path, metadata: Metadata) -> Result<()> {
        let broken = |error: safetensors::SafeTensorError| Error::internal(format!("{}: {error}", path.display()));
        let views = self
            .0
            .iter()
            .map(|(name, bytes)| {
                Ok((*name, TensorView::new(bytes.dtype, bytes.shape.clone(), &bytes.data).map_err(broken)?))
            })
            .collect::<Result<Vec<_>>>()?;
        let strings = metadata.to_strings().into_iter().collect();
        let bytes = serialize(views, Some(strings)).map_err(broken)?;
        std::fs::write(path, bytes).map_err(|source| Error::io(path, source))
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
