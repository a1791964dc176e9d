// Counting sort, step 3: every pair's row, and what the kernels read of it. Rows of one expert keep the order of the
// pairs, so a row's place depends on nothing but the pairs.
//
// A warp ranks its pairs 32 at a time: the earlier lanes with the same expert, and a counter for what came before.
// The last ⌈experts / kOrdered⌉ blocks order the experts by falling count, ties by smaller id, eight lanes an expert; the
// first of them writes the offsets. (Token rounding sorts the choice too, but its rows are others: it asks for neither the
// order nor the tokens' rows.)
//
// grid     ⌈pairs / kPairsPerBlock (2048)⌉ + ⌈experts / kOrdered (64)⌉
// block    kSortThreads (512)
// shared   experts · (4 + 2 · kSortWarps) dynamic, rounded up to 16
// cluster  1
#include "pair_sort.cuh"

using namespace sonic;

constexpr u32 kLanesPerExpert = 8;
constexpr u32 kOrdered = kSortThreads / kLanesPerExpert;

struct SortedPair {
    u32 row, token;
    f32 score;
};

extern "C" __global__ void __launch_bounds__(kSortThreads)
routing_rows(const u32* __restrict__ pair_expert, // (pairs) u32, each below experts, K to a token
             const f32* __restrict__ pair_scores, // (pairs) f32
             const u32* __restrict__ earlier,     // (experts, ⌈blocks⌉₄) u32, of step 2
             const u32* __restrict__ totals,      // (experts) u32
             u32* __restrict__ expert_offsets,    // (experts + 1) u32, written whole
             u32* __restrict__ expert_order,      // (experts) u32, written whole, or null
             u32* __restrict__ row_token,         // (pairs) u32, written whole
             u32* __restrict__ token_rows,        // (pairs) u32, written whole, or null
             f32* __restrict__ scores,            // (pairs) f32 by row, written whole
             u32 pairs,                           // R = T·K, 0 allowed
             u32 experts,                         // 1 ≤ E ≤ kMostExperts (4096)
             u32 k,                               // K ≥ 1
             u32 blocks) {                        // ⌈pairs / kPairsPerBlock⌉
    extern __shared__ u32 dynamic[];
    __shared__ BlockScan<kSortWarps> scan;
    __shared__ SortedPair sorted[kPairsPerBlock];
    u32* const base = dynamic;                                      // (experts) the block's first row of each expert
    u16* const counters = reinterpret_cast<u16*>(dynamic + experts);  // (kSortWarps, experts)
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (blockIdx.x >= blocks) {
        const u32 expert = (blockIdx.x - blocks) * kOrdered + threadIdx.x / kLanesPerExpert;
        for (u32 other = threadIdx.x; other < experts; other += kSortThreads) base[other] = totals[other];
        __syncthreads();
        if (expert_order) {
            const u32 own = expert < experts ? base[expert] : 0;
            u32 place = 0;
#pragma unroll 4
            for (u32 other = threadIdx.x % kLanesPerExpert; other < experts; other += kLanesPerExpert) {
                const u32 count = base[other];
                place += count > own || (count == own && other < expert);
            }
#pragma unroll
            for (u32 distance = 1; distance < kLanesPerExpert; distance *= 2)
                place += __shfl_xor_sync(kAllLanes, place, distance);
            if (expert < experts && threadIdx.x % kLanesPerExpert == 0) expert_order[place] = expert;
        }
        // Offsets by a block that has nothing else to do; with no pairs there is no other one.
        if (blockIdx.x != blocks) return;
        u32 rows = 0;
        for (u32 first = 0; first < experts; first += kSortThreads) {
            const u32 at = first + threadIdx.x;
            u32 total;
            const u32 before = scan.before(at < experts ? base[at] : 0, total);
            if (at < experts) expert_offsets[at] = rows + before;
            rows += total;
        }
        if (threadIdx.x == 0) expert_offsets[experts] = rows;
        return;
    }

    const u32 bits = 32u - u32(__clz(i32(experts - 1)));
    const u32 first = blockIdx.x * kPairsPerBlock + warp * (32 * kSteps) + lane;
    u16* const own_counters = counters + warp * experts;
    u32 expert[kSteps], rank[kSteps];
    f32 score[kSteps];
#pragma unroll
    for (u32 step = 0; step < kSteps; ++step) {
        const u32 pair = first + 32 * step;
        expert[step] = pair < pairs ? pair_expert[pair] : kAllLanes;
        score[step] = pair < pairs ? pair_scores[pair] : 0.0f;
    }
    for (u32 at = threadIdx.x; at < experts * kSortWarps; at += kSortThreads) counters[at] = 0;
    u32 rows = 0;
    for (u32 first = 0; first < experts; first += kSortThreads) {
        const u32 at = first + threadIdx.x;
        const u32 before_block = at < experts ? earlier[u64(at) * counts_pitch(blocks) + blockIdx.x] : 0;
        u32 total;
        const u32 before = scan.before(at < experts ? totals[at] : 0, total);
        if (at < experts) base[at] = rows + before + before_block;
        rows += total;
    }
    __syncthreads();

#pragma unroll
    for (u32 step = 0; step < kSteps; ++step) {
        const bool valid = expert[step] != kAllLanes;
        const u32 lanes = lanes_with_same(expert[step], bits) & __ballot_sync(kAllLanes, valid);
        const u32 before = valid ? own_counters[expert[step]] : 0;
        rank[step] = before + __popc(lanes & lanes_below(lane));
        __syncwarp();
        if (valid && (lanes & lanes_below(lane)) == 0) own_counters[expert[step]] = u16(before + __popc(lanes));
        __syncwarp();
    }
    __syncthreads();
    // Each warp's counters become the number of the expert's pairs in earlier warps of the block, and with the experts
    // before them the places in a block sorted by expert; the base what a place lacks to be a row.
    u32 placed = 0;
    for (u32 first_expert = 0; first_expert < experts; first_expert += kSortThreads) {
        const u32 at = first_expert + threadIdx.x;
        u32 counts[kSortWarps], sum = 0;
        if (at < experts) {
#pragma unroll
            for (u32 i = 0; i < kSortWarps; ++i) counts[i] = counters[i * experts + at];
#pragma unroll
            for (u32 i = 0; i < kSortWarps; ++i) sum += counts[i];
        }
        u32 total;
        u32 place = placed + scan.before(sum, total);
        placed += total;
        if (at < experts) {
            base[at] -= place;
#pragma unroll
            for (u32 i = 0; i < kSortWarps; ++i) {
                counters[i * experts + at] = u16(place);
                place += counts[i];
            }
        }
    }
    __syncthreads();
    // Through shared memory: an expert's pairs then leave side by side.
    const u32 per_k = 0xffffffffu / k;
#pragma unroll
    for (u32 step = 0; step < kSteps; ++step) {
        const u32 pair = first + 32 * step;
        if (pair < pairs) {
            const u32 place = own_counters[expert[step]] + rank[step], row = base[expert[step]] + place;
            if (token_rows) token_rows[pair] = row;
            // pair / k: short of it by one at most.
            u32 token = __umulhi(pair, per_k);
            token += pair - token * k >= k;
            sorted[place] = SortedPair{row, token, score[step]};
        }
    }
    __syncthreads();
    for (u32 place = threadIdx.x; place < min_of(kPairsPerBlock, pairs - blockIdx.x * kPairsPerBlock); place += kSortThreads) {
        const SortedPair pair = sorted[place];
        row_token[pair.row] = pair.token;
        scores[pair.row] = pair.score;
    }
}
