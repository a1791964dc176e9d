// Kernel 5, dW2: dw2[e] = Σ over expert e's rows of dout[token] a′ᵀ, a (d, n) matrix.
//
// grid     blocks of all multiprocessors, a multiple of the cluster; any such number is right
// block    WeightGemmShape::kThreads (384)
// shared   WeightGemmShape::kDynamicSharedBytes dynamic
// cluster  SONIC_CLUSTER (2), set by the kernel itself
//
// a_prime_map  dims (n, max(R, 1)),  stride n · 2 bytes,                box (64, 64), swizzle 128 B, zero fill
// dw2_map      dims (n, d, E),       strides n · 2, d · n · 2 bytes,    box (64, 64, 1), swizzle 128 B
//
// An expert without rows gets +0 in its whole dw2.
#include "sm90/launch.cuh"
#include "sm90/weight_gemm.cuh"

using namespace sonic;

extern "C" __constant__ u32 launch_geometry[kGeometryWords] = {
    WeightGemmShape::kThreads, WeightGemmShape::kDynamicSharedBytes, WeightGemmShape::kCluster, WeightGemmShape::kTileM,
    WeightGemmShape::kTileN,   WeightGemmShape::kDepth,              0,                         WeightGemmShape::kDepth,
    1,                         WeightGemmShape::kStages};

extern "C" __global__ void __cluster_dims__(WeightGemmShape::kCluster, 1, 1) __launch_bounds__(WeightGemmShape::kThreads, 1)
down_backward_weight(const __grid_constant__ TensorMap a_prime_map,  // of a_prime
                     const __grid_constant__ TensorMap dw2_map,      // of dw2 (E, d, n) bf16, written whole
                     const bf16* __restrict__ dout,                  // (T, d) bf16
                     const bf16* __restrict__ a_prime,               // (R, n) bf16, rows sorted by expert
                     const i32* __restrict__ row_token,              // (R) i32
                     const i32* __restrict__ expert_offsets,         // (experts + 1) i32
                     const i32* __restrict__ expert_order,           // (experts) i32, longest first, or null
                     u32 experts,                                    // E ≥ 1
                     u32 d,                                          // multiple of 8
                     u32 n,                                          // multiple of 8
                     u32* status) {                                  // kStatusWords u32 of mapped host memory, or null
    weight_gemm<OutputOrder::kNContiguous>(WeightGemmOperands{&a_prime_map, &dw2_map, dout, a_prime, row_token,
                                                              expert_offsets, expert_order, experts, d, n, status});
}
