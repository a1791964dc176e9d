//! A failing case as a line of text that can be copied, and run again bit by bit.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};

use super::{Claim, Examination, Finding, Section, agreement, exact_regime, examine, laws, show};
use crate::case::{Case, Load, Pairing, Scale, museum};
use crate::element::{DType, Element};
use crate::engine::{Engine, Results};
use crate::error::{Error, Result};
use crate::mutant::Mutant;
use crate::problem::Problem;
use crate::routing::Convention;
use crate::shape::Shape;
use crate::sonic::cpu::CpuEngine;
use crate::sonic::gpu::GpuEngine;

/// The form of the text; another form gets another number.
const VERSION: &str = "1";

/// An engine that a case can be replayed on, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EngineName {
    /// SonicMoE on the CPU with this storage type and f32 sums (f64 beside f64): `cpu-bf16`.
    Cpu(DType),
    /// The same with a planted bug: `cpu-bf16+GateUpSwapped`. (The names that tables show have spaces.)
    Mutant(DType, Mutant),
    /// SonicMoE on a Hopper GPU, bf16: `cuda-bf16`.
    Cuda,
}

/// What is done with an engine of a type that its name decides.
pub trait Task {
    /// What comes of it.
    type Outcome;

    /// Does it.
    ///
    /// # Errors
    /// What the engine returns.
    fn with<S: Element>(self, engine: &dyn Engine<S>) -> Result<Self::Outcome>;
}

impl EngineName {
    /// Opens the engine and hands it to `task`.
    ///
    /// # Errors
    /// A device that is not there, or what `task` returns.
    pub fn run<T: Task>(self, task: T) -> Result<T::Outcome> {
        let (dtype, mutant) = match self {
            Self::Cpu(dtype) => (dtype, None),
            Self::Mutant(dtype, mutant) => (dtype, Some(mutant)),
            Self::Cuda => {
                let engine = GpuEngine::open().map_err(|absence| Error::device(absence.to_string()))?;
                return task.with::<bf16>(&engine);
            }
        };
        match dtype {
            DType::F64 => task.with::<f64>(&CpuEngine::<f64>::with_mutant(mutant)),
            DType::F32 => task.with::<f32>(&CpuEngine::<f32>::with_mutant(mutant)),
            DType::BF16 => task.with::<bf16>(&CpuEngine::<f32>::with_mutant(mutant)),
            DType::F16 => task.with::<f16>(&CpuEngine::<f32>::with_mutant(mutant)),
        }
    }
}

impl fmt::Display for EngineName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu(dtype) => write!(f, "cpu-{dtype}"),
            Self::Mutant(dtype, mutant) => write!(f, "cpu-{dtype}+{mutant:?}"),
            Self::Cuda => write!(f, "cuda-bf16"),
        }
    }
}

impl FromStr for EngineName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Some((sound, mutant)) = text.split_once('+')
            && let Ok(Self::Cpu(dtype)) = sound.parse()
        {
            let known = Mutant::ALL.iter().find(|known| format!("{known:?}") == mutant);
            return known.map(|known| Self::Mutant(dtype, *known)).ok_or_else(|| {
                let names: Vec<String> = Mutant::ALL.iter().map(|known| format!("{known:?}")).collect();
                Error::unknown("mutant", mutant, names.iter().map(String::as_str))
            });
        }
        let known = DType::ALL.map(Self::Cpu).into_iter().chain([Self::Cuda]);
        known.clone().find(|engine| engine.to_string() == text).ok_or_else(|| {
            let names: Vec<String> = known.map(|engine| engine.to_string()).collect();
            Error::unknown("engine", text, names.iter().map(String::as_str))
        })
    }
}

/// What was claimed and failed: a section, and the claim's subject with every run of other
/// characters than letters and digits as one hyphen.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Oracle {
    /// The kind of claim.
    pub section: Section,
    /// Its subject.
    pub subject: String,
}

impl Oracle {
    /// The name of a claim.
    pub fn of(claim: &Claim) -> Self {
        Self { section: claim.section, subject: slug(&claim.subject) }
    }

    /// Whether this is the name of `claim`.
    pub fn names(&self, claim: &Claim) -> bool {
        *self == Self::of(claim)
    }
}

fn slug(subject: &str) -> String {
    let words = subject.split(|character: char| !character.is_ascii_alphanumeric() && character != '_');
    words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join("-").to_lowercase()
}

