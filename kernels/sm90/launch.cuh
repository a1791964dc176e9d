// What the host and the grouped GEMM kernels agree on: tensor maps, parameters, geometry.
//
// Every kernel of this family has the signature
//     (const __grid_constant__ GroupedGemmMaps maps, const __grid_constant__ GroupedGemmParams p)
// and every module exports `launch_geometry`, a constant array of kGeometryWords u32 that the host
// reads (cuModuleGetGlobal) instead of repeating tile sizes.
//
// Launch: gridDim.x = blocks (one per multiprocessor, a multiple of the cluster size), blockDim.x =
// geometry[kGeometryThreads], dynamic shared memory = geometry[kGeometrySharedBytes] (above 48 KB:
// raise the function's limit first), cluster (geometry[kGeometryCluster], 1, 1).
//
// Tensor maps: bf16, no interleave, out-of-bounds fill zero, L2 promotion 256 bytes, element strides
// 1, dimension 0 contiguous. The swizzle spans one line of the box: 128 bytes for 64 columns, 64 bytes
// for 32. A map that a kernel does not use may be all zeros. With R = 0 launch nothing, or encode R as 1.
//   a    contiguous A (R, k): dims {k, R}, strides {2k}, box {64, geometry[kGeometryABoxRows]}; unused
//        by kernels that gather A (their word is 0)
//   b    K-major B (E, n, k): dims {k, n, E}, strides {2k, 2kn}, box {64, geometry[kGeometryBBoxRows], 1}
//        MN-major B (E, k, n): dims {n, k, E}, strides {2n, 2nk}, box {64, 64, 1}
//   h    p.h (R, w): dims {w, R}, strides {2w}, box {geometry[kGeometryHBoxColumns], 64}; word 0: unused
//   out  p.out (R, w): the same with geometry[kGeometryOutBoxColumns]
//   activation  p.activation (R, n'): the same with geometry[kGeometryActivationBoxColumns]
#pragma once
#include "sm90/types.cuh"

namespace sonic {

struct TileQueueWords;

struct GroupedGemmMaps {
    TensorMap a;
    TensorMap b;
    TensorMap h;
    TensorMap out;
    TensorMap activation;
};

// Passed by value. `n` is the number of output columns of the product and `k` the contraction
// length, both multiples of 8; rows are sorted by expert.
struct GroupedGemmParams {
    const i32* expert_offsets;  // [experts + 1], ascending, [0] = 0, [experts] = R
    const i32* row_token;       // [R] token of each row, in [0, T); kernels that gather, else null
    const bf16* gathered;       // (T, k) rows to gather, T·k < 2^35; kernels that gather, else null
    const bf16* bias;           // (experts, n) added to the product; read only by bias variants
    const bf16* h;              // (R, 2n) or ungated (R, n): down_backward_activation, else null
    const f32* scores;          // [R] in row order: down_backward_activation, else null
    bf16* out;                  // the kernel's main output, see its entry point
    bf16* activation;           // a or a′ (R, n): up_forward, down_backward_activation, else null
    f32* ds_partial;            // (R, tiles of n): down_backward_activation, else null
    u32* status;                // kStatusWords u32 in mapped host memory, zeroed, or null
    TileQueueWords* tile_queue;  // zeros, see tile_schedule.cuh; kernels without a cluster
    i32 experts;                // E ≥ 1
    i32 n;
    i32 k;
    i32 reserved;               // 0
};

constexpr u32 kGeometryThreads = 0;
constexpr u32 kGeometrySharedBytes = 1;
constexpr u32 kGeometryCluster = 2;
constexpr u32 kGeometryTileM = 3;
constexpr u32 kGeometryTileN = 4;
constexpr u32 kGeometryTileK = 5;
constexpr u32 kGeometryABoxRows = 6;
constexpr u32 kGeometryBBoxRows = 7;
constexpr u32 kGeometryBIsMNMajor = 8;
constexpr u32 kGeometryStages = 9;
constexpr u32 kGeometryHBoxColumns = 10;
constexpr u32 kGeometryOutBoxColumns = 11;
constexpr u32 kGeometryActivationBoxColumns = 12;
constexpr u32 kGeometryWords = 13;

}  // namespace sonic
