// Kernel 4: G = dO[token] W2 stays in registers; from it and the cached H come dH, A′ and dS.
// A grouped GEMM over token counts that gathers dout.
//
//   maps.b        w2 (E, d, n): MN-major, the contraction runs over its rows
//   p.gathered    dout (T, d)        p.row_token  token of each row
//   p.h           h (R, 2n), ungated (R, n); comes in through maps.h
//   p.scores      s [R] in row order
//   p.out         dh (R, 2n) or (R, n) = act′(s·G; h)
//   p.activation  a′ (R, n) = s·A, A recomputed in f32 from the stored h
//   p.ds_partial  (R, ⌈n / tile⌉): Σ over one tile's columns of G·A. With one tile it is ds itself
//                 (without biases); otherwise ds_sum adds the tiles in order.
//   p.n = n, p.k = d
#include "activation.cuh"
#include "sm90/grouped_gemm.cuh"
#include "sm90/row_box.cuh"

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

// 32 columns of G at a time. The warp's 16 rows of H come in by TMA, up to four boxes ahead and the
// first ones during the main loop; dH takes H's place in the box and leaves by TMA.
class DownBackwardEpilogue {
  public:
    static constexpr bool kGated = kActivationIsGated<SONIC_ACTIVATION>;
    static constexpr Rows kRows = kGated ? Rows::kGatheredEvenOdd : Rows::kGathered;
    static constexpr u32 kPart = 32;
    static constexpr u32 kHColumns = kGated ? 2 * kPart : kPart;
    static constexpr u32 kHBoxColumns = kHColumns;
    static constexpr u32 kOutBoxColumns = kHColumns;
    static constexpr u32 kActivationBoxColumns = kPart;
    static constexpr u32 kHBoxes = 4;
    static constexpr u32 kBarriers = kHBoxes;

    struct alignas(1024) Shared {
        u8 h[kHBoxes][kBoxBytes<kHColumns>];
        u8 a[2][kBoxBytes<kPart>];
    };

    __device__ __forceinline__ DownBackwardEpilogue(const GroupedGemmMaps& maps, const GroupedGemmParams& p, Shared& shared,
                                                    u64* full)
        : p_(p),
          maps_(maps),
          shared_(shared),
          full_(full),
          dh_{&maps.out, p.out, kGated ? 2 * p.n : p.n},
          a_{&maps.activation, p.activation, p.n},
          upper_(row_of_line<kRows>(lane_index() / 4)) {}

    __device__ __forceinline__ void begin(const Tile& tile, i32 row, i32 rows) {
        tile_ = tile;
        row_ = row;
        rows_ = rows;
        i32 width = min_of(p_.n - tile.column, i32(SONIC_TILE_N));
        parts_ = rows > 0 ? ceil_div(u32(width), kPart) : 0;
    }

    // Once the boxes of the previous tile have left, the first boxes of H come in.
    __device__ __forceinline__ void overlap(i32 step, i32 steps) {
        if (step == min_of(2, steps - 1)) {
            if (elect_lane()) {
                store_wait_read<0>();
                for (u32 part = 0; part < min_of(parts_, kHBoxes); ++part) load_h(loaded_ + part, part);
            }
            loaded_ += min_of(parts_, kHBoxes);
            __syncwarp();
        }
    }

