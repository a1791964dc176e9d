// Kernel 8, combine: dx[t] = Σ over token t's rows of dx_expanded[row].
//
// grid     max(1, ⌈tokens · (d / 8) / COMBINE_THREADS⌉)
// block    COMBINE_THREADS (128)
// shared   0 dynamic
// cluster  1
#include "combine.cuh"

using namespace sonic;

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS, COMBINE_BLOCKS)
combine_input_gradient(const bf16* __restrict__ dx_expanded,  // (R, d) bf16, 16-byte aligned
                       const i32* __restrict__ token_offsets, // (tokens + 1) i32, offsets into token_rows
                       const i32* __restrict__ token_rows,    // (R) i32, each token's rows in the order of summation
                       bf16* __restrict__ dx,                 // (tokens, d) bf16, written whole
                       u32 tokens,                            // T, 0 allowed
                       u32 d) {                               // multiple of 8
    combine(dx_expanded, Unweighted{}, token_offsets, token_rows, dx, tokens, d);
}
