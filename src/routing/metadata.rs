//! Routing metadata: the pairs in expert order, by a stable counting sort, and the ways back.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::shape::{ExpertId, TokenId};

/// A checked routing of T tokens to E experts, with the orders that the kernels read.
///
/// A **pair** is (token, expert); pairs keep the order in which they were given (top-K gives
/// t·K + rank). A **row** is a pair's place in expert order: the rows of expert e are
/// `expert_offsets[e]..expert_offsets[e + 1]`, in pair order inside an expert (the sort is stable).
/// Row r of h, a, y, dh, a′ and dx_expanded belongs to token `row_token[r]`.
///
/// ```
/// use sonicmoe::{ExpertId, TokenId, routing::Routing};
/// // Token 0 goes to experts 2 and 0, token 1 to expert 2; expert 1 gets none.
/// let pairs = [(0, 2), (0, 0), (1, 2)].map(|(t, e)| (TokenId(t), ExpertId(e)));
/// let routing = Routing::new(2, 3, pairs)?;
/// assert_eq!(routing.expert_offsets(), [0, 1, 1, 3]);
/// assert_eq!(routing.row_pair(), [1, 0, 2]);
/// assert_eq!(routing.rows_of_token(TokenId(0)), [1, 0]);
/// # Ok::<(), sonicmoe::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routing {
    tokens: usize,
    experts: usize,
    pair_token: Vec<TokenId>,
    pair_expert: Vec<ExpertId>,
    expert_offsets: Vec<u32>,
    row_token: Vec<TokenId>,
    row_pair: Vec<u32>,
    pair_row: Vec<u32>,
    token_offsets: Vec<u32>,
    token_rows: Vec<u32>,
}

impl Routing {
    /// Checks the pairs and sorts them.
    ///
    /// # Errors
    /// An id out of range, a pair that appears twice, or more than `i32::MAX` pairs, tokens or
    /// experts (device kernels index rows with 32 bits).
    pub fn new(tokens: usize, experts: usize, pairs: impl IntoIterator<Item = (TokenId, ExpertId)>) -> Result<Self> {
        let (mut pair_token, mut pair_expert): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        // Lists that grew hold more than their entries; what a layer keeps is to be what it states.
        pair_token.shrink_to_fit();
        pair_expert.shrink_to_fit();
        let routed = pair_token.len();
        for (what, value) in [("T", tokens), ("E", experts), ("R", routed)] {
            if value > i32::MAX as usize {
                return Err(Error::size(what, value, "routing metadata hold 32-bit indices, up to 2³¹ − 1"));
            }
        }
        for (pair, (token, expert)) in pair_token.iter().zip(&pair_expert).enumerate() {
            if token.index() >= tokens {
                return Err(Error::pair_out_of_range(pair, "token", token.0.into(), tokens));
            }
            if expert.index() >= experts {
                return Err(Error::pair_out_of_range(pair, "expert", expert.0.into(), experts));
            }
        }

        let (expert_offsets, row_pair) = counting_sort(experts, pair_expert.iter().map(|expert| expert.index()));
        let mut pair_row = vec![0; routed];
        for (row, &pair) in row_pair.iter().enumerate() {
            pair_row[pair as usize] = row as u32;
        }
        let (token_offsets, token_pairs) = counting_sort(tokens, pair_token.iter().map(|token| token.index()));
        let routing = Self {
            tokens,
            experts,
            row_token: row_pair.iter().map(|&pair| pair_token[pair as usize]).collect(),
            token_rows: token_pairs.iter().map(|&pair| pair_row[pair as usize]).collect(),
            pair_token,
            pair_expert,
            expert_offsets,
            row_pair,
            pair_row,
            token_offsets,
        };
        routing.refuse_duplicates()?;
        Ok(routing)
    }

    /// The stable sort puts equal pairs side by side in the order of tokens within an expert only
    /// if the list was token-sorted, so look instead at each token's few experts.
    fn refuse_duplicates(&self) -> Result<()> {
        let mut seen_at = vec![u32::MAX; self.experts];
        for token in 0..self.tokens {
            let rows = self.rows_of_token(TokenId(token as u32));
            for &row in rows {
                let pair = self.row_pair[row as usize];
                let expert = self.pair_expert[pair as usize].index();
                let first = seen_at[expert];
                if first != u32::MAX && self.pair_token[first as usize].index() == token {
                    return Err(Error::duplicate_pair(token, expert, first as usize, pair as usize));
                }
                seen_at[expert] = pair;
            }
        }
        Ok(())
    }

