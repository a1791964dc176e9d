// Token rounding, step 5: each token's rows, its experts ascending. A row's place among them is the number of the
// token's pairs with smaller experts.
//
// grid     max(1, ⌈rows that there may be / kPairThreads (256)⌉)
// block    kPairThreads (256)
// shared   0 dynamic
// cluster  1
#include "lanes.cuh"

using namespace sonic;

constexpr u32 kPairThreads = 256;

extern "C" __global__ void __launch_bounds__(kPairThreads)
rounding_pairs(const u32* __restrict__ expert_offsets, // (experts + 1) u32
               const u32* __restrict__ row_token,      // u32
               const u32* __restrict__ token_offsets,  // (tokens + 1) u32
               const u32* __restrict__ token_experts,  // (tokens, ⌈experts / 32⌉) u32
               u32* __restrict__ token_rows,           // u32, written up to expert_offsets[experts]
               u32* __restrict__ pair_expert,          // u32, the expert of each entry of token_rows
               u32 experts) {                          // E ≥ 1
    const u32 row = blockIdx.x * kPairThreads + threadIdx.x;
    if (row >= expert_offsets[experts]) return;
    u32 low = 0, high = experts;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (__ldg(expert_offsets + middle) <= row)
            low = middle;
        else
            high = middle;
    }
    const u32 token = row_token[row], words = ceil_div(experts, 32u);
    const u32* const bits = token_experts + u64(token) * words;
    u32 place = token_offsets[token];
    for (u32 word = 0; word < low / 32; ++word) place += __popc(bits[word]);
    place += __popc(bits[low / 32] & lanes_below(low % 32));
    token_rows[place] = row;
    pair_expert[place] = low;
}
