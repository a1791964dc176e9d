// Token rounding: each expert's rows, the front of its ranking, in the order of the tokens, with their scores; and the
// experts by falling count, ties by smaller id.
//
// A block owns an expert. It marks the tokens that it keeps, a bit for each; a row's place is the number of bits before.
// A score is p as it is, or for pairs of a token's own choice p over the sum of its top-K. (Over the pairs that are left:
// rounding_kept_scores.cu.)
//
// grid     experts
// block    kRankThreads (256)
// shared   4 · words dynamic if words_fit, else 0
// cluster  1
#include "ranking.cuh"

using namespace sonic;

// Words of a tile of 256 tokens, those of a block of rounding_tokens; a thread has four of them.
constexpr u32 kTileWords = 8;
constexpr u32 kTogether = 4;

// What a score is divided by.
constexpr u32 kRaw = 0;
constexpr u32 kRenormalizedOverTopK = 1;
// 2: scores come later.

extern "C" __global__ void __launch_bounds__(kRankThreads, 4)
rounding_rows(RankingInput input,
              const u32* __restrict__ choice,         // (tokens, k) u32; read for kRenormalizedOverTopK
              const u32* __restrict__ expert_offsets, // (experts + 1) u32
              u32* __restrict__ expert_order,         // (experts) u32, written whole
              u32* __restrict__ row_token,            // u32, written up to expert_offsets[experts]
              f32* __restrict__ scores,               // f32 by row, the same
              u32* __restrict__ kept,                 // (experts, words) u32, written whole: a bit for each token
              u32* __restrict__ kept_before,          // (experts, words / 8) u32, written whole: bits in earlier tiles
              u32 words_fit, u32 k, u32 semantics) {
    extern __shared__ uint4 dynamic[];
    __shared__ Selection selection;
    const u32 expert = blockIdx.x, experts = gridDim.x, words = input.words;
    const u32 begin = expert_offsets[expert], count = expert_offsets[expert + 1] - begin;
    u32 place = 0;
    for (u32 base = 0; base < experts; base += kRankThreads) {
        const u32 other = base + threadIdx.x;
        const u32 others = other < experts ? expert_offsets[other + 1] - expert_offsets[other] : 0;
        place += u32(__syncthreads_count(other < experts && (others > count || (others == count && other < expert))));
    }
    if (threadIdx.x == 0) expert_order[place] = expert;

    u32* const own_kept = kept + u64(expert) * words;
    u32* const bits = words_fit ? reinterpret_cast<u32*>(dynamic) : own_kept;
    Ranking{input, selection, expert, bits}.first(count, [](u32) {});
    u32 rows = begin;
    for (u32 base = 0; base < words; base += 4 * kRankThreads) {
        const u32 word = base + 4 * threadIdx.x;
        const uint4 four = word < words ? *reinterpret_cast<const uint4*>(bits + word) : uint4{0, 0, 0, 0};
        u32 total;
        u32 row = rows + selection.scan.before(u32(__popc(four.x) + __popc(four.y) + __popc(four.z) + __popc(four.w)), total);
        rows += total;
        if (word >= words) continue;
        if (words_fit) *reinterpret_cast<uint4*>(own_kept + word) = four;
        if (word % kTileWords == 0) kept_before[u64(expert) * (words / kTileWords) + word / kTileWords] = row - begin;
        const u32 part[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            for (u32 left = part[i]; left != 0; left &= left - 1) row_token[row++] = 32 * (word + i) + u32(__ffs(i32(left))) - 1;
    }
    if (semantics != kRaw && semantics != kRenormalizedOverTopK) return;
    __syncthreads();
    // Four rows a thread at a time: what they read is on its way together.
    for (u32 base = begin + threadIdx.x; base < begin + count; base += kTogether * kRankThreads) {
        u32 token[kTogether];
        TokenSoftmax softmax[kTogether];
        f32 logit[kTogether];
#pragma unroll
        for (u32 i = 0; i < kTogether; ++i) token[i] = row_token[min_of(base + i * kRankThreads, begin + count - 1)];
#pragma unroll
        for (u32 i = 0; i < kTogether; ++i) {
            softmax[i] = input.token_softmax[token[i]];
            logit[i] = input.logits[u64(token[i]) * experts + expert];
        }
#pragma unroll
        for (u32 i = 0; i < kTogether; ++i) {
            const u32 row = base + i * kRankThreads;
            if (row >= begin + count) break;
            f32 divisor = softmax[i].total;
            if (semantics == kRenormalizedOverTopK &&
                (logit[i] > softmax[i].smallest ||
                 (logit[i] == softmax[i].smallest && expert <= choice[u64(token[i]) * k + k - 1])))
                divisor = softmax[i].chosen;
            const f32 score = __fdiv_rn(exponential(__fadd_rn(logit[i], -softmax[i].largest)), divisor);
            // A row that allows no choice may hold anything: its scores stay finite.
            scores[row] = score >= 0.0f && score <= 1.0f ? score : 0.0f;
        }
    }
}
