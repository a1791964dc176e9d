// A token's experts in order: keys of logits, and the choice of the best one by one, which any row allows.
#pragma once
#include "softmax.cuh"

namespace sonic {

// Conventions of the scores.
constexpr u32 kSoftmaxOverTopK = 0;
constexpr u32 kTopKOverSoftmax = 1;
// 2: p over Σ p of the chosen.

// Instead of a token: each of them allows a choice.
constexpr u32 kAllUsable = 0xffffffffu;

// Integers in the order of the numbers; −0 and +0 are one.
__device__ __forceinline__ i32 ordered(f32 logit) {
    const i32 bits = i32(__float_as_uint(__fadd_rn(logit, 0.0f)));
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

__device__ __forceinline__ f32 logit_of(i32 order) {
    return __uint_as_float(u32(order ^ ((order >> 31) & 0x7fffffff)));
}

// Larger logits first, then smaller ids. No key of a number is 0.
__device__ __forceinline__ u64 key_of(f32 logit, u32 expert) {
    return u64(u32(ordered(logit)) ^ 0x80000000u) << 32 | u32(~expert);
}

__device__ __forceinline__ f32 logit_of_key(u64 key) { return logit_of(i32(u32(key >> 32) ^ 0x80000000u)); }
__device__ __forceinline__ u32 expert_of_key(u64 key) { return ~u32(key); }

// One token's logits, lane i holding four of every 128, read from memory in every pass.
struct Row {
    const f32* row;
    u32 experts;
    __device__ __forceinline__ u32 chunks() const { return ceil_div(experts, 128u); }
    __device__ __forceinline__ Quad quad(u32 chunk) const {
        return load_row_quad(row, experts, chunk * 128 + 4 * (threadIdx.x % 32), -infinity());
    }
};

// A warp picks the best `k` one by one; lane 0 puts each with its rank. False: fewer than that are above −∞.
template <class Put>
__device__ __forceinline__ bool choose_one_by_one(Row row, u32 k, Put put) {
    const u32 lane = threadIdx.x % 32;
    u64 last = ~0ull;
    for (u32 rank = 0; rank < k; ++rank) {
        u64 best = 0;
        for (u32 chunk = 0; chunk < row.chunks(); ++chunk) {
            const Quad quad = row.quad(chunk);
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const u32 expert = chunk * 128 + 4 * lane + j;
                const u64 key = key_of(quad.v[j], expert);
                if (expert < row.experts && key < last && key > best) best = key;
            }
        }
        const u32 high = warp_max(u32(best >> 32));
        const u32 low = warp_max(u32(best >> 32) == high ? u32(best) : 0u);
        last = u64(high) << 32 | low;
        if (logit_of_key(last) == -infinity()) return false;
        if (lane == 0) put(rank, last);
    }
    return true;
}

}  // namespace sonic
