// The K best experts of every token, exact on the logits, and the scores of the chosen: E ≤ 512, K ≤ 16.
//
// Eight lanes own a token, so that what is done once for each token fills a warp with four. A lane holds the 16-byte
// quads i, i + 8, i + 16, … of the row, and the maxima of four parts of it: 32 maxima a token. The K-th largest of them,
// found by merging sorted lists, is a bound that at least K logits reach, and on random logits few more. Those few are
// ranked by counting. Where more than 32 reach it (ties, masks) the warp picks the token's best K one by one.
//
// With a bias the logits get it first, and are written back: what backward reads are the logits that were compared.
//
// grid     ⌈tokens / kTokensPerBlock (16)⌉
// block    8 · kTokensPerBlock (128)
// shared   0 dynamic
// cluster  1
#include "choice.cuh"

// Quads of a lane: E ≤ 32 · SONIC_QUADS.
#ifndef SONIC_QUADS
#define SONIC_QUADS 4
#endif
// 1: with the sums over all experts.
#ifndef SONIC_SUMS
#define SONIC_SUMS 0
#endif

using namespace sonic;

constexpr u32 kQuads = SONIC_QUADS;
constexpr bool kSums = SONIC_SUMS;
constexpr u32 kGroup = 8;
constexpr u32 kTokensPerBlock = 16;
constexpr u32 kCandidates = 32;
constexpr u32 kMostChosen = 16;
constexpr u32 kTogether = 4;
// As many on a multiprocessor as registers allow without a spill.
constexpr u32 kBlocks = kQuads > 8 ? (kSums ? 4 : 5) : kQuads > 4 ? (kSums ? 5 : 6) : 7;
// Quads of a lane that may reach the bound, where they are looked at again.
constexpr u32 kStaged = 8;
// Four more: the four tokens of a warp lie in other banks.
constexpr u32 kPitch = kCandidates + 4;

// A bitonic list becomes a falling one.
template <u32 kLength>
__device__ __forceinline__ void merge(f32* v) {
#pragma unroll
    for (u32 distance = kLength / 2; distance > 0; distance /= 2)
#pragma unroll
        for (u32 i = 0; i < kLength; ++i)
            if ((i & distance) == 0) {
                const f32 larger = fmaxf(v[i], v[i + distance]), smaller = fminf(v[i], v[i + distance]);
                v[i] = larger;
                v[i + distance] = smaller;
            }
}

// Two falling lists, this lane's and that of the lane at `distance`: the larger half of both, falling, and where
// `list` has room for it the smaller half behind it.
template <u32 kLength, bool kBoth>
__device__ __forceinline__ void join(f32* list, u32 distance) {
    f32 other[kLength];
#pragma unroll
    for (u32 i = 0; i < kLength; ++i) other[i] = __shfl_xor_sync(kAllLanes, list[kLength - 1 - i], distance);
    if constexpr (kBoth) {
#pragma unroll
        for (u32 i = 0; i < kLength; ++i) list[kLength + i] = fminf(list[i], other[i]);
        merge<kLength>(list + kLength);
    }
#pragma unroll
    for (u32 i = 0; i < kLength; ++i) list[i] = fmaxf(list[i], other[i]);
    merge<kLength>(list);
}

// What at least k of the 32 values of a token reach, four a lane, k ≤ 16: for k ≤ 8 the k-th largest, else the k-th
// largest of what are the eight largest of either half of the lanes.
__device__ __forceinline__ f32 reached_by(const f32 (&maxima)[4], u32 k) {
    f32 list[8];
    list[0] = maxima[0];
    list[1] = maxima[1];
    // A rising pair behind a falling one is bitonic.
    list[2] = fminf(maxima[2], maxima[3]);
    list[3] = fmaxf(maxima[2], maxima[3]);
    merge<2>(list);
    merge<4>(list);
    join<4, true>(list, 1);
    join<8, false>(list, 2);
    f32 half[8];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        const f32 other = __shfl_xor_sync(kAllLanes, list[7 - i], 4);
        half[i] = k <= 8 ? fmaxf(list[i], other) : fminf(list[i], other);
    }
    merge<8>(half);
    f32 result = half[0];
