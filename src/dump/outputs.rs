//! What came out of a run, without what went in.

use std::path::{Path, PathBuf};

use super::container::Container;
use super::{GatingKind, Metadata, Overrides};
use crate::element::DType;
use crate::engine::{Output, Results};
use crate::error::Result;

/// The results in a file, in the file's own order of gate and up.
#[derive(Clone, Debug)]
pub struct Outputs {
    /// Where they were read from.
    pub path: PathBuf,
    /// What the strings of the file say.
    pub metadata: Metadata,
    /// The results, each with its type.
    pub results: Results,
    /// (token, expert) of every pair, where the file has them.
    pub pairs: Option<Vec<(i64, i64)>>,
    /// Whether the file has the inputs too, so that [`Dump::read`](super::Dump::read) may read it.
    pub with_inputs: bool,
}

impl Outputs {
    /// Reads every result that a file has; shapes are not compared with anything.
    ///
    /// # Errors
    /// No such file, a malformed one, a result that holds no floating-point numbers, or a string
    /// with an unknown value.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let container = Container::open(path)?;
        let metadata = Metadata::read(container.strings(), &Overrides::default())?;
        let mut results = Results::new();
        for output in Output::RESULTS.into_iter().chain(Output::INTERMEDIATES) {
            // Scores of a given routing went in.
            let input = output == Output::Scores && metadata.router == Some(GatingKind::Given);
            if let (false, Some(stored)) = (input, container.floats(output.name())?) {
                results.insert(output, stored);
            }
        }
        let pairs = match (container.integers("token_idx")?, container.integers("expert_idx")?) {
            (Some(tokens), Some(experts)) => Some(tokens.into_iter().zip(experts).collect()),
            _ => None,
        };
        let has = |name: &str| container.names().any(|other| other == name);
        let with_inputs = ["x", "w1", "w2", "dout"].into_iter().all(has);
        Ok(Self { path: path.to_path_buf(), metadata, results, pairs, with_inputs })
    }

    /// The coarsest type of the results, which bounds follow from; none without results.
    pub fn storage(&self) -> Option<DType> {
        let of_scores =
            |output: &Output| matches!(output, Output::Ds | Output::Dlogits | Output::Scores | Output::Logits);
        let types = self.results.iter().filter(|(output, _)| !of_scores(output)).map(|(_, stored)| stored.dtype);
        types.max_by(|a, b| a.unit_roundoff().total_cmp(&b.unit_roundoff()))
    }
}
