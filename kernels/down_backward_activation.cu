// Kernel 4: G = dO[token] W2 stays in registers; from it and the cached H come dH, A′ and dS.
// A grouped GEMM over token counts that gathers dout.
//
//   a_map         unused
//   b_map         w2 (E, d, n): MN-major, the contraction runs over its rows
//   p.gathered    dout (T, d)        p.row_token  token of each row
//   p.h           h (R, 2n), ungated (R, n)
//   p.scores      s [R] in row order
//   p.out         dh (R, 2n) or (R, n) = act′(s·G; h)
//   p.activation  a′ (R, n) = s·A, A recomputed in f32 from the stored h
//   p.ds_partial  (R, ⌈n / tile⌉): Σ over one tile's columns of G·A. With one tile it is ds itself
//                 (without biases); otherwise ds_sum adds the tiles in order.
//   p.n = n, p.k = d
#include "activation.cuh"
#include "sm90/grouped_gemm.cuh"
#include "sm90/row_store.cuh"

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

constexpr bool kGated = kActivationIsGated<SONIC_ACTIVATION>;

// 32 columns of G at a time: the warp's 16 rows of H come in as 16-byte chunks, one part ahead in
// registers, and pass through the staging area to the accumulator's layout; dH takes H's place there.
class DownBackwardEpilogue {
  public:
    static constexpr u32 kPart = 32;
    static constexpr u32 kHColumns = kGated ? 2 * kPart : kPart;
    static constexpr u32 kHPitch = kHColumns * 2 + 32;  // 8-byte accesses of four rows meet no bank twice
    static constexpr u32 kHBytes = 16 * kHPitch;
    static constexpr u32 kAPitch = kPart * 2 + 16;
    static constexpr u32 kStaging = kHBytes + 16 * kAPitch;
    static constexpr u32 kLanesPerRow = kHColumns / 8;
    static constexpr u32 kRowsAtOnce = 32 / kLanesPerRow;
    static constexpr u32 kLoads = 16 / kRowsAtOnce;

    __device__ __forceinline__ DownBackwardEpilogue(const GroupedGemmParams& p, u8* staging)
        : p_(p), staging_(shared_address(staging)), h_stride_(kGated ? 2 * p.n : p.n) {}

    // H of this warp's rows starts towards L2 while the product is computed.
    __device__ __forceinline__ void begin(const Tile& tile, i32 group_row, i32 group_rows) {
        i32 line = i32(threadIdx.x / 32 % 4) * 16 + i32(lane_index());
        if (lane_index() < 16 && line < group_rows) {
            i32 column = kGated ? 2 * tile.column : tile.column;
            i32 width = min_of(h_stride_ - column, i32(SONIC_TILE_N * kHColumns / kPart));
            prefetch_l2(p_.h + i64(group_row + line) * h_stride_ + column, u32(width) * 2);
        }
    }

