//! A museum of public bugs: for each class of real reports the smallest problem that exposes it.
//!
//! ```
//! use half::bf16;
//! use sonicmoe::case::museum;
//! let exhibit = museum::by_name("empty-expert-unwritten")?;
//! let problem = exhibit.problem::<bf16>()?;
//! assert_eq!((problem.t(), problem.e()), (1, 2));
//! # Ok::<(), sonicmoe::Error>(())
//! ```

use ndarray::{Array, Array2, Array3, Axis, Dimension, ShapeBuilder};

use super::{Case, Load, Pairing};
use crate::activation::Activation;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::problem::{Biases, Gating, Problem, Router};
use crate::routing::{Convention, Routing};
use crate::shape::{ExpertId, TokenId};

/// What a correct implementation does with an exhibit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Right numbers.
    Results,
    /// An error that says what is wrong with the input.
    Refusal,
    /// Nothing to feed to an engine here; why.
    DeviceOnly(&'static str),
}

/// One row of the museum.
#[derive(Clone, Copy, Debug)]
pub struct Exhibit {
    /// Its name on the command line.
    pub name: &'static str,
    /// A report of this class, below `https://github.com/`.
    pub report: &'static str,
    /// What it exposes.
    pub exposes: &'static str,
    /// What a correct implementation does.
    pub answer: Answer,
}

const fn row(name: &'static str, report: &'static str, exposes: &'static str) -> Exhibit {
    Exhibit { name, report, exposes, answer: Answer::Results }
}

const fn refused(name: &'static str, report: &'static str, exposes: &'static str) -> Exhibit {
    Exhibit { answer: Answer::Refusal, ..row(name, report, exposes) }
}

const fn on_device(name: &'static str, report: &'static str, exposes: &'static str, why: &'static str) -> Exhibit {
    Exhibit { answer: Answer::DeviceOnly(why), ..row(name, report, exposes) }
}

/// Every exhibit.
pub const EXHIBITS: [Exhibit; 26] = [
    row("empty-expert-unwritten", "pytorch/pytorch/issues/172439", "gradients of an empty expert left as they were"),
    row("no-token", "NVIDIA/TransformerEngine/pull/3019", "a launch over nothing"),
    row("row-tails", "tenstorrent/tt-metal/issues/50669", "R_e = (16, 0, 1): a last tile of one row"),
    row("column-tail", "ROCm/aiter/pull/4331", "n = 136: the last 8 columns left out"),
    row("nan-beside-the-rows", "huggingface/transformers/pull/48205", "0·NaN from rows that no expert has"),
    row("gate-up-order", "Dao-AILab/sonic-moe/issues/45", "gate and up taken for each other"),
    row("equal-logits", "pytorch/torchtitan/pull/3146", "ties that do not go to the smaller id"),
    row("logits-equal-in-bf16", "pytorch/torchtitan/pull/3146", "logits compared after they were rounded"),
    row("signed-zero-logits", "vllm-project/vllm/pull/39391", "−0 ranked below +0"),
    refused("nan-logits", "vllm-project/vllm/pull/39391", "ids out of range from a NaN logit"),
    refused("infinite-logits", "vllm-project/vllm/pull/39391", "ids out of range from logits of +∞"),
    row("expert-256", "kekzl/imp/pull/2056", "expert ids kept in 8 bits"),
    row("every-expert", "vllm-project/vllm/pull/42608", "K = E: a limit that is off by one"),
    refused("more-than-every-expert", "vllm-project/vllm/pull/42608", "K > E not refused"),
    row("small-between-large", "vllm-project/vllm/issues/15045", "y = 1, 2⁻⁹, −1 summed in bf16"),
    row("perfectly-balanced", "google-research/vmoe/pull/218", "a router gradient that is missing or no number"),
    row("biases-only", "NVIDIA-NeMo/Automodel/pull/2591", "b2 not weighted by the score, or missing in ds"),
    row("softmax-over-topk", "Dao-AILab/sonic-moe/issues/5", "one score convention taken for another"),
    row("topk-over-softmax", "Dao-AILab/sonic-moe/issues/5", "one score convention taken for another"),
    row("topk-over-softmax-renormalized", "Dao-AILab/sonic-moe/issues/5", "one score convention taken for another"),
    row("rounded-down-beyond-t", "Dao-AILab/sonic-moe", "a token count rounded up beyond T"),
    row("strided", "flashinfer-ai/flashinfer/pull/4713", "strides ignored"),
    row("negative-strides", "flashinfer-ai/flashinfer/pull/4713", "strides ignored"),
    row("transposed-weights", "flashinfer-ai/flashinfer/pull/4713", "strides of weights ignored"),
    on_device(
        "beyond-32-bits",
        "vllm-project/vllm/issues/5938",
        "flat indices beyond 2³¹",
        "its h alone has 8 GiB: tests/device/size.rs runs it",
    ),
    on_device(
        "every-setting",
        "Dao-AILab/sonic-moe/issues/63",
        "a fault of one tile setting",
        "only kernels have settings: tests/device/settings.rs runs all of them",
    ),
];

