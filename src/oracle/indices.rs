//! Index audit: the largest flat index of every buffer against the type that holds it.
//!
//! A flat index is row · width + column. On the CPU it is a `usize`. In the CUDA kernels ids and rows
//! are 32-bit, and every product of a row with a width is widened first (`i64(row) * stride` and the
//! like, see `kernels/sm90/row_box.cuh`), TMA coordinates are 32-bit each; so a buffer has two limits:
//! its flat index in 63 bits, and each of its axes in 31.

use std::fmt;

use crate::activation::Activation;
use crate::shape::Shape;

/// A type that holds an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IndexType {
    /// `i32`: ids, rows and columns in routing metadata and in kernels.
    I32,
    /// `i64`: flat indices in kernels.
    I64,
    /// `usize` of this machine, of which an allocation can have half.
    Usize,
}

impl IndexType {
    /// The largest index that it holds.
    pub fn largest(self) -> u128 {
        match self {
            Self::I32 => i32::MAX as u128,
            Self::I64 => i64::MAX as u128,
            Self::Usize => isize::MAX as u128,
        }
    }
}

impl fmt::Display for IndexType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::Usize => "usize",
        })
    }
}

/// One index into one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LargestIndex {
    /// The buffer.
    pub buffer: &'static str,
    /// What is indexed: a flat index, or one axis.
    pub of: &'static str,
    /// The largest value that it takes; 0 in an empty buffer.
    pub value: u128,
    /// The type that holds it.
    pub held_by: IndexType,
}

impl LargestIndex {
    /// Whether the type holds it.
    pub fn fits(&self) -> bool {
        self.value <= self.held_by.largest()
    }
}

impl fmt::Display for LargestIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { buffer, of, value, held_by } = self;
        write!(f, "{of} of {buffer} reaches {value}, {held_by} holds up to {}", held_by.largest())
    }
}

/// Every index of a layer of this shape with R = `routed` pairs, in the CUDA kernels (`flat`
/// [`IndexType::I64`]) or on the CPU ([`IndexType::Usize`]).
///
/// ```
/// use sonicmoe::Activation;
/// use sonicmoe::oracle::indices::{IndexType, audit};
///
/// let shape = "1048576,8,256,8,8".parse()?;
/// let indices = audit(shape, 1 << 23, Activation::SwiGlu, IndexType::I64);
/// assert!(indices.iter().all(|index| index.fits()));
/// // The flat index of h needs more than 32 bits.
/// let h = indices.iter().find(|index| index.buffer == "h" && index.of == "flat index").unwrap();
/// assert_eq!(h.value, (1u128 << 32) - 1);
/// # Ok::<(), sonicmoe::Error>(())
/// ```
pub fn audit(shape: Shape, routed: usize, activation: Activation, flat: IndexType) -> Vec<LargestIndex> {
    let Shape { t, d, n, e, .. } = shape;
    let [t, d, n, e, r] = [t, d, n, e, routed].map(|size| size as u128);
    let width = if activation.gated() { 2 * n } else { n };
    let buffers: [(&'static str, [u128; 3]); 20] = [
        ("x", [1, t, d]),
        ("dout", [1, t, d]),
        ("o", [1, t, d]),
        ("dx", [1, t, d]),
        ("w1", [e, width, d]),
        ("dw1", [e, width, d]),
        ("w2", [e, d, n]),
        ("dw2", [e, d, n]),
        ("b1", [1, e, width]),
        ("db1", [1, e, width]),
        ("b2", [1, e, d]),
        ("db2", [1, e, d]),
        ("h", [1, r, width]),
        ("dh", [1, r, width]),
        ("a", [1, r, n]),
        ("a_prime", [1, r, n]),
        ("y", [1, r, d]),
        ("dx_expanded", [1, r, d]),
        ("ds", [1, 1, r]),
        ("router_logits", [1, t, e]),
    ];
    let last = |size: u128| size.saturating_sub(1);
    let mut indices = Vec::new();
    for (buffer, axes) in buffers {
        let elements = axes[0].saturating_mul(axes[1]).saturating_mul(axes[2]);
        indices.push(LargestIndex { buffer, of: "flat index", value: last(elements), held_by: flat });
        let longest = axes.into_iter().max().unwrap_or(0);
        indices.push(LargestIndex { buffer, of: "longest axis", value: last(longest), held_by: IndexType::I32 });
    }
    indices
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::Routing;

    fn too_large(shape: &str, routed: usize, flat: IndexType) -> Vec<&'static str> {
        let indices = audit(shape.parse().unwrap(), routed, Activation::SwiGlu, flat);
        indices.into_iter().filter(|index| !index.fits()).map(|index| index.buffer).collect()
    }

    #[test]
    fn the_papers_largest_layers_and_one_beyond_2_to_the_31_elements_fit() {
        for (shape, routed) in [("24576,1536,256,128,8", 24576 * 8), ("1048576,8,256,8,8", 1 << 23), ("0,8,8,1,1", 0)] {
            assert!(too_large(shape, routed, IndexType::I64).is_empty(), "{shape}");
            assert!(too_large(shape, routed, IndexType::Usize).is_empty(), "{shape}");
        }
    }

    /// T, d, n, E = 3, 5, 7, 2 and R = 4, without a gate and with one.
    #[test]
    fn the_last_element_of_every_buffer_has_the_largest_flat_index() {
        for (activation, width) in [(Activation::Relu, 7), (Activation::SwiGlu, 14)] {
            let indices = audit("3,5,7,2,1".parse().unwrap(), 4, activation, IndexType::I64);
            let elements = |buffer: &str| match buffer {
                "x" | "dout" | "o" | "dx" => 3 * 5,
                "w1" | "dw1" => 2 * width * 5,
                "w2" | "dw2" => 2 * 5 * 7,
                "b1" | "db1" => 2 * width,
                "b2" | "db2" => 2 * 5,
                "h" | "dh" => 4 * width,
                "a" | "a_prime" => 4 * 7,
                "y" | "dx_expanded" => 4 * 5,
                "ds" => 4,
                "router_logits" => 3 * 2,
                other => panic!("{other}"),
            };
            let flat: Vec<_> = indices.iter().filter(|index| index.of == "flat index").collect();
            assert_eq!(flat.len(), 20);
            for index in flat {
                assert_eq!(index.value, elements(index.buffer) - 1, "{index}");
            }
        }
    }

    #[test]
    fn a_flat_index_of_32_bits_is_found_too_small_where_it_is() {
        // a has 2³¹ elements, and the last of them the index 2³¹ − 1.
        assert_eq!(too_large("1048576,8,256,8,8", 1 << 23, IndexType::I32), ["h", "dh"]);
        assert_eq!(too_large("1048576,8,256,8,8", (1 << 23) + 1, IndexType::I32), ["h", "dh", "a", "a_prime"]);
    }

    #[test]
    fn rows_that_32_bits_do_not_count_are_found_and_the_routing_refuses_them() {
        let routed = 1usize << 32;
        let found = too_large("4294967296,8,8,1,1", routed, IndexType::I64);
        assert!(found.contains(&"h") && found.contains(&"x"), "{found:?}");
        assert!(Routing::new(routed, 1, []).is_err());
    }
}
