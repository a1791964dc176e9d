// db1[e] = Σ over expert e's rows of the stored dh: the sum of what the next kernels read, not of unrounded values.
//
// grid     experts · ⌈columns / kColumnSumColumns (64)⌉
// block    kColumnSumThreads (256)
// shared   0 dynamic
// cluster  1
#include "column_sum.cuh"

using namespace sonic;

extern "C" __global__ void __launch_bounds__(kColumnSumThreads)
up_bias_gradient(const bf16* __restrict__ dh,            // (R, columns) bf16, rows sorted by expert
                 const i32* __restrict__ expert_offsets, // (experts + 1) i32
                 bf16* __restrict__ db1,                 // (experts, columns) bf16, written whole
                 u32 experts,                            // E ≥ 1
                 u32 columns) {                          // 2n (n without a gate), multiple of 8
    // An expert's slabs run together: they share the DRAM pages of its rows.
    const u32 slabs = ceil_div(columns, kColumnSumColumns);
    const u32 expert = blockIdx.x / slabs;
    if (expert >= experts) return;
    column_sum(ExpertRows{dh}, expert_offsets, db1, expert, blockIdx.x % slabs, columns);
}
