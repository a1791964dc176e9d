// Token rounding: each token's rows, its experts ascending.
//
// A block owns 256 tokens. A warp has the 32 of one word of the bits, and a quarter of the experts: it turns the words of
// 32 experts, so that a lane has its token's bit for each of them. A row's place among its expert's is the number of bits
// before its own.
//
// grid     max(1, ⌈tokens / 256⌉)
// block    kTokenThreads (1024)
// shared   4 · experts · (kTileWords (8) + 3) dynamic
// cluster  1
#include "lanes.cuh"

using namespace sonic;

constexpr u32 kTileTokens = 256;
constexpr u32 kTileWords = kTileTokens / 32;
constexpr u32 kParts = 4;
constexpr u32 kTokenThreads = kParts * kTileTokens;
constexpr u32 kHeld = 4;

// Bit i of lane j becomes bit j of lane i.
__device__ __forceinline__ u32 turned(u32 word) {
    const u32 lane = threadIdx.x % 32;
    u32 low_bits = 0x0000ffffu;
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) {
        const u32 other = __shfl_xor_sync(kAllLanes, word, distance);
        word = (lane & distance) == 0 ? (word & low_bits) | (other & low_bits) << distance
                                      : (word & ~low_bits) | (other & ~low_bits) >> distance;
        low_bits ^= low_bits << (distance / 2);
    }
    return word;
}

extern "C" __global__ void __launch_bounds__(kTokenThreads)
rounding_tokens(const u32* __restrict__ expert_offsets, // (experts + 1) u32
                const u32* __restrict__ kept,           // (experts, tiles · 8) u32: a bit for each token
                const u32* __restrict__ kept_before,    // (experts, tiles) u32: bits in earlier tiles
                u32* __restrict__ token_offsets,        // (tokens + 1) u32, written whole
                u32* __restrict__ token_rows,           // u32, written up to expert_offsets[experts]
                u32* __restrict__ pair_expert,          // u32, the expert of each entry of token_rows
                u32 tokens,                             // T, 0 allowed
                u32 tiles,                              // ⌈tokens / 256⌉
                u32 experts) {                          // E ≥ 1
    extern __shared__ u32 dynamic[];
    __shared__ BlockScan<kTokenThreads / 32> scan;
    __shared__ u32 pairs[kParts][kTileTokens];
    if (tokens == 0) {
        if (threadIdx.x == 0) token_offsets[0] = 0;
        return;
    }
    u32* const words = dynamic;                             // (kTileWords, experts)
    u32* const first_row = dynamic + kTileWords * experts;  // (experts) the row of the first bit of the tile
    u32* const before_word = first_row + experts;           // (2, experts) the bits before each word of the tile, in bytes
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x;
    u32 earlier = 0;
    for (u32 expert = threadIdx.x; expert < experts; expert += kTokenThreads) {
        const uint4* const own = reinterpret_cast<const uint4*>(kept + (u64(expert) * tiles + tile) * kTileWords);
        const uint4 low = own[0], high = own[1];
        const u32 before = kept_before[u64(expert) * tiles + tile];
        const u32 word[kTileWords] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        u32 bits = 0, bytes[2] = {0, 0};
#pragma unroll
        for (u32 i = 0; i < kTileWords; ++i) {
            words[i * experts + expert] = word[i];
            bytes[i / 4] |= bits << (8 * (i % 4));
            bits += u32(__popc(word[i]));
        }
        first_row[expert] = expert_offsets[expert] + before;
        before_word[expert] = bytes[0];
        before_word[experts + expert] = bytes[1];
        earlier += before;
    }
    u32 place;
    scan.before(earlier, place);
    __syncthreads();
    const u32 word = warp % kTileWords, part = warp / kTileWords;
    const u32 of_part = round_up(ceil_div(experts, kParts), 32u);
    const u32 begin = part * of_part, end = min_of(begin + of_part, experts);
    const auto turned_at = [&](u32 first) {
        return turned(first + lane < end ? words[word * experts + first + lane] : 0);
    };
    // Bits of the first experts stay in registers.
    u32 held[kHeld], own = 0;
#pragma unroll
    for (u32 i = 0; i < kHeld; ++i) {
        held[i] = begin + 32 * i < end ? turned_at(begin + 32 * i) : 0;
        own += u32(__popc(held[i]));
    }
    for (u32 first = begin + 32 * kHeld; first < end; first += 32) own += u32(__popc(turned_at(first)));
    const u32 in_tile = 32 * word + lane;
    pairs[part][in_tile] = own;
    __syncthreads();
    u32 of_token = 0, before_part = 0;
#pragma unroll
    for (u32 i = 0; i < kParts; ++i) {
        if (i == part) before_part = of_token;
        of_token += pairs[i][in_tile];
    }
    // Warps of one part stand in the order of the tokens; those of the first are scanned.
    u32 total;
    const u32 before = scan.before(part == 0 ? of_token : 0, total);
    if (part == 0) pairs[0][in_tile] = place + before;
    __syncthreads();
    const u32 token = tile * kTileTokens + in_tile;
    place = pairs[0][in_tile];
    if (part == 0 && token < tokens) token_offsets[token] = place;
    if (tile + 1 == tiles && threadIdx.x == kTileTokens - 1) token_offsets[tokens] = place + of_token;
    place += before_part;
    const auto emit = [&](u32 first, u32 bits) {
        for (; bits != 0; bits &= bits - 1) {
            const u32 expert = first + u32(__ffs(i32(bits))) - 1;
            const u32 earlier_words = before_word[word / 4 * experts + expert] >> (8 * (word % 4)) & 255u;
            token_rows[place] =
                first_row[expert] + earlier_words + u32(__popc(words[word * experts + expert] & lanes_below(lane)));
            pair_expert[place] = expert;
            ++place;
        }
    };
#pragma unroll
    for (u32 i = 0; i < kHeld; ++i) emit(begin + 32 * i, held[i]);
    for (u32 first = begin + 32 * kHeld; first < end; first += 32) emit(first, turned_at(first));
}
