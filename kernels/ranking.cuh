// An expert's ranking of the tokens, for token rounding: first those that chose it, by what they rank by, then the others
// by p; ties by the smaller token. Keys are the bits of scores in [0, 1], so that larger keys rank first.
//
// Choosers come sorted by expert. Of the others only the few best are ever asked for, at most M − 1, and they are among
// the expert's candidates: all others whose p reaches a bound that enough of them were expected to reach
// (rounding_thresholds.cu, rounding_candidates.cu). Where the expectation failed (a bound that too few reach, or more than
// a list has room for) an expert looks at its whole column of the logits instead.
#pragma once
#include "softmax.cuh"

namespace sonic {

// As many as a digit has values.
constexpr u32 kRankThreads = 256;
constexpr u32 kRankWarps = kRankThreads / 32;
// Keys in shared memory, and candidates that there is room for.
constexpr u32 kKeysCached = 2048;

// What stands in the place of a key where there is none.
constexpr u32 kNoKey = 0xffffffffu;

// The key of p. A row that allows no choice may hold anything: its keys stay in order.
__device__ __forceinline__ u32 key_of_p(f32 p) { return p <= 1.0f ? __float_as_uint(p) & 0x7fffffffu : 0; }

// How many of the others have to be in the ranking: up to `count` tokens of which f are choosers.
__device__ __forceinline__ u32 others_needed(u32 count, u32 f) { return count > f ? count - f : 0; }

// An expert's count if it goes up, or T if that is less.
__device__ __forceinline__ u32 upper_count(u32 f, u32 tile, u32 tokens) {
    return u32(min_of((u64(f) + tile - 1) / tile * tile, u64(tokens)));
}

// The front of a ranking: keys above `key`, and those at it up to token `last_token`.
struct Cut {
    u32 key, last_token;
    __device__ __forceinline__ bool keeps(u32 other, u32 token) const {
        return other != kNoKey && (other > key || (other == key && token <= last_token));
    }
};

struct Choosers {
    const u32* tokens;
    const u32* keys;
    u32 count;
    __device__ __forceinline__ u32 size() const { return count; }
    __device__ __forceinline__ u32 token(u32 i) const { return tokens[i]; }
    __device__ __forceinline__ u32 key(u32 i) const { return keys[i]; }
};

// The tokens of a list, by their p at one expert; below the bound nothing is known.
struct Candidates {
    const u32* list;
    const f32* logits;
    const TokenSoftmax* token_softmax;
    u32 count, experts, least;
    __device__ __forceinline__ u32 size() const { return count; }
    __device__ __forceinline__ u32 token(u32 i) const { return list[i]; }
    __device__ __forceinline__ u32 key(u32 i) const {
        const u32 key = key_of_p(token_softmax[list[i]].probability(logits[u64(list[i]) * experts]));
        return key < least ? kNoKey : key;
    }
};

// Every token, those of `chosen` without a key.
struct Column {
    const f32* logits;
    const TokenSoftmax* token_softmax;
    const u32* chosen;
    u32 tokens, experts;
    __device__ __forceinline__ u32 size() const { return tokens; }
    __device__ __forceinline__ u32 token(u32 i) const { return i; }
    __device__ __forceinline__ u32 key(u32 i) const {
        if (chosen[i / 32] >> (i % 32) & 1) return kNoKey;
        return key_of_p(token_softmax[i].probability(logits[u64(i) * experts]));
    }
};

// A source's keys, the first of them kept in shared memory, each by the thread that asks for it.
template <class Source>
struct Keys {
    const Source& source;
    u32* cached;

