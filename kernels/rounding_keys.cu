// Token rounding, step 1: every token's ranking key at every expert, expert by expert.
//
// A block turns a tile of 32 tokens × 128 experts: p as a warp reads the logits, the ranking score where the token
// chose the expert, and out by columns.
//
// grid     ⌈tokens / kTileTokens (32)⌉ · ⌈experts / kTileExperts (128)⌉, the experts of one token tile together
// block    256
// shared   0 dynamic
// cluster  1
#include "ranking.cuh"
#include "softmax.cuh"

using namespace sonic;

constexpr u32 kTileTokens = 32;
constexpr u32 kTileExperts = 128;
constexpr u32 kKeyThreads = 256;

extern "C" __global__ void __launch_bounds__(kKeyThreads)
rounding_keys(const f32* __restrict__ logits,                  // (tokens, experts) f32
              const u32* __restrict__ choice,                  // (tokens, k) u32
              const TokenSoftmax* __restrict__ token_softmax,  // (tokens)
              u32* __restrict__ keys,                          // (experts, tokens) u32, written whole
              u32 tokens,                                      // T, 0 allowed
              u32 experts,                                     // E ≥ 1
              u32 k,                                           // K ≥ 1
              u32 renormalized) {                              // 1: choosers rank by p over Σ p of their top-K
    __shared__ u32 tile[kTileExperts][kTileTokens + 1];
    const u32 expert_tiles = ceil_div(experts, kTileExperts);
    const u32 first_token = blockIdx.x / expert_tiles * kTileTokens;
    const u32 first_expert = blockIdx.x % expert_tiles * kTileExperts;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // Line 32j + i of the tile is expert 4i + j: without bank conflicts.
    for (u32 i = warp; i < kTileTokens; i += kKeyThreads / 32) {
        const u32 token = first_token + i;
        if (token >= tokens) break;
        const TokenSoftmax softmax = token_softmax[token];
        const Quad quad = load_row_quad(logits + u64(token) * experts, experts, first_expert + 4 * lane, 0.0f);
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            // A row that allows no choice may hold anything: no key of it may pass for a chooser's.
            const f32 p = softmax.probability(quad.v[j]);
            tile[32 * j + lane][i] = p <= 1.0f ? __float_as_uint(p) & ~kChose : 0;
        }
    }
    __syncthreads();
    for (u32 i = warp; i < kTileTokens; i += kKeyThreads / 32) {
        const u32 token = first_token + i;
        if (token >= tokens) break;
        const f32 sum = token_softmax[token].chosen;
        for (u32 rank = lane; rank < k; rank += 32) {
            const u32 expert = choice[u64(token) * k + rank] - first_expert;
            if (expert < kTileExperts) {
                u32& key = tile[32 * (expert % 4) + expert / 4][i];
                f32 score = __uint_as_float(key);
                if (renormalized && sum > 0.0f) score = __fdiv_rn(score, sum);
                key = __float_as_uint(score) | kChose;
            }
        }
    }
    __syncthreads();
    for (u32 i = warp; i < kTileExperts; i += kKeyThreads / 32) {
        const u32 expert = first_expert + 4 * (i % 32) + i / 32, token = first_token + lane;
        if (expert < experts && token < tokens) keys[u64(expert) * tokens + token] = tile[i][lane];
    }
}
