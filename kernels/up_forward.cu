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
    static constexpr u32 kBarriers = 0;
    static constexpr u32 kHBoxColumns = 0;
    static constexpr u32 kOutBoxColumns = 64;
    static constexpr u32 kActivationBoxColumns = 32;
    // 64 columns of h give 32 of a, or 64 without a gate.
    static constexpr u32 kActivationBoxes = kGated ? 1 : 2;

    // Boxes of h and of a, used in turn.
    static constexpr u32 kTurnsH = kGated ? 4 : 2;
    static constexpr u32 kTurnsA = 2;
    static constexpr u32 kABytes = kActivationBoxes * kBoxBytes<32>;

    struct alignas(1024) Shared {
        u8 h[kTurnsH][kBoxBytes<64>];
        u8 a[kTurnsA][kABytes];
    };

    __device__ __forceinline__ UpForwardEpilogue(const GroupedGemmMaps& maps, const GroupedGemmParams& p, Shared& shared, u64*)
        : p_(p),
          h_{&maps.out, p.out, p.n},
          a_{&maps.activation, p.activation, kGated ? p.n / 2 : p.n},
          h_boxes_(shared_address(shared.h)),
          a_boxes_(shared_address(shared.a)) {}

    __device__ __forceinline__ void begin(const Tile& tile, i32 row, i32 rows) {
        tile_ = tile;
        row_ = row;
        rows_ = rows;
    }

    __device__ __forceinline__ void overlap(i32, i32) {}

    // 64 columns of h and their a make one group of stores; one younger group may be in flight when a
    // box comes round again.
    template <u32 kCount>
    __device__ __forceinline__ void finish(f32 (&acc)[kCount]) {
        if (rows_ <= 0) return;
#pragma unroll
        for (u32 part = 0; part < kCount / 32; ++part) {
            i32 column = tile_.column + i32(part * 64);
            if (column >= p_.n) break;
            f32* values = acc + part * 32;
            u32 h_box = h_boxes_ + turn_ % kTurnsH * kBoxBytes<64>;
            u32 a_box = a_boxes_ + turn_ % kTurnsA * kABytes;
            ++turn_;
            if constexpr (SONIC_BIAS) add_bias(values, p_, tile_.expert, column);
            wait_for_box<1>();
            round_into_box<64>(h_box, values);
            activate_into_box(a_box, values);
            publish_box();
            store_box<64>(h_box, h_, row_, rows_, column);
            if constexpr (kGated) {
                store_box<32>(a_box, a_, row_, rows_, column / 2);
            } else {
                store_box<32>(a_box, a_, row_, rows_, column);
                if (column + 32 < p_.n) store_box<32>(a_box + kBoxBytes<32>, a_, row_, rows_, column + 32);
            }
            commit_boxes();
        }
    }

    __device__ __forceinline__ void drain() {
        if (elect_lane()) store_wait<0>();
    }

  private:
    __device__ __forceinline__ void activate_into_box(u32 box, const f32* values) const {
        if constexpr (kGated) {
            // Gate and up are neighbours in one thread: elements 4j, 4j+1 give column 4j + l%4 of a.
            u32 row = lane_index() / 4;
            u32 upper = box + box_offset<32>(row, 0) + lane_index() % 4 * 2;
            u32 lower = box + box_offset<32>(row + 8, 0) + lane_index() % 4 * 2;
#pragma unroll
            for (u32 j = 0; j < 8; ++j) {
                u32 pair = pack_bf16(activate<SONIC_ACTIVATION>(values[4 * j], values[4 * j + 1]),
                                     activate<SONIC_ACTIVATION>(values[4 * j + 2], values[4 * j + 3]));
                u32 inside = (j / 2 << 4) ^ (j % 2 * 8);
                store_shared_2(upper ^ inside, bf16{u16(pair)});
                store_shared_2(lower ^ inside, bf16{u16(pair >> 16)});
            }
        } else {
            f32 activated[32];
#pragma unroll
            for (u32 i = 0; i < 32; ++i) activated[i] = activate<SONIC_ACTIVATION>(values[i], 0.0f);
            round_into_box<32>(box, activated);
            round_into_box<32>(box + kBoxBytes<32>, activated + 16);
        }
    }

    const GroupedGemmParams& p_;
    BoxTarget h_;
    BoxTarget a_;
    u32 h_boxes_;
    u32 a_boxes_;
    u32 turn_ = 0;
    Tile tile_;
    i32 row_;
    i32 rows_;
};

using Config = GemmConfig<SONIC_TILE_N, SONIC_STAGES, SONIC_CLUSTER, Rows::kGathered, Major::kK, SONIC_BAND>;

}  // namespace sonic

SONIC_LAUNCH_GEOMETRY(sonic::Config, sonic::UpForwardEpilogue);

extern "C" __global__ void __launch_bounds__(sonic::kGemmThreads, 1)
    up_forward(const __grid_constant__ sonic::GroupedGemmMaps maps, const __grid_constant__ sonic::GroupedGemmParams p) {
    extern __shared__ __align__(1024) sonic::u8 shared[];
    sonic::grouped_gemm<sonic::Config, sonic::UpForwardEpilogue>(shared, maps, p);
}
