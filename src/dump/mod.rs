//! Runs of foreign implementations as files: safetensors, or numpy's `.npz` and directories of `.npy`.
//!
//! A dump holds what went into one forward and backward of an MoE layer and what came out. It is
//! read into the crate's own terms at this border, and nowhere else: gate and up interleaved,
//! numbers widened exactly, shapes and ids checked, the types that the file says remembered.
//!
//! | tensors | |
//! | --- | --- |
//! | inputs | `x`, `w1`, `w2`, `dout`; `b1` and `b2` together or not at all |
//! | routing | `router_w`, optional `router_b`, `router_logits`, and ids (`token_idx`, `expert_idx`); or `token_idx`, `expert_idx`, `scores` |
//! | required results | `o`, `dx`, `dw1`, `dw2`; `db1`, `db2` with biases; `drouter_w` (`drouter_b`) with a router, `ds` with given routing |
//! | a shared expert, SwiGLU | `shared_gate`, `shared_up`, `shared_down`; results `dshared_gate`, `dshared_up`, `dshared_down` |
//! | optional results | `dlogits`, `expert_frequency`, `topk_frequency`; behind a router with ids `ds` and `scores` in the ids' order |
//! | between the kernels, rows in expert order | `h`, `a`, `y`, `dh`, `a_prime`, `dx_expanded` |
//!
//! Files with the names of a gpt-oss or DeepSeek-V3 checkpoint (`param.*`, `grad.*`, a JSON `config`) are
//! read too.
//!
//! Strings say what no tensor shows: `router`, `w1_layout`, `activation`, `K`; and optionally
//! `rounding_model`, `token_rounding`, `tile`, `producer`, `seed` and the sizes.
//!
//! ```no_run
//! use sonicmoe::dump::{Dump, Model, Overrides};
//! use sonicmoe::oracle::{bound, judge};
//!
//! let dump = Dump::read("run.safetensors", &Overrides::default())?;
//! let numerics = dump.numerics(Model::Fused);
//! let choice = dump.choose(&numerics)?;
//! for (output, bounded) in bound::layer(&dump.problem, &choice.routing, &numerics)? {
//!     if let Some(stored) = dump.results.get(&output) {
//!         assert!(judge(output, stored, &bounded)?.passes());
//!     }
//! }
//! # Ok::<(), sonicmoe::Error>(())
//! ```

mod archive;
mod choice;
mod container;
mod counts;
mod grouped;
mod identify;
mod import;
mod metadata;
mod numpy;
mod outputs;
mod read;
mod shared;
mod write;

pub use choice::{Chosen, Source};
pub use identify::{Candidate, Reading, identify};
pub use metadata::{GatingKind, Metadata, Model, Overrides};
pub use outputs::Outputs;
pub use write::{write, write_inputs};

use std::path::PathBuf;

use ndarray::{Array2, ArrayD};

use crate::element::DType;
use crate::engine::{Numerics, Output, Results, RoundingModel};
use crate::error::Result;
use crate::layout::GateLayout;
use crate::problem::{Gating, Problem};
use crate::routing::Routing;

/// One run, read and checked. What it computed is judged by others.
#[derive(Clone, Debug)]
pub struct Dump {
    /// Where it was read from.
    pub path: PathBuf,
    /// What its strings say, with the caller's overrides.
    pub metadata: Metadata,
    /// What went in, widened exactly, gate and up interleaved.
    pub problem: Problem<'static, f64>,
    /// A dense expert beside the others, to which every token goes with score 1: the layer of that one
    /// expert. o and dx are the sums of both layers'.
    pub shared: Option<Problem<'static, f64>>,
    /// What came out, gate and up interleaved, with the type that each tensor has in the file.
    pub results: Results,
    /// Required results that the file lacks: a check without them is incomplete.
    pub missing: Vec<Output>,
    /// Tensors that the file has and nobody reads, by name.
    pub unused: Vec<String>,
    /// What a reader of the report should know of how the file was read.
    pub notes: Vec<String>,
    /// The order of gate and up in the file.
    pub layout: GateLayout,
    /// The coarsest type of the layer's tensors: where results are finer, their bound is that of
    /// this type.
    pub storage: DType,
    /// Whether the layer's tensors have more than one type.
    pub mixed: bool,
    /// The type of ds and, behind a router, of scores: the coarsest in the file.
    pub score: DType,
    /// How far elementary functions may err, as [`Numerics::function_ulps`].
    pub function_ulps: f64,
    ids: Option<Routing>,
    logits: Option<Array2<f64>>,
    counts: counts::Counts,
}

impl Dump {
    /// The arithmetic that the file's producer must have had under `model`.
    pub fn numerics(&self, model: Model) -> Numerics {
        model.numerics(self.storage, self.score, self.function_ulps)
    }

    /// The models under which this file may be right, tightest first: up to the declared rounding
    /// model, and only one of them where the router's rounding makes no difference.
    pub fn models(&self) -> Vec<Model> {
        let router_differs = matches!(self.problem.gating(), Gating::Router(_)) && self.storage != self.score;
        Model::ALL
            .into_iter()
            .filter(|model| match self.metadata.rounding_model {
                Some(RoundingModel::Fused) => *model != Model::Eager,
                Some(RoundingModel::Eager) | None => true,
            })
            .filter(|model| router_differs || *model != Model::FusedTensorRouter)
            .collect()
    }

    /// Values of a result as they stand in the file: see [`Dump::file_order`].
    ///
    /// # Errors
    /// Values of a shape other than the result's.
    pub fn in_file_order(&self, output: Output, values: &ArrayD<f64>) -> Result<ArrayD<f64>> {
        match self.file_order(output) {
            Some(_) => self.layout.from_interleaved(output.name(), values.view()),
            None => Ok(values.clone()),
        }
    }

    /// Where the places of axis 1 of a result stand in the file: gate and up are interleaved here, and
    /// may not be there. None where all stand where they do here.
    pub fn file_order(&self, output: Output) -> Option<Vec<usize>> {
        let halves = matches!(output, Output::Dw1 | Output::Db1 | Output::H | Output::Dh);
        let differs = halves && self.problem.activation().gated() && self.layout != GateLayout::InterleavedGateFirst;
        let n = self.problem.n();
        differs.then(|| (0..2 * n).map(|row| self.layout.row_of_interleaved(row, n)).collect())
    }
}
