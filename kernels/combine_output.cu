// Kernel 3, combine: o[t] = Σ over token t's rows of score · y[row].
//
// grid     max(1, ⌈tokens · (d / 8) / COMBINE_THREADS⌉)
// block    COMBINE_THREADS (128)
// shared   0 dynamic
// cluster  1
#include "combine.cuh"

using namespace sonic;

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS, COMBINE_BLOCKS)
combine_output(const bf16* __restrict__ y,            // (R, d) bf16, 16-byte aligned
               const f32* __restrict__ scores,        // (R) f32, by row
               const i32* __restrict__ token_offsets, // (tokens + 1) i32, offsets into token_rows
               const i32* __restrict__ token_rows,    // (R) i32, each token's rows in the order of summation
               bf16* __restrict__ o,                  // (tokens, d) bf16, written whole
               u32 tokens,                            // T, 0 allowed
               u32 d) {                               // multiple of 8
    combine(y, WeightedByScore{scores}, token_offsets, token_rows, o, tokens, d);
}
