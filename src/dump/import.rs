//! Files with the names of a checkpoint: `param.*`, `grad.*`, `buffer.*`, and a JSON `config` among the
//! strings. An importer gives each tensor the name that a dump has for it, and says in strings what the
//! architecture fixes; everything else reads the result as any other dump.
//!
//! | | gpt-oss (`GptOssMLP`) | DeepSeek-V3 (`DeepseekV3MoE`) |
//! | --- | --- | --- |
//! | `w1` | `experts.gate_up_proj` (E, d, 2n), transposed, interleaved | `experts.gate_up_proj` (E, 2n, d), gate first |
//! | `w2` | `experts.down_proj` (E, n, d), transposed | `experts.down_proj` (E, d, n) |
//! | `b1`, `b2` | `experts.gate_up_proj_bias`, `experts.down_proj_bias` | |
//! | router | `router.weight`, `router.bias` | `gate.weight`, buffer `gate.e_score_correction_bias` |
//! | shared expert | | `shared_experts.{gate,up,down}_proj.weight` |

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::Deserialize;

use super::container::{Container, list, quoted};
use crate::activation::Activation;
use crate::error::{Error, Result};
use crate::layout::GateLayout;
use crate::routing::{Convention, GroupedSigmoid};

/// One tensor of an architecture: our name, theirs, our name of its gradient, whether its last two axes
/// stand the other way round.
struct Parameter {
    ours: &'static str,
    theirs: &'static str,
    gradient: &'static str,
    transposed: bool,
}

const fn parameter(ours: &'static str, theirs: &'static str, gradient: &'static str) -> Parameter {
    Parameter { ours, theirs, gradient, transposed: false }
}

const fn transposed(ours: &'static str, theirs: &'static str, gradient: &'static str) -> Parameter {
    Parameter { transposed: true, ..parameter(ours, theirs, gradient) }
}

const GPT_OSS: [Parameter; 6] = [
    transposed("w1", "experts.gate_up_proj", "dw1"),
    transposed("w2", "experts.down_proj", "dw2"),
    parameter("b1", "experts.gate_up_proj_bias", "db1"),
    parameter("b2", "experts.down_proj_bias", "db2"),
    parameter("router_w", "router.weight", "drouter_w"),
    parameter("router_b", "router.bias", "drouter_b"),
];

const DEEPSEEK_V3: [Parameter; 6] = [
    parameter("w1", "experts.gate_up_proj", "dw1"),
    parameter("w2", "experts.down_proj", "dw2"),
    parameter("router_w", "gate.weight", "drouter_w"),
    parameter("shared_gate", "shared_experts.gate_proj.weight", "dshared_gate"),
    parameter("shared_up", "shared_experts.up_proj.weight", "dshared_up"),
    parameter("shared_down", "shared_experts.down_proj.weight", "dshared_down"),
];

#[derive(Deserialize)]
struct GptOssConfig {
    hidden_size: usize,
    intermediate_size: usize,
    num_local_experts: usize,
    num_experts_per_tok: usize,
    swiglu_limit: Option<f64>,
}

#[derive(Deserialize)]
struct DeepseekV3Config {
    hidden_size: usize,
    moe_intermediate_size: usize,
    n_routed_experts: usize,
    n_shared_experts: Option<usize>,
    num_experts_per_tok: usize,
    n_group: usize,
    topk_group: usize,
    norm_topk_prob: bool,
    routed_scaling_factor: f64,
}

/// Renames the tensors of a checkpoint-style file; leaves any other file as it is.
///
/// # Errors
/// *Contract*: a `config` that is no JSON object with the sizes of its architecture, or another clamp than
/// gpt-oss's. *Incomplete*: no `config`, an unknown architecture, or the parameters of a shared expert that
/// the `config` promises.
pub(super) fn import(container: &mut Container, path: &Path) -> Result<()> {
    if !container.names().any(|name| name.starts_with("param.")) || container.has("w1") {
        return Ok(());
    }
    if container.has("param.router.weight") {
        gpt_oss(container, path)
    } else if container.has("param.gate.weight") {
        deepseek_v3(container, path)
    } else {
        let names = list(container.names());
        let remedy = format!(
            "the importer knows gpt-oss (param.router.weight) and DeepSeek-V3 (param.gate.weight), the file has \
             {names}; write a dump with the names of `sonicmoe check --help`"
        );
        Err(Error::missing("a known architecture of this checkpoint", remedy))
    }
}

