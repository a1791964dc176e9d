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
#define SONIC_STAGES 4
#endif
#ifndef SONIC_CLUSTER
#define SONIC_CLUSTER 1
#endif
#ifndef SONIC_BAND
#define SONIC_BAND 16
#endif

static_assert(SONIC_TILE_N >= 128, "the epilogue spills at 64 columns");

namespace sonic {

constexpr bool kGated = kActivationIsGated<SONIC_ACTIVATION>;
// Columns of G at a time, and of H that belong to them.
constexpr u32 kPart = 32;
constexpr u32 kHColumns = kGated ? 2 * kPart : kPart;
constexpr u32 kHSlots = 2;

struct alignas(1024) DownBackwardShared {
    u8 h[kHSlots][kBoxBytes<kHColumns>];
};

__device__ __forceinline__ u32 parts_of(i32 column, i32 columns) {
    return ceil_div(u32(min_of(columns - column, i32(SONIC_TILE_N))), kPart);
}

__device__ __forceinline__ i32 h_column(i32 column) { return kGated ? 2 * column : column; }

// Brings H of both consumer groups into their slots, kHSlots parts ahead, the first ones during the main
// loop. (It writes nothing: dH and A′ leave from registers.)
class DownBackwardWriter {
  public:
    using Slots = SlotBarriers<kHSlots>;

    __device__ __forceinline__ DownBackwardWriter(const GroupedGemmMaps& maps, const GroupedGemmParams& p,
                                                  DownBackwardShared* shared, Slots* slots)
        : map_(&maps.h), columns_(p.n), status_(p.status), shared_(shared), slots_(slots) {}

    __device__ __forceinline__ void write(const GroupRows& first, const GroupRows& second) {
        u32 parts = parts_of(first.column, columns_);
        for (u32 part = 0; part < parts; ++part) {
            load(0, part, first);
            load(1, part, second);
        }
    }

  private:
    // Rows beyond the expert's end bring the next expert's H, which no stored value depends on.
    __device__ __forceinline__ void load(u32 which, u32 part, const GroupRows& group) {
        if (group.rows <= 0) return;
        RingPosition<kHSlots>& at = at_[which];
        Slots& slots = slots_[which];
        // Fresh slots are free.
        barrier_wait(&slots.filled[at.slot], at.round_parity ^ 1, Role::kWriter, at.slot, status_);
        if (elect_lane()) {
            barrier_arrive_expect(&slots.ready[at.slot], kBoxBytes<kHColumns>);
            tma_load_2d(shared_[which].h[at.slot], map_, &slots.ready[at.slot], h_column(group.column + i32(part * kPart)),
                        group.row, kEvictFirst);
        }
        __syncwarp();
        at.advance();
    }

    const TensorMap* map_;
    i32 columns_;
    u32* status_;
    DownBackwardShared* shared_;
    Slots* slots_;
    RingPosition<kHSlots> at_[2];
};

// 32 columns of G at a time. A lane holds gate and up of two neighbouring columns, 8 bytes of dH, and four
// lanes a whole 32-byte sector: dH and A′ go to memory without a stop in shared memory.
class DownBackwardEpilogue {
  public:
    static constexpr Rows kRows = kGated ? Rows::kGatheredEvenOdd : Rows::kGathered;
    static constexpr u32 kHBoxColumns = kHColumns;
    static constexpr u32 kOutBoxColumns = 0;
    static constexpr u32 kActivationBoxColumns = 0;
    using Shared = DownBackwardShared;
    using Slots = SlotBarriers<kHSlots>;
    using Writer = DownBackwardWriter;

    __device__ __forceinline__ DownBackwardEpilogue(const GroupedGemmParams& p, Shared& shared, Slots& slots)
        : p_(p), slots_(slots, p.status), shared_(shared), upper_(row_of_line<kRows>(lane_index() / 4)) {}

