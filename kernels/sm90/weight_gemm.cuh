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

// Rows of a stage, 32 or 64, and stages of the operand ring.
#ifndef WEIGHT_GEMM_DEPTH
#define WEIGHT_GEMM_DEPTH 64
#endif
#ifndef WEIGHT_GEMM_STAGES
#define WEIGHT_GEMM_STAGES (256 / WEIGHT_GEMM_DEPTH)
#endif
// Blocks of a cluster: 1 or 2.
#ifndef WEIGHT_GEMM_CLUSTER
#define WEIGHT_GEMM_CLUSTER 2
#endif
// Who orders the gathered cp.async writes (generic proxy) before wgmma's reads (async proxy):
//   1  the consumer, between its wait and its wgmmas
//   2  the producer, one stage late, once its own copies have landed
#ifndef WEIGHT_GEMM_FENCE
#define WEIGHT_GEMM_FENCE 1
#endif

// L2 hints: B and the output pass through L2 once, the gathered tokens come back for every expert that chose them.
#ifndef WEIGHT_GEMM_HINTS
#define WEIGHT_GEMM_HINTS 1
#endif

namespace sonic {

/// C_e as (M, N) with N contiguous, or as its transpose with M contiguous.
enum class OutputOrder { kNContiguous, kMContiguous };

struct WeightGemmShape {
    static constexpr u32 kTileM = 128;
    static constexpr u32 kTileN = 256;
    static constexpr u32 kDepth = WEIGHT_GEMM_DEPTH;
    static constexpr u32 kStages = WEIGHT_GEMM_STAGES;
    static constexpr u32 kCluster = WEIGHT_GEMM_CLUSTER;

    // kDepth lines of 128 bytes, 64 features each: the unit of the operands' boxes and descriptors.
    static constexpr u32 kSlabBytes = kDepth * 128;
    static constexpr u32 kGatheredBytes = (kTileM / 64) * kSlabBytes;
    static constexpr u32 kContiguousBytes = (kTileN / 64) * kSlabBytes;
    static constexpr u32 kStageBytes = kGatheredBytes + kContiguousBytes;

    // 64 × 64 blocks of staged output per consumer warpgroup; its part of a tile has four.
    static constexpr u32 kBlockBytes = 64 * 128;
    static constexpr u32 kStagedBlocks = kStages * kDepth <= 192 ? 4 : 2;
    static constexpr u32 kStagingBytes = 2 * kStagedBlocks * kBlockBytes;

    static constexpr u32 kThreads = 384;
    // 1024 bytes to align the ring; the barriers are static.
    static constexpr u32 kDynamicSharedBytes = 1024 + kStages * kStageBytes + kStagingBytes;
    static constexpr u32 kStaticSharedBytes = 2 * kStages * 8;
    static_assert(kDynamicSharedBytes + kStaticSharedBytes <= 232448, "more shared memory than a block may have");
    static_assert(kCluster == 1 || kCluster == 2, "B's four slabs are shared by one or two blocks");

    static_assert(kDepth == 32 || kDepth == 64, "a stage is two or four steps of 16 rows");

    // 128 · (88 + 2 · 208) = 64512 of 65536 registers; ptxas allots 168 a thread at entry.
    static constexpr u32 kProducerRegisters = 88;
    static constexpr u32 kConsumerRegisters = 208;
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

constexpr u64 kContiguousHint = WEIGHT_GEMM_HINTS ? kEvictFirst : kEvictNormal;
constexpr u64 kOutputHint = WEIGHT_GEMM_HINTS ? kEvictFirst : kEvictNormal;

__device__ __forceinline__ void tma_store_3d_hinted(const TensorMap* map, const void* shared, i32 c0, i32 c1, i32 c2) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1], %5;"
                 ::"l"(map), "r"(shared_address(shared)), "r"(c0), "r"(c1), "r"(c2), "l"(kOutputHint) : "memory");
}

struct WeightGemmBarriers {
    u64 full[WeightGemmShape::kStages];
    u64 empty[WeightGemmShape::kStages];
};

/// The rows of A that this thread copies: 16 threads cover a line's 2 × 128 bytes, 8 lines are under way at a
/// time, so a thread has lines t / 16 + 8 i, all with the same line mod 8 and thus one swizzle.
struct Gather {
    static constexpr u32 kLines = WeightGemmShape::kDepth / 8;
    i32 token[kLines];

    /// −1 marks a line beyond the expert's end.
    __device__ __forceinline__ void fetch(const i32* row_token, const WeightTile& tile, u32 first) {
#pragma unroll
        for (u32 i = 0; i < kLines; ++i) {
            const u32 row = first + threadIdx.x / 16 + 8 * i;
            token[i] = row < tile.rows ? __ldg(row_token + tile.first_row + row) : -1;
        }
    }

    __device__ __forceinline__ void copy(u32 shared, const WeightGemmOperands& op, const WeightTile& tile) const {
        const u32 chunk = threadIdx.x % 16;
        const u32 feature = tile.m + chunk * 8;
        const bool inside = feature < op.m;
        const bf16* column = op.gathered + (inside ? feature : 0);
        const u32 target = shared + chunk / 8 * WeightGemmShape::kSlabBytes + swizzled_offset(threadIdx.x / 16, chunk % 8);
#pragma unroll
        for (u32 i = 0; i < kLines; ++i) {
            const bool valid = inside && token[i] >= 0;
            copy_16(target + 1024 * i, column + (valid ? u64(u32(token[i])) * op.m : 0), valid);
        }
    }
};