#pragma unroll
    for (u32 i = 1; i < 8; ++i)
        if (i == (k - 1) % 8) result = half[i];
    return result;
}

struct alignas(16) CandidateArrays {
    f32 logits[kPitch];
    u32 experts[kPitch];
};

// Puts a logit that reaches the bound, and its expert, at `address` in CandidateArrays, and goes on to the next: two
// predicated stores, where branches would part the warp.
__device__ __forceinline__ void put_if_reached(u32& address, f32 logit, f32 bound, u32 expert) {
    asm volatile("{ .reg .pred reached; setp.ge.f32 reached, %1, %2;\n"
                 "@reached st.shared.f32 [%0], %1;\n"
                 "@reached st.shared.u32 [%0 + %4], %3;\n"
                 "@reached add.u32 %0, %0, 4; }"
                 : "+r"(address) : "f"(logit), "f"(bound), "r"(expert), "n"(4 * kPitch) : "memory");
}

__device__ __forceinline__ void count_if_reached(u32& count, f32 logit, f32 bound) {
    asm("{ .reg .pred reached; setp.ge.f32 reached, %1, %2;\n"
        "@reached add.u32 %0, %0, 1; }"
        : "+r"(count) : "f"(logit), "f"(bound));
}

// A token's candidates in shared memory, −∞ behind them up to a multiple of four.
struct Candidates {
    const f32* logits;
    const u32* experts;
    u32 count;

    // Writes the best k by rank: the number of larger ones, and kTies: of equal ones with smaller ids. How many this lane
    // wrote, in the upper half, and the sum of their ranks: of all eight, k and 0 + 1 + … + (k − 1) unless equal ones share
    // a rank. `most` is the largest count in the warp.
    template <bool kTies>
    __device__ __forceinline__ u32 choose(u32 most, u32 k, f32* chosen_logits, u32* chosen_experts) const {
        const u32 member = threadIdx.x % kGroup;
        u32 written = 0;
        for (u32 base = 0; base < most; base += 2 * kGroup) {
            f32 logit[2];
            u32 expert[2], rank[2] = {};
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                logit[half] = logits[base + kGroup * half + member];
                expert[half] = experts[base + kGroup * half + member];
            }
#pragma unroll 2
            for (u32 first = 0; first < most; first += 4) {
                const Quad others = *reinterpret_cast<const Quad*>(logits + first);
#pragma unroll
                for (u32 half = 0; half < 2; ++half)
#pragma unroll
                    for (u32 j = 0; j < 4; ++j) {
                        rank[half] += others.v[j] > logit[half];
                        if constexpr (kTies)
                            rank[half] += others.v[j] == logit[half] && first + j < count && experts[first + j] < expert[half];
                    }
            }
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                if (base + kGroup * half + member < count && rank[half] < k) {
                    chosen_logits[rank[half]] = logit[half];
                    chosen_experts[rank[half]] = expert[half];
                    written += 0x10000u + rank[half];
                }
            }
        }
        __syncwarp();
        return written;
    }
};

// Σ over the ranks in the order of sum_of_ranks: lane i of the eight holds those of rank i and 8 + i.
// None beyond 8 unless `two`.
__device__ __forceinline__ f32 group_sum_of_ranks(f32 low, f32 high, bool two) {
    const u32 first = threadIdx.x & 28u;
    f32 sum[2] = {low, high};
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        if (half == 1 && !two) break;
        const f32 v = sum[half];
        f32 quad = __shfl_sync(kAllLanes, v, first);
#pragma unroll
        for (u32 i = 1; i < 4; ++i) quad = __fadd_rn(quad, __shfl_sync(kAllLanes, v, first + i));
        sum[half] = quad;
    }
    const f32 total = __fadd_rn(sum[0], sum[1]);
    return __fadd_rn(total, __shfl_xor_sync(kAllLanes, total, 4));
}

// v / divisor; a v of 0, which a lane without a rank has too, takes the long way round through no division.
__device__ __forceinline__ f32 divided(f32 v, f32 divisor) {
    const f32 quotient = __fdiv_rn(v > 0.0f ? v : 1.0f, divisor);
    return v > 0.0f ? quotient : 0.0f;
}