    template <u32 kCount>
    __device__ __forceinline__ void finish(f32 (&acc)[kCount], const GroupRows& group) {
        i32 warp_row = i32(threadIdx.x / 32 % 4 * 16);
        i64 row = group.row + warp_row;
        i32 rows = group.rows - warp_row;
        i32 upper = i32(upper_), lower = upper + 8;
        RowOutputs to_upper = outputs(row + upper, upper < rows, group.column);
        RowOutputs to_lower = outputs(row + lower, lower < rows, group.column);
        f32 score_upper = upper < rows ? __ldg(p_.scores + row + upper) : 0.0f;
        f32 score_lower = lower < rows ? __ldg(p_.scores + row + lower) : 0.0f;
        f32 ds_upper = 0.0f, ds_lower = 0.0f;
        u32 parts = parts_of(group.column, p_.n);
#pragma unroll
        for (u32 part = 0; part < kCount / 16; ++part) {
            if (part >= parts) break;
            HFragment h, dh;
            read_h(rows_of_this_warp<kHColumns>(shared_address(shared_.h[slots_.acquire()])), h);
            const f32* g = acc + part * 16;
            u32 a_pairs[8];
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                a_pairs[2 * j] = backward_pair(h, dh, 2 * j, g[4 * j], g[4 * j + 1], score_upper, ds_upper);
                a_pairs[2 * j + 1] = backward_pair(h, dh, 2 * j + 1, g[4 * j + 2], g[4 * j + 3], score_lower, ds_lower);
            }
            i32 columns = p_.n - group.column - i32(part * kPart);
            store_part<0>(to_upper, part, columns, dh, a_pairs);
            slots_.publish();
            store_part<1>(to_lower, part, columns, dh, a_pairs);
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

    // Where this lane's columns of one row go.
    struct RowOutputs {
        bf16* dh;
        bf16* a;
        bool exists;
    };

    __device__ __forceinline__ RowOutputs outputs(i64 row, bool exists, i32 column) const {
        u32 quad = lane_index() % 4;
        // Of every 16 columns of A′ even lanes store two pairs of the first eight, odd lanes of the last.
        u32 a_column = quad % 2 == 0 ? 2 * quad : 8 + 2 * (quad - 1);
        return {p_.out + row * h_column(p_.n) + h_column(column) + (kGated ? 4 : 2) * quad,
                p_.activation + row * p_.n + column + a_column, exists};
    }

    // kHalf 0: the rows l/4, 1: eight further down. `columns` of G are left from this part on.
    template <u32 kHalf>
    __device__ __forceinline__ void store_part(const RowOutputs& to, u32 part, i32 columns, const HFragment& dh,
                                               const u32 (&a_pairs)[8]) const {
        bool odd = lane_index() % 2 != 0;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const u32* pairs = dh.pairs[2 * j + kHalf];
            if (to.exists && i32(8 * j) < columns) store_pairs(to.dh + part * kHColumns + j * (kHColumns / 4), pairs);
        }
#pragma unroll
        for (u32 j = 0; j < 4; j += 2) {
            u32 first = a_pairs[2 * j + kHalf], second = a_pairs[2 * j + 2 + kHalf];
            u32 other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
            u32 pairs[2] = {odd ? other : first, odd ? second : other};
            if (to.exists && i32(8 * j + 8 * odd) < columns) {
                asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1, %2};"
                             ::"l"(to.a + part * kPart + j * 8), "r"(pairs[0]), "r"(pairs[1]) : "memory");
            }
        }
    }

    static __device__ __forceinline__ void store_pairs(bf16* target, const u32* pairs) {
        if constexpr (kGated) {
            asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1, %2};" ::"l"(target), "r"(pairs[0]), "r"(pairs[1]) : "memory");
        } else {
            asm volatile("st.global.L1::no_allocate.u32 [%0], %1;" ::"l"(target), "r"(pairs[0]) : "memory");
        }
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
