// Token rounding: the scores of the pairs that are left, by row: the softmax over the pairs themselves.
//
// A warp owns a token.
//
// grid     ⌈tokens / kTokensPerBlock (8)⌉
// block    32 · kTokensPerBlock (256)
// shared   0 dynamic
// cluster  1
#include "softmax.cuh"

using namespace sonic;

constexpr u32 kTokensPerBlock = 8;

extern "C" __global__ void __launch_bounds__(32 * kTokensPerBlock)
rounding_kept_scores(const f32* __restrict__ logits,         // (tokens, experts) f32
                     const u32* __restrict__ token_offsets,  // (tokens + 1) u32
                     const u32* __restrict__ token_rows,     // u32
                     const u32* __restrict__ pair_expert,    // u32, the expert of each entry of token_rows
                     f32* __restrict__ scores,               // f32 by row
                     u32 tokens,                             // T, 0 allowed
                     u32 experts) {
    const u32 lane = threadIdx.x % 32;
    const u64 token = u64(blockIdx.x) * kTokensPerBlock + threadIdx.x / 32;
    if (token >= tokens) return;
    const f32* const row = logits + token * experts;
    const u32 begin = token_offsets[token], count = token_offsets[token + 1] - begin;
    f32 largest = -infinity();
    for (u32 pair = lane; pair < count; pair += 32) largest = fmaxf(largest, row[pair_expert[begin + pair]]);
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    f32 sum = 0.0f;
    for (u32 first = 4 * lane; first < count; first += 128)
        for (u32 pair = first; pair < min_of(first + 4, count); ++pair)
            sum = __fadd_rn(sum, exponential(__fadd_rn(row[pair_expert[begin + pair]], -largest)));
    sum = sum_of_lanes(sum);
    for (u32 pair = lane; pair < count; pair += 32) {
        const f32 score = __fdiv_rn(exponential(__fadd_rn(row[pair_expert[begin + pair]], -largest)), sum);
        // Only masked experts: nothing to divide by.
        scores[token_rows[begin + pair]] = largest > -infinity() && score <= 1.0f ? score : 0.0f;
    }
}
