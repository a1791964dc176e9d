// Experts by falling row count, ties by smaller id: the order in which the weight gradients deal out their tiles.
//
// An expert's place is the number of experts that come before it, so every thread finds its own by counting.
//
// grid     ⌈experts / kOrderThreads (256)⌉
// block    kOrderThreads (256)
// shared   0 dynamic
// cluster  1
#include "sm90/types.cuh"

using namespace sonic;

constexpr u32 kOrderThreads = 256;

extern "C" __global__ void __launch_bounds__(kOrderThreads)
expert_order(const i32* __restrict__ expert_offsets, // (experts + 1) i32
             i32* __restrict__ order,                // (experts) i32, written whole
             u32 experts) {                          // E ≥ 1
    __shared__ i32 counts[kOrderThreads];
    const u32 expert = blockIdx.x * kOrderThreads + threadIdx.x;
    const i32 own = expert < experts ? expert_offsets[expert + 1] - expert_offsets[expert] : 0;
    u32 place = 0;
    for (u32 first = 0; first < experts; first += kOrderThreads) {
        const u32 other = first + threadIdx.x;
        __syncthreads();
        // −1 sorts behind every expert: a place beyond the last one counts for nobody.
        counts[threadIdx.x] = other < experts ? expert_offsets[other + 1] - expert_offsets[other] : -1;
        __syncthreads();
#pragma unroll 8
        for (u32 i = 0; i < kOrderThreads; ++i)
            place += counts[i] > own || (counts[i] == own && first + i < expert);
    }
    if (expert < experts) order[place] = i32(expert);
}
