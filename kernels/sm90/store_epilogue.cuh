// The epilogue of a plain product: add the expert's bias in f32 if there is one, round once, store.
#pragma once
#include "sm90/launch.cuh"
#include "sm90/row_store.cuh"
#include "sm90/tile_schedule.cuh"

namespace sonic {

// Adds bias[expert, column + …] to 64 columns of an accumulator fragment.
__device__ __forceinline__ void add_bias(f32* values, const GroupedGemmParams& p, i32 expert, i32 column) {
    const bf16* bias = p.bias + i64(expert) * p.n;
#pragma unroll
    for (u32 j = 0; j < 8; ++j) {
        i32 c = column + i32(8 * j + 2 * (lane_index() % 4));
        u32 pair = c < p.n ? __ldg(reinterpret_cast<const u32*>(bias + c)) : 0;
        values[4 * j] += low_f32(pair);
        values[4 * j + 1] += high_f32(pair);
        values[4 * j + 2] += low_f32(pair);
        values[4 * j + 3] += high_f32(pair);
    }
}

// Rounds 64 columns of an accumulator fragment and stores the rows that exist.
__device__ __forceinline__ void round_and_store(u32 staging, const f32* values, bf16* out, i64 row, i32 rows, i32 column,
                                                i32 stride) {
    u32 pairs[16];
#pragma unroll
    for (u32 i = 0; i < 16; ++i) pairs[i] = pack_bf16(values[2 * i], values[2 * i + 1]);
    stage_columns(staging, pairs);
    __syncwarp();
    store_staged<64, kStagingPitch>(staging, out, row, rows, column, stride);
    __syncwarp();
}

template <bool kBias>
class StoreEpilogue {
  public:
    __device__ __forceinline__ StoreEpilogue(const GroupedGemmParams& p, u8* staging)
        : p_(p), staging_(shared_address(staging)) {}

    __device__ __forceinline__ void begin(const Tile&, i32, i32) {}

    template <u32 kCount>
    __device__ __forceinline__ void finish(f32 (&acc)[kCount], const Tile& tile, i32 group_row, i32 group_rows) {
        i32 warp_row = i32(threadIdx.x / 32 % 4) * 16;
        i32 rows = group_rows - warp_row;
        if (rows <= 0) return;
#pragma unroll
        for (u32 part = 0; part < kCount / 32; ++part) {
            i32 column = tile.column + i32(part * 64);
            if (column >= p_.n) break;
            f32* values = acc + part * 32;
            if constexpr (kBias) add_bias(values, p_, tile.expert, column);
            round_and_store(staging_, values, p_.out, group_row + warp_row, rows, column, p_.n);
        }
    }

  private:
    const GroupedGemmParams& p_;
    u32 staging_;
};

}  // namespace sonic
