// The epilogue of a plain product: add the expert's bias in f32 if there is one, round once, store.
#pragma once
#include "sm90/grouped_gemm.cuh"
#include "sm90/launch.cuh"
#include "sm90/row_box.cuh"
#include "sm90/slot_ring.cuh"

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
    write_rows<kColumns>(rows_of_this_warp<kColumns>(box), pairs, lane_index() % 16);
}

template <u32 kTileN, bool kBias>
class StoreEpilogue {
  public:
    static constexpr u32 kHBoxColumns = 0;
    static constexpr u32 kOutBoxColumns = 64;
    static constexpr u32 kActivationBoxColumns = 0;
    static constexpr u32 kParts = kTileN / 64;
    // One slot: the whole tile.
    using Slots = SlotBarriers<1>;

    struct alignas(1024) Shared {
        u8 box[kParts][kBoxBytes<64>];
    };

    __device__ __forceinline__ StoreEpilogue(const GroupedGemmParams& p, Shared& shared, Slots& slots)
        : p_(p), slots_(slots, p.status), boxes_(shared_address(shared.box)) {}

    __device__ __forceinline__ void finish(f32 (&acc)[kTileN / 2], const GroupRows& group) {
        slots_.acquire();
#pragma unroll
        for (u32 part = 0; part < kParts; ++part) {
            i32 column = group.column + i32(part * 64);
            if (column >= p_.n) break;
            if constexpr (kBias) add_bias(acc + part * 32, p_, group.expert, column);
            round_into_box<64>(boxes_ + part * kBoxBytes<64>, acc + part * 32);
        }
        slots_.publish();
    }

    class Writer {
      public:
        __device__ __forceinline__ Writer(const GroupedGemmMaps& maps, const GroupedGemmParams& p, Shared* shared, Slots* slots)
            : out_{&maps.out, p.out, p.n}, shared_(shared), slots_{{slots[0], p.status}, {slots[1], p.status}} {}

        __device__ __forceinline__ void write(const GroupRows& first, const GroupRows& second) {
            write_group(0, first);
            write_group(1, second);
            release_.flush();
        }

      private:
        __device__ __forceinline__ void write_group(u32 which, const GroupRows& group) {
            if (group.rows <= 0) return;
            slots_[which].wait_filled();
#pragma unroll
            for (u32 part = 0; part < kParts; ++part) {
                i32 column = group.column + i32(part * 64);
                u32 box = shared_address(shared_[which].box[part]);
                if (column < out_.stride) store_box<64>(box, out_, group.row, group.rows, column);
            }
            release_.after_read(slots_[which].pass());
        }

        BoxTarget out_;
        Shared* shared_;
        SlotServer<1> slots_[2];
        DeferredRelease release_;
    };

  private:
    const GroupedGemmParams& p_;
    SlotUser<1, false> slots_;
    u32 boxes_;
};

}  // namespace sonic
