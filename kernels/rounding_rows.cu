// Token rounding, step 3: each expert's rows, the front of its ranking, in the order of the tokens.
//
// A block owns an expert, a warp a stretch of the tokens: it counts what it keeps, then writes it.
//
// grid     experts
// block    kRankThreads (1024)
// shared   4 · tokens dynamic if keys_fit, else 0
// cluster  1
#include "ranking.cuh"

using namespace sonic;

extern "C" __global__ void __launch_bounds__(kRankThreads)
rounding_rows(const u32* __restrict__ keys,           // (experts, tokens) u32
              const u32* __restrict__ frequency,      // (experts) u32: tokens that chose each
              const u32* __restrict__ expert_offsets, // (experts + 1) u32
              u32* __restrict__ row_token,            // u32, written up to expert_offsets[experts]
              u32* __restrict__ token_count,          // (tokens) u32, 0 before: pairs of each
              u32* __restrict__ token_experts,        // (tokens, ⌈experts / 32⌉) u32, 0 before: a bit for each pair
              u32 tokens,                             // T, 0 allowed
              u32 keys_fit) {
    extern __shared__ u32 dynamic[];
    __shared__ Selection selection;
    __shared__ u32 above_of_warp[kRankWarps], ties_of_warp[kRankWarps];
    const u32 expert = blockIdx.x, words = ceil_div(gridDim.x, 32u);
    const u32 begin = expert_offsets[expert], count = expert_offsets[expert + 1] - begin;
    if (count == 0) return;
    const u32* const own = keys_at_hand(keys + u64(expert) * tokens, tokens, dynamic, keys_fit != 0);
    const Threshold threshold =
        count == frequency[expert] ? choosers() : selection.first(own, tokens, count);

    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 stretch = round_up(ceil_div(tokens, kRankWarps), 32u);
    const u32 first = warp * stretch, end = min_of(first + stretch, tokens);
    u32 above = 0, ties = 0;
    for (u32 base = first; base < end; base += 32) {
        const u32 key = base + lane < end ? own[base + lane] : 0;
        const bool in = base + lane < end;
        above += __popc(__ballot_sync(kAllLanes, in && key > threshold.key));
        ties += __popc(__ballot_sync(kAllLanes, in && key == threshold.key));
    }
    if (lane == 0) {
        above_of_warp[warp] = above;
        ties_of_warp[warp] = ties;
    }
    __syncthreads();
    above = 0;
    ties = 0;
    for (u32 other = 0; other < warp; ++other) {
        above += above_of_warp[other];
        ties += ties_of_warp[other];
    }
    for (u32 base = first; base < end; base += 32) {
        const u32 token = base + lane;
        const bool in = token < end;
        const u32 key = in ? own[token] : 0;
        const bool is_above = in && key > threshold.key, is_tie = in && key == threshold.key;
        const u32 above_lanes = __ballot_sync(kAllLanes, is_above), tie_lanes = __ballot_sync(kAllLanes, is_tie);
        const u32 ties_before = ties + __popc(tie_lanes & lanes_below(lane));
        if (is_above || (is_tie && ties_before < threshold.ties)) {
            const u32 above_before = above + __popc(above_lanes & lanes_below(lane));
            row_token[begin + above_before + min_of(ties_before, threshold.ties)] = token;
            atomicAdd(token_count + token, 1u);
            atomicOr(token_experts + u64(token) * words + expert / 32, 1u << (expert % 32));
        }
        above += __popc(above_lanes);
        ties += __popc(tie_lanes);
    }
}