    // Before anything else.
    __device__ __forceinline__ void fill() const {
        constexpr u32 kTogether = 4;
        for (u32 base = threadIdx.x; base < min_of(source.size(), kKeysCached); base += kTogether * kRankThreads) {
            u32 key[kTogether];
#pragma unroll
            for (u32 i = 0; i < kTogether; ++i) {
                const u32 at = base + i * kRankThreads;
                key[i] = at < source.size() ? source.key(at) : kNoKey;
            }
#pragma unroll
            for (u32 i = 0; i < kTogether; ++i)
                if (base + i * kRankThreads < kKeysCached) cached[base + i * kRankThreads] = key[i];
        }
    }
    __device__ __forceinline__ u32 operator()(u32 i) const { return i < kKeysCached ? cached[i] : source.key(i); }

    // How many there are, by all threads.
    __device__ __forceinline__ u32 count() const {
        u32 found = 0;
        for (u32 base = 0; base < source.size(); base += kRankThreads) {
            const u32 i = base + threadIdx.x;
            found += u32(__syncthreads_count(i < source.size() && (*this)(i) != kNoKey));
        }
        return found;
    }
};

struct Selection {
    u32 histogram[kRankThreads];
    BlockScan<kRankWarps> scan;
    u32 digit, left, at_digit;
    u32 cached[kKeysCached];
    u32 list[kKeysCached];

    // The `wanted`-th largest value that `value_of` gives for 0 … size − 1, kNoKey being none; how many of those that are
    // equal to it belong to the first `wanted`, and how many there are: by digits of 8 bits from the top, one a thread.
    template <class ValueOf>
    __device__ __forceinline__ u32 nth(u32 size, u32 wanted, ValueOf value_of, u32& ties, u32& all_ties) {
        u32 prefix = 0, mask = 0;
#pragma unroll 1
        for (u32 shift = 32; shift > 0;) {
            shift -= 8;
            histogram[threadIdx.x] = 0;
            __syncthreads();
            for (u32 i = threadIdx.x; i < size; i += kRankThreads) {
                const u32 value = value_of(i);
                if (value != kNoKey && (value & mask) == prefix) atomicAdd(&histogram[value >> shift & 255u], 1u);
            }
            __syncthreads();
            // The largest digit first.
            const u32 own = histogram[255 - threadIdx.x];
            u32 total;
            const u32 before = scan.before(own, total);
            if (before < wanted && wanted <= before + own) {
                digit = 255 - threadIdx.x;
                left = wanted - before;
                at_digit = own;
            }
            __syncthreads();
            prefix |= digit << shift;
            mask |= 255u << shift;
            wanted = left;
        }
        ties = wanted;
        all_ties = at_digit;
        return prefix;
    }

    // The cut behind the first `count` of `source`, 1 ≤ count ≤ keys in it. The same in every thread.
    template <class Source>
    __device__ __forceinline__ Cut first(const Source& source, const Keys<Source>& keys, u32 count) {
        u32 ties, all_ties;
        const u32 key = nth(source.size(), count, keys, ties, all_ties);
        if (ties == all_ties) return Cut{key, kNoKey};
        // More of them than places: the smaller tokens. 2³² − 2 − token is never kNoKey.
        u32 one, all;
        const auto reversed = [&](u32 i) { return keys(i) == key ? kNoKey - 1 - source.token(i) : kNoKey; };
        return Cut{key, kNoKey - 1 - nth(source.size(), ties, reversed, one, all)};
    }
};

// What the kernels that rank read.
struct RankingInput {
    const f32* logits;                  // (tokens, experts) f32
    const TokenSoftmax* token_softmax;  // (tokens)
    const u32* chosen_offsets;          // (experts + 1) u32: where an expert's choosers begin
    const u32* chosen_token;            // (tokens · k) u32, by expert, ascending
    const u32* chosen_key;              // (tokens · k) the bits of what they rank by
    const f32* bounds;                  // (experts) f32: candidates are all others whose ln p reaches it
    const u32* candidates;              // (experts, words) u32: a bit for each token
    u32 tokens, experts;
    u32 words;                          // ⌈tokens / 256⌉ · 8
};

// One expert's ranking, by a block of kRankThreads.
struct Ranking {
    const RankingInput& input;
    Selection& selection;
    u32 expert;
    // A bit for each token, `words` of them: those visited.
    u32* visited;

