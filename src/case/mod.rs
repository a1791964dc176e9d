//! Random problems as small values: a [`Case`] names a problem, the seed draws its tensors.
//!
//! The same case gives the same bits on every machine and for any number of threads, so a failing
//! case is repeated from its few numbers alone. [`strategy`] draws and shrinks cases, [`table`]
//! lists the edge cases that every engine has to pass.

pub mod campaign;
mod draw;
mod exact;
pub mod museum;
pub mod strategy;
pub mod table;

use std::collections::BTreeSet;
use std::fmt;

use ndarray::Array1;

use crate::activation::Activation;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::problem::{Biases, Gating, Problem, Router};
use crate::routing::{Convention, Routing};
use crate::shape::{ExpertId, Shape, TokenId};

use draw::{Stream, Tensor};

/// How tokens spread over experts behind a random router.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Load {
    /// A router without a bias: every expert is as likely.
    Uniform,
    /// A router with a small random bias.
    Biased,
    /// A router whose bias makes expert e about as likely as 1/(e + 1).
    Zipf,
    /// A router whose bias keeps every token away from these experts (fewer than E − K + 1).
    Without(Vec<u32>),
}

/// Where a case takes its routing from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Pairing {
    /// A router inside the layer.
    Router {
        /// How scores follow from logits.
        convention: Convention,
        /// How tokens spread.
        load: Load,
    },
    /// Given pairs: K distinct random experts per token, random scores.
    TopK,
    /// Given pairs: expert e gets `counts[e]` random tokens; tokens have any number of experts.
    Counts(Vec<usize>),
}

/// The size of the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scale {
    /// x ~ 1, W ~ fan_in^−1/2, b ~ 0.1, dout ~ 1: every term of every sum matters.
    Unit,
    /// Everything at 0.02, as in SonicMoE's own tests.
    Small,
    /// Small integers and scores of 1/4, 1/2 and 1, so that every sum is exact in f32 in any order:
    /// [`oracle::exact`](crate::oracle::exact) says which bits a correct engine has. For given
    /// routing, d and n from 8 to 4096 and T up to 4096.
    Exact,
    /// The same with scores of 9 to 12 bits, more than bf16 keeps. The sums of bf16 engines are exact;
    /// those of engines that store more bits may not be.
    ExactFineScores,
}

/// A problem, named by a few numbers.
///
/// ```
/// use half::bf16;
/// use sonicmoe::case::Case;
/// let case = Case::new("17,16,24,3,1".parse()?).with_seed(7);
/// let problem = case.problem::<bf16>()?;
/// assert_eq!((problem.t(), problem.d(), problem.n(), problem.e()), (17, 16, 24, 3));
/// # Ok::<(), sonicmoe::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Case {
    /// T, d, n, E, K. K has no meaning for [`Pairing::Counts`].
    pub shape: Shape,
    /// The activation.
    pub activation: Activation,
    /// With b1 and b2.
    pub biases: bool,
    /// Where the routing comes from.
    pub pairing: Pairing,
    /// The size of the numbers.
    pub scale: Scale,
    /// What the tensors are drawn from.
    pub seed: u64,
}

/// What makes a case an edge case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// T = 0.
    NoTokens,
    /// An expert without tokens, though there are tokens.
    EmptyExpert,
    /// Some R_e > 0 with R_e mod 128 = 0.
    FullTiles,
    /// Some R_e mod 128 = 1.
    OneRowOver,
    /// Some R_e mod 128 = 127.
    OneRowShort,
    /// Every token goes to every expert.
    AllExperts,
    /// R ≥ 4096, n ≥ 128, d ≥ 128.
    Large,
}

impl Class {
    /// Every class.
    pub const ALL: [Self; 7] = [
        Self::NoTokens,
        Self::EmptyExpert,
        Self::FullTiles,
        Self::OneRowOver,
        Self::OneRowShort,
        Self::AllExperts,
        Self::Large,
    ];

    /// What the reports call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoTokens => "T = 0",
            Self::EmptyExpert => "empty expert",
            Self::FullTiles => "R_e mod 128 = 0",
            Self::OneRowOver => "R_e mod 128 = 1",
            Self::OneRowShort => "R_e mod 128 = 127",
            Self::AllExperts => "K = E",
            Self::Large => "R ≥ 4096, n, d ≥ 128",
        }
    }
}

impl Case {
    /// SwiGLU without biases behind a softmax-over-top-K router, unit scale, seed 0.
    pub fn new(shape: Shape) -> Self {
        Self {
            shape,
            activation: Activation::SwiGlu,
            biases: false,
            pairing: Pairing::Router { convention: Convention::SoftmaxOverTopK, load: Load::Uniform },
            scale: Scale::Unit,
            seed: 0,
        }
    }

    /// With another seed.
    pub fn with_seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// With another activation.
    pub fn with_activation(self, activation: Activation) -> Self {
        Self { activation, ..self }
    }

