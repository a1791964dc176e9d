// A Chunk is eight bf16 values in one 16-byte access: the unit of the memory-bound kernels.
#pragma once
#include "sm90/types.cuh"

namespace sonic {

// Chunk number `index` of a tensor whose rows are whole chunks.
__device__ __forceinline__ const Chunk* chunk_at(const bf16* tensor, i64 index) {
    return reinterpret_cast<const Chunk*>(tensor) + index;
}

// Values read once: they bypass L1, which the index arrays use.
__device__ __forceinline__ Chunk load_once(const Chunk* address) {
    Chunk v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
    return v;
}

// Values that neighbouring threads or blocks read again.
__device__ __forceinline__ Chunk load_reused(const Chunk* address) {
    Chunk v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
    return v;
}

__device__ __forceinline__ void store_chunk(bf16* tensor, i64 index, Chunk v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(reinterpret_cast<Chunk*>(tensor) + index), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Eight f32 sums, one for each value of a chunk.
struct ChunkSum {
    f32 sum[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};

    // sum += v
    __device__ __forceinline__ void add(Chunk v) {
        const u32 pair[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            sum[2 * i] += low_f32(pair[i]);
            sum[2 * i + 1] += high_f32(pair[i]);
        }
    }

    // sum += factor · v, product and addition rounded once together
    __device__ __forceinline__ void add_scaled(f32 factor, Chunk v) {
        const u32 pair[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            sum[2 * i] = __fmaf_rn(factor, low_f32(pair[i]), sum[2 * i]);
            sum[2 * i + 1] = __fmaf_rn(factor, high_f32(pair[i]), sum[2 * i + 1]);
        }
    }

    // The one rounding to bf16, to nearest even.
    __device__ __forceinline__ Chunk rounded() const {
        return Chunk{pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7])};
    }
};

// sum + ⟨u, v⟩, in the order of the elements
__device__ __forceinline__ f32 add_product(f32 sum, Chunk u, Chunk v) {
    const u32 left[4] = {u.x, u.y, u.z, u.w}, right[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        sum = __fmaf_rn(low_f32(left[i]), low_f32(right[i]), sum);
        sum = __fmaf_rn(high_f32(left[i]), high_f32(right[i]), sum);
    }
    return sum;
}

}  // namespace sonic
