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

    // Once the boxes of the previous tile have left, the first boxes of H come in; the rest of the
    // warp's rows of H starts towards L2, a few rows a step.
    __device__ __forceinline__ void overlap(i32 step, i32 steps) {
        u32 rows_a_step = ceil_div(kBoxRows, u32(steps));
        u32 line = u32(step) * rows_a_step + lane_index();
        if (parts_ > kHBoxes && lane_index() < rows_a_step && i32(line) < min_of(rows_, i32(kBoxRows))) {
            i32 column = (kGated ? 2 * tile_.column : tile_.column) + i32(kHBoxes * kHColumns);
            i32 width = min_of(dh_.stride - column, i32((parts_ - kHBoxes) * kHColumns));
            prefetch_l2(p_.h + i64(row_ + i32(line)) * dh_.stride + column, u32(width) * 2);
        }
        if (step == min_of(2, steps - 1)) {
            if (lane_index() == 0) {
                store_wait_read<0>();
                for (u32 part = 0; part < min_of(parts_, kHBoxes); ++part) load_h(part);
            }
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
            u32 a_pairs[8];
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const f32* g = acc + part * 16 + 4 * j;
                a_pairs[2 * j] = backward_pair(h_box, j, upper_, g[0], g[1], score_upper, ds_upper);
                a_pairs[2 * j + 1] = backward_pair(h_box, j, upper_ + 8, g[2], g[3], score_lower, ds_lower);
            }
            write_box<kPart>(a_box, a_pairs, row_of_line<kRows>(lane_index() % 16));
            publish_box();
            i32 column = tile_.column + i32(part * kPart);
            store_box<kHColumns>(h_box, dh_, row_, rows_, kGated ? 2 * column : column);
            store_box<kPart>(a_box, a_, row_, rows_, column);
            ++used_;
            if (lane_index() == 0) {
                store_commit();
                // The boxes of the part before this one have left: the next but two comes in.
                store_wait_read<1>();
                if (part >= 1 && part + kHBoxes - 1 < parts_) load_h(part + kHBoxes - 1);
            }
            __syncwarp();
        }
        store_ds(upper, ds_upper);
        store_ds(lower, ds_lower);
    }

    __device__ __forceinline__ void drain() {
        if (lane_index() == 0) store_wait<0>();
    }

  private:
    // Lane 0: the box of `part` of the current tile, whose slot is free. Rows beyond the expert's end
    // bring the next expert's H, which no stored value depends on.
    __device__ __forceinline__ void load_h(u32 part) {
        u32 slot = loaded_ % kHBoxes;
        i32 column = tile_.column + i32(part * kPart);
        barrier_arrive_expect(&full_[slot], kBoxBytes<kHColumns>);
        tma_load_2d(shared_.h[slot], &maps_.h, &full_[slot], kGated ? 2 * column : column, row_, kEvictFirst);
        ++loaded_;
    }

    // Columns 8j + 2(l%4) + {0, 1} of one row: replaces h by dh, adds to ds, returns a′ packed.
    __device__ __forceinline__ u32 backward_pair(u32 box, u32 j, u32 row, f32 g0, f32 g1, f32 score, f32& ds) const {
        u32 quad = lane_index() % 4;
        ActivationGradient first, second;
        if constexpr (kGated) {
            u32 address = (box + box_offset<64>(row, quad / 2) + quad % 2 * 8) ^ (j << 5);
            u32 h0, h1;
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(h0), "=r"(h1) : "r"(address) : "memory");
            first = activate_backward<SONIC_ACTIVATION>(low_f32(h0), high_f32(h0), score * g0);
            second = activate_backward<SONIC_ACTIVATION>(low_f32(h1), high_f32(h1), score * g1);
            asm volatile("st.shared.v2.u32 [%0], {%1, %2};"
                         ::"r"(address), "r"(pack_bf16(first.d_gate, first.d_up)),
                         "r"(pack_bf16(second.d_gate, second.d_up)) : "memory");
        } else {
            u32 address = box + box_offset<32>(row, j) + quad * 4;
            u32 h01;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(h01) : "r"(address) : "memory");
            first = activate_backward<SONIC_ACTIVATION>(low_f32(h01), 0.0f, score * g0);
            second = activate_backward<SONIC_ACTIVATION>(high_f32(h01), 0.0f, score * g1);
            store_shared_4(address, pack_bf16(first.d_gate, second.d_gate));
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
    u32 loaded_ = 0;  // boxes of H, over all tiles; lane 0
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
