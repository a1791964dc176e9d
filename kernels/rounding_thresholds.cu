// Token rounding: how far down an expert has to look for the tokens that it did not win.
//
// An expert that goes up needs the best n < M of the tokens that did not choose it. Of every s-th token the block takes
// ln p; the bound is reached by n/s + 3√(n/s) + 4 of them, and so, if tokens come in no order, by more than n of all and
// by few more. Nothing depends on that: where too few or too many reach it, the expert looks at all (ranking.cuh).
//
// grid     experts
// block    kSamples (512)
// shared   0 dynamic
// cluster  1
#include "ranking.cuh"

using namespace sonic;

constexpr u32 kSamples = 512;

extern "C" __global__ void __launch_bounds__(kSamples)
rounding_thresholds(const f32* __restrict__ logits,                 // (tokens, experts) f32
                    const TokenSoftmax* __restrict__ token_softmax, // (tokens)
                    const u32* __restrict__ frequency,              // (experts) u32: tokens that chose each
                    const u32* __restrict__ expert_offsets,         // (experts + 1) u32, or null: any may yet go up
                    f32* __restrict__ bounds,                       // (experts) f32, written whole: ln p that candidates
                                                                    // reach, ∞ where none are needed
                    u32 tokens,                                     // T, 0 allowed
                    u32 experts,                                    // E ≥ 1
                    u32 tile) {                                     // M ≥ 1
    const u32 expert = blockIdx.x;
    const u32 f = frequency[expert];
    const u32 count = expert_offsets ? expert_offsets[expert + 1] - expert_offsets[expert] : upper_count(f, tile, tokens);
    const u32 needed = others_needed(count, f);
    if (needed == 0) {
        if (threadIdx.x == 0) bounds[expert] = infinity();
        return;
    }
    const u32 stride = ceil_div(tokens, kSamples);
    const u32 share = ceil_div(needed, stride);
    const u32 wanted = share + 3 * u32(__fsqrt_rn(f32(share))) + 4;
    const u64 token = u64(threadIdx.x) * stride;
    // Minus ln p, so that the bits of what is not negative order as the numbers; whoever chose the expert, and what is no
    // number, stands behind all.
    u32 depth = kNoKey;
    if (token < tokens) {
        const TokenSoftmax softmax = token_softmax[token];
        const f32 logit = logits[token * experts + expert];
        const f32 below = softmax.log_total() - __fadd_rn(logit, -softmax.largest);
        if (logit < softmax.smallest && below >= 0.0f) depth = __float_as_uint(below);
    }
    // The smallest depth that enough stay above, bit by bit; the lowest bits of a sample say nothing.
    constexpr u32 kLastBit = 14;
    u32 bound = 0;
#pragma unroll 1
    for (u32 bit = 31; bit-- > kLastBit;) {
        const u32 trial = bound | ((1u << bit) - 1);
        if (u32(__syncthreads_count(depth <= trial)) < wanted) bound |= 1u << bit;
    }
    // Too few tokens at all leave all bits set, which is no number: −∞, and every token is a candidate. So is it where p
    // comes near what f32 holds: bits of subnormal numbers say little of their logarithms.
    const f32 deepest = __uint_as_float(bound | ((1u << kLastBit) - 1));
    if (threadIdx.x == 0) bounds[expert] = deepest < 80.0f ? -deepest : -infinity();
}
