// An expert's ranking of the tokens, for token rounding.
//
// A token's key is the bits of its ranking score, and above them whether it chose the expert: scores are in [0, 1], so
// that larger keys rank first, and tokens of one key by their number. The first `count` tokens of a ranking are those
// with keys above a threshold and the first few at it.
#pragma once
#include "lanes.cuh"

namespace sonic {

constexpr u32 kRankThreads = 1024;
constexpr u32 kRankWarps = kRankThreads / 32;
constexpr u32 kChose = 0x80000000u;

// The tokens whose key is above `key`, and the first `ties` of those at it.
struct Threshold {
    u32 key;
    u32 ties;
};

// Every token that chose the expert, and no other.
__device__ __forceinline__ Threshold choosers() { return Threshold{kChose - 1u, 0}; }

struct Selection {
    u32 histogram[2048];
    BlockScan<kRankWarps> scan;
    u32 digit;
    u32 left;

    // The threshold of the first `count` keys, 1 ≤ count ≤ tokens: digit by digit from the top, 11, 11 and 10 bits.
    __device__ __forceinline__ Threshold first(const u32* keys, u32 tokens, u32 count) {
        u32 prefix = 0, mask = 0;
        u32 wanted = count;
#pragma unroll 1
        for (u32 pass = 0; pass < 3; ++pass) {
            const u32 shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
            const u32 digits = pass == 2 ? 1024 : 2048;
            __syncthreads();
            histogram[threadIdx.x] = 0;
            histogram[threadIdx.x + kRankThreads] = 0;
            __syncthreads();
            for (u32 token = threadIdx.x; token < tokens; token += kRankThreads) {
                const u32 key = keys[token];
                if ((key & mask) == prefix) atomicAdd(&histogram[(key >> shift) & (digits - 1)], 1u);
            }
            __syncthreads();
            // Two digits a thread, the largest first.
            const u32 upper = 2047 - 2 * threadIdx.x;
            const u32 at_upper = histogram[upper], at_lower = histogram[upper - 1];
            u32 total;
            const u32 before = scan.before(at_upper + at_lower, total);
            if (before < wanted && wanted <= before + at_upper) {
                digit = upper;
                left = wanted - before;
            } else if (before + at_upper < wanted && wanted <= before + at_upper + at_lower) {
                digit = upper - 1;
                left = wanted - before - at_upper;
            }
            __syncthreads();
            prefix |= digit << shift;
            mask |= (digits - 1) << shift;
            wanted = left;
        }
        return Threshold{prefix, wanted};
    }
};

// The expert's keys: in shared memory if they fit there, else as they lie.
__device__ __forceinline__ const u32* keys_at_hand(const u32* keys, u32 tokens, u32* shared, bool fits) {
    if (!fits) return keys;
    for (u32 token = threadIdx.x; token < tokens; token += kRankThreads) shared[token] = keys[token];
    __syncthreads();
    return shared;
}

}  // namespace sonic
