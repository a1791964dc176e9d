// Token rounding, step 4: where each token's entries in token_rows begin.
//
// grid     1
// block    kTokenThreads (1024)
// shared   0 dynamic
// cluster  1
#include "lanes.cuh"

using namespace sonic;

constexpr u32 kTokenThreads = 1024;
constexpr u32 kPerThread = 8;

extern "C" __global__ void __launch_bounds__(kTokenThreads)
rounding_tokens(const u32* __restrict__ token_count, // (tokens) u32
                u32* __restrict__ token_offsets,     // (tokens + 1) u32, written whole
                u32 tokens) {                        // T, 0 allowed
    __shared__ BlockScan<kTokenThreads / 32> scan;
    u32 rows = 0;
    for (u32 base = 0; base < tokens; base += kTokenThreads * kPerThread) {
        const u32 first = base + threadIdx.x * kPerThread;
        u32 count[kPerThread];
        u32 sum = 0;
#pragma unroll
        for (u32 i = 0; i < kPerThread; ++i) {
            count[i] = first + i < tokens ? token_count[first + i] : 0;
            sum += count[i];
        }
        u32 total;
        u32 before = rows + scan.before(sum, total);
#pragma unroll
        for (u32 i = 0; i < kPerThread; ++i) {
            if (first + i < tokens) token_offsets[first + i] = before;
            before += count[i];
        }
        rows += total;
    }
    if (threadIdx.x == 0) token_offsets[tokens] = rows;
}