/// A case, the engine that it ran on and the oracle that it failed.
///
/// ```
/// use sonicmoe::verify::CaseId;
/// let text = "1/33,16,24,5,2/swiglu+biases/topk_over_softmax,zipf/unit/7/cpu-bf16/layer:dx";
/// let id: CaseId = text.parse()?;
/// assert_eq!(id.to_string(), text);
/// assert_eq!((id.case.shape.t, id.case.seed), (33, 7));
/// # Ok::<(), sonicmoe::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CaseId {
    /// The problem.
    pub case: Case,
    /// The engine. The two derivations of the truth, which [`Section::Agreement`] compares, are in f64
    /// whatever its name.
    pub engine: EngineName,
    /// What failed.
    pub oracle: Oracle,
}

impl CaseId {
    /// An exhibit of the museum on an engine: `1/museum:no-token/cpu-bf16`. It is no case of a
    /// campaign; `case` says nothing of it.
    ///
    /// # Errors
    /// There is no exhibit of that name.
    pub fn of_exhibit(name: &str, engine: EngineName) -> Result<Self> {
        let name = museum::by_name(name)?.name;
        let case = Case::new(Shape { t: 0, d: 1, n: 1, e: 1, k: 1 });
        Ok(Self { case, engine, oracle: Oracle { section: Section::Museum, subject: name.into() } })
    }
}

impl fmt::Display for CaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.oracle.section == Section::Museum {
            return write!(f, "{VERSION}/museum:{}/{}", self.oracle.subject, self.engine);
        }
        let Self { case: Case { shape, activation, biases, pairing, scale, seed }, engine, oracle } = self;
        write!(f, "{VERSION}/{shape}/{activation}{}/", if *biases { "+biases" } else { "" })?;
        match pairing {
            Pairing::TopK => write!(f, "given")?,
            Pairing::Counts(counts) => write!(f, "counts{}", list(counts))?,
            Pairing::Router { convention, load } => {
                write!(f, "{convention},")?;
                match load {
                    Load::Uniform => write!(f, "uniform")?,
                    Load::Biased => write!(f, "biased")?,
                    Load::Zipf => write!(f, "zipf")?,
                    Load::Without(experts) => write!(f, "without{}", list(experts))?,
                }
            }
        }
        write!(f, "/{}/{seed}/{engine}/{}:{}", scale_name(*scale), section_name(oracle.section), oracle.subject)
    }
}

impl FromStr for CaseId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refuse = |reason: String| Error::parse("case", text, reason);
        let parts: Vec<&str> = text.trim().split('/').collect();
        if let [VERSION, exhibit, engine] = parts[..]
            && let Some(name) = exhibit.strip_prefix("museum:")
        {
            return Self::of_exhibit(name, engine.parse()?);
        }
        let [version, shape, activation, pairing, scale, seed, engine, oracle] = parts[..] else {
            let form = "write 1/T,d,n,E,K/activation[+biases]/routing/scale/seed/engine/section:subject";
            return Err(refuse(format!("it has {} parts between slashes, not 8; {form}", parts.len())));
        };
        if version != VERSION {
            return Err(refuse(format!("its form is {version}, and this program reads form {VERSION}")));
        }
        let (activation, biases) = match activation.strip_suffix("+biases") {
            Some(activation) => (activation, true),
            None => (activation, false),
        };
        let scale = SCALES
            .into_iter()
            .find(|known| scale_name(*known) == scale)
            .ok_or_else(|| Error::unknown("scale", scale, SCALES.map(scale_name)))?;
        let (section, subject) =
            oracle.split_once(':').ok_or_else(|| refuse(format!("{oracle} is no section:subject")))?;
        let section = SECTIONS
            .into_iter()
            .find(|known| section_name(*known) == section)
            .ok_or_else(|| Error::unknown("section", section, SECTIONS.map(section_name)))?;
        if slug(subject) != subject || subject.is_empty() {
            return Err(refuse(format!("{subject} names no claim")));
        }
        let case = Case {
            shape: shape.parse()?,
            activation: activation.parse()?,
            biases,
            pairing: pairing_of(pairing).ok_or_else(|| refuse(format!("{pairing} names no routing")))?,
            scale,
            seed: seed.parse().map_err(|_| refuse(format!("{seed} is no seed")))?,
        };
        let oracle = Oracle { section, subject: subject.into() };
        Ok(Self { case, engine: engine.parse()?, oracle })
    }
}

fn list<N: ToString>(numbers: &[N]) -> String {
    numbers.iter().map(|number| format!(".{}", number.to_string())).collect()
}

