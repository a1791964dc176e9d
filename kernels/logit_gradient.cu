// dlogits from ds, and dlogits in three bf16 parts for the products that follow.
//
// With s the scores, g = ds, and ĝ holding g at the token's pairs and 0 elsewhere:
//
//   sparse           s(g − Σ gs) at the pairs, 0 elsewhere
//   dense            p(ĝ − Σ ĝp) everywhere
//   added ones raw   p(ĝ − Σ ĝp) everywhere, ĝ only at pairs that the token did not choose, plus q(g′ − Σ g′q) at its
//                    top-K: q their softmax, g′ = g where the pair was kept, else 0
//
// A warp owns a token: what every expert gets first, then what the pairs get instead. dlogits = high + middle + low
// exactly, each the bf16 nearest to what is left (but for what lies below 2⁻¹³³).
//
// grid     ⌈tokens / kTokensPerBlock (8)⌉
// block    32 · kTokensPerBlock (256)
// shared   0 dynamic
// cluster  1
#include "softmax.cuh"

using namespace sonic;

constexpr u32 kTokensPerBlock = 8;

constexpr u32 kSparse = 0;
constexpr u32 kDense = 1;

// One row of dlogits and its parts.
struct GradientRow {
    f32* dlogits;
    bf16* parts;
    u32 experts;
    u32 padded;

    __device__ __forceinline__ void split(f32 v, bf16 (&part)[3]) const {
        part[0] = to_bf16(v);
        const f32 left = __fadd_rn(v, -to_f32(part[0]));
        part[1] = to_bf16(left);
        part[2] = to_bf16(__fadd_rn(left, -to_f32(part[1])));
    }

    __device__ __forceinline__ void set(u32 expert, f32 v) const {
        bf16 part[3];
        split(v, part);
        dlogits[expert] = v;
#pragma unroll
        for (u32 i = 0; i < 3; ++i) parts[i * padded + expert] = part[i];
    }

    // Four neighbours; beyond the experts only parts, which are 0 there.
    __device__ __forceinline__ void set_quad(u32 first, Quad quad) const {
        store_row_quad(dlogits, experts, first, quad);
        u32 pair[3][2];
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            bf16 low[3], high[3];
            split(quad.v[2 * j], low);
            split(quad.v[2 * j + 1], high);
#pragma unroll
            for (u32 i = 0; i < 3; ++i) pair[i][j] = u32(low[i].bits) | u32(high[i].bits) << 16;
        }
#pragma unroll
        for (u32 i = 0; i < 3; ++i) {
            u32* const at = reinterpret_cast<u32*>(parts + i * padded + first);
            at[0] = pair[i][0];
            at[1] = pair[i][1];
        }
    }
};

__device__ __forceinline__ f32 warp_sum(f32 v) {
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(kAllLanes, v, distance);
    return v;
}

