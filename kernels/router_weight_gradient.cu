// drouter_w = high + (middle + low): the products of the three parts of dlogits with x, added and rounded once.
//
// grid     max(1, ⌈experts · (d / 8) / kSumThreads (256)⌉)
// block    kSumThreads (256)
// shared   0 dynamic
// cluster  1
#include "chunk.cuh"
#include "lanes.cuh"

using namespace sonic;

constexpr u32 kSumThreads = 256;

extern "C" __global__ void __launch_bounds__(kSumThreads)
router_weight_gradient(const f32* __restrict__ parts,     // (3, padded, d) f32
                       bf16* __restrict__ drouter_w,      // (experts, d) bf16, written whole
                       u32 experts, u32 padded, u32 d) {  // d a multiple of 8
    const u64 chunk = u64(blockIdx.x) * kSumThreads + threadIdx.x;
    if (chunk >= u64(experts) * (d / 8)) return;
    ChunkSum sum;
#pragma unroll
    for (u32 i = 3; i > 0; --i)
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const Quad quad = load_quad(parts + u64(i - 1) * padded * d + chunk * 8 + half * 4);
#pragma unroll
            for (u32 j = 0; j < 4; ++j) sum.sum[half * 4 + j] += quad.v[j];
        }
    store_chunk(drouter_w, i64(chunk), sum.rounded());
}