    /// With b1 and b2.
    pub fn with_biases(self) -> Self {
        Self { biases: true, ..self }
    }

    /// With numbers of another size.
    pub fn with_scale(self, scale: Scale) -> Self {
        Self { scale, ..self }
    }

    /// With another source of the routing.
    pub fn with_pairing(self, pairing: Pairing) -> Self {
        Self { pairing, ..self }
    }

    /// Given routing with `counts[e]` tokens for expert e: E follows, and T is at least the largest.
    pub fn with_counts(self, counts: &[usize]) -> Self {
        let t = self.shape.t.max(counts.iter().copied().max().unwrap_or(0));
        let shape = Shape { t, e: counts.len(), k: 1, ..self.shape };
        Self { shape, pairing: Pairing::Counts(counts.to_vec()), ..self }
    }

    /// Draws the tensors in f64 and rounds them once to the storage type.
    ///
    /// # Errors
    /// A case whose parts contradict each other: counts for another number of experts or beyond T,
    /// or too many experts kept without tokens; at an exact scale, a router, or sizes or an activation
    /// that the exact regime does not hold for.
    pub fn problem<S: Element>(&self) -> Result<Problem<'static, S>> {
        let Shape { t, d, n, e, k } = Shape::new(self.shape.t, self.shape.d, self.shape.n, self.shape.e, self.shape.k)?;
        let rows = self.activation.h_width(n);
        let fan_in = |size: usize| 1.0 / (size as f64).sqrt();
        let (one, wide, narrow, bias) = match self.scale {
            Scale::Unit => (1.0, fan_in(d), fan_in(n), 0.1),
            Scale::Small => (0.02, 0.02, 0.02, 0.02),
            Scale::Exact => return exact::problem(self, exact::Scores::Coarse),
            Scale::ExactFineScores => return exact::problem(self, exact::Scores::Fine),
        };
        let biases = self.biases.then(|| Biases {
            b1: self.stream(Tensor::B1).normal((e, rows), bias).into(),
            b2: self.stream(Tensor::B2).normal((e, d), bias).into(),
        });
        let gating = match &self.pairing {
            Pairing::Router { convention, load } => Gating::Router(Router {
                w: self.stream(Tensor::RouterW).normal((e, d), fan_in(d)).into(),
                b: self.router_bias(load)?.map(Into::into),
                k,
                convention: *convention,
                selection_bias: match convention {
                    Convention::GroupedSigmoid(_) => Some(self.stream(Tensor::SelectionBias).normal(e, 0.1).into()),
                    _ => None,
                },
            }),
            Pairing::TopK | Pairing::Counts(_) => self.given(self.given_pairs()?),
        };
        Problem::new(
            self.stream(Tensor::X).normal((t, d), one),
            self.stream(Tensor::W1).normal((e, rows, d), wide),
            self.stream(Tensor::W2).normal((e, d, n), narrow),
            biases,
            gating,
            self.activation,
            self.stream(Tensor::Dout).normal((t, d), one),
        )
    }

    /// The classes that this case belongs to under the routing it got.
    pub fn classes(&self, routing: &Routing) -> BTreeSet<Class> {
        let mut classes = BTreeSet::new();
        if routing.tokens() == 0 {
            classes.insert(Class::NoTokens);
        }
        for expert in 0..routing.experts() {
            let count = routing.rows_of_expert(ExpertId(expert as u32)).len();
            match (count, count % 128) {
                (0, _) if routing.tokens() > 0 => _ = classes.insert(Class::EmptyExpert),
                (1.., 0) => _ = classes.insert(Class::FullTiles),
                (_, 1) => _ = classes.insert(Class::OneRowOver),
                (_, 127) => _ = classes.insert(Class::OneRowShort),
                _ => {}
            }
        }
        if routing.tokens() > 0 && routing.routed() == routing.tokens() * routing.experts() {
            classes.insert(Class::AllExperts);
        }
        if routing.routed() >= 4096 && self.shape.n >= 128 && self.shape.d >= 128 {
            classes.insert(Class::Large);
        }
        classes
    }

    /// The pairs of a given routing.
    fn given_pairs(&self) -> Result<Routing> {
        let Shape { t, e, k, .. } = self.shape;
        let mut stream = self.stream(Tensor::Pairs);
        match &self.pairing {
            Pairing::Router { .. } => Err(Error::internal("pairs were asked of a case with a router")),
            Pairing::TopK => Routing::new(t, e, stream.experts_of_tokens(t, e, k)),
            Pairing::Counts(counts) => {
                if counts.len() != e {
                    return Err(Error::shape("counts", &[e], &[counts.len()], "one count per expert"));
                }
                if let Some(expert) = counts.iter().position(|&count| count > t) {
                    return Err(Error::size(
                        format!("the token count of expert {expert}"),
                        counts[expert],
                        format!("there are only T = {t} tokens"),
                    ));
                }
                Routing::new(t, e, stream.tokens_of_experts(t, counts))
            }
        }
    }

    fn stream(&self, tensor: Tensor) -> Stream {
        Stream::new(self.seed, tensor)
    }

    fn given<S: Element>(&self, routing: Routing) -> Gating<'static, S> {
        let scores = self.stream(Tensor::Scores).scores(routing.routed());
        Gating::Given { routing, scores }
    }

    fn router_bias<S: Element>(&self, load: &Load) -> Result<Option<Array1<S>>> {
        let e = self.shape.e;
        let small = || self.stream(Tensor::RouterB).normal::<f64, _>(e, 0.1);
        let bias = match load {
            Load::Uniform => return Ok(None),
            Load::Biased => small(),
            // Logits have variance 1, so a bias of −ln(e + 1) scales the odds of expert e.
            Load::Zipf => small() + Array1::from_shape_fn(e, |expert| -libm::log((expert + 1) as f64)),
            Load::Without(experts) => {
                let kept_away: BTreeSet<_> = experts.iter().copied().collect();
                if kept_away.len() + self.shape.k > e {
                    return Err(Error::size(
                        "the number of experts without tokens",
                        kept_away.len(),
                        format!("K = {} of E = {e} are needed", self.shape.k),
                    ));
                }
                // Logits of unit-scale data stay within ±15 of their mean at any size used here.
                let mut bias = small();
                for expert in kept_away {
                    let slot = bias.get_mut(expert as usize).ok_or_else(|| {
                        Error::size("an expert without tokens", expert as usize, format!("experts end at {e}"))
                    })?;
                    *slot = -64.0;
                }
                bias
            }
        };
        Ok(Some(bias.mapv(S::from_f64)))
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { shape, activation, biases, pairing, scale, seed } = self;
        write!(f, "{shape} {activation}")?;
        if *biases {
            write!(f, " with biases")?;
        }
        match pairing {
            Pairing::Router { convention, load } => write!(f, ", {convention} router, load {load:?}")?,
            Pairing::TopK => write!(f, ", given top-K routing")?,
            Pairing::Counts(counts) => write!(f, ", given routing with R_e = {counts:?}")?,
        }
        write!(f, ", {scale:?} scale, seed {seed}")
    }
}

