// Token rounding by scores: Σ of the first lo, f and min(hi, T) ranking scores of each expert, in f64, rounded once.
//
// The scores are added as integers, in units of 2⁻¹⁴⁹, so that no order shows: each falls on two 32-bit digits, which
// are summed in 64 bits. A block owns an expert.
//
// grid     experts
// block    kRankThreads (256)
// shared   4 · words dynamic if words_fit, else 0
// cluster  1
#include "ranking.cuh"

using namespace sonic;

constexpr u32 kSumDigits = 8;

// sum += score
__device__ __forceinline__ void add_score(u64* digits, u32 score_bits) {
    const u32 exponent = score_bits >> 23;
    const u64 units = (score_bits & 0x7fffffu) | (exponent > 0 ? 0x800000u : 0);
    const u32 shift = exponent > 0 ? exponent - 1 : 0;
    const u64 shifted = units << (shift % 32);
    u64* const digit = digits + shift / 32;
    if (u32(shifted) != 0) atomicAdd(digit, u64(u32(shifted)));
    if (shifted >> 32 != 0) atomicAdd(digit + 1, shifted >> 32);
}

// The sum of the digits in units of 2⁻¹⁴⁹, rounded to nearest even.
__device__ __forceinline__ double rounded_sum(const u64* digits) {
    u64 window = 0;  // the top 64 bits so far
    u32 sticky = 0;
    i32 exponent = -149;
    u64 carry = 0;
    u32 plain[kSumDigits];
#pragma unroll
    for (u32 i = 0; i < kSumDigits; ++i) {
        const u64 sum = digits[i] + carry;
        plain[i] = u32(sum);
        carry = sum >> 32;
    }
    bool full = false;
#pragma unroll
    for (u32 i = 0; i < kSumDigits; ++i) {
        const u32 digit = plain[kSumDigits - 1 - i];
        if (full) {
            // All 64 bits are in use but for leading zeros: the next digit fills them, the rest only shows as sticky.
            sticky |= digit;
            exponent += 32;
        } else if (window >> 32 == 0) {
            window = window << 32 | digit;
        } else {
            const u32 zeros = __clzll(i64(window));
            if (zeros > 0) {
                window = window << zeros | digit >> (32 - zeros);
                sticky = zeros < 32 ? digit << zeros : 0;
            } else {
                sticky = digit;
            }
            exponent += 32 - i32(zeros);
            full = true;
        }
    }
    if (sticky != 0) window |= 1;
    // 64 bits hold 53 and a tie's other side: the conversion rounds as the whole number would.
    const double scale = __longlong_as_double(i64(exponent + 1023) << 52);
    return __dmul_rn(__ull2double_rn(window), scale);
}

extern "C" __global__ void __launch_bounds__(kRankThreads, 4)
rounding_sums(RankingInput input,
              double* __restrict__ sums,         // (experts, 3) f64, written whole
              u32* __restrict__ visited,         // (experts, words) u32, overwritten; not used if words_fit
              u32 tile,                          // M ≥ 1
              u32 words_fit) {
    extern __shared__ u32 dynamic[];
    __shared__ Selection selection;
    __shared__ u64 digits[3][kSumDigits];
    const u32 expert = blockIdx.x;
    if (threadIdx.x < 3 * kSumDigits) digits[threadIdx.x / kSumDigits][threadIdx.x % kSumDigits] = 0;
    const Ranking ranking{input, selection, expert, words_fit ? dynamic : visited + u64(expert) * input.words};
    const u32 f = ranking.choosers();
#pragma unroll 1
    for (u32 set = 0; set < 3; ++set) {
        const u32 count = set == 0 ? f / tile * tile : set == 1 ? f : upper_count(f, tile, input.tokens);
        ranking.first(count, [&](u32 key) { add_score(digits[set], key); });
    }
    __syncthreads();
    if (threadIdx.x < 3) sums[u64(expert) * 3 + threadIdx.x] = rounded_sum(digits[threadIdx.x]);
}
