// The grouped GEMM that contracts over tokens: for every expert e, C_e (M, N) = A_eᵀ B_e, summed over e's rows.
//
// A is gathered (row r is the M features of token row_token[r]), B is contiguous (row r of a (R, N) tensor). Both
// are MN-major: a line of shared memory is 64 features of one token, so wgmma's K runs over lines.
//
//   block      128 × 256 of one expert's C; a cluster holds kCluster such tiles, neighbours along M, same N
//   producer   one warpgroup: gathers A by cp.async; B comes by TMA, each block of the cluster loading its share
//              of the lines' columns for all of them
//   consumers  two warpgroups, 64 × 256 accumulators each; the output leaves through shared memory by TMA,
//              which clips at M and N and cannot reach another expert, since E is a dimension of its map
//
// Rows beyond the expert's end must be exactly zero in both operands: 0 × NaN is NaN, and the rows that follow
// belong to the next expert. TMA knows no expert, so it loads only whole stages of 64 rows. In the last, partial
// stage both operands are copied by cp.async with a source size of 0 beyond the end, which writes zeros; every
// byte that wgmma reads is thus written by exactly one copy, and nothing needs to be cleared afterwards.
#pragma once
#include "sm90/types.cuh"
#include "sm90/barrier.cuh"
#include "sm90/copy.cuh"
#include "sm90/warp.cuh"
#include "sm90/wgmma.cuh"

// Stages of the operand ring. Three leave room to stage a whole output tile, four for half of one.
#ifndef SONIC_STAGES
#define SONIC_STAGES 4
#endif
// Blocks of a cluster: 1 or 2.
#ifndef SONIC_CLUSTER
#define SONIC_CLUSTER 2
#endif

namespace sonic {

/// C_e as (M, N) with N contiguous, or as its transpose with M contiguous.
enum class OutputOrder { kNContiguous, kMContiguous };

struct WeightGemmShape {
    static constexpr u32 kTileM = 128;
    static constexpr u32 kTileN = 256;
    static constexpr u32 kDepth = 64;
    static constexpr u32 kStages = SONIC_STAGES;
    static constexpr u32 kCluster = SONIC_CLUSTER;

    // kDepth lines of 128 bytes, 64 features each: the unit of the operands' boxes and descriptors.
    static constexpr u32 kSlabBytes = kDepth * 128;
    static constexpr u32 kGatheredBytes = (kTileM / 64) * kSlabBytes;
    static constexpr u32 kContiguousBytes = (kTileN / 64) * kSlabBytes;
    static constexpr u32 kStageBytes = kGatheredBytes + kContiguousBytes;

    // 64 × 64 blocks of staged output per consumer warpgroup; its part of a tile has four.
    static constexpr u32 kBlockBytes = 64 * 128;
    static constexpr u32 kStagedBlocks = kStages <= 3 ? 4 : 2;
    static constexpr u32 kStagingBytes = 2 * kStagedBlocks * kBlockBytes;

    static constexpr u32 kThreads = 384;
    // 1024 bytes to align the ring; the barriers are static.
    static constexpr u32 kDynamicSharedBytes = 1024 + kStages * kStageBytes + kStagingBytes;
    static constexpr u32 kStaticSharedBytes = 2 * kStages * 8;
    static_assert(kDynamicSharedBytes + kStaticSharedBytes <= 232448, "more shared memory than a block may have");
    static_assert(kCluster == 1 || kCluster == 2, "B's four slabs are shared by one or two blocks");

