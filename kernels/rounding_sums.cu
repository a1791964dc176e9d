// Token rounding by scores: Σ of the first lo, f and min(hi, T) ranking scores of each expert, in f64, rounded once.
//
// The scores are added as integers, in units of 2⁻¹⁴⁹, so that no order shows: each falls on two 32-bit digits, which
// are summed in 64 bits. A block owns an expert.
//
// grid     experts
// block    kRankThreads (1024)
// shared   4 · tokens dynamic if keys_fit, else 0
// cluster  1
#include "ranking.cuh"

using namespace sonic;

constexpr u32 kDigits = 8;

// sum += times · score
__device__ __forceinline__ void add_score(u64* digits, u32 score_bits, u32 times) {
    const u32 exponent = score_bits >> 23;
    const u64 units = u64((score_bits & 0x7fffffu) | (exponent > 0 ? 0x800000u : 0)) * times;
    const u32 shift = exponent > 0 ? exponent - 1 : 0;
    const u64 low = (units & 0xffffffffu) << (shift % 32), high = (units >> 32) << (shift % 32);
    u64* const digit = digits + shift / 32;
    if (u32(low) != 0) atomicAdd(digit, u64(u32(low)));
    const u64 middle = (low >> 32) + u32(high);
    if (middle != 0) atomicAdd(digit + 1, middle);
    if (high >> 32 != 0) atomicAdd(digit + 2, high >> 32);
}

// The sum of the digits in units of 2⁻¹⁴⁹, rounded to nearest even.
__device__ __forceinline__ double rounded_sum(const u64* digits) {
    u64 window = 0;  // the top 64 bits so far
    u32 sticky = 0;
    i32 exponent = -149;
    u64 carry = 0;
    u32 plain[kDigits];
#pragma unroll
    for (u32 i = 0; i < kDigits; ++i) {
        const u64 sum = digits[i] + carry;
        plain[i] = u32(sum);
        carry = sum >> 32;
    }
    bool full = false;
#pragma unroll
    for (u32 i = 0; i < kDigits; ++i) {
        const u32 digit = plain[kDigits - 1 - i];
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

extern "C" __global__ void __launch_bounds__(kRankThreads)
rounding_sums(const u32* __restrict__ keys,      // (experts, tokens) u32
              const u32* __restrict__ frequency, // (experts) u32: tokens that chose each
              double* __restrict__ sums,         // (experts, 3) f64, written whole
              u32 tokens,                        // T, 0 allowed
              u32 tile,                          // M ≥ 1
              u32 keys_fit) {
    extern __shared__ u32 dynamic[];
    __shared__ Selection selection;
    __shared__ u64 digits[3][kDigits];
    const u32 expert = blockIdx.x;
    const u32* const own = keys_at_hand(keys + u64(expert) * tokens, tokens, dynamic, keys_fit != 0);
    if (threadIdx.x < 3 * kDigits) digits[threadIdx.x / kDigits][threadIdx.x % kDigits] = 0;
    __syncthreads();

    const u32 f = frequency[expert];
    const u64 hi = (u64(f) + tile - 1) / tile * tile;
    const u32 ends[3] = {f / tile * tile, f, u32(min_of(hi, u64(tokens)))};
    for (u32 set = 0; set < 3; ++set) {
        const u32 count = ends[set];
        if (count == 0) continue;
        const Threshold threshold = count == f ? choosers() : selection.first(own, tokens, count);
        for (u32 token = threadIdx.x; token < tokens; token += kRankThreads)
            if (own[token] > threshold.key) add_score(digits[set], own[token] & ~kChose, 1);
        if (threadIdx.x == 0 && threshold.ties > 0) add_score(digits[set], threshold.key & ~kChose, threshold.ties);
    }
    __syncthreads();
    if (threadIdx.x < 3) sums[u64(expert) * 3 + threadIdx.x] = rounded_sum(digits[threadIdx.x]);
}
