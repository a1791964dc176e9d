// Counting sort, step 2: how many pairs of each expert stand in earlier blocks, and how many it has.
//
// A warp owns an expert.
//
// grid     ⌈experts / kSortWarps (8)⌉
// block    kSortThreads (256)
// shared   0 dynamic
// cluster  1
#include "pair_sort.cuh"

using namespace sonic;

extern "C" __global__ void __launch_bounds__(kSortThreads)
routing_prefix(const u32* __restrict__ counts, // (experts, blocks) u32
               u32* __restrict__ earlier,      // (blocks, experts) u32, written whole
               u32* __restrict__ totals,       // (experts) u32, written whole
               u32 blocks,                     // of step 1, 0 allowed
               u32 experts) {
    const u32 expert = blockIdx.x * kSortWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (expert >= experts) return;
    u32 sum = 0;
    for (u32 first = 0; first < blocks; first += 32) {
        const u32 block = first + lane;
        const u32 own = block < blocks ? counts[u64(expert) * blocks + block] : 0;
        u32 inclusive = own;
#pragma unroll
        for (u32 distance = 1; distance < 32; distance *= 2) {
            const u32 other = __shfl_up_sync(kAllLanes, inclusive, distance);
            if (lane >= distance) inclusive += other;
        }
        if (block < blocks) earlier[u64(block) * experts + expert] = sum + inclusive - own;
        sum += __shfl_sync(kAllLanes, inclusive, 31);
    }
    if (lane == 0) totals[expert] = sum;
}
