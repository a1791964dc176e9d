// Freestanding base types for sm_90a kernels.
//
// No CUDA header is included anywhere under kernels/: the same sources compile under NVRTC without
// an include path and under nvcc. Every include is spelled relative to kernels/ ("sm90/types.cuh"),
// so NVRTC takes the headers as named sources and nvcc takes `-I kernels`.
#pragma once

namespace sonic {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;
using f32 = float;

// Bits of a bfloat16. Arithmetic is f32 only; this type is storage.
struct alignas(2) bf16 {
    u16 bits;
};

// 16 bytes: eight bf16, the unit of every copy that is not TMA.
struct alignas(16) Chunk {
    u32 x, y, z, w;
};

// The 128 opaque bytes of a CUtensorMap, passed as a __grid_constant__ kernel parameter.
struct alignas(128) TensorMap {
    u64 opaque[16];
};

__device__ __forceinline__ f32 to_f32(bf16 v) { return __uint_as_float(u32(v.bits) << 16); }

// The two halves of a packed pair of bf16: the lower address is in the low 16 bits.
__device__ __forceinline__ f32 low_f32(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ f32 high_f32(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Round to nearest even, twice; `low` lands at the lower address.
__device__ __forceinline__ u32 pack_bf16(f32 low, f32 high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ bf16 to_bf16(f32 v) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    return bf16{bits};
}

__device__ __forceinline__ u32 shared_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

template <typename T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

template <typename T>
__host__ __device__ constexpr T round_up(T a, T b) {
    return ceil_div(a, b) * b;
}

template <typename T>
__device__ __forceinline__ T min_of(T a, T b) {
    return a < b ? a : b;
}

template <typename T>
__device__ __forceinline__ T max_of(T a, T b) {
    return a < b ? b : a;
}

}  // namespace sonic
