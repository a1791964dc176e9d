//! What the strings of a dump say about its numbers: conventions, which no tensor shows.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use super::container::quoted;
use crate::activation::Activation;
use crate::element::DType;
use crate::engine::{Numerics, RoundingModel, RouterRounding};
use crate::error::{Error, Result};
use crate::layout::GateLayout;
use crate::routing::{Convention, GroupedSigmoid};

/// Where a dump's routing comes from: metadata key `router`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GatingKind {
    /// A router in the file, `router_w`, with this convention of scores.
    Router(Convention),
    /// Pairs and scores in the file: `token_idx`, `expert_idx`, `scores`.
    Given,
}

impl GatingKind {
    /// The name used on the command line and in dumps.
    pub fn name(self) -> &'static str {
        match self {
            Self::Router(convention) => convention.name(),
            Self::Given => "given",
        }
    }
}

impl fmt::Display for GatingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Router(convention) => convention.fmt(f),
            Self::Given => f.pad(self.name()),
        }
    }
}

impl FromStr for GatingKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == Self::Given.name() {
            return Ok(Self::Given);
        }
        text.parse().map(Self::Router).map_err(|_| {
            let known = Convention::ALL.map(Convention::name).into_iter();
            Error::unknown("router", text, known.chain([GroupedSigmoid::NAME, Self::Given.name()]))
        })
    }
}

/// Where an engine rounds, as far as a check of its results can tell: the sequence of
/// [`Model::ALL`] goes from the tightest bounds to the widest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Model {
    /// SonicMoE's rounding points, logits and scores in f32.
    Fused,
    /// SonicMoE's rounding points; logits, scores, dlogits and the router's part of dx in the type
    /// of the tensors.
    FusedTensorRouter,
    /// Op by op, the router in the type of the tensors.
    Eager,
}

impl Model {
    /// Every model, the tightest first.
    pub const ALL: [Self; 3] = [Self::Fused, Self::FusedTensorRouter, Self::Eager];

    /// The name used on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fused => "fused",
            Self::FusedTensorRouter => "fused_tensor_router",
            Self::Eager => "eager",
        }
    }

    /// The model in words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Fused => "fused",
            Self::FusedTensorRouter => "fused, with the router in the tensors' type",
            Self::Eager => "eager",
        }
    }

    /// Where the kernels round.
    pub fn rounding(self) -> RoundingModel {
        match self {
            Self::Fused | Self::FusedTensorRouter => RoundingModel::Fused,
            Self::Eager => RoundingModel::Eager,
        }
    }

    /// What the router rounds to.
    pub fn router(self) -> RouterRounding {
        match self {
            Self::Fused => RouterRounding::Score,
            Self::FusedTensorRouter | Self::Eager => RouterRounding::TensorType,
        }
    }

    /// The arithmetic of an engine with this model whose tensors have the type `storage`, and
    /// scores and ds the type `score`: sums in f32 (f64 beside f64 storage), elementary functions
    /// within `function_ulps`.
    pub fn numerics(self, storage: DType, score: DType, function_ulps: f64) -> Numerics {
        let accumulator = if storage == DType::F64 { DType::F64 } else { DType::F32 };
        Numerics {
            storage,
            score,
            accumulator: accumulator.unit_roundoff(),
            rounding: self.rounding(),
            router: self.router(),
            function_ulps,
            flushes_denormals: false,
        }
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Model {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|model| model.name() == text)
            .ok_or_else(|| Error::unknown("rounding model", text, Self::ALL.map(Self::name)))
    }
}

/// What the caller knows of a file better than its metadata; each value wins over the file's.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// `--router`.
    pub router: Option<GatingKind>,
    /// `--layout`.
    pub layout: Option<GateLayout>,
    /// `--activation`.
    pub activation: Option<Activation>,
    /// `--k`.
    pub k: Option<usize>,
    /// `--map name=theirs`: our name of a tensor, and the file's.
    pub names: BTreeMap<String, String>,
}

/// The strings of a dump, understood.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    /// `router`.
    pub router: Option<GatingKind>,
    /// `w1_layout`: the order of gate and up in w1, b1, h and their gradients.
    pub layout: Option<GateLayout>,
    /// `activation`.
    pub activation: Option<Activation>,
    /// `K`, experts per token.
    pub k: Option<usize>,
    /// `rounding_model`, as the producer declares it.
    pub rounding_model: Option<RoundingModel>,
    /// `token_rounding`: the rule by which counts per expert were rounded to multiples of the tile.
    pub token_rounding: Option<String>,
    /// `tile`, M.
    pub tile: Option<usize>,
    /// `producer`.
    pub producer: Option<String>,
    /// `seed`.
    pub seed: Option<String>,
    /// `T`, `d`, `n`, `E` where the file states them.
    pub sizes: BTreeMap<&'static str, usize>,
}

