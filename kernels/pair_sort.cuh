// The stable counting sort of the pairs by expert: what its three kernels agree on.
//
// A block owns kPairsPerBlock pairs, a warp 32 · kSteps of them, in order.
#pragma once
#include "lanes.cuh"

namespace sonic {

constexpr u32 kSortThreads = 512;
constexpr u32 kSortWarps = kSortThreads / 32;
constexpr u32 kSteps = 4;
constexpr u32 kPairsPerBlock = kSortThreads * kSteps;
constexpr u32 kMostExperts = 4096;

// Counts of one expert, one for each block, begin at 16 bytes.
__device__ __forceinline__ u32 counts_pitch(u32 blocks) { return round_up(blocks, 4u); }

}  // namespace sonic
