// The grouped GEMM that contracts over features: out[row, :] = A[row, :] · B[expert]ᵀ.
//
// One producer warpgroup fills a ring of stages (64 contraction elements of a 128-row A tile and a
// kTileN-column B tile); two consumer warpgroups own 64 rows each and multiply with wgmma. The two
// consumers meet only through the ring, so one may run its epilogue while the other multiplies.
//
//   full[s]   completes when A and B of stage s have landed
//   empty[s]  completes when every consumer warp (of every block of the cluster, since B is
//             multicast to all of them) has finished reading stage s
#pragma once
#include "sm90/types.cuh"
#include "sm90/barrier.cuh"
#include "sm90/copy.cuh"
#include "sm90/launch.cuh"
#include "sm90/tile_schedule.cuh"
#include "sm90/warp.cuh"
#include "sm90/wgmma.cuh"

namespace sonic {

constexpr u32 kTileM = 128;
constexpr u32 kTileK = 64;
constexpr u32 kGemmThreads = 3 * kWarpgroup;
constexpr u32 kConsumerWarps = 8;
constexpr u32 kProducerRegisters = 40;
constexpr u32 kConsumerRegisters = 232;
constexpr u32 kSharedLimit = 232448;

// How the rows of A reach the product.
enum class Rows : u32 {
    kContiguous = 0,
    kGathered = 1,
    // Gathered, and within every eight lines of A line i holds row 2(i%4) + i/4, so that an epilogue
    // which reads eight bytes a lane from a box with 128-byte lines meets no bank twice.
    kGatheredEvenOdd = 2,
};

template <Rows kRows>
__device__ __forceinline__ u32 row_of_line(u32 line) {
    return kRows == Rows::kGatheredEvenOdd ? (line & ~7u) + 2 * (line % 4) + (line / 4) % 2 : line;
}

template <u32 kTileN_, u32 kStages_, u32 kCluster_, Rows kRows_, Major kMajorB_, u32 kBand_>
struct GemmConfig {
    static constexpr u32 kTileN = kTileN_;
    static constexpr u32 kStages = kStages_;
    static constexpr u32 kCluster = kCluster_;
    static constexpr Rows kRows = kRows_;
    static constexpr bool kGatherA = kRows != Rows::kContiguous;
    static constexpr Major kMajorB = kMajorB_;
    static constexpr u32 kBand = kBand_;

    static constexpr u32 kABytes = kTileM * kTileK * 2;
    static constexpr u32 kBBytes = kTileN * kTileK * 2;
    static constexpr u32 kStageBytes = kABytes + kBBytes;
    static constexpr u32 kFullArrivals = kGatherA ? 1 + kWarpgroup : 1;
    static constexpr u32 kEmptyArrivals = kConsumerWarps * kCluster;
    static constexpr u32 kTileReaders = kConsumerWarps + (kGatherA ? 3 : 0);
    static constexpr u32 kBBoxRows = kMajorB == Major::kK ? kTileN / kCluster : 64;

    static_assert(kCluster == 1 || kCluster == 2, "clusters of one or two blocks along M");
    static_assert(kTileN % (64 * kCluster) == 0 && kTileN <= 256, "the B tile splits into 64-wide boxes");
};

// An epilogue declares `struct alignas(1024) Shared`, the shared memory of one consumer warp, and how
// many barriers of one arrival that warp needs.
template <class Config, class Epilogue>
struct GemmShared {
    alignas(1024) u8 stage[Config::kStages][Config::kStageBytes];
    typename Epilogue::Shared epilogue[kConsumerWarps];
    u64 full[Config::kStages];
    u64 empty[Config::kStages];
    u64 epilogue_full[kConsumerWarps][Epilogue::kBarriers + 1];
    TileRing ring;
};

// Fills the ring with this block's tiles.
template <class Config, class Shared>
class Producer {
  public:
    __device__ __forceinline__ Producer(Shared& shared, const GroupedGemmMaps& maps, const GroupedGemmParams& p, u32 rank)
        : shared_(shared), maps_(maps), p_(p), rank_(rank), warp_(uniform(threadIdx.x / 32)) {}