    template <u32 kCount>
    __device__ __forceinline__ void finish(f32 (&acc)[kCount]) {
        if (rows_ <= 0) return;
        i32 upper = i32(upper_), lower = upper + 8;
        f32 score_upper = upper < rows_ ? __ldg(p_.scores + row_ + upper) : 0.0f;
        f32 score_lower = lower < rows_ ? __ldg(p_.scores + row_ + lower) : 0.0f;
        f32 ds_upper = 0.0f, ds_lower = 0.0f;
#pragma unroll
        for (u32 part = 0; part < kCount / 16; ++part) {
            if (part >= parts_) break;
            u32 slot = used_ % kHBoxes;
            u32 h_box = shared_address(shared_.h[slot]);
            u32 a_box = shared_address(shared_.a[used_ % 2]);
            barrier_wait(&full_[slot], (used_ / kHBoxes) % 2, Role::kEpilogue, slot, p_.status);
            __syncwarp();
            const f32* g = acc + part * 16;
            HFragment h, dh;
            u32 a_pairs[8];
            read_h(h_box, h);
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                a_pairs[2 * j] = backward_pair(h, dh, 2 * j, g[4 * j], g[4 * j + 1], score_upper, ds_upper);
                a_pairs[2 * j + 1] = backward_pair(h, dh, 2 * j + 1, g[4 * j + 2], g[4 * j + 3], score_lower, ds_lower);
            }
            write_dh(h_box, dh);
            write_box<kPart>(a_box, a_pairs, row_of_line<kRows>(lane_index() % 16));
            publish_box();
            i32 column = tile_.column + i32(part * kPart);
            store_box<kHColumns>(h_box, dh_, row_, rows_, kGated ? 2 * column : column);
            store_box<kPart>(a_box, a_, row_, rows_, column);
            ++used_;
            bool another = part >= 1 && part + kHBoxes - 1 < parts_;
            if (elect_lane()) {
                store_commit();
                // The boxes of the part before this one have left: the next but two comes in.
                store_wait_read<1>();
                if (another) load_h(loaded_, part + kHBoxes - 1);
            }
            loaded_ += another;
            __syncwarp();
        }
        store_ds(upper, ds_upper);
        store_ds(lower, ds_lower);
    }

    __device__ __forceinline__ void drain() {
        if (elect_lane()) store_wait<0>();
    }

  private:
    // This lane's share of 16 rows of H or dH: entry 2j is row l/4 and 2j + 1 the row eight further
    // down, columns 8j + 2(l%4) + {0, 1} of G; gate and up of each, or of both columns without a gate.
    struct HFragment {
        u32 pairs[8][kGated ? 2 : 1];
    };

    // One lane: box number `count` of H, `part` of the current tile, whose slot is free. Rows beyond the
    // expert's end bring the next expert's H, which no stored value depends on.
    __device__ __forceinline__ void load_h(u32 count, u32 part) {
        u32 slot = count % kHBoxes;
        i32 column = tile_.column + i32(part * kPart);
        barrier_arrive_expect(&full_[slot], kBoxBytes<kHColumns>);
        tma_load_2d(shared_.h[slot], &maps_.h, &full_[slot], kGated ? 2 * column : column, row_, kEvictFirst);
    }

    __device__ __forceinline__ u32 h_address(u32 box, u32 entry) const {
        u32 quad = lane_index() % 4, row = upper_ + entry % 2 * 8, j = entry / 2;
        if constexpr (kGated) return (box + box_offset<64>(row, quad / 2) + quad % 2 * 8) ^ (j << 5);
        return (box + box_offset<32>(row, 0) + quad * 4) ^ (j << 4);
    }

    __device__ __forceinline__ void read_h(u32 box, HFragment& h) const {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            if constexpr (kGated) {
                asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                             : "=r"(h.pairs[i][0]), "=r"(h.pairs[i][1]) : "r"(h_address(box, i)) : "memory");
            } else {
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(h.pairs[i][0]) : "r"(h_address(box, i)) : "memory");
            }
        }
    }

    __device__ __forceinline__ void write_dh(u32 box, const HFragment& dh) const {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            if constexpr (kGated) {
                asm volatile("st.shared.v2.u32 [%0], {%1, %2};"
                             ::"r"(h_address(box, i)), "r"(dh.pairs[i][0]), "r"(dh.pairs[i][1]) : "memory");
            } else {
                store_shared_4(h_address(box, i), dh.pairs[i][0]);
            }
        }
    }

    // Two columns of G in one row: fills dh, adds to ds, returns a′ packed.
    static __device__ __forceinline__ u32 backward_pair(const HFragment& h, HFragment& dh, u32 entry, f32 g0, f32 g1,
                                                        f32 score, f32& ds) {
        ActivationGradient first, second;
        const u32* pairs = h.pairs[entry];
        if constexpr (kGated) {
            first = activate_backward<SONIC_ACTIVATION>(low_f32(pairs[0]), high_f32(pairs[0]), score * g0);
            second = activate_backward<SONIC_ACTIVATION>(low_f32(pairs[1]), high_f32(pairs[1]), score * g1);
            dh.pairs[entry][0] = pack_bf16(first.d_gate, first.d_up);
            dh.pairs[entry][1] = pack_bf16(second.d_gate, second.d_up);
        } else {
            first = activate_backward<SONIC_ACTIVATION>(low_f32(pairs[0]), 0.0f, score * g0);
            second = activate_backward<SONIC_ACTIVATION>(high_f32(pairs[0]), 0.0f, score * g1);
            dh.pairs[entry][0] = pack_bf16(first.d_gate, second.d_gate);
        }
        ds += g0 * first.a;
        ds += g1 * second.a;
        return pack_bf16(score * first.a, score * second.a);
    }

    // The four lanes of a row add up in a fixed order.
    __device__ __forceinline__ void store_ds(i32 line, f32 ds) const {
        ds += __shfl_xor_sync(0xffffffffu, ds, 1);
        ds += __shfl_xor_sync(0xffffffffu, ds, 2);
        i32 tiles = ceil_div(p_.n, i32(SONIC_TILE_N));
        if (lane_index() % 4 == 0 && line < rows_) {
            p_.ds_partial[i64(row_ + line) * tiles + tile_.column / SONIC_TILE_N] = ds;
        }
    }

    const GroupedGemmParams& p_;
    const GroupedGemmMaps& maps_;
    Shared& shared_;
    u64* full_;  // per box: H has landed
    BoxTarget dh_;
    BoxTarget a_;
    u32 upper_;  // the row of this lane's first accumulators
    Tile tile_;
    i32 row_;
    i32 rows_;
    u32 parts_;
    u32 loaded_ = 0;  // boxes of H, over all tiles
    u32 used_ = 0;
};

using Config = GemmConfig<SONIC_TILE_N, SONIC_STAGES, SONIC_CLUSTER, DownBackwardEpilogue::kRows, Major::kMN, SONIC_BAND>;

}  // namespace sonic

SONIC_LAUNCH_GEOMETRY(sonic::Config, sonic::DownBackwardEpilogue);

extern "C" __global__ void __launch_bounds__(sonic::kGemmThreads, 1)
    down_backward_activation(const __grid_constant__ sonic::GroupedGemmMaps maps, const __grid_constant__ sonic::GroupedGemmParams p) {
    extern __shared__ __align__(1024) sonic::u8 shared[];
    sonic::grouped_gemm<sonic::Config, sonic::DownBackwardEpilogue>(shared, maps, p);
}