    /// T.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// E.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// R, the number of pairs.
    pub fn routed(&self) -> usize {
        self.pair_token.len()
    }

    /// (R) the token of each pair, in the order given.
    pub fn pair_token(&self) -> &[TokenId] {
        &self.pair_token
    }

    /// (R) the expert of each pair, in the order given.
    pub fn pair_expert(&self) -> &[ExpertId] {
        &self.pair_expert
    }

    /// (E + 1) where each expert's rows begin; the last entry is R.
    pub fn expert_offsets(&self) -> &[u32] {
        &self.expert_offsets
    }

    /// (R) the token of each row: what a gather reads.
    pub fn row_token(&self) -> &[TokenId] {
        &self.row_token
    }

    /// (R) the pair that stands at each row.
    pub fn row_pair(&self) -> &[u32] {
        &self.row_pair
    }

    /// (R) the row of each pair, the inverse of [`Routing::row_pair`].
    pub fn pair_row(&self) -> &[u32] {
        &self.pair_row
    }

    /// (T + 1) where each token's entries in [`Routing::token_rows`] begin.
    pub fn token_offsets(&self) -> &[u32] {
        &self.token_offsets
    }

    /// (R) the rows of each token in pair order: the order in which combines sum.
    pub fn token_rows(&self) -> &[u32] {
        &self.token_rows
    }

    /// The rows of expert `expert`; empty for an expert without tokens.
    ///
    /// # Panics
    /// If `expert` ≥ E.
    #[track_caller]
    pub fn rows_of_expert(&self, expert: ExpertId) -> Range<usize> {
        self.expert_offsets[expert.index()] as usize..self.expert_offsets[expert.index() + 1] as usize
    }

    /// (E) R_e, the number of tokens of each expert.
    pub fn tokens_per_expert(&self) -> Vec<usize> {
        self.expert_offsets.windows(2).map(|ends| (ends[1] - ends[0]) as usize).collect()
    }

    /// The rows of one token, in pair order.
    ///
    /// # Panics
    /// If `token` ≥ T.
    #[track_caller]
    pub fn rows_of_token(&self, token: TokenId) -> &[u32] {
        let range = self.token_offsets[token.index()] as usize..self.token_offsets[token.index() + 1] as usize;
        &self.token_rows[range]
    }

    /// Values given by pair, put into row order.
    ///
    /// # Panics
    /// If there are not R values.
    #[track_caller]
    pub fn to_rows<V: Copy>(&self, by_pair: &[V]) -> Vec<V> {
        assert_eq!(by_pair.len(), self.routed(), "one value per pair");
        self.row_pair.iter().map(|&pair| by_pair[pair as usize]).collect()
    }

    /// Values by row, put into pair order.
    ///
    /// # Panics
    /// If there are not R values.
    #[track_caller]
    pub fn to_pairs<V: Copy>(&self, by_row: &[V]) -> Vec<V> {
        assert_eq!(by_row.len(), self.routed(), "one value per row");
        self.pair_row.iter().map(|&row| by_row[row as usize]).collect()
    }

    /// Bytes of all its lists, 4 an entry: what a layer that keeps this routing keeps of it.
    pub fn bytes(&self) -> usize {
        let Self {
            tokens: _,
            experts: _,
            pair_token,
            pair_expert,
            expert_offsets,
            row_token,
            row_pair,
            pair_row,
            token_offsets,
            token_rows,
        } = self;
        size_of_val(&pair_token[..])
            + size_of_val(&pair_expert[..])
            + size_of_val(&expert_offsets[..])
            + size_of_val(&row_token[..])
            + size_of_val(&row_pair[..])
            + size_of_val(&pair_row[..])
            + size_of_val(&token_offsets[..])
            + size_of_val(&token_rows[..])
    }
}

/// Offsets of each bucket, and the items in bucket order; items of one bucket keep their order.
fn counting_sort(buckets: usize, bucket_of: impl Iterator<Item = usize> + Clone) -> (Vec<u32>, Vec<u32>) {
    let mut offsets = vec![0u32; buckets + 1];
    for bucket in bucket_of.clone() {
        offsets[bucket + 1] += 1;
    }
    for bucket in 0..buckets {
        offsets[bucket + 1] += offsets[bucket];
    }
    let mut next = offsets[..buckets].to_vec();
    let mut order = vec![0u32; offsets[buckets] as usize];
    for (item, bucket) in bucket_of.enumerate() {
        order[next[bucket] as usize] = item as u32;
        next[bucket] += 1;
    }
    (offsets, order)
}
