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
#include "sm90/box_writer.cuh"
#include "sm90/row_box.cuh"
#include "sm90/store_epilogue.cuh"

#ifndef SONIC_BIAS
#define SONIC_BIAS 0
#endif
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

class UpForwardEpilogue {
  public:
    static constexpr bool kGated = kActivationIsGated<SONIC_ACTIVATION>;
    static constexpr u32 kHBoxColumns = 0;
    static constexpr u32 kOutBoxColumns = 64;
    static constexpr u32 kActivationBoxColumns = 32;
    // A slot: 64 rows, 64 columns of h and their 32 columns of a, or 64 without a gate.
    static constexpr u32 kActivationBoxes = kGated ? 1 : 2;
    static constexpr u32 kSlots = kGated ? 3 : 2;

    struct Slot {
        u8 h[kBoxBytes<64>];
        u8 a[kActivationBoxes][kBoxBytes<32>];
    };
    struct alignas(1024) Shared {
        Slot slot[kSlots];
    };
    static_assert(sizeof(Slot) % 1024 == 0, "boxes keep the alignment of their swizzle");

    __device__ __forceinline__ UpForwardEpilogue(const GroupedGemmParams& p, Shared& shared, SlotBarriers<kSlots>& slots)
        : p_(p), slots_(slots, p.status), shared_(shared) {}

    template <u32 kCount>
    __device__ __forceinline__ void finish(f32 (&acc)[kCount], const GroupRows& group) {
#pragma unroll
        for (u32 part = 0; part < kCount / 32; ++part) {
            i32 column = group.column + i32(part * 64);
            if (column >= p_.n) break;
            f32* values = acc + part * 32;
            if constexpr (SONIC_BIAS) add_bias(values, p_, group.expert, column);
            Slot& slot = shared_.slot[slots_.acquire()];
            round_into_box<64>(shared_address(slot.h), values);
            activate_into_box(shared_address(slot.a), values);
            slots_.publish();
        }
    }

    // What the writer does with a slot.
    struct Target {
        BoxTarget h;
        BoxTarget a;

        __device__ __forceinline__ Target(const GroupedGemmMaps& maps, const GroupedGemmParams& p)
            : h{&maps.out, p.out, p.n}, a{&maps.activation, p.activation, kGated ? p.n / 2 : p.n} {}

        __device__ __forceinline__ u32 turns(i32 column) const {
            return min_of(ceil_div(u32(h.stride - column), 64u), u32(SONIC_TILE_N / 64));
        }

        __device__ __forceinline__ void store(const Shared& shared, u32 index, u32 turn, const GroupRows& group) const {
            const Slot& slot = shared.slot[index];
            i32 column = group.column + i32(turn * 64);
            store_box<64>(shared_address(slot.h), h, group.row, group.rows, column);
            if constexpr (kGated) {
                store_box<32>(shared_address(slot.a[0]), a, group.row, group.rows, column / 2);
            } else {
                store_box<32>(shared_address(slot.a[0]), a, group.row, group.rows, column);
                if (column + 32 < a.stride) store_box<32>(shared_address(slot.a[1]), a, group.row, group.rows, column + 32);
            }
        }
    };
    using Writer = BoxWriter<Shared, Target, kSlots>;

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
    SlotUser<kSlots, false> slots_;
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
