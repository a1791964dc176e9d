// Kernel 7, dW1: dw1[e] = Σ over expert e's rows of dh x[token]ᵀ, a (2n, d) matrix.
//
// The product is formed as its transpose, x[token] dhᵀ, M = d and N = 2n: the gathered operand is then the narrow
// one of the tile and the contiguous one is shared by the cluster. stmatrix transposes on the way out.
//
// grid     blocks of all multiprocessors, a multiple of the cluster; any such number is right
// block    WeightGemmShape::kThreads (384)
// shared   WeightGemmShape::kDynamicSharedBytes dynamic
// cluster  SONIC_CLUSTER (2), set by the kernel itself
//
// dh_map   dims (columns, max(R, 1)),  stride columns · 2 bytes,             box (64, 64), swizzle 128 B, zero fill
// dw1_map  dims (d, columns, E),       strides d · 2, columns · d · 2 bytes, box (64, 64, 1), swizzle 128 B
//
// An expert without rows gets +0 in its whole dw1.
#include "sm90/launch.cuh"
#include "sm90/weight_gemm.cuh"

using namespace sonic;

extern "C" __constant__ u32 launch_geometry[kGeometryWords] = {
    WeightGemmShape::kThreads, WeightGemmShape::kDynamicSharedBytes, WeightGemmShape::kCluster, WeightGemmShape::kTileM,
    WeightGemmShape::kTileN,   WeightGemmShape::kDepth,              0,                         WeightGemmShape::kDepth,
    1,                         WeightGemmShape::kStages};

extern "C" __global__ void __cluster_dims__(WeightGemmShape::kCluster, 1, 1) __launch_bounds__(WeightGemmShape::kThreads, 1)
up_backward_weight(const __grid_constant__ TensorMap dh_map,   // of dh
                   const __grid_constant__ TensorMap dw1_map,  // of dw1 (E, columns, d) bf16, written whole
                   const bf16* __restrict__ x,                 // (T, d) bf16
                   const bf16* __restrict__ dh,                // (R, columns) bf16, rows sorted by expert
                   const i32* __restrict__ row_token,          // (R) i32
                   const i32* __restrict__ expert_offsets,     // (experts + 1) i32
                   const i32* __restrict__ expert_order,       // (experts) i32, longest first, or null
                   u32 experts,                                // E ≥ 1
                   u32 d,                                      // multiple of 8
                   u32 columns,                                // 2n (n without a gate), multiple of 8
                   u32* status) {                              // kStatusWords u32 of mapped host memory, or null
    weight_gemm<OutputOrder::kMContiguous>(WeightGemmOperands{&dh_map, &dw1_map, x, dh, row_token, expert_offsets,
                                                              expert_order, experts, d, columns, status});
}