/// The exhibit of that name.
///
/// # Errors
/// There is none; the message lists all names.
pub fn by_name(name: &str) -> Result<Exhibit> {
    let known = EXHIBITS.map(|exhibit| exhibit.name);
    EXHIBITS.into_iter().find(|exhibit| exhibit.name == name).ok_or_else(|| Error::unknown("exhibit", name, known))
}

impl Exhibit {
    /// The address of the report.
    pub fn address(&self) -> String {
        format!("https://github.com/{}", self.report)
    }

    /// The problem, with its numbers rounded once to the storage type.
    ///
    /// # Errors
    /// K > E, for the exhibit that has it; an exhibit for devices only.
    pub fn problem<S: Element>(&self) -> Result<Problem<'static, S>> {
        let case = |shape: &str| Ok::<_, Error>(Case::new(shape.parse()?).with_seed(1));
        let router = |convention| Pairing::Router { convention, load: Load::Uniform };
        if let Answer::DeviceOnly(why) = self.answer {
            return Err(Error::device(format!("`{}` is for devices: {why}", self.name)));
        }
        match self.name {
            "empty-expert-unwritten" => case("1,8,8,2,1")?.with_counts(&[1, 0]).with_biases().problem(),
            "no-token" => case("0,8,8,4,2")?.problem(),
            "row-tails" => case("17,16,24,3,1")?.with_counts(&[16, 0, 1]).problem(),
            "column-tail" => case("129,16,136,5,2")?.problem(),
            "nan-beside-the-rows" => nan_beside_the_rows(),
            "gate-up-order" => primes(),
            "equal-logits" => with_logits([0.0; 4], Convention::SoftmaxOverTopK, 2),
            "logits-equal-in-bf16" => {
                with_logits([0, 1, 2, 3].map(|e| 1.0 + f64::from(e) / 1024.0), Convention::SoftmaxOverTopK, 2)
            }
            "signed-zero-logits" => with_logits([-0.0, 0.0, -0.0, 0.0], Convention::SoftmaxOverTopK, 2),
            "nan-logits" => with_x_at(f64::NAN),
            "infinite-logits" => with_x_at(f64::INFINITY),
            "expert-256" => {
                let pairs = [0, 255, 256].into_iter().flat_map(|e| (0..3).map(move |t| (TokenId(t), ExpertId(e))));
                with_pairs(&case("3,8,8,257,3")?, 257, pairs.collect())
            }
            "every-expert" => case("4,8,8,4,4")?.with_pairing(router(Convention::TopKOverSoftmax)).problem(),
            "more-than-every-expert" => {
                let within = case("4,8,8,4,4")?.problem::<f64>()?;
                let w = stored(within.router_w().map(|w| w.to_owned()).unwrap_or_default());
                let gating = Gating::Router(Router::new(w, 5, Convention::SoftmaxOverTopK));
                with_gating(&within, gating)
            }
            "small-between-large" => small_between_large(),
            "perfectly-balanced" => perfectly_balanced(),
            "biases-only" => biases_only(&case("2,8,8,2,2")?.with_biases()),
            "softmax-over-topk" => with_logits([0.0, 1.0, 2.0], Convention::SoftmaxOverTopK, 2),
            "topk-over-softmax" => with_logits([0.0, 1.0, 2.0], Convention::TopKOverSoftmax, 2),
            "topk-over-softmax-renormalized" => {
                with_logits([0.0, 1.0, 2.0], Convention::TopKOverSoftmaxRenormalized, 2)
            }
            // One expert, five tokens, tiles of four: up would be eight, so every rule keeps four.
            "rounded-down-beyond-t" => {
                with_pairs(&case("5,8,8,1,1")?, 1, (0..4).map(|t| (TokenId(t), ExpertId(0))).collect())
            }
            "strided" => strided(&case("33,16,16,8,2")?, Strides::ColumnMajor),
            "negative-strides" => strided(&case("33,16,16,8,2")?, Strides::Negative),
            "transposed-weights" => strided(&case("33,16,16,8,2")?, Strides::Weights),
            other => Err(Error::internal(format!("exhibit `{other}` has no problem"))),
        }
    }
}