    template <u32 kCount>
    __device__ __forceinline__ void finish(f32 (&acc)[kCount], const Tile& tile, i32 group_row, i32 group_rows) {
        constexpr u32 kParts = kCount / 16;
        i32 warp_row = i32(threadIdx.x / 32 % 4) * 16;
        i64 row = group_row + warp_row;
        i32 rows = group_rows - warp_row;
        if (rows <= 0) return;
        i32 upper = i32(lane_index() / 4), lower = upper + 8;
        f32 score_upper = upper < rows ? __ldg(p_.scores + row + upper) : 0.0f;
        f32 score_lower = lower < rows ? __ldg(p_.scores + row + lower) : 0.0f;
        f32 ds_upper = 0.0f, ds_lower = 0.0f;
        Chunk h[kLoads];
        load_h(h, row, rows, tile.column);
#pragma unroll
        for (u32 part = 0; part < kParts; ++part) {
            i32 column = tile.column + i32(part * kPart);
            if (column >= p_.n) break;
            place_h(h);
            if (part + 1 < kParts) load_h(h, row, rows, column + i32(kPart));
            __syncwarp();
            u32 a_pairs[8];
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const f32* g = acc + part * 16 + 4 * j;
                a_pairs[2 * j] = backward_pair(j, upper, g[0], g[1], score_upper, ds_upper);
                a_pairs[2 * j + 1] = backward_pair(j, lower, g[2], g[3], score_lower, ds_lower);
            }
            u32 a_staging = staging_ + kHBytes;
            u32 address = a_staging + (lane_index() % 16) * kAPitch + (lane_index() / 16) * 16;
            store_matrix_x4(address, a_pairs[0], a_pairs[1], a_pairs[2], a_pairs[3]);
            store_matrix_x4(address + 32, a_pairs[4], a_pairs[5], a_pairs[6], a_pairs[7]);
            __syncwarp();
            store_staged<kHColumns, kHPitch>(staging_, p_.out, row, rows, kGated ? 2 * column : column, h_stride_);
            store_staged<kPart, kAPitch>(a_staging, p_.activation, row, rows, column, p_.n);
            __syncwarp();
        }
        store_ds(tile, row, rows, upper, ds_upper);
        store_ds(tile, row, rows, lower, ds_lower);
    }

  private:
    __device__ __forceinline__ void load_h(Chunk (&h)[kLoads], i64 row, i32 rows, i32 column) const {
        u32 line = lane_index() / kLanesPerRow;
        i32 h_column = (kGated ? 2 * column : column) + i32(lane_index() % kLanesPerRow * 8);
        const bf16* source = p_.h + (row + line) * i64(h_stride_) + h_column;
#pragma unroll
        for (u32 i = 0; i < kLoads; ++i) {
            bool exists = h_column < h_stride_ && i32(line + i * kRowsAtOnce) < rows;
            h[i] = exists ? load_global_16(source + i64(i * kRowsAtOnce) * h_stride_) : Chunk{0, 0, 0, 0};
        }
    }

    __device__ __forceinline__ void place_h(const Chunk (&h)[kLoads]) const {
        u32 line = lane_index() / kLanesPerRow;
        u32 target = staging_ + line * kHPitch + lane_index() % kLanesPerRow * 16;
#pragma unroll
        for (u32 i = 0; i < kLoads; ++i) store_shared_16(target + i * kRowsAtOnce * kHPitch, h[i]);
    }

    // Columns 8j + 2(l%4) + {0, 1} of one row: replaces h by dh, adds to ds, returns a′ packed.
    __device__ __forceinline__ u32 backward_pair(u32 j, i32 line, f32 g0, f32 g1, f32 score, f32& ds) const {
        u32 quad = lane_index() % 4;
        ActivationGradient first, second;
        if constexpr (kGated) {
            u32 address = staging_ + u32(line) * kHPitch + j * 32 + quad * 8;
            u32 h0, h1;
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(h0), "=r"(h1) : "r"(address) : "memory");
            first = activate_backward<SONIC_ACTIVATION>(low_f32(h0), high_f32(h0), score * g0);
            second = activate_backward<SONIC_ACTIVATION>(low_f32(h1), high_f32(h1), score * g1);
            asm volatile("st.shared.v2.u32 [%0], {%1, %2};"
                         ::"r"(address), "r"(pack_bf16(first.d_gate, first.d_up)),
                         "r"(pack_bf16(second.d_gate, second.d_up)) : "memory");
        } else {
            u32 address = staging_ + u32(line) * kHPitch + j * 16 + quad * 4;
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
    __device__ __forceinline__ void store_ds(const Tile& tile, i64 row, i32 rows, i32 line, f32 ds) const {
        ds += __shfl_xor_sync(0xffffffffu, ds, 1);
        ds += __shfl_xor_sync(0xffffffffu, ds, 2);
        i32 tiles = ceil_div(p_.n, i32(SONIC_TILE_N));
        if (lane_index() % 4 == 0 && line < rows) p_.ds_partial[(row + line) * tiles + tile.column / SONIC_TILE_N] = ds;
    }

    const GroupedGemmParams& p_;
    u32 staging_;
    i32 h_stride_;
};

using Config = GemmConfig<SONIC_TILE_N, SONIC_STAGES, SONIC_CLUSTER, true, Major::kMN, SONIC_BAND,
                          DownBackwardEpilogue::kStaging>;

}  // namespace sonic

SONIC_LAUNCH_GEOMETRY(sonic::Config);

extern "C" __global__ void __launch_bounds__(sonic::kGemmThreads, 1)
    down_backward_activation(const __grid_constant__ sonic::TensorMap a_map, const __grid_constant__ sonic::TensorMap b_map,
                             const __grid_constant__ sonic::GroupedGemmParams p) {
    extern __shared__ __align__(1024) sonic::u8 shared[];
    sonic::grouped_gemm<sonic::Config, sonic::DownBackwardEpilogue>(shared, a_map, b_map, p);
}
