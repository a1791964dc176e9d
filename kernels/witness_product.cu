// The witness of the six grouped GEMMs: every stored element against an f64 product of what its kernel read,
// within the a-priori bound of one sum and one store. No tensor core, no shared line with the kernels' code.
//
// SONIC_WITNESS  0  one result, stored as it is: y, dx̃, dw2, dw1
//                1  kernel 1 with SwiGLU: h, and a from the unrounded h
//                2  kernel 4 with SwiGLU: G is the product; dh, a′, and the parts of ds
//
// Element (i, j) of expert e is Σ_k A[i, k]·B[j, k]. Of A and B each index is a stride, and one index of each
// may count the expert's rows, directly or by the token of the row.
//
// grid     (⌈n / 64⌉, ⌈m / 64⌉, experts), m at least the most rows of an expert where i counts rows
// block    256
#include "witness/ball.cuh"

#ifndef SONIC_WITNESS
#define SONIC_WITNESS 0
#endif

using namespace sonic;

enum class Along : u32 { kPlain = 0, kRow = 1, kToken = 2 };

// base[expert · by_expert + outer · by_outer + k · by_k], where `outer` or `k` may be a row of the expert.
struct WitnessOperand {
    const bf16* base;
    i64 by_expert, by_outer, by_k;
    Along outer, k;
};

struct WitnessParams {
    WitnessOperand a, b;
    const i32* row_token;
    const i32* expert_offsets;
    const bf16* out;     // y, dx̃, dw2, dw1; h; dh
    const bf16* second;  // a; a′
    const bf16* h;
    const f32* scores;
    f64* ds_sum;  // (R) Σ G·A; zeroed
    f64* ds_rad;  // (R) what its parts pass on
    f64* ds_size; // (R) Σ(|G| + E)(|A| + E)
    Tally* tally; // of out, then of second
    u32 m, n, k;  // 0 where it counts the rows of an expert
    u32 reserved;
    WitnessNumerics numerics;
};

constexpr u32 kTile = 64, kDepth = 16, kPitch = kTile + 2;

__device__ __forceinline__ i64 place(Along along, i64 index, i64 first_row, const i32* row_token) {
    if (along == Along::kPlain) return index;
    return along == Along::kRow ? first_row + index : i64(row_token[first_row + index]);
}

__device__ __forceinline__ void load_tile(f64 (&tile)[kDepth][kPitch], const WitnessOperand& x, u32 expert, i64 first_row,
                                          const i32* row_token, u32 outer0, u32 outers, u32 k0, u32 ks) {
#pragma unroll
    for (u32 step = 0; step < kTile * kDepth / 256; ++step) {
        u32 at = threadIdx.x + step * 256;
        // Neighbouring threads read neighbouring elements, whichever index is contiguous.
        bool deep = x.by_k == 1;
        u32 outer = deep ? at / kDepth : at % kTile, k = deep ? at % kDepth : at / kTile;
        f64 value = 0.0;
        if (outer0 + outer < outers && k0 + k < ks) {
            i64 from = i64(expert) * x.by_expert + place(x.outer, outer0 + outer, first_row, row_token) * x.by_outer +
                       place(x.k, k0 + k, first_row, row_token) * x.by_k;
            value = to_f64(x.base[from]);
        }
        tile[k][outer] = value;
    }
}