fn stored<S: Element, D: Dimension>(values: Array<f64, D>) -> Array<S, D> {
    values.mapv(S::from_f64)
}

/// The tensors of `drawn` with another gating.
fn with_gating<S: Element>(drawn: &Problem<'_, f64>, gating: Gating<'static, S>) -> Result<Problem<'static, S>> {
    let biases = drawn
        .biases()
        .map(|biases| Biases { b1: stored(biases.b1.to_owned()).into(), b2: stored(biases.b2.to_owned()).into() });
    Problem::new(
        stored(drawn.x().to_owned()),
        stored(drawn.w1().to_owned()),
        stored(drawn.w2().to_owned()),
        biases,
        gating,
        drawn.activation(),
        stored(drawn.dout().to_owned()),
    )
}

/// A drawn layer of `case` with these pairs, scores 1, 1/2, 1/3, ….
fn with_pairs<S: Element>(case: &Case, e: usize, pairs: Vec<(TokenId, ExpertId)>) -> Result<Problem<'static, S>> {
    let scores = (0..pairs.len()).map(|pair| Element::from_f64(1.0 / (pair + 1) as f64)).collect();
    let gating = Gating::Given { routing: Routing::new(case.shape.t, e, pairs)?, scores };
    with_gating(&case.problem()?, gating)
}

/// R_e = (1, 17, 0) of 20 tokens; two tokens that no expert has, the first and the last, are NaN.
fn nan_beside_the_rows<S: Element>() -> Result<Problem<'static, S>> {
    let pairs = [(9, 0)].into_iter().chain((1..18).map(|token| (token, 1)));
    let pairs: Vec<_> = pairs.map(|(token, expert)| (TokenId(token), ExpertId(expert))).collect();
    let drawn = with_pairs::<S>(&Case::new("20,8,8,3,1".parse()?).with_seed(1), 3, pairs)?;
    let (mut x, mut dout) = (drawn.x().to_owned(), drawn.dout().to_owned());
    for token in [0, 18, 19] {
        x.row_mut(token).fill(S::from_f64(f64::NAN));
        dout.row_mut(token).fill(S::from_f64(f64::NAN));
    }
    let (w1, w2) = (drawn.w1().to_owned(), drawn.w2().to_owned());
    Problem::new(x, w1, w2, None, owned(drawn.gating()), drawn.activation(), dout)
}

fn owned<S: Element>(gating: &Gating<'_, S>) -> Gating<'static, S> {
    match gating {
        Gating::Router(router) => Gating::Router(router.map(|value| value)),
        Gating::Given { routing, scores } => Gating::Given { routing: routing.clone(), scores: scores.clone() },
    }
}

/// One token, two units, every weight another prime: no two orders of gate and up give the same.
fn primes<S: Element>() -> Result<Problem<'static, S>> {
    let gating = Gating::Given {
        routing: Routing::new(1, 1, [(TokenId(0), ExpertId(0))])?,
        scores: vec![Element::from_f64(1.0)],
    };
    Problem::new(
        Array2::from_elem((1, 1), S::from_f64(1.0)),
        stored(ndarray::arr3(&[[[2.0], [3.0], [5.0], [7.0]]])),
        stored(ndarray::arr3(&[[[11.0, 13.0]]])),
        None,
        gating,
        Activation::SwiGlu,
        Array2::from_elem((1, 1), S::from_f64(1.0)),
    )
}

