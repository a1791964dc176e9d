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
#include "sm90/slot_ring.cuh"

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

constexpr bool kGated = kActivationIsGated<SONIC_ACTIVATION>;
// Columns of G at a time, and of H that belong to them.
constexpr u32 kPart = 32;
constexpr u32 kHColumns = kGated ? 2 * kPart : kPart;
constexpr u32 kHSlots = 4;

struct alignas(1024) DownBackwardShared {
    u8 h[kHSlots][kBoxBytes<kHColumns>];
    u8 a[kBoxBytes<kPart>];
};

__device__ __forceinline__ u32 parts_of(i32 column, i32 columns) {
    return ceil_div(u32(min_of(columns - column, i32(SONIC_TILE_N))), kPart);
}

__device__ __forceinline__ i32 h_column(i32 column) { return kGated ? 2 * column : column; }

// Brings H of both consumer groups into their slots, up to kHSlots parts ahead, and stores the dH that
// takes its place.
class DownBackwardWriter {
  public:
    __device__ __forceinline__ DownBackwardWriter(const GroupedGemmMaps& maps, const GroupedGemmParams& p,
                                                  DownBackwardShared* shared, SlotBarriers<kHSlots>* slots)
        : maps_(maps), p_(p), dh_{&maps.out, p.out, h_column(p.n)}, shared_(shared), slots_(slots) {}

    __device__ __forceinline__ void write(const GroupRows& first, const GroupRows& second) {
        if (first.rows <= 0) return;
        bool both = second.rows > 0;
        u32 parts = parts_of(first.column, p_.n);
        // Every slot is free: the previous tile's stores have been read.
        for (u32 part = 0; part < min_of(parts, kHSlots); ++part) {
            load(0, part, first);
            if (both) load(1, part, second);
        }
        for (u32 part = 0; part < parts; ++part) {
            store(0, part, first);
            if (both) store(1, part, second);
            // The slots of the part before this one have been read: the next H comes in.
            if (elect_lane()) {
                if (both) {
                    store_wait_read<2>();
                } else {
                    store_wait_read<1>();
                }
            }
            __syncwarp();
            u32 next = part + kHSlots - 1;
            if (part >= 1 && next < parts) {
                load(0, next, first);
                if (both) load(1, next, second);
            }
        }
        if (elect_lane()) store_wait_read<0>();
        __syncwarp();
    }

  private:
    // Rows beyond the expert's end bring the next expert's H, which no stored value depends on.
    __device__ __forceinline__ void load(u32 which, u32 part, const GroupRows& group) {
        RingPosition<kHSlots>& at = loaded_[which];
        if (elect_lane()) {
            u64* ready = &slots_[which].ready[at.slot];
            barrier_arrive_expect(ready, kBoxBytes<kHColumns>);
            tma_load_2d(shared_[which].h[at.slot], &maps_.h, ready, h_column(group.column + i32(part * kPart)), group.row,
                        kEvictFirst);
        }
        __syncwarp();
        at.advance();
    }

    __device__ __forceinline__ void store(u32 which, u32 part, const GroupRows& group) {
        RingPosition<kHSlots>& at = stored_[which];
        barrier_wait(&slots_[which].filled[at.slot], at.round_parity, Role::kWriter, at.slot, p_.status);
        store_box<kHColumns>(shared_address(shared_[which].h[at.slot]), dh_, group.row, group.rows,
                             h_column(group.column + i32(part * kPart)));
        if (elect_lane()) store_commit();
        __syncwarp();
        at.advance();
    }

    const GroupedGemmMaps& maps_;
    const GroupedGemmParams& p_;
    BoxTarget dh_;
    DownBackwardShared* shared_;
    SlotBarriers<kHSlots>* slots_;
    RingPosition<kHSlots> loaded_[2];
    RingPosition<kHSlots> stored_[2];
};

// 32 columns of G at a time: H from its slot, dH back into it, A′ through a box that the writer does not touch.
class DownBackwardEpilogue {
  public:
    static constexpr Rows kRows = kGated ? Rows::kGatheredEvenOdd : Rows::kGathered;
    static constexpr u32 kHBoxColumns = kHColumns;
    static constexpr u32 kOutBoxColumns = kHColumns;
    static constexpr u32 kActivationBoxColumns = 0;
    static constexpr u32 kSlots = kHSlots;
    using Shared = DownBackwardShared;
    using Writer = DownBackwardWriter;

