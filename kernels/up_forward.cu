// Kernel 1: H = X_e W1ᵀ (+ b1), A = act(H). A grouped GEMM over token counts that gathers x.
//
//   a_map     unused
//   b_map     w1 (E, 2n, d), interleaved gate first; (E, n, d) without a gate
//   p.gathered  x (T, d)            p.row_token  token of each row
//   p.bias      b1 (E, 2n) or (E, n)
//   p.out       h (R, 2n) or (R, n), rounded once from the f32 pre-activation
//   p.activation  a (R, n), rounded once from the same f32 pre-activation
//   p.n = 2n or n, p.k = d
#include "activation.cuh"
#include "sm90/grouped_gemm.cuh"
#include "sm90/row_store.cuh"
#include "sm90/store_epilogue.cuh"

#ifndef SONIC_BIAS
#define SONIC_BIAS 0
#endif
#ifndef SONIC_TILE_N
#define SONIC_TILE_N 256
#endif
#ifndef SONIC_STAGES
#define SONIC_STAGES 4
#endif
#ifndef SONIC_CLUSTER
#define SONIC_CLUSTER 1
#endif
#ifndef SONIC_BAND
#define SONIC_BAND 16
#endif

namespace sonic {

constexpr bool kGated = kActivationIsGated<SONIC_ACTIVATION>;

class UpForwardEpilogue {
  public:
    __device__ __forceinline__ UpForwardEpilogue(const GroupedGemmParams& p, u8* staging)
        : p_(p), staging_(shared_address(staging)) {}

    __device__ __forceinline__ void begin(const Tile&, i32, i32) {}

    template <u32 kCount>
    __device__ __forceinline__ void finish(f32 (&acc)[kCount], const Tile& tile, i32 group_row, i32 group_rows) {
        i32 warp_row = i32(threadIdx.x / 32 % 4) * 16;
        i64 row = group_row + warp_row;
        i32 rows = group_rows - warp_row;
        if (rows <= 0) return;
#pragma unroll
        for (u32 part = 0; part < kCount / 32; ++part) {
            i32 column = tile.column + i32(part * 64);
            if (column >= p_.n) break;
            f32* values = acc + part * 32;
            if constexpr (SONIC_BIAS) add_bias(values, p_, tile.expert, column);
            round_and_store(staging_, values, p_.out, row, rows, column, p_.n);
            store_activation(values, row, rows, column);
        }
    }

  private:
    __device__ __forceinline__ void store_activation(const f32* values, i64 row, i32 rows, i32 column) {
        if constexpr (kGated) {
            // Gate and up are neighbours in one thread: element 4j, 4j+1 gives column 4j + l%4 of a.
            u32 address = staging_ + (lane_index() / 4) * kStagingPitch + (lane_index() % 4) * 2;
#pragma unroll
            for (u32 j = 0; j < 8; ++j) {
                f32 upper = activate<SONIC_ACTIVATION>(values[4 * j], values[4 * j + 1]);
                f32 lower = activate<SONIC_ACTIVATION>(values[4 * j + 2], values[4 * j + 3]);
                store_shared_2(address + j * 8, to_bf16(upper));
                store_shared_2(address + j * 8 + 8 * kStagingPitch, to_bf16(lower));
            }
            __syncwarp();
            store_staged<32, kStagingPitch>(staging_, p_.activation, row, rows, column / 2, p_.n / 2);
            __syncwarp();
        } else {
            f32 activated[32];
#pragma unroll
            for (u32 i = 0; i < 32; ++i) activated[i] = activate<SONIC_ACTIVATION>(values[i], 0.0f);
            round_and_store(staging_, activated, p_.activation, row, rows, column, p_.n);
        }
    }

    const GroupedGemmParams& p_;
    u32 staging_;
};

using Config = GemmConfig<SONIC_TILE_N, SONIC_STAGES, SONIC_CLUSTER, true, Major::kK, SONIC_BAND, kStagingBytes>;

}  // namespace sonic

SONIC_LAUNCH_GEOMETRY(sonic::Config);

extern "C" __global__ void __launch_bounds__(sonic::kGemmThreads, 1)
    up_forward(const __grid_constant__ sonic::TensorMap a_map, const __grid_constant__ sonic::TensorMap b_map,
               const __grid_constant__ sonic::GroupedGemmParams p) {
    extern __shared__ __align__(1024) sonic::u8 shared[];
    sonic::grouped_gemm<sonic::Config, sonic::UpForwardEpilogue>(shared, a_map, b_map, p);
}