/// One token whose logits are these, each the sum of its whole part and its fraction so that bf16
/// weights have them exactly.
fn with_logits<S: Element, const E: usize>(
    logits: [f64; E],
    convention: Convention,
    k: usize,
) -> Result<Problem<'static, S>> {
    let drawn = Case::new(format!("1,8,8,{E},{k}").parse()?).with_seed(1).problem::<f64>()?;
    let mut x = drawn.x().to_owned();
    x.slice_mut(ndarray::s![0, ..2]).fill(1.0);
    let mut w = Array2::from_elem((E, 8), 0.0);
    for (expert, logit) in logits.into_iter().enumerate() {
        w[[expert, 0]] = logit.trunc();
        w[[expert, 1]] = logit.fract();
    }
    let gating = Gating::Router(Router::new(w, k, convention));
    let (w1, w2) = (drawn.w1().to_owned(), drawn.w2().to_owned());
    let wide = Problem::new(x, w1, w2, None, gating, drawn.activation(), drawn.dout().to_owned())?;
    let Gating::Router(Router { w, .. }) = wide.gating() else {
        return Err(Error::internal("this layer has a router"));
    };
    let gating = Gating::Router(Router::new(stored(w.to_owned()), k, convention));
    with_gating(&wide, gating)
}

/// Five tokens behind a router; the third holds a number from which no logit can follow.
fn with_x_at<S: Element>(value: f64) -> Result<Problem<'static, S>> {
    let drawn = Case::new("5,8,8,4,2".parse()?).with_seed(1).problem::<S>()?;
    let mut x = drawn.x().to_owned();
    x.row_mut(0).fill(S::from_f64(0.0));
    x.row_mut(1).fill(S::from_f64(-0.0));
    x[[2, 3]] = S::from_f64(value);
    let (w1, w2, dout) = (drawn.w1().to_owned(), drawn.w2().to_owned(), drawn.dout().to_owned());
    Problem::new(x, w1, w2, None, owned(drawn.gating()), drawn.activation(), dout)
}

/// y = 1, 2⁻⁹ and −1 of one token's three experts: o = 2⁻⁹, but 0 where partial sums are bf16.
fn small_between_large<S: Element>() -> Result<Problem<'static, S>> {
    let mut x = Array2::zeros((1, 8));
    x[[0, 0]] = 1.0;
    let w1 = Array3::from_shape_fn((3, 8, 8), |(_, unit, feature)| f64::from(u8::from(unit == 0 && feature == 0)));
    let y = [1.0, libm::exp2(-9.0), -1.0];
    let w2 = Array3::from_shape_fn((3, 8, 8), |(expert, _, unit)| if unit == 0 { y[expert] } else { 0.0 });
    let pairs = (0..3).map(|expert| (TokenId(0), ExpertId(expert)));
    let gating = Gating::Given { routing: Routing::new(1, 3, pairs)?, scores: vec![Element::from_f64(1.0); 3] };
    let dout = Array2::from_elem((1, 8), 1.0);
    Problem::new(stored(x), stored(w1), stored(w2), None, gating, Activation::Relu, stored(dout))
}

/// Two tokens, two experts, one token each.
fn perfectly_balanced<S: Element>() -> Result<Problem<'static, S>> {
    let drawn = Case::new("2,8,8,2,1".parse()?).with_seed(1).problem::<f64>()?;
    let mut w = Array2::zeros((2, 8));
    let mut x = drawn.x().to_owned();
    for token in 0..2 {
        x[[token, 0]] = 1.0;
        x[[token, 1]] = -1.0;
        w[[token, 0]] = 1.0;
        x[[token, token]] = 2.0;
        w[[token, token]] = 2.0;
    }
    let router = Router::new(stored(w), 1, Convention::TopKOverSoftmax);
    let wide = Problem::new(
        x,
        drawn.w1().to_owned(),
        drawn.w2().to_owned(),
        None,
        owned(drawn.gating()),
        drawn.activation(),
        drawn.dout().to_owned(),
    )?;
    with_gating(&wide, Gating::Router(router))
}

