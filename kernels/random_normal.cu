// Normally distributed bf16 numbers, each a pure function of (seed, index): data for measurements and proofs at
// sizes that no host should fill.
//
// grid     any
// block    256
#include "sm90/types.cuh"

using namespace sonic;

// splitmix64
__device__ __forceinline__ u64 mixed(u64 z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

extern "C" __global__ void __launch_bounds__(256)
random_normal(bf16* __restrict__ out, // written whole
              u64 elements, u64 seed,
              f32 deviation) {
    const u64 step = u64(gridDim.x) * blockDim.x;
    for (u64 pair = u64(blockIdx.x) * blockDim.x + threadIdx.x; 2 * pair < elements; pair += step) {
        const u64 bits = mixed(seed ^ mixed(pair));
        // Box and Muller: both in (0, 1].
        const f32 u = (f32(u32(bits >> 40)) + 1.0f) * 5.9604644775390625e-8f;
        const f32 v = (f32(u32(bits) >> 8) + 1.0f) * 5.9604644775390625e-8f;
        const f32 radius = deviation * __fsqrt_rn(-2.0f * __logf(u));
        out[2 * pair] = to_bf16(radius * __cosf(6.283185307179586f * v));
        if (2 * pair + 1 < elements) out[2 * pair + 1] = to_bf16(radius * __sinf(6.283185307179586f * v));
    }
}