    __device__ __forceinline__ DownBackwardEpilogue(const GroupedGemmParams& p, Shared& shared, SlotBarriers<kHSlots>& slots)
        : p_(p), slots_(slots, p.status), shared_(shared), upper_(row_of_line<kRows>(lane_index() / 4)) {}

    template <u32 kCount>
    __device__ __forceinline__ void finish(f32 (&acc)[kCount], const GroupRows& group) {
        i32 warp_row = i32(threadIdx.x / 32 % 4 * 16);
        i64 row = group.row + warp_row;
        i32 rows = group.rows - warp_row;
        i32 upper = i32(upper_), lower = upper + 8;
        f32 score_upper = upper < rows ? __ldg(p_.scores + row + upper) : 0.0f;
        f32 score_lower = lower < rows ? __ldg(p_.scores + row + lower) : 0.0f;
        f32 ds_upper = 0.0f, ds_lower = 0.0f;
        u32 parts = parts_of(group.column, p_.n);
        u32 a_rows = rows_of_this_warp<kPart>(shared_address(shared_.a));
#pragma unroll
        for (u32 part = 0; part < kCount / 16; ++part) {
            if (part >= parts) break;
            u32 h_rows = rows_of_this_warp<kHColumns>(shared_address(shared_.h[slots_.acquire()]));
            const f32* g = acc + part * 16;
            HFragment h, dh;
            u32 a_pairs[8];
            read_h(h_rows, h);
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                a_pairs[2 * j] = backward_pair(h, dh, 2 * j, g[4 * j], g[4 * j + 1], score_upper, ds_upper);
                a_pairs[2 * j + 1] = backward_pair(h, dh, 2 * j + 1, g[4 * j + 2], g[4 * j + 3], score_lower, ds_lower);
            }
            write_dh(h_rows, dh);
            write_rows<kPart>(a_rows, a_pairs, row_of_line<kRows>(lane_index() % 16));
            slots_.publish();
            store_rows<kPart, 16>(a_rows, p_.activation, p_.n, i32(row), rows, group.column + i32(part * kPart));
            __syncwarp();
        }
        store_ds(row, rows, group.column, upper, ds_upper);
        store_ds(row, rows, group.column, lower, ds_lower);
    }

  private:
    // This lane's share of 16 rows of H or dH: entry 2j is row l/4 and 2j + 1 the row eight further
    // down, columns 8j + 2(l%4) + {0, 1} of G; gate and up of each, or of both columns without a gate.
    struct HFragment {
        u32 pairs[8][kGated ? 2 : 1];
    };

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
    __device__ __forceinline__ void store_ds(i64 row, i32 rows, i32 column, i32 line, f32 ds) const {
        ds += __shfl_xor_sync(0xffffffffu, ds, 1);
        ds += __shfl_xor_sync(0xffffffffu, ds, 2);
        i32 tiles = ceil_div(p_.n, i32(SONIC_TILE_N));
        if (lane_index() % 4 == 0 && line < rows) p_.ds_partial[(row + line) * tiles + column / SONIC_TILE_N] = ds;
    }

    const GroupedGemmParams& p_;
    SlotUser<kHSlots, true> slots_;
    Shared& shared_;
    u32 upper_;  // the row of this lane's first accumulators
};

using Config = GemmConfig<SONIC_TILE_N, SONIC_STAGES, SONIC_CLUSTER, DownBackwardEpilogue::kRows, Major::kMN, SONIC_BAND>;

}  // namespace sonic

SONIC_LAUNCH_GEOMETRY(sonic::Config, sonic::DownBackwardEpilogue);

extern "C" __global__ void __launch_bounds__(sonic::kGemmThreads, 1)
    down_backward_activation(const __grid_constant__ sonic::GroupedGemmMaps maps, const __grid_constant__ sonic::GroupedGemmParams p) {
    extern __shared__ __align__(1024) sonic::u8 shared[];
    sonic::grouped_gemm<sonic::Config, sonic::DownBackwardEpilogue>(shared, maps, p);
}
