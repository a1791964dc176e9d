// Work of a warp on one row of f32: loads of four values, reductions over all lanes.
#pragma once
#include "sm90/types.cuh"

namespace sonic {

constexpr u32 kAllLanes = 0xffffffffu;

// Four neighbouring f32, one 16-byte access.
struct alignas(16) Quad {
    f32 v[4];
};

__device__ __forceinline__ Quad load_quad(const f32* address) {
    Quad q;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(q.v[0]), "=f"(q.v[1]), "=f"(q.v[2]), "=f"(q.v[3]) : "l"(address) : "memory");
    return q;
}

__device__ __forceinline__ void store_quad(f32* address, Quad q) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(address), "f"(q.v[0]), "f"(q.v[1]), "f"(q.v[2]), "f"(q.v[3]) : "memory");
}

// The larger one; NaN if either is.
__device__ __forceinline__ f32 max_or_nan(f32 a, f32 b) {
    f32 result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

__device__ __forceinline__ i32 warp_max(i32 v) {
    i32 result;
    asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(v));
    return result;
}

__device__ __forceinline__ u32 warp_max(u32 v) {
    u32 result;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(v));
    return result;
}

// The lanes that hold the same value of so many bits as this one: a vote for each bit. (match.any asks once for each
// value that occurs.)
__device__ __forceinline__ u32 lanes_with_same(u32 v, u32 bits) {
    u32 lanes = kAllLanes;
    for (u32 bit = 0; bit < bits; ++bit) {
        const bool set = v >> bit & 1;
        const u32 voters = __ballot_sync(kAllLanes, set);
        lanes &= set ? voters : ~voters;
    }
    return lanes;
}

__device__ __forceinline__ u32 lanes_below(u32 lane) { return (1u << lane) - 1u; }

// Values in 128-wide chunks of a row of `length` values: lane i holds four neighbours of each chunk. Beyond the end
// stands `beyond`. Rows of a multiple of four values are read 16 bytes at a time.
__device__ __forceinline__ Quad load_row_quad(const f32* row, u32 length, u32 first, f32 beyond) {
    Quad q{{beyond, beyond, beyond, beyond}};
    if (length % 4 == 0) {
        if (first < length) q = load_quad(row + first);
    } else {
#pragma unroll
        for (u32 j = 0; j < 4; ++j)
            if (first + j < length) q.v[j] = row[first + j];
    }
    return q;
}

__device__ __forceinline__ void store_row_quad(f32* row, u32 length, u32 first, Quad q) {
    if (length % 4 == 0) {
        if (first < length) store_quad(row + first, q);
    } else {
#pragma unroll
        for (u32 j = 0; j < 4; ++j)
            if (first + j < length) row[first + j] = q.v[j];
    }
}

// Σ over the block's threads before this one, and over all of them; the same in every run. A block of
// 32 · kWarps threads, all of which call it.
template <u32 kWarps>
struct BlockScan {
    u32 warp_sums[kWarps];

    __device__ __forceinline__ u32 before(u32 v, u32& total) {
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        u32 inclusive = v;
#pragma unroll
        for (u32 distance = 1; distance < 32; distance *= 2) {
            const u32 other = __shfl_up_sync(kAllLanes, inclusive, distance);
            if (lane >= distance) inclusive += other;
        }
        __syncthreads();
        if (lane == 31) warp_sums[warp] = inclusive;
        __syncthreads();
        u32 earlier = 0;
        total = 0;
#pragma unroll
        for (u32 i = 0; i < kWarps; ++i) {
            const u32 sum = warp_sums[i];
            if (i < warp) earlier += sum;
            total += sum;
        }
        return earlier + inclusive - v;
    }
};

}  // namespace sonic
