// The stable counting sort of the pairs by expert: what its three kernels agree on.
//
// A block owns kPairsPerBlock pairs, a warp 32 · kSteps of them, in order.
#pragma once
#include "lanes.cuh"

namespace sonic {

constexpr u32 kSortThreads = 256;
constexpr u32 kSortWarps = kSortThreads / 32;
constexpr u32 kSteps = 8;
constexpr u32 kPairsPerBlock = kSortThreads * kSteps;
constexpr u32 kMostExperts = 4096;

}  // namespace sonic