/// All given pairs of a token are drawn together, so that they are distinct.
fn pairs_of_token(token: usize, experts: impl IntoIterator<Item = usize>) -> impl Iterator<Item = (TokenId, ExpertId)> {
    experts.into_iter().map(move |expert| (TokenId(token as u32), ExpertId(expert as u32)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_met_exactly_and_tokens_are_distinct_within_an_expert() {
        let case = Case::new("5,8,8,1,1".parse().unwrap()).with_counts(&[0, 17, 1, 9]);
        let problem = case.problem::<f32>().unwrap();
        let Gating::Given { routing, .. } = problem.gating() else { panic!("counts make given routing") };
        assert_eq!(routing.expert_offsets(), [0, 0, 17, 18, 27]);
        assert_eq!(problem.t(), 17);
    }

    #[test]
    fn a_case_draws_the_same_bits_again_and_other_bits_from_another_seed() {
        let case = Case::new("9,8,8,4,2".parse().unwrap());
        let first = case.problem::<f64>().unwrap();
        assert_eq!(first.x(), case.problem::<f64>().unwrap().x());
        assert_ne!(first.x(), case.clone().with_seed(1).problem::<f64>().unwrap().x());
        // The bits of one draw, so that no change of a dependency goes unseen.
        assert_eq!(first.x()[[0, 0]].to_bits(), 0xbfac_9910_267d_0ca4);
    }

    #[test]
    fn contradictory_cases_are_refused() {
        let base = Case::new("4,8,8,2,2".parse().unwrap());
        let counts = Pairing::Counts(vec![5, 1]);
        assert!(base.clone().with_pairing(counts).problem::<f32>().is_err());
        let without = Pairing::Router { convention: Convention::TopKOverSoftmax, load: Load::Without(vec![0]) };
        assert!(base.with_pairing(without).problem::<f32>().is_err());
    }

    #[test]
    fn classes_are_read_off_the_routing() {
        let all = (0..2).flat_map(|token| pairs_of_token(token, 0..3));
        let routing = Routing::new(2, 3, all).unwrap();
        let case = Case::new("2,8,8,3,3".parse().unwrap());
        assert_eq!(case.classes(&routing), BTreeSet::from([Class::AllExperts]));
        let counts = Case::new("128,8,8,1,1".parse().unwrap()).with_counts(&[128, 127, 0, 1]);
        let problem = counts.problem::<f32>().unwrap();
        let Gating::Given { routing, .. } = problem.gating() else { panic!("counts make given routing") };
        let expected = [Class::FullTiles, Class::OneRowShort, Class::EmptyExpert, Class::OneRowOver];
        assert_eq!(counts.classes(routing), BTreeSet::from(expected));
    }
}
