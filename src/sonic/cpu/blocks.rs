//! How the work is cut: by the sizes alone, never by the number of threads, so that every sum has
//! one order and results have the same bits on any machine.

use std::ops::Range;

use crate::routing::Routing;
use crate::shape::ExpertId;

/// Rows of a tile at most: the operand on the right is packed again for every block of rows.
pub(super) const ROWS: usize = 512;

/// Columns of a tile at most. The packed block of the operand on the right is read again for every
/// four rows, so it has to stay in the cache beside what else is read.
pub(super) const COLUMNS: usize = 256;

/// Columns at a time of what is written only to be summed over each token's rows (y, dx̃): such a
/// slab stays small, and its memory serves the next.
pub(super) const SLAB: usize = 256;

/// Terms of a sum that one product takes at a time: in f32 blocks of 768 KiB and 384 KiB, and a
/// tile of 512 KiB, stay within a core's 2 MiB cache.
pub(super) const DEPTH: usize = 384;

/// Bytes between the rows of a transposed left operand from which on it is copied before it is
/// multiplied: a page for every row, and often the same cache sets, halve the product's speed.
pub(super) const FAR: usize = 4096;

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

/// Consecutive columns of y or dx̃: a kernel writes them, a combine sums them, and their memory is
/// free for the next.
#[derive(Clone, Debug)]
pub(super) struct Slab {
    /// All of its columns.
    pub columns: Range<usize>,
    /// The same in blocks.
    pub tiles: Vec<Range<usize>>,
}

/// `0..width` in slabs, or in one where somebody wants the `whole` tensor; its blocks are the same.
pub(super) fn slabs(width: usize, whole: bool) -> Vec<Slab> {
    let tiles: Vec<_> = blocks(width, SLAB).collect();
    let at_once = if whole { tiles.len().max(1) } else { 1 };
    let slab = |tiles: &[Range<usize>]| {
        let start = tiles.first().map_or(0, |tile| tile.start);
        Slab { columns: start..tiles.last().map_or(start, |tile| tile.end), tiles: tiles.to_vec() }
    };
    tiles.chunks(at_once).map(slab).collect()
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
    fn slabs_cover_every_column_once_in_the_same_blocks_as_the_whole() {
        for width in [1, 16, 255, 256, 257, 1000, 1024] {
            let tiles = |whole| slabs(width, whole).into_iter().flat_map(|slab| slab.tiles).collect::<Vec<_>>();
            assert_eq!(tiles(false), tiles(true));
            assert_eq!(slabs(width, true).len(), 1);
            let columns = slabs(width, false).into_iter().flat_map(|slab| slab.columns);
            assert_eq!(columns.collect::<Vec<_>>(), (0..width).collect::<Vec<_>>());
        }
    }

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