    // 128 · (120 + 2 · 192) = 64512 of 65536 registers; ptxas allots 168 a thread at entry.
    static constexpr u32 kProducerRegisters = 120;
    static constexpr u32 kConsumerRegisters = 192;
};

/// Where a tile lies: expert, first row of the expert, its row count, first M and N index of this block.
struct WeightTile {
    u32 expert;
    i32 first_row;
    u32 rows;
    u32 m;
    u32 n;
};

struct WeightGemmOperands {
    const TensorMap* contiguous_map;  // (R, N): box 64 × kDepth rows, 128-byte swizzle
    const TensorMap* out_map;         // (E, M, N) or (E, N, M): box 64 × 64 × 1, 128-byte swizzle
    const bf16* gathered;             // (T, M)
    const bf16* contiguous;           // (R, N), the memory of contiguous_map
    const i32* row_token;             // (R)
    const i32* expert_offsets;        // (E + 1)
    const i32* expert_order;          // (E), or null for 0, 1, …
    u32 experts;
    u32 m;
    u32 n;
    u32* status;                      // kStatusWords, or null
};

/// This block's tiles, in the order of `expert_order`, dealt to the clusters in rounds that run forth and back:
/// with experts sorted by falling row count no cluster ends up with the longer tile of every round.
///
/// The place of the next tile takes three dependent loads. It is looked up while the current tile is at work.
class WeightTiles {
    using S = WeightGemmShape;
    const WeightGemmOperands& op;
    const u32 tiles_n;
    const u32 per_expert;
    const u32 total;
    const u32 cluster;
    const u32 clusters;
    const u32 rank;
    u32 round = 0;
    bool found;
    WeightTile ahead;

    __device__ __forceinline__ void look_ahead() {
        found = false;
        // The last round may have no tile for this cluster.
        if (round * clusters < total) {
            const u32 tile = round * clusters + (round & 1 ? clusters - 1 - cluster : cluster);
            ++round;
            found = tile < total;
            if (found) {
                const u32 place = tile / per_expert;
                const u32 within = tile - place * per_expert;
                ahead.expert = op.expert_order ? u32(__ldg(op.expert_order + place)) : place;
                ahead.first_row = __ldg(op.expert_offsets + ahead.expert);
                ahead.rows = u32(__ldg(op.expert_offsets + ahead.expert + 1) - ahead.first_row);
                ahead.n = within % tiles_n * S::kTileN;
                ahead.m = (within / tiles_n * S::kCluster + rank) * S::kTileM;
            }
        }
    }

  public:
    __device__ __forceinline__ WeightTiles(const WeightGemmOperands& operands)
        : op(operands),
          tiles_n(ceil_div(operands.n, S::kTileN)),
          per_expert(ceil_div(operands.m, S::kTileM * S::kCluster) * tiles_n),
          total(operands.experts * per_expert),
          cluster(blockIdx.x / S::kCluster),
          clusters(gridDim.x / S::kCluster),
          rank(S::kCluster > 1 ? cluster_rank() : 0) {
        look_ahead();
    }

    __device__ __forceinline__ bool next(WeightTile& tile) {
        if (!found) return false;
        tile = ahead;
        look_ahead();
        return true;
    }
};

// B and the output pass through L2 once; the gathered tokens come back for every expert that chose them.
constexpr u64 kContiguousHint = kEvictFirst;
constexpr u64 kOutputHint = kEvictFirst;

__device__ __forceinline__ void tma_store_3d_hinted(const TensorMap* map, const void* shared, i32 c0, i32 c1, i32 c2) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1], %5;"
                 ::"l"(map), "r"(shared_address(shared)), "r"(c0), "r"(c1), "r"(c2), "l"(kOutputHint) : "memory");
}

// As copy_16, for lines known to be inside: no size operand.
__device__ __forceinline__ void copy_16_whole(u32 shared, const void* global) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

struct WeightGemmBarriers {
    u64 full[WeightGemmShape::kStages];
    u64 empty[WeightGemmShape::kStages];
};

/// The tokens of a warp's lines of two stages, one a lane: of every 8 lines, warp w copies lines 2 w and 2 w + 1.
/// Line 8 i + 2 w + h of stage s is held by lane 16 s + 2 i + h. −1 marks a line beyond the expert's end.
__device__ __forceinline__ i32 fetch_tokens(const i32* row_token, const WeightTile& tile, u32 first) {
    const u32 lane = lane_index();
    const u32 line = lane % 16 / 2 * 8 + 2 * (threadIdx.x / 32) + lane % 2;
    const u32 row = first + lane / 16 * 64 + line;
    return row < tile.rows ? __ldg(row_token + tile.first_row + row) : -1;
}

/// The token of this thread's line of a step: the lower 16 lanes copy line 8 step + 2 w, the upper ones the next.
template <u32 kStage>
__device__ __forceinline__ i32 token_of_line(i32 tokens, u32 step) {
    return __shfl_sync(0xffffffffu, tokens, kStage * 16 + 2 * step + lane_index() / 16);
}