    __device__ __forceinline__ void run() {
        if constexpr (Config::kGatherA) {
            if (warp_ == 0) {
                run_scheduling_warp();
            } else {
                run_gathering_warp();
            }
        } else {
            if (warp_ == 0) run_scheduling_warp();
        }
    }

  private:
    // Warp 0 chooses tiles, one ahead of the copies, and issues the TMA loads.
    __device__ __forceinline__ void run_scheduling_warp() {
        TileCursor<kTileM, Config::kTileN, Config::kCluster, Config::kBand> cursor(p_.expert_offsets, p_.experts, p_.n);
        RingPosition<kTileRing> published;
        u32 index = blockIdx.x / Config::kCluster;
        Tile tile = cursor.seek(index, rank_);
        shared_.ring.publish(tile, published, p_.status);
        i32 token = load_token(tile);
        while (tile.expert >= 0) {
            index += gridDim.x / Config::kCluster;
            Tile next = cursor.seek(index, rank_);
            shared_.ring.publish(next, published, p_.status);
            begin_gather(tile, token);
            token = load_token(next);
            fill_tile<true>(tile);
            tile = next;
        }
    }

    __device__ __forceinline__ void run_gathering_warp() {
        RingPosition<kTileRing> taken;
        Tile tile = shared_.ring.read(taken, p_.status);
        i32 token = load_token(tile);
        while (tile.expert >= 0) {
            Tile next = shared_.ring.read(taken, p_.status);
            begin_gather(tile, token);
            token = load_token(next);
            fill_tile<false>(tile);
            tile = next;
        }
    }

    // Lane l holds the token of line 32·warp + l of a tile; loaded one tile ahead of its use.
    __device__ __forceinline__ i32 load_token(const Tile& tile) const {
        if constexpr (Config::kGatherA) {
            i32 row = i32(row_of_line<Config::kRows>(warp_ * 32 + lane_index()));
            if (tile.expert >= 0 && row < tile.rows) return __ldg(p_.row_token + tile.row + row);
        }
        return 0;
    }

    // This lane copies chunk l%8 of lines 32·warp + 4i + l/8. Offsets count 16-byte chunks, so that
    // 32 bits reach 64 GB of gathered rows.
    __device__ __forceinline__ void begin_gather(const Tile& tile, i32 token) {
        if constexpr (Config::kGatherA) {
            u32 chunks_per_row = u32(p_.k) / 8;
            bool exists = i32(row_of_line<Config::kRows>(warp_ * 32 + lane_index())) < tile.rows;
            lines_ = __ballot_sync(0xffffffffu, exists) >> (lane_index() / 8);
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                u32 row_token = u32(__shfl_sync(0xffffffffu, token, 4 * i + lane_index() / 8));
                source_[i] = row_token * chunks_per_row + lane_index() % 8;
            }
        }
    }

    template <bool kIssuesTma>
    __device__ __forceinline__ void fill_tile(const Tile& tile) {
        i32 steps = ceil_div(p_.k, i32(kTileK));
        for (i32 step = 0; step < steps; ++step) {
            u32 slot = at_.slot;
            barrier_wait(&shared_.empty[slot], at_.round_parity ^ 1, Role::kProducer, slot, p_.status);
            if constexpr (kIssuesTma) {
                if (elect_lane()) issue_tma(tile, step, slot);
                __syncwarp();
            }
            if constexpr (Config::kGatherA) {
                gather(step, slot);
                jitter(slot);
                barrier_arrive_after_copies(&shared_.full[slot]);
            }
            at_.advance();
        }
    }

