// A plain copy, 16 bytes a thread and step: what the card's memory gives, the floor of the memory-bound kernels.
//
// grid     any
// block    512
#include "chunk.cuh"

using namespace sonic;

extern "C" __global__ void __launch_bounds__(512)
plain_copy(const bf16* __restrict__ from, bf16* __restrict__ to, // `chunks` times eight elements each
           u64 chunks) {
    const u64 step = u64(gridDim.x) * blockDim.x;
    u64 at = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; at + 3 * step < chunks; at += 4 * step) {
        Chunk values[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) values[i] = load_once(chunk_at(from, i64(at + i * step)));
#pragma unroll
        for (u32 i = 0; i < 4; ++i) store_chunk(to, i64(at + i * step), values[i]);
    }
    for (; at < chunks; at += step) store_chunk(to, i64(at), load_once(chunk_at(from, i64(at))));
}