/// Where in A's part of a stage this thread's lines go: 16 lanes cover a line's 2 × 128 bytes.
__device__ __forceinline__ u32 gathered_offset(u32 step) {
    const u32 lane = lane_index();
    const u32 line = 8 * step + 2 * (threadIdx.x / 32) + lane / 16;
    return lane % 16 / 8 * WeightGemmShape::kSlabBytes + swizzled_offset(line, lane % 8);
}

/// B's lines of the partial last stage, zeros beyond the expert's end and beyond N.
__device__ __forceinline__ void copy_contiguous_tail(u32 shared, const WeightGemmOperands& op, const WeightTile& tile,
                                                     u32 first) {
    const u32 chunk = threadIdx.x % 32;
    const u32 column = tile.n + chunk * 8;
    const u32 lines = round_up(tile.rows - first, 16u);
#pragma unroll 1
    for (u32 line = threadIdx.x / 32; line < lines; line += 4) {
        const bool valid = column < op.n && first + line < tile.rows;
        const bf16* source = op.contiguous;
        if (valid) source += u64(u32(tile.first_row) + first + line) * op.n + column;
        copy_16(shared + chunk / 8 * WeightGemmShape::kSlabBytes + swizzled_offset(line, chunk % 8), source, valid);
    }
}

/// Announces and loads this block's share of B's lines, for all blocks of the cluster. One thread.
__device__ __forceinline__ void load_contiguous(const WeightGemmOperands& op, const WeightTile& tile, u32 first, u64* full,
                                                u8* shared) {
    using S = WeightGemmShape;
    constexpr u32 kShare = 4 / S::kCluster;
    const u32 rank = S::kCluster > 1 ? cluster_rank() : 0;
    barrier_arrive_expect(full, S::kContiguousBytes);
#pragma unroll
    for (u32 i = 0; i < kShare; ++i) {
        const u32 slab = rank * kShare + i;
        const i32 column = i32(tile.n + slab * 64), row = tile.first_row + i32(first);
        if (S::kCluster > 1)
            tma_load_2d_multicast(shared + slab * S::kSlabBytes, op.contiguous_map, full, column, row,
                                  (1u << S::kCluster) - 1, kContiguousHint);
        else
            tma_load_2d(shared + slab * S::kSlabBytes, op.contiguous_map, full, column, row, kContiguousHint);
    }
}

/// Fills the stage at the ring's position with rows first … first + 63 of the tile's expert.
template <u32 kStage>
__device__ __forceinline__ void produce_stage(const WeightGemmOperands& op, const WeightTile& tile, u32 first,
                                             i32 tokens, const RingPosition<WeightGemmShape::kStages>& ring, u8* ring_memory,
                                             WeightGemmBarriers& barriers) {
    using S = WeightGemmShape;
    constexpr u32 kSteps = S::kDepth / 8;
    u64* full = &barriers.full[ring.slot];
    u64* empty = &barriers.empty[ring.slot];
    u8* gathered = ring_memory + ring.slot * S::kStageBytes;
    const u32 shared = shared_address(gathered);
    const u32 feature = tile.m + lane_index() % 16 * 8;
    const bool whole_rows = first + S::kDepth <= tile.rows;
    if (whole_rows && tile.m + S::kTileM <= op.m) {
        // The addresses are ready before the slot is: a shuffle between two copies would make each wait for the other.
        const u8* column = reinterpret_cast<const u8*>(op.gathered + feature);
        const u8* source[kSteps];
#pragma unroll
        for (u32 i = 0; i < kSteps; ++i) source[i] = column + u64(u32(token_of_line<kStage>(tokens, i))) * (2 * op.m);
        barrier_wait(empty, ring.round_parity ^ 1, Role::kProducer, ring.slot, op.status);
        if (threadIdx.x == 0) load_contiguous(op, tile, first, full, gathered + S::kGatheredBytes);
        __syncwarp();
#pragma unroll
        for (u32 i = 0; i < kSteps; ++i) copy_16_whole(shared + gathered_offset(i), source[i]);
    } else {
        barrier_wait(empty, ring.round_parity ^ 1, Role::kProducer, ring.slot, op.status);
        if (threadIdx.x == 0) {
            if (whole_rows)
                load_contiguous(op, tile, first, full, gathered + S::kGatheredBytes);
            else
                barrier_arrive(full);
        }
        __syncwarp();
        if (!whole_rows) copy_contiguous_tail(shared + S::kGatheredBytes, op, tile, first);
#pragma unroll
        for (u32 i = 0; i < kSteps; ++i) {
            const i32 token = token_of_line<kStage>(tokens, i);
            const bool valid = feature < op.m && token >= 0;
            copy_16(shared + gathered_offset(i), op.gathered + (valid ? u64(u32(token)) * op.m + feature : 0), valid);
        }
    }
    barrier_arrive_after_copies(full);
}

