// Counting sort, step 1: how many pairs of each block go to each expert.
//
// grid     ⌈pairs / kPairsPerBlock (2048)⌉
// block    kSortThreads (512)
// shared   0 dynamic
// cluster  1
#include "pair_sort.cuh"

using namespace sonic;

extern "C" __global__ void __launch_bounds__(kSortThreads)
routing_histogram(const u32* __restrict__ pair_expert, // (pairs) u32, each below experts
                  u32* __restrict__ counts,            // (experts, ⌈blocks⌉₄) u32, written up to blocks
                  u32 pairs,                           // R, 0 allowed
                  u32 experts) {                       // 1 ≤ E ≤ kMostExperts (4096)
    __shared__ u32 histogram[kMostExperts];
    for (u32 expert = threadIdx.x; expert < experts; expert += kSortThreads) histogram[expert] = 0;
    const u32 first = blockIdx.x * kPairsPerBlock + threadIdx.x;
    u32 expert_of_step[kSteps];
#pragma unroll
    for (u32 step = 0; step < kSteps; ++step) {
        const u32 pair = first + step * kSortThreads;
        expert_of_step[step] = pair < pairs ? pair_expert[pair] : kMostExperts;
    }
    __syncthreads();
#pragma unroll
    for (u32 step = 0; step < kSteps; ++step)
        if (expert_of_step[step] < kMostExperts) atomicAdd(&histogram[expert_of_step[step]], 1u);
    __syncthreads();
    for (u32 expert = threadIdx.x; expert < experts; expert += kSortThreads)
        counts[u64(expert) * counts_pitch(gridDim.x) + blockIdx.x] = histogram[expert];
}
