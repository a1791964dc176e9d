// Token rounding, step 2: down or up, expert by expert, and where each expert's rows begin.
//
// grid     1
// block    kDecisionThreads (1024)
// shared   0 dynamic
// cluster  1
#include "lanes.cuh"

using namespace sonic;

constexpr u32 kDecisionThreads = 1024;
constexpr u32 kMostExperts = 4096;

// Rules.
constexpr u32 kNearest = 0;
constexpr u32 kNearestHalfToEven = 1;
constexpr u32 kStochasticByFrequency = 2;
constexpr u32 kStochasticByScores = 3;
constexpr u32 kBalance = 4;
constexpr u32 kUp = 5;

__device__ __forceinline__ u32 rotated(u32 v, u32 by) { return v << by | v >> (32 - by); }

__device__ __forceinline__ void quarter_round(u32& a, u32& b, u32& c, u32& d) {
    a += b;
    d = rotated(d ^ a, 16);
    c += d;
    b = rotated(b ^ c, 12);
    a += b;
    d = rotated(d ^ a, 8);
    c += d;
    b = rotated(b ^ c, 7);
}

// The draw of `expert` in [0, 1): the first 53 bits of a block of ChaCha8, as src/routing/rounding/draw.rs has it.
__device__ __forceinline__ double draw(u64 seed, u32 expert) {
    u32 x[16] = {0x61707865u, 0x3320646eu, 0x79622d32u, 0x6b206574u, u32(seed), u32(seed >> 32), 0, 0, 0, 0, 0, 0, 0, 0,
                 expert, 0};
    const u32 first = x[0], second = x[1];
#pragma unroll
    for (u32 round = 0; round < 4; ++round) {
        quarter_round(x[0], x[4], x[8], x[12]);
        quarter_round(x[1], x[5], x[9], x[13]);
        quarter_round(x[2], x[6], x[10], x[14]);
        quarter_round(x[3], x[7], x[11], x[15]);
        quarter_round(x[0], x[5], x[10], x[15]);
        quarter_round(x[1], x[6], x[11], x[12]);
        quarter_round(x[2], x[7], x[8], x[13]);
        quarter_round(x[3], x[4], x[9], x[14]);
    }
    const u64 word = u64(x[1] + second) << 32 | (x[0] + first);
    return __dmul_rn(__ull2double_rn(word >> 11), 0x1p-53);
}

__device__ __forceinline__ i64 magnitude(i64 v) { return v < 0 ? -v : v; }

extern "C" __global__ void __launch_bounds__(kDecisionThreads)
rounding_decision(const u32* __restrict__ frequency, // (experts) u32: tokens that chose each
                  const double* __restrict__ sums,   // (experts, 3) f64, for the rule by scores only
                  u32* __restrict__ expert_offsets,  // (experts + 1) u32, written whole
                  u32* __restrict__ capped,          // (experts) u32, written whole: 1 if hi was chosen and hi > T
                  u64 seed,
                  u32 tokens,                        // T
                  u32 experts,                       // 1 ≤ E ≤ kMostExperts (4096)
                  u32 tile,                          // M ≥ 1
                  u32 rule) {
    __shared__ u32 frequencies[kMostExperts];
    __shared__ u32 counts[kMostExperts];
    __shared__ BlockScan<kDecisionThreads / 32> scan;
    for (u32 expert = threadIdx.x; expert < experts; expert += kDecisionThreads) frequencies[expert] = frequency[expert];
    __syncthreads();
    // Balance looks at what experts before did: one thread takes all of them in turn.
    const bool in_turn = rule == kBalance;
    const u32 step = in_turn ? 1 : kDecisionThreads;
    i64 moved = 0;
    for (u32 expert = in_turn && threadIdx.x > 0 ? experts : threadIdx.x; expert < experts; expert += step) {
        const u32 f = frequencies[expert];
        const u32 lo = f / tile * tile;
        const i64 hi = f == lo ? i64(lo) : i64(lo) + tile;
        const i64 down_by = f - lo, up_by = hi - f;
        bool up = false;
        if (hi > lo) {
            if (rule == kNearest) {
                up = up_by < down_by;
            } else if (rule == kNearestHalfToEven) {
                up = up_by < down_by || (up_by == down_by && hi / tile % 2 == 0);
            } else if (rule == kStochasticByFrequency) {
                up = draw(seed, expert) < __ddiv_rn(double(down_by), double(tile));
            } else if (rule == kStochasticByScores) {
                const double lower = sums[u64(expert) * 3], all = sums[u64(expert) * 3 + 1],
                             upper = sums[u64(expert) * 3 + 2];
                up = upper > lower &&
                     draw(seed, expert) < __ddiv_rn(__dadd_rn(all, -lower), __dadd_rn(upper, -lower));
            } else if (rule == kBalance) {
                up = magnitude(up_by + moved) < magnitude(moved - down_by);
            } else {
                up = rule == kUp;
            }
        }
        const bool beyond = up && hi > i64(tokens);
        const u32 count = up && !beyond ? u32(hi) : lo;
        moved += i64(count) - i64(f);
        counts[expert] = count;
        capped[expert] = beyond;
    }
    __syncthreads();
    u32 rows = 0;
    for (u32 first = 0; first < experts; first += kDecisionThreads) {
        const u32 expert = first + threadIdx.x;
        u32 total;
        const u32 before = scan.before(expert < experts ? counts[expert] : 0, total);
        if (expert < experts) expert_offsets[expert] = rows + before;
        rows += total;
    }
    if (threadIdx.x == 0) expert_offsets[experts] = rows;
}