__device__ __forceinline__ void weight_gemm_produce(const WeightGemmOperands& op, u8* ring_memory, WeightGemmBarriers& barriers) {
    using S = WeightGemmShape;
    RingPosition<S::kStages> ring;
    WeightTiles tiles(op);
    WeightTile tile;
    while (tiles.next(tile)) {
        i32 tokens = fetch_tokens(op.row_token, tile, 0);
        for (u32 first = 0; first < tile.rows; first += 2 * S::kDepth) {
            // The next pair's indices travel while this pair waits for its slots.
            const i32 following = fetch_tokens(op.row_token, tile, first + 2 * S::kDepth);
            produce_stage<0>(op, tile, first, tokens, ring, ring_memory, barriers);
            ring.advance();
            if (first + S::kDepth < tile.rows) {
                produce_stage<1>(op, tile, first + S::kDepth, tokens, ring, ring_memory, barriers);
                ring.advance();
            }
            tokens = following;
        }
    }
}

/// Every warp reports for itself: its wait covers its own wgmmas. Each block of the cluster writes into the
/// others' stages, so it must hear from their consumers too.
__device__ __forceinline__ void release_stage(WeightGemmBarriers& barriers, u32 slot) {
    using S = WeightGemmShape;
    if (S::kCluster == 1) {
        if (lane_index() == 0) barrier_arrive_relaxed(&barriers.empty[slot]);
    } else {
        if (lane_index() < S::kCluster) barrier_arrive_relaxed_remote(&barriers.empty[slot], lane_index());
    }
}

/// Rounds 64 × 64 of the accumulators into one staged block: its lines run along N, or along M if M is contiguous.
template <OutputOrder kOrder>
__device__ __forceinline__ void stage_block(u32 staging, const f32 (&acc)[128], u32 block) {
    const u32 lane = lane_index();
    const u32 warp = threadIdx.x / 32 % 4;
    const u32 matrix = lane / 8;
#pragma unroll
    for (u32 pair = 0; pair < 4; ++pair) {
        const u32 j = 4 * (block * 8 + 2 * pair);
        const u32 a = pack_bf16(acc[j], acc[j + 1]), b = pack_bf16(acc[j + 2], acc[j + 3]);
        const u32 c = pack_bf16(acc[j + 4], acc[j + 5]), d = pack_bf16(acc[j + 6], acc[j + 7]);
        if (kOrder == OutputOrder::kNContiguous)
            store_matrix_x4(staging + swizzled_offset(warp * 16 + matrix % 2 * 8 + lane % 8, pair * 2 + matrix / 2), a, b, c, d);
        else
            store_matrix_x4_transposed(
                staging + swizzled_offset((pair * 2 + matrix / 2) * 8 + lane % 8, warp * 2 + matrix % 2), a, b, c, d);
    }
}

/// acc (+)= Aᵀ B over the first 16 · kSteps rows of a stage, as one group.
template <u32 kSteps>
__device__ __forceinline__ void multiply(f32 (&acc)[128], u64 a, u64 b, bool accumulate) {
    constexpr u64 kStep = kDescriptorStep<Major::kMN>;
    wgmma_fence();
#pragma unroll
    for (u32 k = 0; k < kSteps; ++k)
        Wgmma<256, Major::kMN, Major::kMN>::step(acc, a + k * kStep, b + k * kStep, k > 0 || accumulate);
    wgmma_commit();
}