// Four times `v` at `address`.
__device__ __forceinline__ void store_shared(f32* address, f32 v) {
    *reinterpret_cast<Quad*>(address) = Quad{{v, v, v, v}};
}

// Sixteen bytes at `address`, or four times −∞: a load under a predicate, not a branch.
__device__ __forceinline__ Quad load_quad_if(bool inside, const f32* address) {
    Quad q{{-infinity(), -infinity(), -infinity(), -infinity()}};
    asm volatile("{ .reg .pred inside; setp.ne.u32 inside, %5, 0;\n"
                 "@inside ld.global.v4.f32 {%0, %1, %2, %3}, [%4]; }"
                 : "+f"(q.v[0]), "+f"(q.v[1]), "+f"(q.v[2]), "+f"(q.v[3]) : "l"(address), "r"(u32(inside)) : "memory");
    return q;
}

extern "C" __global__ void __launch_bounds__(kGroup * kTokensPerBlock, kBlocks)
top_k(f32* logits,                                // (tokens, experts) f32; with a bias, it is added
      const bf16* __restrict__ bias,              // (experts) bf16, or null
      u32* __restrict__ choice,                   // (tokens, k) u32, written whole: ids by rank
      f32* __restrict__ pair_scores,              // (tokens, k) f32, written whole
      TokenSoftmax* __restrict__ token_softmax,   // (tokens), written whole with SONIC_SUMS
      u32* __restrict__ first_refused,            // (⌈tokens / 4⌉) u32, written whole: kAllUsable, or a warp's first token
                                                  // that allows no choice
      u32 tokens,                                 // T, 0 allowed
      u32 experts,                                // 1 ≤ E ≤ 32 · SONIC_QUADS
      u32 k,                                      // 1 ≤ K ≤ min(E, 16)
      u32 convention) {
    __shared__ CandidateArrays candidates[kTokensPerBlock];
    __shared__ u32 candidate_counts[kTokensPerBlock];
    // One more, so that neighbouring lanes lie in other banks.
    __shared__ Quad staged[kQuads > 4 ? kGroup * kTokensPerBlock : 1][kStaged + 1];
    __shared__ f32 chosen_logits[kTokensPerBlock][kMostChosen + 1];
    __shared__ u32 chosen_experts[kTokensPerBlock][kMostChosen + 1];
    const u32 lane = threadIdx.x % 32, member = lane % kGroup, slot = threadIdx.x / kGroup;
    const u64 token = u64(blockIdx.x) * kTokensPerBlock + slot;
    const bool exists = token < tokens;
    // Lanes without a token follow those of the last one, and write nothing.
    f32* const values = logits + (exists ? token : tokens - 1) * experts;

    // Beyond the experts stands −∞.
    Quad quads[kQuads];
    if (experts == 32 * kQuads) {
#pragma unroll
        for (u32 c = 0; c < kQuads; ++c) quads[c] = load_quad(values + 4 * (member + kGroup * c));
    } else if (experts % 4 == 0) {
#pragma unroll
        for (u32 c = 0; c < kQuads; ++c) {
            const u32 first = 4 * (member + kGroup * c);
            quads[c] = load_quad_if(first < experts, values + first);
        }
    } else {
#pragma unroll
        for (u32 c = 0; c < kQuads; ++c)
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const u32 expert = 4 * (member + kGroup * c) + j;
                quads[c].v[j] = expert < experts ? values[expert] : -infinity();
            }
    }
    if (bias) {
#pragma unroll
        for (u32 c = 0; c < kQuads; ++c) {
            const u32 first = 4 * (member + kGroup * c);
#pragma unroll
            for (u32 j = 0; j < 4; ++j)
                if (first + j < experts) quads[c].v[j] = __fadd_rn(quads[c].v[j], to_f32(bias[first + j]));
            if (exists) store_row_quad(values, experts, first, quads[c]);
        }
    }
    // Maxima of quads, and of four parts of them; few quads are parted by the places in them, so that no part is empty.
    f32 quad_maxima[kQuads], maxima[4];
    if constexpr (kQuads > 4) {
#pragma unroll
        for (u32 c = 0; c < kQuads; ++c) {
            const f32(&v)[4] = quads[c].v;
            quad_maxima[c] = max_or_nan(max_or_nan(v[0], v[1]), max_or_nan(v[2], v[3]));
            f32& of_part = maxima[c * 4 / kQuads];
            of_part = c * 4 % kQuads == 0 ? quad_maxima[c] : max_or_nan(of_part, quad_maxima[c]);
        }
    } else {
#pragma unroll
        for (u32 c = 0; c < kQuads; ++c)
#pragma unroll
            for (u32 j = 0; j < 4; ++j) maxima[j] = c == 0 ? quads[c].v[j] : max_or_nan(maxima[j], quads[c].v[j]);
    }
    f32 largest = max_or_nan(max_or_nan(maxima[0], maxima[1]), max_or_nan(maxima[2], maxima[3]));
