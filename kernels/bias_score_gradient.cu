// ds[row] = Σ over the n-tiles of kernel 4's partial ⟨G, A⟩, plus ⟨dout[token], b2[expert]⟩ with biases.
//
// A warp owns a token: dout[t] comes from DRAM once and meets the b2 of each of the token's experts, which stay in
// L2. Rows are in no order of tokens, so the row's expert is looked up in expert_offsets. The tiles are added in
// their order, then the bias term: lane by lane in column order, and a butterfly whose order is fixed.
//
// grid     max(1, ⌈tokens / kTokensPerBlock (8)⌉)
// block    32 · kTokensPerBlock (256)
// shared   0 dynamic
// cluster  1
//
// Without biases and with one n-tile ds is final already: there is nothing to launch.
#include "chunk.cuh"

using namespace sonic;

constexpr u32 kTokensPerBlock = 8;
constexpr u32 kRowsInFlight = 8;

// The expert e with offsets[e] ≤ row < offsets[e + 1]; empty experts are stepped over.
__device__ __forceinline__ u32 expert_of_row(const i32* __restrict__ expert_offsets, u32 experts, i32 row) {
    u32 low = 0, high = experts;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (__ldg(expert_offsets + middle) <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(32 * kTokensPerBlock)
bias_score_gradient(const bf16* __restrict__ dout,          // (tokens, d) bf16; not read without b2
                    const bf16* __restrict__ b2,            // (experts, d) bf16, or null: no biases
                    const f32* __restrict__ ds_partial,     // (R, tiles) f32
                    const i32* __restrict__ expert_offsets, // (experts + 1) i32
                    const i32* __restrict__ token_offsets,  // (tokens + 1) i32, offsets into token_rows
                    const i32* __restrict__ token_rows,     // (R) i32
                    f32* __restrict__ ds,                   // (R) f32, written whole
                    u32 tokens,                             // T, 0 allowed
                    u32 experts,                            // E ≥ 1
                    u32 tiles,                              // n-tiles of kernel 4
                    u32 d) {                                // multiple of 8
    const u64 token = u64(blockIdx.x) * kTokensPerBlock + threadIdx.x / 32;
    if (token >= tokens) return;
    const u32 lane = threadIdx.x % 32;
    const u32 chunks = d / 8;
    const i32 begin = __ldg(token_offsets + token);
    const u32 count = u32(__ldg(token_offsets + token + 1) - begin);

    for (u32 next = 0; next < count; next += kRowsInFlight) {
        const u32 rows = min_of(count - next, kRowsInFlight);
        f32 sum[kRowsInFlight];
#pragma unroll
        for (u32 i = 0; i < kRowsInFlight; ++i) sum[i] = 0.0f;
        i32 row = 0;
        if (lane < rows) row = __ldg(token_rows + begin + next + lane);
        if (b2) {
            const u32 own = lane < rows ? expert_of_row(expert_offsets, experts, row) : 0;
            u32 expert[kRowsInFlight];
#pragma unroll
            for (u32 i = 0; i < kRowsInFlight; ++i) expert[i] = __shfl_sync(0xffffffffu, own, i);
            for (u32 column = lane; column < chunks; column += 32) {
                const Chunk gradient = load_reused(chunk_at(dout, i64(token * chunks + column)));
                Chunk bias[kRowsInFlight];
#pragma unroll
                for (u32 i = 0; i < kRowsInFlight; ++i)
                    if (i < rows) bias[i] = load_reused(chunk_at(b2, i64(expert[i]) * chunks + column));
#pragma unroll
                for (u32 i = 0; i < kRowsInFlight; ++i)
                    if (i < rows) sum[i] = add_product(sum[i], gradient, bias[i]);
            }
#pragma unroll
            for (u32 i = 0; i < kRowsInFlight; ++i)
#pragma unroll
                for (u32 distance = 16; distance > 0; distance /= 2)
                    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], distance);
        }
        if (lane < rows) {
            f32 total = 0.0f;
            for (u32 tile = 0; tile < tiles; ++tile) total += ds_partial[i64(row) * tiles + tile];
            f32 bias_term = 0.0f;
#pragma unroll
            for (u32 i = 0; i < kRowsInFlight; ++i)
                if (i == lane) bias_term = sum[i];
            ds[row] = b2 ? total + bias_term : total;
        }
    }
}
