// Kernel 6: dX̃ = dH W1. A grouped GEMM over token counts on contiguous rows.
//
//   maps.a   dh (R, 2n), ungated (R, n)
//   maps.b   w1 (E, 2n, d), ungated (E, n, d): MN-major, the contraction runs over its rows
//   p.out   dx_expanded (R, d)
//   p.n = d, p.k = 2n or n
#include "sm90/grouped_gemm.cuh"
#include "sm90/store_epilogue.cuh"

#ifndef SONIC_TILE_N
#define SONIC_TILE_N 256
#endif
#ifndef SONIC_STAGES
#define SONIC_STAGES 3
#endif
#ifndef SONIC_CLUSTER
#define SONIC_CLUSTER 1
#endif
#ifndef SONIC_BAND
#define SONIC_BAND 16
#endif

namespace sonic {

using Config = GemmConfig<SONIC_TILE_N, SONIC_STAGES, SONIC_CLUSTER, Rows::kContiguous, Major::kMN, SONIC_BAND>;

using Epilogue = StoreEpilogue<SONIC_TILE_N, false>;

}  // namespace sonic

SONIC_LAUNCH_GEOMETRY(sonic::Config, sonic::Epilogue);

extern "C" __global__ void __launch_bounds__(sonic::kGemmThreads, 1)
    up_backward_activation(const __grid_constant__ sonic::GroupedGemmMaps maps, const __grid_constant__ sonic::GroupedGemmParams p) {
    extern __shared__ __align__(1024) sonic::u8 shared[];
    sonic::grouped_gemm<sonic::Config, sonic::Epilogue>(shared, maps, p);
}