/// B's lines of the partial last stage, zeros beyond the expert's end and beyond N.
__device__ __forceinline__ void copy_contiguous_tail(u32 shared, const WeightGemmOperands& op, const WeightTile& tile,
                                                     u32 first) {
    const u32 chunk = threadIdx.x % 32;
    const u32 column = tile.n + chunk * 8;
    const u32 lines = round_up(tile.rows - first, 16u);
    for (u32 line = threadIdx.x / 32; line < lines; line += 4) {
        const bool valid = column < op.n && first + line < tile.rows;
        const bf16* source = op.contiguous;
        if (valid) source += u64(u32(tile.first_row) + first + line) * op.n + column;
        copy_16(shared + chunk / 8 * WeightGemmShape::kSlabBytes + swizzled_offset(line, chunk % 8), source, valid);
    }
}

__device__ __forceinline__ void weight_gemm_produce(const WeightGemmOperands& op, u32 ring_address, u8* ring_memory,
                                                    WeightGemmBarriers& barriers) {
    using S = WeightGemmShape;
    constexpr u32 kShare = 4 / S::kCluster;
    const u32 rank = S::kCluster > 1 ? cluster_rank() : 0;
    RingPosition<S::kStages> ring;
    WeightTiles tiles(op);
#if WEIGHT_GEMM_FENCE == 2
    i32 landing = -1;
#endif
    WeightTile tile;
    while (tiles.next(tile)) {
        // The indices of the next stages travel while this one waits for its slot.
        constexpr u32 kAhead = 64 / S::kDepth;
        Gather gather[kAhead + 1];
#pragma unroll
        for (u32 i = 0; i < kAhead; ++i) gather[i].fetch(op.row_token, tile, i * S::kDepth);
        for (u32 first = 0; first < tile.rows; first += S::kDepth) {
            gather[kAhead].fetch(op.row_token, tile, first + kAhead * S::kDepth);
            u64* full = &barriers.full[ring.slot];
            barrier_wait(&barriers.empty[ring.slot], ring.round_parity ^ 1, Role::kProducer, ring.slot, op.status);
            const u32 stage = ring.slot * S::kStageBytes;
            if (first + S::kDepth <= tile.rows) {
                if (threadIdx.x == 0) {
                    barrier_arrive_expect(full, S::kContiguousBytes);
#pragma unroll
                    for (u32 i = 0; i < kShare; ++i) {
                        const u32 slab = rank * kShare + i;
                        void* target = ring_memory + stage + S::kGatheredBytes + slab * S::kSlabBytes;
                        const i32 column = i32(tile.n + slab * 64), row = tile.first_row + i32(first);
                        if (S::kCluster > 1)
                            tma_load_2d_multicast(target, op.contiguous_map, full, column, row, (1u << S::kCluster) - 1,
                                                  kContiguousHint);
                        else
                            tma_load_2d(target, op.contiguous_map, full, column, row, kContiguousHint);
                    }
                }
            } else {
                copy_contiguous_tail(ring_address + stage + S::kGatheredBytes, op, tile, first);
                if (threadIdx.x == 0) barrier_arrive(full);
            }
            gather[0].copy(ring_address + stage, op, tile);
#if WEIGHT_GEMM_FENCE == 2
            copy_commit();
            if (landing >= 0) {
                copy_wait<1>();
                fence_async_shared();
                barrier_arrive(&barriers.full[landing]);
            }
            landing = i32(ring.slot);
#else
            barrier_arrive_after_copies(full);
#endif
#pragma unroll
            for (u32 i = 0; i < kAhead; ++i) gather[i] = gather[i + 1];
            ring.advance();
        }
    }
#if WEIGHT_GEMM_FENCE == 2
    if (landing >= 0) {
        copy_wait<0>();
        fence_async_shared();
        barrier_arrive(&barriers.full[landing]);
    }
#endif
}

/// Arrives on the barrier at the same shared address of block `rank` of the cluster, with the semantics at block
/// scope that mbarrier.arrive has by default. Release at cluster scope costs a MEMBAR.GPU in every stage and its
/// acquire a CCTL.IVALL, a third of the kernel's speed, and there is nothing to publish: the barrier only tells
/// that wgmmas, whose completion this warp has awaited, no longer read the stage.
__device__ __forceinline__ void arrive_at(u64* barrier, u32 rank) {
    asm volatile(
        "{\n .reg .b32 remote;\n"
        " mapa.shared::cluster.u32 remote, %0, %1;\n"
        " mbarrier.arrive.shared::cluster.b64 _, [remote];\n}"
        ::"r"(shared_address(barrier)), "r"(rank) : "memory");
}

/// Every warp reports for itself: its wait covers its own wgmmas. Each block of the cluster writes into the
/// others' stages, so it must hear from their consumers too.
__device__ __forceinline__ void release_stage(WeightGemmBarriers& barriers, u32 slot) {
    using S = WeightGemmShape;
    if (S::kCluster == 1) {
        if (lane_index() == 0) barrier_arrive(&barriers.empty[slot]);
    } else {
        if (lane_index() < S::kCluster) arrive_at(&barriers.empty[slot], lane_index());
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
#if WEIGHT_GEMM_FENCE == 1
            fence_async_shared();
#endif
            const u64 offset = ring.slot * (S::kStageBytes >> 4);
            const u64 a = a_descriptor + offset, b = b_descriptor + offset;
            const u32 left = tile.rows - first;
            if (S::kDepth == 64 && left > 48)
                multiply<4>(acc, a, b, accumulate);
            else if (S::kDepth == 64 && left > 32)
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
            // 128 gathering threads and the announcement of the TMA bytes.
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
        weight_gemm_produce(op, shared_address(ring_memory), ring_memory, barriers);
    } else {
        grow_registers<S::kConsumerRegisters>();
        weight_gemm_consume<kOrder>(op, ring_memory, staging_memory, barriers);
    }
    // A block that left could still be written to or signalled by the other.
    if (S::kCluster > 1) cluster_barrier();
}

}  // namespace sonic
