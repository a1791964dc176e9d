// db2[e] = Σ over expert e's rows of score · dout[token of the row].
//
// grid     experts · ⌈d / kColumnSumColumns (64)⌉
// block    kColumnSumThreads (256)
// shared   0 dynamic
// cluster  1
#include "column_sum.cuh"

using namespace sonic;

extern "C" __global__ void __launch_bounds__(kColumnSumThreads)
down_bias_gradient(const bf16* __restrict__ dout,          // (T, d) bf16
                   const f32* __restrict__ scores,         // (R) f32, by row
                   const i32* __restrict__ row_token,      // (R) i32
                   const i32* __restrict__ expert_offsets, // (experts + 1) i32
                   bf16* __restrict__ db2,                 // (experts, d) bf16, written whole
                   u32 experts,                            // E ≥ 1
                   u32 d) {                                // multiple of 8
    // All experts of one slab run together: T · 128 bytes of dout stay in L2 while every expert gathers them.
    const u32 slab = blockIdx.x / experts;
    if (slab * kColumnSumColumns >= d) return;
    column_sum(ScoredTokenRows{dout, row_token, scores}, expert_offsets, db2, blockIdx.x % experts, slab, d);
}