extern "C" __global__ void __launch_bounds__(32 * kTokensPerBlock)
logit_gradient(const f32* __restrict__ logits,                 // (tokens, experts) f32; not read if sparse
               const u32* __restrict__ choice,                 // (tokens, k) u32; not read unless added ones are raw
               const TokenSoftmax* __restrict__ token_softmax, // (tokens); not read if sparse
               const u32* __restrict__ token_offsets,          // (tokens + 1) u32
               const u32* __restrict__ token_rows,             // u32
               const u32* __restrict__ pair_expert,            // u32, the expert of each entry of token_rows
               const f32* __restrict__ scores,                 // f32 by row
               const f32* __restrict__ ds,                     // f32 by row
               f32* __restrict__ dlogits,                      // (tokens, experts) f32, written whole
               bf16* __restrict__ parts,                       // (tokens, 3, padded) bf16, written whole
               u32 tokens,                                     // T, 0 allowed
               u32 experts,                                    // E ≥ 1
               u32 padded,                                     // E rounded up to a multiple of 8
               u32 k, u32 form) {
    const u32 lane = threadIdx.x % 32;
    const u64 token = u64(blockIdx.x) * kTokensPerBlock + threadIdx.x / 32;
    if (token >= tokens) return;
    const f32* const row = logits + token * experts;
    const GradientRow out{dlogits + token * experts, parts + token * 3 * padded, experts, padded};
    const u32 begin = token_offsets[token], count = token_offsets[token + 1] - begin;

    if (form == kSparse) {
        for (u32 first = 4 * lane; first < padded; first += 128) out.set_quad(first, Quad{{0.0f, 0.0f, 0.0f, 0.0f}});
        f32 sum = 0.0f;
        for (u32 pair = lane; pair < count; pair += 32) {
            const u32 at = token_rows[begin + pair];
            sum = __fmaf_rn(ds[at], scores[at], sum);
        }
        sum = warp_sum(sum);
        __syncwarp();
        for (u32 pair = lane; pair < count; pair += 32) {
            const u32 at = token_rows[begin + pair];
            const f32 s = scores[at], g = ds[at];
            // One pair with the score 1: exactly 0.
            out.set(pair_expert[begin + pair], __fmul_rn(s, __fadd_rn(g, -sum)));
        }
        return;
    }

    const TokenSoftmax softmax = token_softmax[token];
    u32 own[2] = {kAllLanes, kAllLanes};
    f32 q[2] = {0.0f, 0.0f}, kept[2] = {0.0f, 0.0f};
    if (form != kDense) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half)
            if (32 * half + lane < k) {
                own[half] = choice[token * k + 32 * half + lane];
                q[half] = exponential(__fadd_rn(row[own[half]], -softmax.largest));
            }
        const f32 total = sum_of_ranks(q[0], q[1]);
        q[0] = __fdiv_rn(q[0], total);
        q[1] = __fdiv_rn(q[1], total);
    }
    // Σ ĝp over the pairs that go by p, the same in every lane.
    f32 sum = 0.0f;
    for (u32 first = 0; first < count; first += 32) {
        const u32 pairs = min_of(count - first, 32u);
        u32 expert = kAllLanes;
        f32 g = 0.0f;
        if (lane < pairs) {
            expert = pair_expert[begin + first + lane];
            g = ds[token_rows[begin + first + lane]];
        }
        bool chosen = false;
        if (form != kDense)
            for (u32 pair = 0; pair < pairs; ++pair) {
                const u32 of_pair = __shfl_sync(kAllLanes, expert, pair);
                const f32 g_of_pair = __shfl_sync(kAllLanes, g, pair);
                const bool is_own[2] = {own[0] == of_pair, own[1] == of_pair};
#pragma unroll
                for (u32 half = 0; half < 2; ++half)
                    if (is_own[half]) kept[half] = g_of_pair;
                const bool any = __any_sync(kAllLanes, is_own[0] || is_own[1]);
                if (lane == pair) chosen = any;
            }
        if (lane < pairs && !chosen) sum = __fmaf_rn(g, softmax.probability(row[expert]), sum);
    }
    sum = warp_sum(sum);
    for (u32 first = 4 * lane; first < padded; first += 128) {
        Quad quad = load_row_quad(row, experts, first, 0.0f);
#pragma unroll
        for (u32 j = 0; j < 4; ++j)
            quad.v[j] = first + j < experts ? __fmul_rn(softmax.probability(quad.v[j]), -sum) : 0.0f;
        out.set_quad(first, quad);
    }
    __syncwarp();
    for (u32 pair = lane; pair < count; pair += 32) {
        const u32 expert = pair_expert[begin + pair];
        out.set(expert, __fmul_rn(softmax.probability(row[expert]), __fadd_rn(ds[token_rows[begin + pair]], -sum)));
    }
    if (form == kDense) return;
    // Of the pairs just set, those of the top-K are set again.
    __syncwarp();
    const f32 sum_over_top_k = warp_sum(__fmaf_rn(kept[1], q[1], __fmul_rn(kept[0], q[0])));
#pragma unroll
    for (u32 half = 0; half < 2; ++half)
        if (32 * half + lane < k) {
            const f32 raw = __fmul_rn(softmax.probability(row[own[half]]), -sum);
            out.set(own[half], __fadd_rn(raw, __fmul_rn(q[half], __fadd_rn(kept[half], -sum_over_top_k))));
        }
}