extern "C" __global__ void __launch_bounds__(256) witness_product(const __grid_constant__ WitnessParams p) {
    __shared__ f64 a_tile[kDepth][kPitch], b_tile[kDepth][kPitch];
    const u32 expert = blockIdx.z;
    const i64 first_row = p.expert_offsets[expert];
    const u32 rows = u32(p.expert_offsets[expert + 1] - first_row);
    const u32 m = p.m != 0 ? p.m : rows, n = p.n, k = p.k != 0 ? p.k : rows;
    const u32 i0 = blockIdx.y * kTile, j0 = blockIdx.x * kTile;
    if (i0 >= m) return;
    const u32 ti = threadIdx.x / 16 * 4, tj = threadIdx.x % 16 * 4;
    f64 sum[4][4] = {}, size[4][4] = {};
    for (u32 k0 = 0; k0 < k; k0 += kDepth) {
        __syncthreads();
        load_tile(a_tile, p.a, expert, first_row, p.row_token, i0, m, k0, k);
        load_tile(b_tile, p.b, expert, first_row, p.row_token, j0, n, k0, k);
        __syncthreads();
#pragma unroll 4
        for (u32 step = 0; step < kDepth; ++step) {
            f64 a[4], b[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) a[i] = a_tile[step][ti + i], b[i] = b_tile[step][tj + i];
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    sum[i][j] = fma(a[i], b[j], sum[i][j]);
                    size[i][j] = fma(fabs(a[i]), fabs(b[j]), size[i][j]);
                }
        }
    }

    const WitnessNumerics& numerics = p.numerics;
    const f64 largest = numerics.storage.largest;
    Verdicts of_out, of_second;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u32 row_in = i0 + ti + i;
        const bool row_exists = row_in < m;
        // Results by row of the routing, or (E, m, n).
        const i64 row = p.m != 0 ? i64(expert) * m + row_in : first_row + row_in;
        f64 ds_sum = 0.0, ds_rad = 0.0, ds_size = 0.0;
        if constexpr (SONIC_WITNESS == 0) {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const u32 column = j0 + tj + j;
                if (!row_exists || column >= n) continue;
                const Ball stored = round_ball(numerics.storage, dot_product(numerics, sum[i][j], size[i][j], f64(k)));
                const i64 at = row * n + column;
                of_out.judge(to_f64(p.out[at]), stored, largest, u64(at));
            }
        } else if constexpr (SONIC_WITNESS == 1) {
#pragma unroll
            for (u32 j = 0; j < 4; j += 2) {
                const u32 column = j0 + tj + j;
                if (!row_exists || column >= n) continue;
                const Ball gate = dot_product(numerics, sum[i][j], size[i][j], f64(k));
                const Ball up = dot_product(numerics, sum[i][j + 1], size[i][j + 1], f64(k));
                const Ball a = round_ball(numerics.storage, multiply(numerics, silu(numerics, gate), up));
                const i64 at = row * n + column;
                of_out.judge(to_f64(p.out[at]), round_ball(numerics.storage, gate), largest, u64(at));
                of_out.judge(to_f64(p.out[at + 1]), round_ball(numerics.storage, up), largest, u64(at) + 1);
                of_second.judge(to_f64(p.second[at / 2]), a, largest, u64(at / 2));
            }
        } else {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const u32 column = j0 + tj + j;
                if (!row_exists || column >= n) continue;
                const Ball g = dot_product(numerics, sum[i][j], size[i][j], f64(k));
                const Ball score = {f64(p.scores[row]), 0.0};
                const i64 at = row * n + column;
                const Ball gate = {to_f64(p.h[2 * at]), 0.0}, up = {to_f64(p.h[2 * at + 1]), 0.0};
                const Ball on = silu(numerics, gate);
                const Ball a = multiply(numerics, on, up);
                of_second.judge(to_f64(p.second[at]), round_ball(numerics.storage, multiply(numerics, score, a)), largest, u64(at));
                // dgate = dA·up·silu′(gate), in either order of the products; dup = dA·silu(gate).
                const Ball da = multiply(numerics, score, g);
                Ball dgate = multiply(numerics, multiply(numerics, da, up), silu_slope(numerics, gate.mid));
                dgate.rad += smaller(numerics.accumulate.underflow * magnitude(da), magnitude(dgate));
                const Ball dup = multiply(numerics, da, on);
                of_out.judge(to_f64(p.out[2 * at]), round_ball(numerics.storage, dgate), largest, u64(2 * at));
                of_out.judge(to_f64(p.out[2 * at + 1]), round_ball(numerics.storage, dup), largest, u64(2 * at) + 1);
                const Ball term = product(g, a);
                ds_sum += term.mid, ds_rad += term.rad, ds_size += magnitude(term);
            }
            // 16 threads hold a row's 64 columns; tiles meet in memory, in any order: f64 to spare.
#pragma unroll
            for (u32 distance = 8; distance > 0; distance /= 2) {
                ds_sum += __shfl_xor_sync(0xffffffffu, ds_sum, distance);
                ds_rad += __shfl_xor_sync(0xffffffffu, ds_rad, distance);
                ds_size += __shfl_xor_sync(0xffffffffu, ds_size, distance);
            }
            if (row_exists && threadIdx.x % 16 == 0) {
                atomicAdd(p.ds_sum + row, ds_sum);
                atomicAdd(p.ds_rad + row, ds_rad);
                atomicAdd(p.ds_size + row, ds_size);
            }
        }
    }
    of_out.add_to(p.tally);
    if constexpr (SONIC_WITNESS != 0) of_second.add_to(p.tally + 1);
}
