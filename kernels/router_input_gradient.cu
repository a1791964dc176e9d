// dx += dlogits W_r, the product in f32: one rounding after the experts' own. (Through a bf16 result with
// beta = 1 the library rounds the product once more.)
//
// grid     ⌈chunks / 256⌉
// block    256
#include "chunk.cuh"

using namespace sonic;

extern "C" __global__ void __launch_bounds__(256)
router_input_gradient(const f32* __restrict__ product, // eight a chunk: (tokens, d)
                      bf16* __restrict__ dx,           // (tokens, d), of the experts; added to
                      u64 chunks) {                    // tokens · d / 8
    const u64 at = u64(blockIdx.x) * 256 + threadIdx.x;
    if (at >= chunks) return;
    // A chunk holds 16 bytes of any kind: here four f32.
    const Chunk* from = reinterpret_cast<const Chunk*>(product) + 2 * at;
    const Chunk low = load_once(from), high = load_once(from + 1);
    const u32 part[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    ChunkSum sum;
    sum.add(chunk_at(dx, i64(at))[0]);
#pragma unroll
    for (u32 i = 0; i < 8; ++i) sum.sum[i] += __uint_as_float(part[i]);
    store_chunk(dx, i64(at), sum.rounded());
}
