// Counting sort, step 1: how many pairs of each block go to each expert.
//
// grid     ⌈pairs / kPairsPerBlock (2048)⌉
// block    kSortThreads (256)
// shared   0 dynamic
// cluster  1
#include "pair_sort.cuh"

using namespace sonic;

extern "C" __global__ void __launch_bounds__(kSortThreads)
routing_histogram(const u32* __restrict__ pair_expert, // (pairs) u32, each below experts
                  u32* __restrict__ counts,            // (experts, blocks) u32, written whole
                  u32 pairs,                           // R, 0 allowed
                  u32 experts) {                       // 1 ≤ E ≤ kMostExperts (4096)
    __shared__ u32 histogram[kMostExperts];
    for (u32 expert = threadIdx.x; expert < experts; expert += kSortThreads) histogram[expert] = 0;
    __syncthreads();
    const u32 first = blockIdx.x * kPairsPerBlock + threadIdx.x;
#pragma unroll
    for (u32 step = 0; step < kSteps; ++step) {
        const u32 pair = first + step * kSortThreads;
        if (pair < pairs) atomicAdd(&histogram[pair_expert[pair]], 1u);
    }
    __syncthreads();
    for (u32 expert = threadIdx.x; expert < experts; expert += kSortThreads)
        counts[u64(expert) * gridDim.x + blockIdx.x] = histogram[expert];
}