fn numbers<N: FromStr>(text: &str) -> Option<Vec<N>> {
    match text {
        "" => Some(Vec::new()),
        text => text.strip_prefix('.')?.split('.').map(|number| number.parse().ok()).collect(),
    }
}

fn pairing_of(text: &str) -> Option<Pairing> {
    if text == "given" {
        return Some(Pairing::TopK);
    }
    if let Some(counts) = text.strip_prefix("counts") {
        return numbers(counts).map(Pairing::Counts);
    }
    // A convention may have commas of its own, a load has none.
    let (convention, load) = text.rsplit_once(',')?;
    let convention: Convention = convention.parse().ok()?;
    let load = match load {
        "uniform" => Load::Uniform,
        "biased" => Load::Biased,
        "zipf" => Load::Zipf,
        load => Load::Without(numbers(load.strip_prefix("without")?)?),
    };
    Some(Pairing::Router { convention, load })
}

const SCALES: [Scale; 4] = [Scale::Unit, Scale::Small, Scale::Exact, Scale::ExactFineScores];

const SECTIONS: [Section; 7] = [
    Section::Agreement,
    Section::Kernel,
    Section::Layer,
    Section::ExactRegime,
    Section::Laws,
    Section::Museum,
    Section::Exact,
];

fn scale_name(scale: Scale) -> &'static str {
    match scale {
        Scale::Unit => "unit",
        Scale::Small => "small",
        Scale::Exact => "exact",
        Scale::ExactFineScores => "exact_fine_scores",
    }
}

fn section_name(section: Section) -> &'static str {
    match section {
        Section::Agreement => "agreement",
        Section::Kernel => "kernel",
        Section::Layer => "layer",
        Section::ExactRegime => "exact_regime",
        Section::Laws => "laws",
        Section::Museum => "museum",
        Section::Exact => "exact",
    }
}

/// What happened when a case ran again.
#[derive(Clone, Debug)]
pub struct Replay {
    /// What the oracle found, if it judged this case at all.
    pub finding: Option<Finding>,
    /// A fingerprint of all results, bit by bit: equal on two machines where their engines agree.
    pub fingerprint: u64,
}

impl Replay {
    /// Whether the case fails as its name says.
    pub fn fails(&self) -> bool {
        self.finding.as_ref().is_some_and(|finding| finding.failing > 0)
    }
}

impl CaseId {
    /// Runs the case again on the engine that its name says.
    ///
    /// # Errors
    /// A case that cannot be drawn, an engine that refuses it, or a device that is not there.
    pub fn replay(&self) -> Result<Replay> {
        struct Again<'i>(&'i CaseId);
        impl Task for Again<'_> {
            type Outcome = Replay;

            fn with<S: Element>(self, engine: &dyn Engine<S>) -> Result<Replay> {
                self.0.oracle.judge(engine, &self.0.case.problem::<S>()?)
            }
        }
        self.engine_of_oracle().run(Again(self))
    }

    /// The engine that the oracle looks at.
    pub(super) fn engine_of_oracle(&self) -> EngineName {
        if self.oracle.section == Section::Agreement { EngineName::Cpu(DType::F64) } else { self.engine }
    }
}

impl Oracle {
    /// Runs a problem on any engine before this oracle.
    ///
    /// # Errors
    /// What the engine returns.
    pub fn judge<S: Element>(&self, engine: &dyn Engine<S>, problem: &Problem<'_, S>) -> Result<Replay> {
        if self.section == Section::Museum {
            let shown = show(engine, museum::by_name(&self.subject)?)?;
            return Ok(Replay { finding: shown.ok(), fingerprint: 0 });
        }
        let Examination { findings, results, .. } = examine(engine, problem)?;
        let findings = match self.section {
            Section::Agreement => agreement(&problem.widen())?,
            Section::ExactRegime => exact_regime(engine, problem)?,
            Section::Laws => laws(engine, problem)?,
            Section::Kernel | Section::Layer | Section::Exact | Section::Museum => findings,
        };
        let finding = findings.into_iter().find(|finding| self.names(&finding.claim));
        Ok(Replay { finding, fingerprint: fingerprint(&results) })
    }
}

/// FNV-1a over the bits of every value, in the order of results.
fn fingerprint(results: &Results) -> u64 {
    let bits = results.values().flat_map(|stored| stored.values.iter().map(|value| value.to_bits()));
    bits.fold(0xcbf2_9ce4_8422_2325, |hash, bits| (hash ^ bits).wrapping_mul(0x0100_0000_01b3))
}
