// drouter_b = Σ over the tokens of dlogits.
//
// A block owns 32 experts; warp i adds tokens i, i + 32, … in order, and the warps' sums are then added in order.
//
// grid     ⌈experts / 32⌉
// block    1024
// shared   0 dynamic
// cluster  1
#include "lanes.cuh"

using namespace sonic;

extern "C" __global__ void __launch_bounds__(1024)
router_bias_gradient(const f32* __restrict__ dlogits, // (tokens, experts) f32
                     bf16* __restrict__ drouter_b,    // (experts) bf16, written whole
                     u32 tokens, u32 experts) {
    __shared__ f32 partial[32][33];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 expert = blockIdx.x * 32 + lane;
    f32 sum = 0.0f;
    if (expert < experts) {
#pragma unroll 8
        for (u32 token = warp; token < tokens; token += 32) sum += dlogits[u64(token) * experts + expert];
    }
    partial[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && expert < experts) {
        f32 total = 0.0f;
        for (u32 other = 0; other < 32; ++other) total += partial[other][lane];
        drouter_b[expert] = to_bf16(total);
    }
}