template <OutputOrder kOrder>
__device__ __forceinline__ void weight_gemm_consume(const WeightGemmOperands& op, u8* ring_memory, u8* staging_memory,
                                                    WeightGemmBarriers& barriers) {
    using S = WeightGemmShape;
    const u32 group = uniform(threadIdx.x / kWarpgroup) - 1;
    const bool storer = threadIdx.x % kWarpgroup == 0;
    u8* staging = staging_memory + group * S::kStagedBlocks * S::kBlockBytes;
    const u64 a_descriptor = operand_descriptor<Major::kMN>(ring_memory + group * S::kSlabBytes);
    const u64 b_descriptor = operand_descriptor<Major::kMN>(ring_memory + S::kGatheredBytes, S::kSlabBytes);

    RingPosition<S::kStages> ring;
    WeightTiles tiles(op);
    f32 acc[128];
    WeightTile tile;
    while (tiles.next(tile)) {
        if (tile.rows == 0) {
#pragma unroll
            for (u32 i = 0; i < 128; ++i) acc[i] = 0.0f;
        }
        bool accumulate = false;
        u32 previous = 0;
        for (u32 first = 0; first < tile.rows; first += S::kDepth) {
            barrier_wait(&barriers.full[ring.slot], ring.round_parity, Role::kConsumer, ring.slot, op.status);
            fence_async_shared();
            const u64 offset = ring.slot * (S::kStageBytes >> 4);
            const u64 a = a_descriptor + offset, b = b_descriptor + offset;
            const u32 left = tile.rows - first;
            if (left > 48)
                multiply<4>(acc, a, b, accumulate);
            else if (left > 32)
                multiply<3>(acc, a, b, accumulate);
            else if (left > 16)
                multiply<2>(acc, a, b, accumulate);
            else
                multiply<1>(acc, a, b, accumulate);
            if (accumulate) {
                wgmma_wait<1>();
                release_stage(barriers, previous);
            }
            accumulate = true;
            previous = ring.slot;
            ring.advance();
        }
        wgmma_wait<0>();
        pin(acc);
        if (accumulate) release_stage(barriers, previous);

#pragma unroll
        for (u32 block = 0; block < 4; ++block) {
            u8* staged = staging + block % S::kStagedBlocks * S::kBlockBytes;
            if (storer) store_wait_read<S::kStagedBlocks - 1>();
            named_barrier<kWarpgroup>(1 + group);
            stage_block<kOrder>(shared_address(staged), acc, block);
            fence_async_shared();
            named_barrier<kWarpgroup>(1 + group);
            if (storer) {
                const i32 m = i32(tile.m + group * 64), n = i32(tile.n + block * 64);
                if (kOrder == OutputOrder::kNContiguous)
                    tma_store_3d_hinted(op.out_map, staged, n, m, i32(tile.expert));
                else
                    tma_store_3d_hinted(op.out_map, staged, m, n, i32(tile.expert));
                store_commit();
            }
        }
    }
    // Shared memory must outlive the stores that read it.
    if (storer) store_wait<0>();
}

template <OutputOrder kOrder>
__device__ __forceinline__ void weight_gemm(const WeightGemmOperands& op) {
    using S = WeightGemmShape;
    extern __shared__ u8 dynamic_shared[];
    __shared__ WeightGemmBarriers barriers;
    u8* ring_memory = dynamic_shared + (1024 - shared_address(dynamic_shared) % 1024) % 1024;
    u8* staging_memory = ring_memory + S::kStages * S::kStageBytes;

    if (threadIdx.x == 0) {
        prefetch_map(op.contiguous_map);
        prefetch_map(op.out_map);
        for (u32 i = 0; i < S::kStages; ++i) {
            // The gathering threads and the announcement of the TMA bytes.
            barrier_init(&barriers.full[i], kWarpgroup + 1);
            barrier_init(&barriers.empty[i], 8 * S::kCluster);
        }
        barrier_init_fence();
    }
    // No block may signal another whose barriers are not yet initialised.
    if (S::kCluster > 1)
        cluster_barrier();
    else
        __syncthreads();

    if (threadIdx.x < kWarpgroup) {
        shrink_registers<S::kProducerRegisters>();
        weight_gemm_produce(op, ring_memory, barriers);
    } else {
        grow_registers<S::kConsumerRegisters>();
        weight_gemm_consume<kOrder>(op, ring_memory, staging_memory, barriers);
    }
    // A block that left could still be written to or signalled by the other.
    if (S::kCluster > 1) cluster_barrier();
}

}  // namespace sonic
