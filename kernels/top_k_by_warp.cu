// The K best experts of every token, exact on the logits, and the scores of the chosen: any E, and K up to 64. Where E
// and K are small, top_k.cu is the same several times faster.
//
// A warp owns a token. Lane i holds experts 4i … 4i + 3 of every 128. The K-th largest of the 32 lanes' maxima is a
// bound that at least K logits reach, and on random logits few more: those few are ranked by counting, on 64-bit keys
// (logit, then the smaller id). Where more than 32 reach it (ties, masks, K > 32) the warp picks the best K times.
//
// With a bias the logits get it first, and are written back: what backward reads are the logits that were compared.
//
// grid     ⌈tokens / kTokensPerBlock (8)⌉
// block    32 · kTokensPerBlock (256)
// shared   0 dynamic
// cluster  1
#include "choice.cuh"

using namespace sonic;

constexpr u32 kTokensPerBlock = 8;
constexpr u32 kCandidates = 32;
constexpr u32 kMostChosen = 64;

// Writes the keys of the best `k`, best first. False: the row allows no choice.
__device__ __forceinline__ bool choose(Row row, u32 k, f32 own_largest, u64* candidates, u64* chosen) {
    const u32 lane = threadIdx.x % 32;
    u32 found = kCandidates + 1;
    if (k <= 32) {
        // Lanes of one value fall together, so the bound may be lower than the K-th maximum, never higher.
        i32 left = ordered(own_largest), reached = 0;
        for (u32 round = 0; round < k; ++round) {
            reached = warp_max(left);
            if (left == reached) left = i32(0x80000000);
        }
        const f32 bound = logit_of(reached);
        if (reached != i32(0x80000000) && bound > -infinity()) {
            found = 0;
            for (u32 chunk = 0; chunk < row.chunks(); ++chunk) {
                const Quad quad = row.quad(chunk);
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    const bool reaches = quad.v[j] >= bound;
                    const u32 lanes = __ballot_sync(kAllLanes, reaches);
                    if (lanes != 0) {
                        const u32 place = found + __popc(lanes & lanes_below(lane));
                        if (reaches && place < kCandidates)
                            candidates[place] = key_of(quad.v[j], chunk * 128 + 4 * lane + j);
                        found += __popc(lanes);
                    }
                }
            }
        }
    }
    __syncwarp();
    if (found > kCandidates) {
        const bool usable = choose_one_by_one(row, k, [&](u32 rank, u64 key) { chosen[rank] = key; });
        __syncwarp();
        return usable;
    }
    const u64 own = lane < found ? candidates[lane] : 0;
    u32 rank = 0;
    for (u32 other = 0; other < found; ++other) rank += candidates[other] > own;
    if (lane < found && rank < k) chosen[rank] = own;
    __syncwarp();
    return true;
}

extern "C" __global__ void __launch_bounds__(32 * kTokensPerBlock)
top_k_by_warp(f32* logits,                               // (tokens, experts) f32; with a bias, it is added
              const bf16* __restrict__ bias,             // (experts) bf16, or null
              u32* __restrict__ choice,                  // (tokens, k) u32, written whole: ids by rank
              f32* __restrict__ pair_scores,             // (tokens, k) f32, written whole
              TokenSoftmax* __restrict__ token_softmax,  // (tokens) or null: then no sum over all experts
              u32* __restrict__ first_refused,           // (tokens) u32, written whole: kAllUsable, or the token if it
                                                         // allows no choice
              u32 tokens,                                // T, 0 allowed
              u32 experts,                               // 1 ≤ E ≤ 4096
              u32 k,                                     // 1 ≤ K ≤ min(E, 64)
              u32 convention) {
    __shared__ u64 candidates[kTokensPerBlock][kCandidates];
    __shared__ u64 chosen_keys[kTokensPerBlock][kMostChosen];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u64 token = u64(blockIdx.x) * kTokensPerBlock + warp;
    if (token >= tokens) return;
    u64* const chosen = chosen_keys[warp];

    f32* const values = logits + token * experts;
    const Row row{values, experts};
    f32 largest = -infinity();
    for (u32 chunk = 0; chunk < row.chunks(); ++chunk) {
        const u32 first = chunk * 128 + 4 * lane;
        Quad quad = load_row_quad(values, experts, first, -infinity());
        if (bias) {
#pragma unroll
            for (u32 j = 0; j < 4; ++j)
                if (first + j < experts) quad.v[j] = __fadd_rn(quad.v[j], to_f32(bias[first + j]));
            store_row_quad(values, experts, first, quad);
        }
#pragma unroll
        for (u32 j = 0; j < 4; ++j) largest = max_or_nan(largest, quad.v[j]);
    }

    // NaN and +∞ allow no order.
    bool usable = !__any_sync(kAllLanes, !(largest < infinity()));
    if (usable) usable = choose(row, k, largest, candidates[warp], chosen);
    if (lane == 0) first_refused[token] = usable ? kAllUsable : u32(token);
    if (!usable) {
        // Distinct ids in range and finite scores, for kernels that run before the host has looked.
        for (u32 rank = lane; rank < k; rank += 32) {
            choice[token * k + rank] = rank;
            pair_scores[token * k + rank] = 1.0f / f32(k);
        }
        if (lane == 0 && token_softmax) token_softmax[token] = TokenSoftmax{};
        return;
    }

    const f32 best = logit_of_key(chosen[0]);
    f32 logit[2], weight[2];
    u32 expert[2];
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        const u32 rank = 32 * half + lane;
        const u64 key = rank < k ? chosen[rank] : 0;
        expert[half] = expert_of_key(key);
        logit[half] = rank < k ? logit_of_key(key) : -infinity();
        weight[half] = rank < k ? exponential(__fadd_rn(logit[half], -best)) : 0.0f;
    }
    f32 score[2] = {weight[0], weight[1]};
    if (token_softmax) {
        f32 sum = 0.0f;
        for (u32 chunk = 0; chunk < row.chunks(); ++chunk) {
            const Quad quad = row.quad(chunk);
#pragma unroll
            for (u32 j = 0; j < 4; ++j) sum = __fadd_rn(sum, exponential(__fadd_rn(quad.v[j], -best)));
        }
        const TokenSoftmax softmax{best, sum_of_lanes(sum), sum_of_ranks(weight[0], weight[1]),
                                   logit_of_key(chosen[k - 1])};
        if (lane == 0) token_softmax[token] = softmax;
        if (convention != kSoftmaxOverTopK) {
            score[0] = __fdiv_rn(weight[0], softmax.total);
            score[1] = __fdiv_rn(weight[1], softmax.total);
        }
    }
    if (convention != kTopKOverSoftmax) {
        // The best logit is among them: its own weight is 1, its p at least 1/E, so the sum is above 0.
        const f32 sum = sum_of_ranks(score[0], score[1]);
        score[0] = __fdiv_rn(score[0], sum);
        score[1] = __fdiv_rn(score[1], sum);
    }
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        const u32 rank = 32 * half + lane;
        if (rank < k) {
            choice[token * k + rank] = expert[half];
            pair_scores[token * k + rank] = score[half];
        }
    }
}
