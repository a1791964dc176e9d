// Kernel 1: H = X_e W1ᵀ (+ b1), A = act(H). A grouped GEMM over token counts that gathers x.
//
//   maps.b      w1 (E, 2n, d), interleaved gate first; (E, n, d) without a gate; K-major
//   p.gathered  x (T, d)            p.row_token  token of each row
//   p.bias      b1 (E, 2n) or (E, n)
//   p.out       h (R, 2n) or (R, n), rounded once from the f32 pre-activation
//   p.activation  a (R, n), rounded once from the same f32 pre-activation
//   p.n = 2n or n, p.k = d
#include "activation.cuh"
#include "sm90/grouped_gemm.cuh"
#include "sm90/row_box.cuh"
#include "sm90/slot_ring.cuh"
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

class UpForwardEpilogue {
  public:
    static constexpr bool kGated = kActivationIsGated<SONIC_ACTIVATION>;
    static constexpr u32 kHBoxColumns = 0;
    static constexpr u32 kOutBoxColumns = 64;
    static constexpr u32 kActivationBoxColumns = 32;
    // 64 rows at a time: 64 columns of h, then the 32 columns of a that come from them, or 64 without a
    // gate. h leaves while a is computed.
    static constexpr u32 kABoxes = kGated ? 1 : 2;
    static constexpr u32 kASlots = kGated ? 2 : 1;

    struct alignas(1024) Shared {
        u8 h[kBoxBytes<64>];
        u8 a[kASlots][kABoxes][kBoxBytes<32>];
    };
    struct Slots {
        SlotBarriers<1> h;
        SlotBarriers<kASlots> a;

        __device__ __forceinline__ void init() {
            h.init();
            a.init();
        }
    };

    __device__ __forceinline__ UpForwardEpilogue(const GroupedGemmParams& p, Shared& shared, Slots& slots)
        : p_(p), h_slots_(slots.h, p.status), a_slots_(slots.a, p.status), shared_(shared) {}

    template <u32 kCount>
    __device__ __forceinline__ void finish(f32 (&acc)[kCount], const GroupRows& group) {
#pragma unroll
        for (u32 part = 0; part < kCount / 32; ++part) {
            i32 column = group.column + i32(part * 64);
            if (column >= p_.n) break;
            f32* values = acc + part * 32;
            if constexpr (SONIC_BIAS) add_bias(values, p_, group.expert, column);
            h_slots_.acquire();
            round_into_box<64>(shared_address(shared_.h), values);
            h_slots_.publish();
            activate_into_box(shared_address(shared_.a[a_slots_.acquire()]), values);
            a_slots_.publish();
        }
    }

    class Writer {
      public:
        __device__ __forceinline__ Writer(const GroupedGemmMaps& maps, const GroupedGemmParams& p, Shared* shared, Slots* slots)
            : h_{&maps.out, p.out, p.n},
              a_{&maps.activation, p.activation, kGated ? p.n / 2 : p.n},
              shared_(shared),
              h_slots_{{slots[0].h, p.status}, {slots[1].h, p.status}},
              a_slots_{{slots[0].a, p.status}, {slots[1].a, p.status}} {}

        __device__ __forceinline__ void write(const GroupRows& first, const GroupRows& second) {
            if (first.rows <= 0) return;
            bool both = second.rows > 0;
            i32 end = min_of(first.column + i32(SONIC_TILE_N), h_.stride);
            for (i32 column = first.column; column < end; column += 64) {
                write_h(0, first, column);
                if (both) write_h(1, second, column);
                write_a(0, first, column);
                if (both) write_a(1, second, column);
            }
            release_.flush();
        }

      private:
        __device__ __forceinline__ void write_h(u32 which, const GroupRows& group, i32 column) {
            h_slots_[which].wait_filled();
            store_box<64>(shared_address(shared_[which].h), h_, group.row, group.rows, column);
            release_.after_read(h_slots_[which].pass());
        }

        __device__ __forceinline__ void write_a(u32 which, const GroupRows& group, i32 column) {
            a_slots_[which].wait_filled();
            auto& boxes = shared_[which].a[a_slots_[which].slot()];
            i32 a_column = kGated ? column / 2 : column;
            store_box<32>(shared_address(boxes[0]), a_, group.row, group.rows, a_column);
            if (kABoxes == 2 && a_column + 32 < a_.stride) {
                store_box<32>(shared_address(boxes[kABoxes - 1]), a_, group.row, group.rows, a_column + 32);
            }
            release_.after_read(a_slots_[which].pass());
        }

        BoxTarget h_;
        BoxTarget a_;
        Shared* shared_;
        SlotServer<1> h_slots_[2];
        SlotServer<kASlots> a_slots_[2];
        DeferredRelease release_;
    };

  private:
    __device__ __forceinline__ void activate_into_box(u32 box, const f32* values) const {
        if constexpr (kGated) {
            // Gate and up are neighbours in one thread: elements 4j, 4j+1 give column 4j + l%4 of a.
            u32 row = lane_index() / 4;
            u32 rows = rows_of_this_warp<32>(box);
            u32 upper = rows + box_offset<32>(row, 0) + lane_index() % 4 * 2;
            u32 lower = rows + box_offset<32>(row + 8, 0) + lane_index() % 4 * 2;
#pragma unroll
            for (u32 j = 0; j < 8; ++j) {
                u32 pair = pack_bf16(activate<SONIC_ACTIVATION>(values[4 * j], values[4 * j + 1]),
                                     activate<SONIC_ACTIVATION>(values[4 * j + 2], values[4 * j + 3]));
                u32 inside = (j / 2 << 4) ^ (j % 2 * 8);
                store_shared_2(upper ^ inside, bf16{u16(pair)});
                store_shared_2(lower ^ inside, bf16{u16(pair >> 16)});
            }
        } else {
            // Eight values at a time: with more in flight the longer activations spill.
#pragma unroll
            for (u32 j = 0; j < 8; j += 2) {
                u32 pairs[4];
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    f32 v0 = values[4 * j + 2 * i], v1 = values[4 * j + 2 * i + 1];
                    asm volatile("" : "+f"(v0), "+f"(v1)::"memory");
                    pairs[i] = pack_bf16(activate<SONIC_ACTIVATION>(v0, 0.0f), activate<SONIC_ACTIVATION>(v1, 0.0f));
                }
                u32 rows = rows_of_this_warp<32>(box + j / 4 * kBoxBytes<32>);
                u32 address = rows + box_offset<32>(lane_index() % 16, j % 4 + lane_index() / 16);
                store_matrix_x4(address, pairs[0], pairs[1], pairs[2], pairs[3]);
            }
        }
    }

    const GroupedGemmParams& p_;
    SlotUser<1, false> h_slots_;
    SlotUser<kASlots, false> a_slots_;
    Shared& shared_;
};

using Config = GemmConfig<SONIC_TILE_N, SONIC_STAGES, SONIC_CLUSTER, Rows::kGathered, Major::kK, SONIC_BAND>;

}  // namespace sonic

SONIC_LAUNCH_GEOMETRY(sonic::Config, sonic::UpForwardEpilogue);

extern "C" __global__ void __launch_bounds__(sonic::kGemmThreads, 1)
    up_forward(const __grid_constant__ sonic::GroupedGemmMaps maps, const __grid_constant__ sonic::GroupedGemmParams p) {
    extern __shared__ __align__(1024) sonic::u8 shared[];
    sonic::grouped_gemm<sonic::Config, sonic::UpForwardEpilogue>(shared, maps, p);
}
