// Token rounding: of every expert that goes up the tokens that may be among those it takes without having been chosen.
//
// A block has 256 tokens and 128 experts, a warp 32 of the tokens, a lane four of the experts, whose bounds it holds and
// whose bits it collects. A token's smallest chosen logit is among the hits, as others may tie with it: who ranks knows its
// choosers.
//
// grid     ⌈tokens / 256⌉ · ⌈experts / 128⌉, the experts of one token tile together
// block    256
// shared   0 dynamic
// cluster  1
#include "ranking.cuh"

using namespace sonic;

constexpr u32 kWarps = 8;
// Tokens whose logits are on their way together.
constexpr u32 kInFlight = 4;
constexpr u32 kExpertsPerBlock = 128;

extern "C" __global__ void __launch_bounds__(32 * kWarps)
rounding_candidates(const f32* __restrict__ logits,                 // (tokens, experts) f32
                    const TokenSoftmax* __restrict__ token_softmax, // (tokens)
                    const f32* __restrict__ bounds,                 // (experts) f32: ln p to be reached; ∞: no candidates
                    u32* __restrict__ candidates,                   // (experts, words) u32, written whole where there is a
                                                                    // bound: a bit for each token
                    u32 tokens,                                     // T, 0 allowed
                    u32 experts,                                    // E ≥ 1
                    u32 words) {                                    // ⌈tokens / 256⌉ · 8
    __shared__ u32 bits[kExpertsPerBlock][kWarps + 1];
    const u32 expert_tiles = ceil_div(experts, kExpertsPerBlock);
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 token_tile = blockIdx.x / expert_tiles, tile_expert = blockIdx.x % expert_tiles * kExpertsPerBlock;
    const u32 first_token = (token_tile * kWarps + warp) * 32;
    const u32 first_expert = tile_expert + 4 * lane;
    f32 bound[4];
    bool any = false;
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
        bound[j] = first_expert + j < experts ? bounds[first_expert + j] : infinity();
        any |= bound[j] < infinity();
        // Beyond the largest of all differences.
        if (!(bound[j] < infinity())) bound[j] = 1.0f;
    }
    if (!__any_sync(kAllLanes, any)) return;

    u32 word[4] = {};
#pragma unroll 1
    for (u32 base = 0; base < 32; base += kInFlight) {
        if (first_token + base >= tokens) break;
        Quad quads[kInFlight];
        TokenSoftmax softmax[kInFlight];
#pragma unroll
        for (u32 i = 0; i < kInFlight; ++i) {
            const u32 token = min_of(first_token + base + i, tokens - 1);
            quads[i] = load_row_quad(logits + u64(token) * experts, experts, first_expert, -infinity());
            softmax[i] = token_softmax[token];
        }
#pragma unroll
        for (u32 i = 0; i < kInFlight; ++i) {
            const f32 log_total = softmax[i].log_total();
            const u32 bit = first_token + base + i < tokens ? 1u << (base + i) : 0;
#pragma unroll
            for (u32 j = 0; j < 4; ++j)
                if (__fadd_rn(quads[i].v[j], -softmax[i].largest) >= bound[j] + log_total &&
                    quads[i].v[j] <= softmax[i].smallest)
                    word[j] |= bit;
        }
    }
#pragma unroll
    for (u32 j = 0; j < 4; ++j) bits[4 * lane + j][warp] = word[j];
    __syncthreads();
    const u32 in_tile = threadIdx.x / 2, first_word = threadIdx.x % 2 * 4;
    if (tile_expert + in_tile < experts) {
        const u32* const own = bits[in_tile] + first_word;
        *reinterpret_cast<uint4*>(candidates + u64(tile_expert + in_tile) * words + token_tile * kWarps + first_word) =
            uint4{own[0], own[1], own[2], own[3]};
    }
}
