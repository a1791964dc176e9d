//! The report for programs. Numbers that JSON has no word for are strings: "inf", "-inf", "NaN".

use std::path::Path;

use serde_json::{Map, Value, json};

use super::Checked;
use super::trial::Judged;
use crate::dump::Source;
use crate::engine::RoundingModel;
use crate::error::Error;
use crate::oracle::{Judgement, Verdict};
use crate::problem::Gating;
use crate::report::float;

/// The form of the document; it changes with any change of meaning.
const SCHEMA: &str = "sonicmoe.check/1";

/// What each field of the document means, as JSON Schema.
pub(super) const SCHEMA_DOCUMENT: &str = include_str!("schema.json");

/// The whole document.
pub(super) fn document(worst: Verdict, files: Vec<Value>) -> Value {
    json!({ "schema": SCHEMA, "verdict": worst.name(), "exit_code": worst.code(), "files": files })
}

/// One file's part.
pub(super) fn file(path: &Path, checked: &Result<Checked, Error>) -> Value {
    let path = path.display().to_string();
    let checked = match checked {
        Ok(checked) => checked,
        Err(error) => {
            let verdict = Verdict::from(error);
            return json!({
                "path": path,
                "verdict": verdict.name(),
                "exit_code": verdict.code(),
                "error": error.to_string(),
            });
        }
    };
    let Checked { dump, refused, trial, verdict, missing } = checked;
    let problem = &dump.problem;
    let (gating, k) = match problem.gating() {
        Gating::Router(router) => (router.convention.name(), Some(router.k)),
        Gating::Given { .. } => ("given", None),
    };
    let names = |outputs: &[crate::engine::Output]| outputs.iter().map(|output| output.name()).collect::<Vec<_>>();
    json!({
        "path": path,
        "verdict": verdict.name(),
        "exit_code": verdict.code(),
        "sizes": {
            "T": problem.t(), "d": problem.d(), "n": problem.n(), "E": problem.e(), "R": problem.routed(), "K": k,
        },
        "router": gating,
        "activation": problem.activation().name(),
        "w1_layout": dump.layout.name(),
        "storage": dump.storage.name(),
        "score": dump.score.name(),
        "producer": dump.metadata.producer,
        "declared_model": dump.metadata.rounding_model.map(|model| match model {
            RoundingModel::Fused => "fused",
            RoundingModel::Eager => "eager",
        }),
        "model": trial.model.name(),
        "refused_models": refused
            .iter()
            .map(|(model, reason)| json!({ "model": model.name(), "reason": reason }))
            .collect::<Vec<_>>(),
        "choice": {
            "source": match trial.chosen.source {
                Source::Given => "given",
                Source::Ids => "ids",
                Source::Logits => "logits",
                Source::Computed => "computed",
            },
            "ambiguous_tokens": trial.chosen.ambiguous,
            "departing_tokens": trial.chosen.departing,
            "untried_tokens": trial.chosen.untried,
        },
        "counts": trial.counts,
        "tokens_per_expert": trial.chosen.routing.tokens_per_expert(),
        "results": trial.judged.iter().map(result).collect::<Vec<_>>(),
        "missing": names(missing),
        "unjudged": names(&trial.unjudged),
        "unused": dump.unused,
    })
}

fn result(judged: &Judged) -> Value {
    let Judgement {
        output,
        elements,
        skipped,
        failing,
        worst,
        largest_error,
        floor,
        median_bound_over_rms,
        clusters,
        heat: _,
    } = &judged.judgement;
    let mut object = Map::new();
    object.insert("result".into(), output.name().into());
    object.insert("kernel".into(), judged.kernel.into());
    object.insert("dtype".into(), judged.dtype.name().into());
    object.insert("verdict".into(), judged.verdict().name().into());
    object.insert("elements".into(), (*elements).into());
    object.insert("skipped".into(), (*skipped).into());
    object.insert("failing".into(), (*failing).into());
    object.insert("largest_error".into(), float(*largest_error));
    object.insert("floor".into(), float(*floor));
    object.insert("median_bound_over_rms".into(), float(*median_bound_over_rms));
    object.insert(
        "worst".into(),
        worst.as_ref().map_or(Value::Null, |worst| {
            json!({
                "at": worst.at,
                "value": float(worst.value),
                "reference": float(worst.reference),
                "bound": float(worst.bound),
                "ratio": float(worst.ratio),
            })
        }),
    );
    object.insert("clusters".into(), clusters.iter().map(|cluster| Value::from(cluster.to_string())).collect());
    object.insert("biased".into(), judged.biased.iter().map(|bias| Value::from(bias.as_str())).collect());
    object.insert("impostors".into(), judged.impostors.iter().map(|name| Value::from(*name)).collect());
    Value::Object(object)
}
