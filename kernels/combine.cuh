// The combine of kernels 3 and 8: each token gathers its rows and adds them.
//
// One thread owns eight columns of one token. It issues the loads of up to COMBINE_ROWS_IN_FLIGHT rows before
// the first addition and then adds in the order of token_rows, so that the sum does not depend on the launch.
#pragma once
#include "chunk.cuh"

#ifndef COMBINE_THREADS
#define COMBINE_THREADS 128
#endif
#ifndef COMBINE_ROWS_IN_FLIGHT
#define COMBINE_ROWS_IN_FLIGHT 4
#endif
// Blocks that must fit a multiprocessor. 1280 threads cap the registers at 48: here occupancy hides the three
// dependent loads (offsets, row, value) better than more loads a thread do.
#ifndef COMBINE_BLOCKS
#define COMBINE_BLOCKS (1280 / COMBINE_THREADS)
#endif

namespace sonic {

// A row enters the sum as it is, or times its score.
struct Unweighted {
    __device__ __forceinline__ f32 factor(i32) const { return 1.0f; }
    __device__ __forceinline__ void accumulate(ChunkSum& sum, f32, Chunk v) const { sum.add(v); }
};
struct WeightedByScore {
    const f32* scores;
    __device__ __forceinline__ f32 factor(i32 row) const { return __ldg(scores + row); }
    __device__ __forceinline__ void accumulate(ChunkSum& sum, f32 factor, Chunk v) const { sum.add_scaled(factor, v); }
};

// out[t] = Σ over token t's rows, f32 in the order given, one rounding. A token without rows gets +0.
template <class Weight>
__device__ __forceinline__ void combine(const bf16* __restrict__ rows, const Weight weight,
                                        const i32* __restrict__ token_offsets, const i32* __restrict__ token_rows,
                                        bf16* __restrict__ out, u32 tokens, u32 d) {
    constexpr u32 kFlight = COMBINE_ROWS_IN_FLIGHT;
    const u32 chunks = d / 8;
    // One 64-bit division per block; what is left for a thread fits 32 bits.
    const u64 first = u64(blockIdx.x) * COMBINE_THREADS;
    const u64 first_token = first / chunks;
    const u32 within = u32(first - first_token * chunks) + threadIdx.x;
    const u64 token = first_token + within / chunks;
    const u32 column = within % chunks;
    if (token >= tokens) return;

    const i32 begin = __ldg(token_offsets + token);
    const u32 count = u32(__ldg(token_offsets + token + 1) - begin);
    ChunkSum sum;
    for (u32 next = 0; next < count; next += kFlight) {
        i32 row[kFlight];
        f32 factor[kFlight];
        Chunk value[kFlight];
#pragma unroll
        for (u32 i = 0; i < kFlight; ++i)
            if (next + i < count) row[i] = __ldg(token_rows + begin + next + i);
#pragma unroll
        for (u32 i = 0; i < kFlight; ++i)
            if (next + i < count) {
                value[i] = load_once(chunk_at(rows, i64(row[i]) * chunks + column));
                factor[i] = weight.factor(row[i]);
            }
#pragma unroll
        for (u32 i = 0; i < kFlight; ++i)
            if (next + i < count) weight.accumulate(sum, factor[i], value[i]);
    }
    store_chunk(out, i64(token * chunks + column), sum.rounded());
}

}  // namespace sonic
