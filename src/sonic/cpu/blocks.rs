//! How the work is cut: by the sizes alone, never by the number of threads, so that every sum has
//! one order and results have the same bits on any machine.

use std::ops::Range;

use crate::routing::Routing;
use crate::shape::ExpertId;

/// Rows of a tile at most.
pub(super) const ROWS: usize = 256;

/// Columns of a tile at most. Rows are gathered again for every block of columns, so wide.
pub(super) const COLUMNS: usize = 512;

/// Terms of a sum that one product takes at a time: in f32 the operands' blocks of 512 KiB and
/// 1 MiB and the tile of 512 KiB stay within a core's 2 MiB cache.
pub(super) const DEPTH: usize = 512;

/// Tokens that a combine takes at a time.
pub(super) const TOKENS: usize = 64;

/// Sizes of blocks are multiples of it where possible: whole vectors, and gate and up stay together.
const GRANULE: usize = 16;

/// `0..total` in blocks of about equal size, none longer than `limit` (a multiple of 16).
pub(super) fn blocks(total: usize, limit: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let count = total.div_ceil(limit).max(1);
    let size = total.div_ceil(count).max(1).next_multiple_of(GRANULE);
    (0..total).step_by(size).map(move |start| start..total.min(start + size))
}

/// Some rows of one expert.
#[derive(Clone, Debug)]
pub(super) struct RowBlock {
    /// The expert.
    pub expert: usize,
    /// Rows, counted over all experts.
    pub rows: Range<usize>,
}

/// The rows of every expert in blocks, in row order; an expert without tokens has none.
pub(super) fn row_blocks(routing: &Routing) -> Vec<RowBlock> {
    (0..routing.experts())
        .flat_map(|expert| {
            let rows = routing.rows_of_expert(ExpertId(expert as u32));
            let start = rows.start;
            blocks(rows.len(), ROWS).map(move |block| RowBlock { expert, rows: start + block.start..start + block.end })
        })
        .collect()
}

/// The tokens in blocks of `limit`.
pub(super) fn token_blocks(tokens: usize, limit: usize) -> Vec<Range<usize>> {
    blocks(tokens, limit).collect()
}

/// Cuts `values` into consecutive pieces of the given lengths.
pub(super) fn split<V>(mut values: &mut [V], lengths: impl IntoIterator<Item = usize>) -> Vec<&mut [V]> {
    lengths
        .into_iter()
        .map(|length| {
            let (piece, rest) = std::mem::take(&mut values).split_at_mut(length);
            values = rest;
            piece
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_everything_once_and_respect_the_limit() {
        for total in [0, 1, 2, 15, 16, 17, 255, 256, 257, 258, 511, 512, 513, 1000, 1025] {
            for limit in [16, 64, 256] {
                let all: Vec<_> = blocks(total, limit).collect();
                assert_eq!(all.iter().cloned().flatten().collect::<Vec<_>>(), (0..total).collect::<Vec<_>>());
                assert!(all.iter().all(|block| !block.is_empty() && block.len() <= limit), "{total} {limit} {all:?}");
            }
        }
    }
}