impl Metadata {
    /// Reads the strings of a file; unknown keys are nobody's business.
    ///
    /// # Errors
    /// A known key with an unknown value, unless `overrides` replaces it.
    pub fn read(strings: &BTreeMap<String, String>, overrides: &Overrides) -> Result<Self> {
        let read = Strings(strings);
        let mut sizes = BTreeMap::new();
        for name in ["T", "d", "n", "E"] {
            if let Some(size) = read.size(name)? {
                sizes.insert(name, size);
            }
        }
        Ok(Self {
            router: read.or(overrides.router, "router")?,
            layout: read.or(overrides.layout, "w1_layout")?,
            activation: read.or(overrides.activation, "activation")?,
            k: match overrides.k {
                Some(k) => Some(k),
                None => read.size("K")?,
            },
            rounding_model: match read.text("rounding_model") {
                None => None,
                Some("fused") => Some(RoundingModel::Fused),
                Some("eager") => Some(RoundingModel::Eager),
                Some(text) => return Err(unknown_value("rounding_model", text, &["fused", "eager"])),
            },
            token_rounding: read.text("token_rounding").map(str::to_string),
            tile: read.size("tile")?,
            producer: read.text("producer").map(str::to_string),
            seed: read.text("seed").map(str::to_string),
            sizes,
        })
    }

    /// The strings of a file that says all this.
    pub fn to_strings(&self) -> BTreeMap<String, String> {
        let Self { router, layout, activation, k, rounding_model, token_rounding, tile, producer, seed, sizes } = self;
        let rounding_model = rounding_model.map(|model| match model {
            RoundingModel::Fused => "fused",
            RoundingModel::Eager => "eager",
        });
        let known = [
            ("router", router.map(|router| router.to_string())),
            ("w1_layout", layout.map(|layout| layout.name().to_string())),
            ("activation", activation.map(|activation| activation.name().to_string())),
            ("K", k.map(|k| k.to_string())),
            ("rounding_model", rounding_model.map(str::to_string)),
            ("token_rounding", token_rounding.clone()),
            ("tile", tile.map(|tile| tile.to_string())),
            ("producer", producer.clone()),
            ("seed", seed.clone()),
        ];
        let known = known.into_iter().filter_map(|(key, value)| Some((key.to_string(), value?)));
        known.chain(sizes.iter().map(|(key, size)| (key.to_string(), size.to_string()))).collect()
    }

    /// Where the routing comes from.
    ///
    /// # Errors
    /// Nobody said it.
    pub fn required_router(&self) -> Result<GatingKind> {
        let names = Convention::ALL.map(Convention::name).join(", ");
        self.router.ok_or_else(|| {
            Error::missing("metadata `router`", format!("say with --router how scores follow ({names}, given)"))
        })
    }

    /// The activation.
    ///
    /// # Errors
    /// Nobody said it.
    pub fn required_activation(&self) -> Result<Activation> {
        let names = Activation::ALL.map(Activation::name).join(", ");
        self.activation.ok_or_else(|| {
            Error::missing("metadata `activation`", format!("say with --activation which it was ({names})"))
        })
    }

    /// The order of gate and up; interleaved stands in where there is no gate to order.
    ///
    /// # Errors
    /// Nobody said it, and the activation has a gate.
    pub fn required_layout(&self, activation: Activation) -> Result<GateLayout> {
        if !activation.gated() {
            return Ok(GateLayout::InterleavedGateFirst);
        }
        let names = GateLayout::ALL.map(GateLayout::name).join(", ");
        self.layout.ok_or_else(|| {
            let remedy = format!("say with --layout where gate and up stand in w1 ({names}); no shape shows it");
            Error::missing("metadata `w1_layout`", remedy)
        })
    }

    /// K.
    ///
    /// # Errors
    /// Nobody said it.
    pub fn required_k(&self) -> Result<usize> {
        self.k.ok_or_else(|| Error::missing("metadata `K`", "say with --k how many experts each token goes to"))
    }
}

struct Strings<'s>(&'s BTreeMap<String, String>);

impl Strings<'_> {
    fn text(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    fn or<V: FromStr<Err = Error>>(&self, known: Option<V>, key: &'static str) -> Result<Option<V>> {
        match (known, self.text(key)) {
            (None, Some(text)) => match text.parse() {
                Ok(value) => Ok(Some(value)),
                // A value from a file may hold anything, and a message is one line.
                Err(_) => Err(V::from_str(quoted(text).trim_matches('`'))
                    .err()
                    .unwrap_or_else(|| Error::parse("metadata", key, format!("{} is no value of it", quoted(text))))),
            },
            (known, _) => Ok(known),
        }
    }

    fn size(&self, key: &'static str) -> Result<Option<usize>> {
        let size = |text: &str| {
            text.parse().map_err(|_| Error::parse("metadata", key, format!("{} is no size", quoted(text))))
        };
        self.text(key).map(size).transpose()
    }
}

fn unknown_value(key: &'static str, text: &str, known: &[&'static str]) -> Error {
    Error::unknown(key, quoted(text).trim_matches('`'), known.iter().copied())
}