    __device__ __forceinline__ u32 choosers() const {
        return input.chosen_offsets[expert + 1] - input.chosen_offsets[expert];
    }

    // Calls `visit` with the key of each of the first `count`, count ≤ tokens, in no order; `visited` are they then.
    template <class Visit>
    __device__ __forceinline__ void first(u32 count, Visit visit) const {
        __syncthreads();
        for (u32 word = threadIdx.x; word < input.words; word += kRankThreads) visited[word] = 0;
        __syncthreads();
        const u32 begin = input.chosen_offsets[expert], f = choosers();
        if (count > 0) {
            const Choosers choosers{input.chosen_token + begin, input.chosen_key + begin, f};
            const Keys<Choosers> keys{choosers, selection.cached};
            keys.fill();
            visit_those(choosers, keys, count < f ? selection.first(choosers, keys, count) : Cut{0, kNoKey}, visit);
        }
        __syncthreads();
        if (others_needed(count, f) > 0) visit_others(others_needed(count, f), visit);
        __syncthreads();
    }

    template <class Visit>
    __device__ __forceinline__ void visit_others(u32 needed, Visit visit) const {
        // Who missed the bound is below it by more than both sides' logarithms may be off, a few units of 2⁻¹⁸.
        const f32 bound = input.bounds[expert];
        const u32 least = bound > -infinity() ? __float_as_uint(exponential(bound + 0x1p-12f)) : 0;
        const u32 listed = list_candidates();
        if (needed <= listed && listed <= kKeysCached) {
            const Candidates candidates{selection.list, input.logits + expert, input.token_softmax, listed, input.experts,
                                        least};
            const Keys<Candidates> keys{candidates, selection.cached};
            keys.fill();
            if (keys.count() >= needed) {
                visit_those(candidates, keys, selection.first(candidates, keys, needed), visit);
                return;
            }
        }
        const Column column{input.logits + expert, input.token_softmax, visited, input.tokens, input.experts};
        const Keys<Column> keys{column, selection.cached};
        keys.fill();
        visit_those(column, keys, selection.first(column, keys, needed), visit);
    }

    // The candidates that did not choose the expert, as far as there is room for them; how many they are.
    __device__ __forceinline__ u32 list_candidates() const {
        const u32* const candidates = input.candidates + u64(expert) * input.words;
        u32 listed = 0;
        for (u32 base = 0; base < input.words; base += 4 * kRankThreads) {
            const u32 word = base + 4 * threadIdx.x;
            u32 bits[4] = {};
            if (word < input.words) {
                const uint4 four = *reinterpret_cast<const uint4*>(candidates + word);
                bits[0] = four.x & ~visited[word];
                bits[1] = four.y & ~visited[word + 1];
                bits[2] = four.z & ~visited[word + 2];
                bits[3] = four.w & ~visited[word + 3];
            }
            u32 total;
            u32 place = listed + selection.scan.before(
                                     u32(__popc(bits[0]) + __popc(bits[1]) + __popc(bits[2]) + __popc(bits[3])), total);
            listed += total;
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
                for (u32 left = bits[i]; left != 0; left &= left - 1, ++place)
                    if (place < kKeysCached) selection.list[place] = 32 * (word + i) + u32(__ffs(i32(left))) - 1;
        }
        __syncthreads();
        return listed;
    }

    template <class Source, class Visit>
    __device__ __forceinline__ void visit_those(const Source& source, const Keys<Source>& keys, Cut cut,
                                                Visit visit) const {
        for (u32 i = threadIdx.x; i < source.size(); i += kRankThreads) {
            const u32 key = keys(i), token = source.token(i);
            if (cut.keeps(key, token)) {
                atomicOr(visited + token / 32, 1u << (token % 32));
                visit(key);
            }
        }
    }
};

}  // namespace sonic
