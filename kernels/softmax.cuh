// Softmax with the bits of src/routing/softmax.rs: the same exponential, the same order of every sum, no
// multiplication contracted into an addition.
#pragma once
#include "lanes.cuh"

namespace sonic {

__device__ __forceinline__ f32 infinity() { return __int_as_float(0x7f800000); }

// e^x for x ≤ 0: x = n·ln 2 + r with ln 2 in two parts, the first of which times n is exact, and a polynomial on
// |r| ≤ ln 2 / 2. Below −104 the result is 0, as it would round; between, it may be subnormal.
__device__ __forceinline__ f32 exponential(f32 x) {
    // Adding 1.5·2²³ + 64 rounds to an integer and leaves n + 64 in the low bits.
    const f32 shifted = __fadd_rn(__fmul_rn(x, 0x1.715476p+0f), 0x1.80008p+23f);
    const f32 whole = __fadd_rn(shifted, -0x1.80008p+23f);
    f32 r = __fadd_rn(x, -__fmul_rn(whole, 0x1.63p-1f));
    r = __fadd_rn(r, __fmul_rn(whole, 0x1.bd0106p-13f));
    f32 p = 0x1.a0d2cep-13f;
    p = __fadd_rn(__fmul_rn(p, r), 0x1.6e879cp-10f);
    p = __fadd_rn(__fmul_rn(p, r), 0x1.11121p-7f);
    p = __fadd_rn(__fmul_rn(p, r), 0x1.555382p-5f);
    p = __fadd_rn(__fmul_rn(p, r), 0x1.555554p-3f);
    p = __fadd_rn(__fmul_rn(p, r), 0x1.0p-1f);
    const f32 value = __fadd_rn(__fadd_rn(__fmul_rn(p, __fmul_rn(r, r)), r), 1.0f);
    // value lies in [0.7, 1.5]: 2ⁿ⁺⁶⁴ goes into its exponent and leaves it normal, and 2⁻⁶⁴ rounds once.
    const f32 scaled = __uint_as_float(__float_as_uint(value) + (__float_as_uint(shifted) << 23));
    return x < -104.0f ? 0.0f : __fmul_rn(scaled, 0x1p-64f);
}

// The sum over all lanes, lane i being the sum of the values 4i … 4i + 3 of every 128, in order.
__device__ __forceinline__ f32 sum_of_lanes(f32 v) {
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) v = __fadd_rn(v, __shfl_xor_sync(kAllLanes, v, distance));
    return v;
}

// The same sum of at most 64 values of which lane i holds number i and number 32 + i; 0 where there is none.
__device__ __forceinline__ f32 sum_of_ranks(f32 low, f32 high) {
    const u32 first = threadIdx.x & 28u;
    f32 sum[2] = {low, high};
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        const f32 v = sum[half];
        f32 quad = __shfl_sync(kAllLanes, v, first);
#pragma unroll
        for (u32 i = 1; i < 4; ++i) quad = __fadd_rn(quad, __shfl_sync(kAllLanes, v, first + i));
        sum[half] = quad;
    }
    f32 total = __fadd_rn(sum[0], sum[1]);
#pragma unroll
    for (u32 distance = 16; distance > 2; distance /= 2)
        total = __fadd_rn(total, __shfl_xor_sync(kAllLanes, total, distance));
    return total;
}

// What a token's probabilities follow from: p = e^(l − largest) / total, total = Σ e^(l − largest). `chosen` is the same
// sum over its top-K, in the order of their ranks, and `smallest` the smallest of their logits. A row that allows no
// choice has a total of 1 and zeros.
struct alignas(16) TokenSoftmax {
    f32 largest = 0.0f, total = 1.0f, chosen = 0.0f, smallest = 0.0f;

    __device__ __forceinline__ TokenSoftmax() {}
    __device__ __forceinline__ TokenSoftmax(f32 most, f32 sum, f32 sum_of_chosen, f32 least)
        : largest(most), total(sum), chosen(sum_of_chosen), smallest(least) {}

    // ln total, within 2⁻¹⁸: total lies in [1, 4096].
    __device__ __forceinline__ f32 log_total() const {
        f32 binary;
        asm("lg2.approx.f32 %0, %1;" : "=f"(binary) : "f"(total));
        return binary * 0x1.62e430p-1f;
    }

    __device__ __forceinline__ f32 probability(f32 logit) const {
        return __fdiv_rn(exponential(__fadd_rn(logit, -largest)), total);
    }
};

}  // namespace sonic