    __device__ __forceinline__ void issue_tma(const Tile& tile, i32 step, u32 slot) {
        u64* full = &shared_.full[slot];
        u8* a = shared_.stage[slot];
        u8* b = a + Config::kABytes;
        i32 k = step * i32(kTileK);
        barrier_arrive_expect(full, Config::kBBytes + (Config::kGatherA ? 0 : Config::kABytes));
        if constexpr (!Config::kGatherA) tma_load_2d(a, &maps_.a, full, k, tile.row);
        if constexpr (Config::kMajorB == Major::kK) {
            load_b(b + rank_ * Config::kBBoxRows * 128, full, k, tile.column + i32(rank_ * Config::kBBoxRows), tile.expert);
        } else {
            constexpr u32 kBoxes = Config::kTileN / 64 / Config::kCluster;
#pragma unroll
            for (u32 i = 0; i < kBoxes; ++i) {
                u32 box = rank_ * kBoxes + i;
                load_b(b + box * 8192, full, tile.column + i32(box * 64), k, tile.expert);
            }
        }
    }

    __device__ __forceinline__ void load_b(u8* target, u64* full, i32 c0, i32 c1, i32 expert) {
        if constexpr (Config::kCluster > 1) {
            tma_load_3d_multicast(target, &maps_.b, full, c0, c1, expert, u16((1u << Config::kCluster) - 1), kEvictLast);
        } else {
            tma_load_3d(target, &maps_.b, full, c0, c1, expert, kEvictLast);
        }
    }

    // Rows beyond the expert's end keep whatever the stage held: a row of A reaches no row of the
    // output but its own, and that one is not stored. Contraction elements beyond k are zeroed.
    __device__ __forceinline__ void gather(i32 step, u32 slot) {
        u32 lane_row = lane_index() / 8, lane_chunk = lane_index() % 8;
        u32 target = shared_address(shared_.stage[slot]) + warp_ * 4096 + swizzled_offset(lane_row, lane_chunk);
        bool inside = step * 8 + i32(lane_chunk) < p_.k / 8;
        const u8* base = reinterpret_cast<const u8*>(p_.gathered);
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            // Four lines further down the swizzle flips bit 2 of the chunk index.
            u32 line = (target + (i / 2) * 1024 + (i % 2) * 512) ^ ((i % 2) * 64);
            u64 chunk = inside ? u64(source_[i]) + u64(u32(step) * 8) : 0;
            if (lines_ >> (4 * i) & 1) copy_16(line, base + chunk * 16, inside);
        }
    }

    Shared& shared_;
    const GroupedGemmMaps& maps_;
    const GroupedGemmParams& p_;
    u32 rank_;
    u32 warp_;
    RingPosition<Config::kStages> at_;
    u32 source_[8];
    u32 lines_ = 0;  // bit 4i: this lane's i-th line has a row
};

// Multiplies the tiles of the ring and hands each 64 × kTileN accumulator to the epilogue.
template <class Config, class Epilogue>
__device__ __forceinline__ void consume(GemmShared<Config, Epilogue>& shared, const GroupedGemmMaps& maps,
                                        const GroupedGemmParams& p) {
    constexpr u32 kAccumulators = Config::kTileN / 2;
    using Mma = Wgmma<Config::kTileN, Major::kK, Config::kMajorB>;
    u32 group = uniform(threadIdx.x / kWarpgroup) - 1;
    u32 warp = uniform(threadIdx.x / 32) - 4;
    Epilogue epilogue(maps, p, shared.epilogue[warp], shared.epilogue_full[warp]);
    RingPosition<Config::kStages> at;
    RingPosition<kTileRing> taken;
    i32 steps = ceil_div(p.k, i32(kTileK));
    f32 acc[kAccumulators];

    auto release = [&](u32 slot) {
        jitter(slot + group);
        if constexpr (Config::kCluster > 1) {
            if (lane_index() < Config::kCluster) barrier_arrive_relaxed_remote(&shared.empty[slot], lane_index());
        } else {
            if (lane_index() == 0) barrier_arrive_relaxed(&shared.empty[slot]);
        }
    };

    for (;;) {
        Tile tile = shared.ring.read(taken, p.status);
        tile.expert = i32(uniform(u32(tile.expert)));
        if (tile.expert < 0) break;
        i32 group_rows = i32(uniform(u32(tile.rows - i32(group * 64))));
        i32 warp_row = i32(group * 64 + warp % 4 * 16);
        if (group_rows <= 0) {
            // All 64 rows lie beyond the expert's end: let the stages pass.
            for (i32 step = 0; step < steps; ++step) {
                barrier_wait(&shared.full[at.slot], at.round_parity, Role::kConsumer, at.slot, p.status);
                release(at.slot);
                at.advance();
            }
            continue;
        }
        epilogue.begin(tile, tile.row + warp_row, tile.rows - warp_row);
        u32 previous = 0;
        for (i32 step = 0; step < steps; ++step) {
            u32 slot = at.slot;
            barrier_wait(&shared.full[slot], at.round_parity, Role::kConsumer, slot, p.status);
            // Gathered rows were written through the generic proxy; wgmma reads through the async one.
            if constexpr (Config::kGatherA) fence_async_shared();
            u64 a = operand_descriptor<Major::kK>(shared.stage[slot] + group * 64 * 128);
            u64 b = operand_descriptor<Config::kMajorB>(shared.stage[slot] + Config::kABytes);
            wgmma_fence();
#pragma unroll
            for (u32 k = 0; k < kTileK / 16; ++k) {
                Mma::step(acc, a + k * kDescriptorStep<Major::kK>, b + k * kDescriptorStep<Config::kMajorB>, step > 0 || k > 0);
            }
            wgmma_commit();
            wgmma_wait<1>();
            if (step > 0) release(previous);
            epilogue.overlap(step, steps);
            previous = slot;
            at.advance();
        }
        wgmma_wait<0>();
        pin(acc);
        release(previous);
        epilogue.finish(acc);
    }
    epilogue.drain();
}