/// x = 0: all that comes out comes from the biases.
fn biases_only<S: Element>(case: &Case) -> Result<Problem<'static, S>> {
    let drawn = case.clone().with_pairing(Pairing::TopK).problem::<S>()?;
    let biases = drawn.biases().map(|Biases { b1, b2 }| Biases { b1: b1.to_owned().into(), b2: b2.to_owned().into() });
    let x = Array2::from_elem(drawn.x().raw_dim(), S::from_f64(0.0));
    let (w1, w2, dout) = (drawn.w1().to_owned(), drawn.w2().to_owned(), drawn.dout().to_owned());
    Problem::new(x, w1, w2, biases, owned(drawn.gating()), drawn.activation(), dout)
}

#[derive(Clone, Copy, PartialEq)]
enum Strides {
    ColumnMajor,
    Negative,
    Weights,
}

/// The same numbers in other places of memory.
fn strided<S: Element>(case: &Case, strides: Strides) -> Result<Problem<'static, S>> {
    let drawn = case.problem::<S>()?;
    let column_major = |values: ndarray::ArrayView2<'_, S>| {
        let mut other = Array2::from_elem(values.raw_dim().f(), S::from_f64(0.0));
        other.assign(&values);
        other
    };
    let backwards = |values: ndarray::ArrayView2<'_, S>| {
        let mut other = values.to_owned();
        other.invert_axis(Axis(0));
        other.invert_axis(Axis(1));
        other.assign(&values);
        other
    };
    let transposed = |values: ndarray::ArrayView3<'_, S>| {
        let (e, rows, columns) = values.dim();
        let mut other = Array3::from_elem((columns, e, rows), S::from_f64(0.0)).permuted_axes([1, 2, 0]);
        other.assign(&values);
        other
    };
    let (x, dout) = match strides {
        Strides::ColumnMajor => (column_major(drawn.x()), column_major(drawn.dout())),
        Strides::Negative => (backwards(drawn.x()), backwards(drawn.dout())),
        Strides::Weights => (drawn.x().to_owned(), drawn.dout().to_owned()),
    };
    let (w1, w2) = match strides {
        Strides::Weights => (transposed(drawn.w1()), transposed(drawn.w2())),
        _ => (drawn.w1().to_owned(), drawn.w2().to_owned()),
    };
    Problem::new(x, w1, w2, None, owned(drawn.gating()), drawn.activation(), dout)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn every_exhibit_is_found_by_its_name_and_has_a_problem_unless_it_is_for_devices_or_refused() {
        for exhibit in EXHIBITS {
            assert_eq!(by_name(exhibit.name).unwrap().report, exhibit.report);
            let problem = exhibit.problem::<bf16>();
            match exhibit.answer {
                Answer::Results => assert!(problem.is_ok(), "{}: {:?}", exhibit.name, problem.err()),
                Answer::DeviceOnly(_) => assert!(problem.is_err()),
                Answer::Refusal => {}
            }
        }
        assert!(by_name("nothing").unwrap_err().to_string().contains("empty-expert-unwritten"));
    }

    #[test]
    fn strides_are_not_those_of_a_row_major_tensor_and_the_numbers_are_the_same() {
        let plain = Case::new("33,16,16,8,2".parse().unwrap()).with_seed(1).problem::<bf16>().unwrap();
        for name in ["strided", "negative-strides", "transposed-weights"] {
            let strided = by_name(name).unwrap().problem::<bf16>().unwrap();
            assert!(strided.x().strides() != plain.x().strides() || strided.w1().strides() != plain.w1().strides());
            assert_eq!((strided.x(), strided.w1(), strided.w2()), (plain.x(), plain.w1(), plain.w2()));
        }
    }
}