#pragma unroll
    for (u32 distance = 1; distance < kGroup; distance *= 2)
        largest = max_or_nan(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    // NaN and +∞ allow no order.
    bool usable = exists && largest < infinity();

    const f32 bound = reached_by(maxima, k);
    static_assert(kCandidates == 4 * kGroup, "a lane clears four");
    store_shared(candidates[slot].logits + 4 * member, -infinity());
    if (member == 0) candidate_counts[slot] = 0;
    // With a bias other lanes wrote what this one reads again.
    __syncwarp();
    // What reaches the bound, in any order.
    const bool bounded = usable && bound > -infinity();
    const auto reserve = [&](u32 hits) {
        const u32 place = atomicAdd(&candidate_counts[slot], hits);
        return place + hits <= kCandidates ? place : kCandidates;
    };
    if constexpr (kQuads > 4) {
        u32 reaching = 0;
        // Through shared memory, as registers cannot be asked for by number.
        Quad* const own = staged[threadIdx.x];
        u32 kept = 0;
#pragma unroll
        for (u32 c = 0; c < kQuads; ++c)
            if (quad_maxima[c] >= bound) {
                if (kept < kStaged) own[kept] = quads[c];
                ++kept;
                reaching |= 1u << c;
            }
        if (!bounded) reaching = 0;
        if (bounded && kept > kStaged) {
            reserve(kCandidates + 1);
            reaching = 0;
        }
        for (u32 at = 0; __any_sync(kAllLanes, reaching != 0); at += kTogether) {
            Quad again[kTogether];
            f32 limit[kTogether];
            u32 first[kTogether], hits = 0;
#pragma unroll
            for (u32 i = 0; i < kTogether; ++i) {
                again[i] = own[at + i];
                // What was never staged reaches no NaN.
                limit[i] = reaching != 0 ? bound : __int_as_float(0x7fffffff);
                first[i] = 4 * (member + kGroup * (u32(__ffs(i32(reaching))) - 1));
                reaching &= reaching - 1;
#pragma unroll
                for (u32 j = 0; j < 4; ++j) count_if_reached(hits, again[i].v[j], limit[i]);
            }
            const u32 place = hits > 0 ? reserve(hits) : kCandidates;
            if (place < kCandidates) {
                u32 address = shared_address(candidates[slot].logits + place);
#pragma unroll
                for (u32 i = 0; i < kTogether; ++i)
#pragma unroll
                    for (u32 j = 0; j < 4; ++j) put_if_reached(address, again[i].v[j], limit[i], first[i] + j);
            }
        }
    } else {
        u32 hits = 0;
#pragma unroll
        for (u32 c = 0; c < kQuads; ++c)
#pragma unroll
            for (u32 j = 0; j < 4; ++j) count_if_reached(hits, quads[c].v[j], bound);
        const u32 place = bounded && hits > 0 ? reserve(hits) : kCandidates;
        if (place < kCandidates) {
            u32 address = shared_address(candidates[slot].logits + place);
#pragma unroll
            for (u32 c = 0; c < kQuads; ++c)
#pragma unroll
                for (u32 j = 0; j < 4; ++j)
                    put_if_reached(address, quads[c].v[j], bound, 4 * (member + kGroup * c) + j);
        }
    }
    __syncwarp();
    const u32 found = candidate_counts[slot];
    const bool few = found > 0 && found <= kCandidates;
    const u32 most = warp_max(few ? found : 0u);
    Candidates list{candidates[slot].logits, candidates[slot].experts, few ? found : 0};
    u32 written = list.choose<false>(most, k, chosen_logits[slot], chosen_experts[slot]);
#pragma unroll
    for (u32 distance = 1; distance < kGroup; distance *= 2) written += __shfl_xor_sync(kAllLanes, written, distance);
    if (__any_sync(kAllLanes, few && written != 0x10000u * k + k * (k - 1) / 2))
        list.choose<true>(most, k, chosen_logits[slot], chosen_experts[slot]);
    // The others' tokens in turn, by all lanes.
    u32 slow = __ballot_sync(kAllLanes, usable && !few && member == 0);
    while (slow != 0) {
        const u32 group = (u32(__ffs(i32(slow))) - 1) / kGroup;
        slow &= slow - 1;
        const u32 of_slot = threadIdx.x / 32 * (32 / kGroup) + group;
        const u64 of_token = u64(blockIdx.x) * kTokensPerBlock + of_slot;
        const bool chose = choose_one_by_one(Row{logits + of_token * experts, experts}, k, [&](u32 rank, u64 key) {
            chosen_logits[of_slot][rank] = logit_of_key(key);
            chosen_experts[of_slot][rank] = expert_of_key(key);
        });
        if (lane / kGroup == group) usable = chose;
    }
    __syncwarp();

    // Every lane goes on: sums are over all of them.
    const bool two = k > kGroup;
    const f32 best = usable ? chosen_logits[slot][0] : 0.0f;
    f32 weight[2] = {};
#pragma unroll
    for (u32 half = 0; half < 2; ++half)
        if ((half == 0 || two) && usable && kGroup * half + member < k)
            weight[half] = exponential(__fadd_rn(chosen_logits[slot][kGroup * half + member], -best));
    const f32 of_chosen = group_sum_of_ranks(weight[0], weight[1], two);
    f32 score[2] = {weight[0], weight[1]};
    f32 divisor = of_chosen;
    if constexpr (kSums) {
        // Lane i of a warp sums the quads i, i + 32, …: this lane has the quads of four such lanes.
        f32 sums[4] = {};
#pragma unroll
        for (u32 c = 0; c < kQuads; ++c)
#pragma unroll
            for (u32 j = 0; j < 4; ++j)
                sums[c % 4] = __fadd_rn(sums[c % 4], exponential(__fadd_rn(quads[c].v[j], -best)));
        f32 total = __fadd_rn(__fadd_rn(sums[0], sums[2]), __fadd_rn(sums[1], sums[3]));
#pragma unroll
        for (u32 distance = kGroup / 2; distance > 0; distance /= 2)
            total = __fadd_rn(total, __shfl_xor_sync(kAllLanes, total, distance));
        if (member == 0 && exists)
            token_softmax[token] =
                usable ? TokenSoftmax(best, total, of_chosen, chosen_logits[slot][k - 1]) : TokenSoftmax();
        if (convention != kSoftmaxOverTopK) {
            score[0] = divided(weight[0], total);
            if (two) score[1] = divided(weight[1], total);
            // The best p is at least 1/E, so the sum is above 0.
            divisor = group_sum_of_ranks(score[0], score[1], two);
        }
    }
    if (convention != kTopKOverSoftmax) {
        score[0] = divided(score[0], divisor);
        if (two) score[1] = divided(score[1], divisor);
    }
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        const u32 rank = kGroup * half + member;
        if (exists && rank < k) {
            // Without a choice distinct ids in range and finite scores, for kernels that run before the host has looked.
            choice[token * k + rank] = usable ? chosen_experts[slot][rank] : rank;
            pair_scores[token * k + rank] = usable ? score[half] : 1.0f / f32(k);
        }
    }
    const u32 refused = __ballot_sync(kAllLanes, exists && !usable);
    const u32 first_token = (blockIdx.x * (kGroup * kTokensPerBlock) + threadIdx.x) / 32 * (32 / kGroup);
    if (lane == 0 && first_token < tokens)
        first_refused[first_token / (32 / kGroup)] =
            refused == 0 ? kAllUsable : first_token + (u32(__ffs(i32(refused))) - 1) / kGroup;
}