fn gpt_oss(container: &mut Container, path: &Path) -> Result<()> {
    let config: GptOssConfig = config(container, path)?;
    if let Some(limit) = config.swiglu_limit
        && limit != 7.0
    {
        let reason = format!("it clamps at {limit}; the activation gpt_oss clamps at 7");
        return Err(Error::parse("metadata", "swiglu_limit", reason));
    }
    rename(container, &GPT_OSS)?;
    container
        .note("names of a gpt-oss checkpoint; w1, w2 and their gradients are turned, and so are coordinates in them");
    say_all(
        container,
        Convention::SoftmaxOverTopK,
        Activation::GptOss,
        GateLayout::InterleavedGateFirst,
        [config.hidden_size, config.intermediate_size, config.num_local_experts, config.num_experts_per_tok],
    );
    Ok(())
}

fn deepseek_v3(container: &mut Container, path: &Path) -> Result<()> {
    let config: DeepseekV3Config = config(container, path)?;
    rename(container, &DEEPSEEK_V3)?;
    container.note("names of a DeepSeek-V3 checkpoint");
    let bias = "buffer.gate.e_score_correction_bias";
    if container.has(bias) {
        container.rename("selection_bias", bias)?;
    }
    if config.n_shared_experts.is_some_and(|shared| shared > 0) && !container.has("shared_down") {
        return Err(Error::missing(
            "the shared expert",
            "the config has one; add param.shared_experts.{gate,up,down}_proj.weight",
        ));
    }
    let router = GroupedSigmoid {
        groups: config.n_group,
        kept: config.topk_group,
        renormalized: config.norm_topk_prob,
        factor: config.routed_scaling_factor,
    };
    say_all(
        container,
        router,
        Activation::SwiGlu,
        GateLayout::ConcatenatedGateFirst,
        [config.hidden_size, config.moe_intermediate_size, config.n_routed_experts, config.num_experts_per_tok],
    );
    Ok(())
}

fn rename(container: &mut Container, parameters: &[Parameter]) -> Result<()> {
    for Parameter { ours, theirs, gradient, transposed } in parameters {
        for (prefix, name) in [("param", ours), ("grad", gradient)] {
            let theirs = format!("{prefix}.{theirs}");
            if container.has(&theirs) {
                container.rename(name, &theirs)?;
                if *transposed {
                    container.transpose(name)?;
                }
            }
        }
    }
    Ok(())
}

/// The metadata of a dump, with d, n, E and K.
fn say_all(
    container: &mut Container,
    router: impl fmt::Display,
    activation: Activation,
    layout: GateLayout,
    [d, n, e, k]: [usize; 4],
) {
    container.say("router", router);
    container.say("activation", activation.name());
    container.say("w1_layout", layout.name());
    for (key, size) in [("d", d), ("n", n), ("E", e), ("K", k)] {
        container.say(key, size);
    }
}

/// The constants of the architecture.
fn config<C: for<'de> Deserialize<'de>>(container: &Container, path: &Path) -> Result<C> {
    let strings: &BTreeMap<String, String> = container.strings();
    let Some(text) = strings.get("config") else {
        let remedy = format!("{} names its tensors as a checkpoint does; add its config as JSON", path.display());
        return Err(Error::missing("metadata `config`", remedy));
    };
    serde_json::from_str(text).map_err(|error| {
        let reason = quoted(&error.to_string());
        Error::parse("metadata", "config", format!("it does not hold what the architecture needs: {reason}"))
    })
}
