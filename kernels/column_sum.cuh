// The bias gradients: per expert, the sum of its rows.
//
// A block owns 64 columns of one expert. Eight threads cover a row's 128 bytes, 32 rows are under way at a time;
// thread (lane, chunk) adds rows lane, lane + 32, … in order, and the 32 partial sums are then added in order.
// The order depends on nothing but the expert's row count, so the result is the same in every launch.
#pragma once
#include "chunk.cuh"

namespace sonic {

constexpr u32 kColumnSumThreads = 256;
constexpr u32 kColumnSumColumns = 64;

// The expert's rows as they lie. They come from DRAM: many loads in flight.
struct ExpertRows {
    static constexpr u32 kInFlight = 8;
    const bf16* rows;
    __device__ __forceinline__ i64 place(i32 row) const { return row; }
    __device__ __forceinline__ f32 factor(i32) const { return 1.0f; }
    __device__ __forceinline__ Chunk load(i64 index) const { return load_once(chunk_at(rows, index)); }
};

// The rows of the expert's tokens, each times the pair's score.
// They come from L2: many warps do better than many loads.
struct ScoredTokenRows {
    static constexpr u32 kInFlight = 4;
    const bf16* tokens;
    const i32* row_token;
    const f32* scores;
    __device__ __forceinline__ i64 place(i32 row) const { return __ldg(row_token + row); }
    __device__ __forceinline__ f32 factor(i32 row) const { return __ldg(scores + row); }
    __device__ __forceinline__ Chunk load(i64 index) const { return load_reused(chunk_at(tokens, index)); }
};

// out[expert][columns of this slab] = Σ over the expert's rows of factor · row; +0 for an expert without rows.
template <class Rows>
__device__ __forceinline__ void column_sum(const Rows rows, const i32* __restrict__ expert_offsets,
                                           bf16* __restrict__ out, u32 expert, u32 slab, u32 columns) {
    constexpr u32 kWide = kColumnSumColumns / 8;
    constexpr u32 kLanes = kColumnSumThreads / kWide;
    constexpr u32 kFlight = Rows::kInFlight;
    __shared__ f32 partial[kLanes][kColumnSumColumns + 4];
    const u32 lane = threadIdx.x / kWide;
    const u32 chunk = threadIdx.x % kWide;
    const u32 chunks = columns / 8;
    const u32 column = slab * kWide + chunk;
    const i32 begin = __ldg(expert_offsets + expert);
    const u32 count = u32(__ldg(expert_offsets + expert + 1) - begin);

    ChunkSum sum;
    if (column < chunks) {
        for (u32 next = lane; next < count; next += kLanes * kFlight) {
            Chunk value[kFlight];
            f32 factor[kFlight];
#pragma unroll
            for (u32 i = 0; i < kFlight; ++i)
                if (next + i * kLanes < count) {
                    const i32 row = begin + i32(next + i * kLanes);
                    value[i] = rows.load(rows.place(row) * chunks + column);
                    factor[i] = rows.factor(row);
                }
#pragma unroll
            for (u32 i = 0; i < kFlight; ++i)
                if (next + i * kLanes < count) sum.add_scaled(factor[i], value[i]);
        }
    }
#pragma unroll
    for (u32 i = 0; i < 8; ++i) partial[lane][chunk * 8 + i] = sum.sum[i];
    __syncthreads();

    if (threadIdx.x < kWide && column < chunks) {
        ChunkSum total;
        for (u32 other = 0; other < kLanes; ++other)
#pragma unroll
            for (u32 i = 0; i < 8; ++i) total.sum[i] += partial[other][chunk * 8 + i];
        store_chunk(out, i64(expert) * chunks + column, total.rounded());
    }
}

}  // namespace sonic
