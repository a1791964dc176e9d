// Counting sort, step 2: how many pairs of each expert stand in earlier blocks, and how many it has.
//
// A warp owns an expert, a lane four neighbouring blocks of every 128.
//
// grid     ⌈experts / kPrefixWarps (8)⌉
// block    32 · kPrefixWarps (256)
// shared   0 dynamic
// cluster  1
#include "pair_sort.cuh"

using namespace sonic;

constexpr u32 kPrefixWarps = 8;

extern "C" __global__ void __launch_bounds__(32 * kPrefixWarps)
routing_prefix(u32* __restrict__ counts,      // (experts, ⌈blocks⌉₄) u32; becomes the pairs in earlier blocks
               u32* __restrict__ totals,      // (experts) u32, written whole
               u32 blocks,                    // of step 1, 0 allowed
               u32 experts) {
    const u32 expert = blockIdx.x * kPrefixWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (expert >= experts) return;
    u32* const own = counts + u64(expert) * counts_pitch(blocks);
    u32 sum = 0;
    for (u32 first = 4 * lane; first - 4 * lane < blocks; first += 128) {
        uint4 count = first < blocks ? *reinterpret_cast<const uint4*>(own + first) : uint4{0, 0, 0, 0};
        // What lies beyond the blocks was never written.
        if (first + 1 >= blocks) count.y = 0;
        if (first + 2 >= blocks) count.z = 0;
        if (first + 3 >= blocks) count.w = 0;
        const u32 of_lane = count.x + count.y + count.z + count.w;
        u32 inclusive = of_lane;
#pragma unroll
        for (u32 distance = 1; distance < 32; distance *= 2) {
            const u32 other = __shfl_up_sync(kAllLanes, inclusive, distance);
            if (lane >= distance) inclusive += other;
        }
        const u32 before = sum + inclusive - of_lane;
        if (first < blocks)
            *reinterpret_cast<uint4*>(own + first) =
                uint4{before, before + count.x, before + count.x + count.y, before + count.x + count.y + count.z};
        sum += __shfl_sync(kAllLanes, inclusive, 31);
    }
    if (lane == 0) totals[expert] = sum;
}
