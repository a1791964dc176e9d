//! SonicMoE in Rust, and the proof that it is right.
//!
//! A mixture-of-experts layer sends each of T tokens to K of E experts and sums their outputs,
//! weighted by scores:
//!
//! ```text
//! H = X_e W1ᵀ (+ b1)     A = act(H)     Y = A W2ᵀ (+ b2)     O_t = Σ s·Y
//! ```
//!
//! Standard autograd computes the scores' gradient as ⟨dO, Y⟩ and so keeps Y, and a gathered copy of
//! x besides. SonicMoE ([arXiv 2512.14080](https://arxiv.org/abs/2512.14080)) takes ⟨dO W2, A⟩
//! instead, the same number, recomputes A from H, and keeps **x and h only**: 2Td + 4TKn bytes.
//!
//! # What is proved, and by what
//!
//! 1. **The closed form is the gradient.** [`mod@reference`] differentiates the plain layer with a tape
//!    that knows nothing but primitives; central differences confirm it. [`sonic::cpu`] computes the
//!    closed form. In f64 both agree to roundoff on every problem that is drawn
//!    ([`verify::agreement`]).
//! 2. **Every kernel and every result is within what a correct engine cannot exceed.** Bounds follow
//!    from the shapes and the number types, never from trying: [`oracle::kernel`] judges each kernel
//!    from what it really read, [`oracle::bound`] propagates all roundings through the layer.
//! 3. **Memory is exact.** [`oracle::memory`] and an allocator that counts.
//! 4. **Routing is certified** without calling the code that made it: [`routing::certificate`],
//!    [`routing::rounding::certificate`].
//! 5. **Where sums are exact, so is every bit**, whatever the order of summation: [`oracle::exact`].
//! 6. **The checks could have failed.** Every judgement states its floor, the smallest uniform
//!    relative error that it would have seen; [`mod@score`] plants bugs ([`mod@mutant`]) and lists who notices.
//!
//! # How to read the crate
//!
//! The data go one way:
//!
//! ```text
//! Problem ─▶ Routing ─▶ Engine ─▶ Results ─▶ oracle ─▶ Verdict ─▶ report
//! ```
//!
//! * [`problem`], [`shape`], [`activation`], [`layout`], [`element`]: the vocabulary. Shapes are
//!   checked once, in [`Problem::new`].
//! * [`routing`]: top-K, score conventions, given routing, metadata, token rounding.
//! * [`mod@reference`] and [`sonic`]: two implementations that share no arithmetic. A kernel of the paper
//!   has the same name in `sonic::cpu`, in `sonic::gpu` and in the folder `kernels`.
//! * [`oracle`]: judges; imports no engine. [`case`] draws problems, [`verify`] feeds them to an
//!   engine and its results to the oracles, [`dump`] reads runs of other implementations.
//! * [`mod@mutant`] and [`mod@score`]: planted bugs, and which oracle catches them.
//!
//! # Check an engine of one's own
//!
//! Implement [`Engine`] and hand it to [`verify::examine`]:
//!
//! ```
//! use sonicmoe::case::Case;
//! use sonicmoe::sonic::cpu::CpuEngine; // stands in for yours
//! use sonicmoe::verify::examine;
//!
//! let problem = Case::new("33,16,24,5,2".parse()?).with_biases().problem::<half::bf16>()?;
//! let examination = examine(&CpuEngine::<f32>::new(), &problem)?;
//! for finding in &examination.findings {
//!     assert_eq!(finding.failing, 0, "{}: {}", finding.claim.subject, finding.explanation);
//! }
//! # Ok::<(), sonicmoe::Error>(())
//! ```
//!
//! [`verify::suite()`] feeds it to everything there is: edge cases, the exact regime, laws, the museum of
//! public bugs. [`verify::FunctionEngine`] makes an engine of one function.
//!
//! # A map for auditors
//!
//! Where each equation and invariant is, and what holds it; a test checks that all of it exists.
//!
#![doc = include_str!("audit.md")]
#![warn(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]

pub mod activation;
pub mod case;
pub mod cli;
pub mod dump;
pub mod element;
pub mod engine;
pub mod error;
pub mod layout;
pub mod mutant;
pub mod oracle;
pub mod problem;
pub mod reference;
pub mod report;
pub mod routing;
pub mod score;
pub mod shape;
pub mod sonic;
pub mod verify;

pub use activation::{Activation, Gelu};
pub use element::{DType, Element, Real};
pub use engine::{Engine, Pass, Record, run};
pub use error::{Error, ErrorClass, Result};
pub use layout::GateLayout;
pub use mutant::Mutant;
pub use problem::{Biases, Gating, Problem, Router};
pub use routing::Convention;
pub use shape::{ExpertId, Shape, TokenId};