template <class Config, class Epilogue>
__device__ __forceinline__ void grouped_gemm(u8* dynamic_shared, const GroupedGemmMaps& maps, const GroupedGemmParams& p) {
    using Shared = GemmShared<Config, Epilogue>;
    static_assert(sizeof(Shared) <= kSharedLimit, "too many stages for one block's shared memory");
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
    u32 rank = Config::kCluster > 1 ? cluster_rank() : 0;
    if (threadIdx.x == 0) {
        if (shared_address(dynamic_shared) % 1024 != 0) __trap();
        if constexpr (!Config::kGatherA) prefetch_map(&maps.a);
        prefetch_map(&maps.b);
        for (u32 i = 0; i < Config::kStages; ++i) {
            barrier_init(&shared.full[i], Config::kFullArrivals);
            barrier_init(&shared.empty[i], Config::kEmptyArrivals);
        }
        shared.ring.init(Config::kTileReaders);
        for (u32 warp = 0; warp < kConsumerWarps; ++warp) {
            for (u32 i = 0; i < Epilogue::kBarriers; ++i) barrier_init(&shared.epilogue_full[warp][i], 1);
        }
        barrier_init_fence();
    }
    __syncthreads();
    // A remote arrival or a multicast must not meet an uninitialised barrier.
    if constexpr (Config::kCluster > 1) cluster_barrier();

    if (threadIdx.x < kWarpgroup) {
        shrink_registers<kProducerRegisters>();
        Producer<Config, Shared>(shared, maps, p, rank).run();
    } else {
        grow_registers<kConsumerRegisters>();
        consume<Config, Epilogue>(shared, maps, p);
    }
    // A block must outlive its peer's arrivals on its barriers.
    if constexpr (Config::kCluster > 1) cluster_barrier();
}

}  // namespace sonic

#define SONIC_LAUNCH_GEOMETRY(Config, Epilogue)                                                                     \
    extern "C" __constant__ sonic::u32 launch_geometry[sonic::kGeometryWords] = {                                   \
        sonic::kGemmThreads, sizeof(sonic::GemmShared<Config, Epilogue>), Config::kCluster, sonic::kTileM,          \
        Config::kTileN, sonic::kTileK, Config::kGatherA ? 0 : sonic::kTileM, Config::kBBoxRows,                     \
        Config::kMajorB == sonic::Major::kMN, Config::kStages, Epilogue::kHBoxColumns, Epilogue::kOutBoxColumns,    \
        Epilogue::kActivationBoxColumns}
