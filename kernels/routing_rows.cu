// Counting sort, step 3: every pair's row, and what the kernels read of it. Rows of one expert keep the order of the
// pairs, so a row's place depends on nothing but the pairs.
//
// A warp ranks its pairs 32 at a time: the earlier lanes with the same expert, and a counter for what came before.
// The last ⌈experts / kSortThreads⌉ blocks order the experts by falling count, ties by smaller id.
//
// grid     ⌈pairs / kPairsPerBlock (2048)⌉ + ⌈experts / kSortThreads (256)⌉
// block    kSortThreads (256)
// shared   experts · (4 + 2 · kSortWarps) dynamic, rounded up to 16
// cluster  1
#include "pair_sort.cuh"

using namespace sonic;

extern "C" __global__ void __launch_bounds__(kSortThreads)
routing_rows(const u32* __restrict__ pair_expert, // (pairs) u32, each below experts, K to a token
             const f32* __restrict__ pair_scores, // (pairs) f32
             const u32* __restrict__ earlier,     // (blocks, experts) u32, of step 2
             const u32* __restrict__ totals,      // (experts) u32
             u32* __restrict__ expert_offsets,    // (experts + 1) u32, written whole
             u32* __restrict__ expert_order,      // (experts) u32, written whole
             u32* __restrict__ row_token,         // (pairs) u32, written whole
             u32* __restrict__ token_rows,        // (pairs) u32, written whole
             f32* __restrict__ scores,            // (pairs) f32 by row, written whole
             u32 pairs,                           // R = T·K, 0 allowed
             u32 experts,                         // 1 ≤ E ≤ kMostExperts (4096)
             u32 k,                               // K ≥ 1
             u32 blocks) {                        // ⌈pairs / kPairsPerBlock⌉
    extern __shared__ u32 dynamic[];
    __shared__ BlockScan<kSortWarps> scan;
    u32* const base = dynamic;                                      // (experts) the block's first row of each expert
    u16* const counters = reinterpret_cast<u16*>(dynamic + experts);  // (kSortWarps, experts)
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (blockIdx.x >= blocks) {
        const u32 expert = (blockIdx.x - blocks) * kSortThreads + threadIdx.x;
        for (u32 other = threadIdx.x; other < experts; other += kSortThreads) base[other] = totals[other];
        __syncthreads();
        if (expert < experts) {
            const u32 own = base[expert];
            u32 place = 0;
#pragma unroll 8
            for (u32 other = 0; other < experts; ++other)
                place += base[other] > own || (base[other] == own && other < expert);
            expert_order[place] = expert;
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

    for (u32 at = threadIdx.x; at < experts * kSortWarps; at += kSortThreads) counters[at] = 0;
    u32 rows = 0;
    for (u32 first = 0; first < experts; first += kSortThreads) {
        const u32 at = first + threadIdx.x;
        u32 total;
        const u32 before = scan.before(at < experts ? totals[at] : 0, total);
        if (at < experts) base[at] = rows + before + earlier[u64(blockIdx.x) * experts + at];
        rows += total;
    }
    __syncthreads();

    const u32 first = blockIdx.x * kPairsPerBlock + warp * (32 * kSteps) + lane;
    u16* const own_counters = counters + warp * experts;
    u32 expert[kSteps], rank[kSteps];
#pragma unroll
    for (u32 step = 0; step < kSteps; ++step) {
        const u32 pair = first + 32 * step;
        expert[step] = pair < pairs ? pair_expert[pair] : kAllLanes;
    }
#pragma unroll
    for (u32 step = 0; step < kSteps; ++step) {
        const bool valid = expert[step] != kAllLanes;
        const u32 lanes = lanes_with_same(expert[step]);
        const u32 before = valid ? own_counters[expert[step]] : 0;
        rank[step] = before + __popc(lanes & lanes_below(lane));
        __syncwarp();
        if (valid && (lanes & lanes_below(lane)) == 0) own_counters[expert[step]] = u16(before + __popc(lanes));
        __syncwarp();
    }
    __syncthreads();
    // Each warp's counters become the number of the expert's pairs in earlier warps of the block.
    for (u32 at = threadIdx.x; at < experts; at += kSortThreads) {
        u32 sum = 0;
#pragma unroll
        for (u32 i = 0; i < kSortWarps; ++i) {
            const u32 count = counters[i * experts + at];
            counters[i * experts + at] = u16(sum);
            sum += count;
        }
    }
    __syncthreads();
#pragma unroll
    for (u32 step = 0; step < kSteps; ++step) {
        const u32 pair = first + 32 * step;
        if (pair < pairs) {
            const u32 row = base[expert[step]] + own_counters[expert[step]] + rank[step];
            row_token[row] = pair / k;
            token_rows[pair] = row;
            scores[row] = pair_scores[pair];
        }
    }
}
