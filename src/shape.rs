//! Sizes of a layer, and the ids that must not be mixed up.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// The five sizes of a top-K layer, in the paper's letters.
///
/// ```
/// use sonicmoe::Shape;
/// let shape: Shape = "1024,2048,512,32,4".parse()?;
/// assert_eq!(shape.routed(), 4096);
/// assert_eq!(shape.to_string(), "1024,2048,512,32,4");
/// # Ok::<(), sonicmoe::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// T, tokens; may be 0.
    pub t: usize,
    /// d, model width.
    pub d: usize,
    /// n, expert width.
    pub n: usize,
    /// E, experts.
    pub e: usize,
    /// K, experts per token.
    pub k: usize,
}

impl Shape {
    /// A shape with d, n, E, K ≥ 1 and K ≤ E.
    ///
    /// # Errors
    /// A size of 0 other than T, or K > E.
    pub fn new(t: usize, d: usize, n: usize, e: usize, k: usize) -> Result<Self> {
        for (what, value) in [("d", d), ("n", n), ("E", e)] {
            if value == 0 {
                return Err(Error::size(what, value, "it must be at least 1"));
            }
        }
        if k == 0 || k > e {
            return Err(Error::top_k(k, e));
        }
        Ok(Self { t, d, n, e, k })
    }

    /// R = T·K, the routed pairs of top-K routing.
    pub fn routed(self) -> usize {
        self.t * self.k
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { t, d, n, e, k } = self;
        f.pad(&format!("{t},{d},{n},{e},{k}"))
    }
}

impl FromStr for Shape {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let form = |reason: String| Error::parse("shape", text, reason);
        let sizes = text
            .split(',')
            .map(|size| size.trim().parse::<usize>().map_err(|_| form(format!("`{size}` is no size; write T,d,n,E,K"))))
            .collect::<Result<Vec<_>>>()?;
        match sizes[..] {
            [t, d, n, e, k] => Self::new(t, d, n, e, k),
            _ => Err(form(format!("{} sizes were given; write five: T,d,n,E,K", sizes.len()))),
        }
    }
}

macro_rules! id {
    ($name:ident, $what:literal) => {
        #[doc = concat!("The index of ", $what, ".")]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// As an index.
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(TokenId, "a token, 0 ≤ id < T");
id!(ExpertId, "an expert, 0 ≤ id < E");
