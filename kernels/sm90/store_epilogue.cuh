// The epilogue of a plain product: add the expert's bias in f32 if there is one, round once, store.
#pragma once
#include "sm90/launch.cuh"
#include "sm90/row_box.cuh"
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

// Rounds kColumns columns of an accumulator fragment and writes them into a box.
template <u32 kColumns>
__device__ __forceinline__ void round_into_box(u32 box, const f32* values) {
    u32 pairs[kColumns / 4];
#pragma unroll
    for (u32 i = 0; i < kColumns / 4; ++i) pairs[i] = pack_bf16(values[2 * i], values[2 * i + 1]);
    write_box<kColumns>(box, pairs, lane_index() % 16);
}

// The whole tile has boxes of its own, so that the warp never waits for TMA within a tile.
template <u32 kTileN, bool kBias>
class StoreEpilogue {
  public:
    static constexpr u32 kBarriers = 0;
    static constexpr u32 kHBoxColumns = 0;
    static constexpr u32 kOutBoxColumns = 64;
    static constexpr u32 kActivationBoxColumns = 0;
    static constexpr u32 kParts = kTileN / 64;

    struct alignas(1024) Shared {
        u8 box[kParts][kBoxBytes<64>];
    };

    __device__ __forceinline__ StoreEpilogue(const GroupedGemmMaps& maps, const GroupedGemmParams& p, Shared& shared, u64*)
        : p_(p), target_{&maps.out, p.out, p.n}, boxes_(shared_address(shared.box)) {}

    // `row` is the warp's first row, `rows` how many of its 16 exist.
    __device__ __forceinline__ void begin(const Tile& tile, i32 row, i32 rows) {
        tile_ = tile;
        row_ = row;
        rows_ = rows;
    }

    __device__ __forceinline__ void overlap(i32, i32) {}

    __device__ __forceinline__ void finish(f32 (&acc)[kTileN / 2]) {
        if (rows_ <= 0) return;
        wait_for_box<0>();
#pragma unroll
        for (u32 part = 0; part < kParts; ++part) {
            i32 column = tile_.column + i32(part * 64);
            if (column >= p_.n) break;
            if constexpr (kBias) add_bias(acc + part * 32, p_, tile_.expert, column);
            round_into_box<64>(boxes_ + part * kBoxBytes<64>, acc + part * 32);
        }
        publish_box();
        if (rows_ >= i32(kBoxRows)) {
            if (elect_lane()) {
#pragma unroll
                for (u32 part = 0; part < kParts; ++part) {
                    i32 column = tile_.column + i32(part * 64);
                    if (column < p_.n) tma_store_2d(target_.map, boxes_ + part * kBoxBytes<64>, column, row_);
                }
                store_commit();
            }
        } else {
#pragma unroll 1
            for (u32 part = 0; part < kParts; ++part) {
                i32 column = tile_.column + i32(part * 64);
                store_partial_box<64>(boxes_ + part * kBoxBytes<64>, target_, row_, rows_, column);
            }
        }
    }

    __device__ __forceinline__ void drain() {
        if (elect_lane()) store_wait<0>();
    }

  private:
    const GroupedGemmParams& p_;
    BoxTarget target_;
    u32 boxes_;
    Tile tile_;
    i32 row_;
    i32 rows_;
};

}  // namespace sonic
