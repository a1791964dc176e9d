// The grouped GEMM that contracts over features: out[row, :] = A[row, :] · B[expert]ᵀ.
//
// Producer warps fill a ring of stages (64 contraction elements of a 128-row A tile and a kTileN-column
// B tile); two consumer warpgroups own 64 rows each, multiply with wgmma and pass their rows, finished
// by the epilogue, through slots to a writer warp.
//
//   full[s]   completes when A and B of stage s have landed
//   empty[s]  completes when every consumer warp (of every block of the cluster, since B is
//             multicast to all of them) has finished reading stage s
#pragma once
#include "sm90/types.cuh"
#include "sm90/barrier.cuh"
#include "sm90/copy.cuh"
#include "sm90/gemm_config.cuh"
#include "sm90/launch.cuh"
#include "sm90/tile_producer.cuh"
#include "sm90/tile_schedule.cuh"
#include "sm90/warp.cuh"
#include "sm90/wgmma.cuh"

namespace sonic {

// Multiplies the tiles of the ring and hands each accumulator to the epilogue.
template <class Config, class Epilogue>
__device__ __forceinline__ void consume(GemmShared<Config, Epilogue>& shared, const GroupedGemmParams& p) {
    using Mma = Wgmma<Config::kTileN, Major::kK, Config::kMajorB>;
    u32 group = uniform(threadIdx.x / kWarpgroup) - 1;
    Epilogue epilogue(p, shared.epilogue[group], shared.slots[group]);
    RingPosition<Config::kStages> at;
    RingPosition<kTileRing> taken;
    i32 steps = ceil_div(p.k, i32(kTileK));
    f32 acc[Config::kTileN / 2];

    auto release = [&](u32 slot) {
        jitter(slot + group);
        if constexpr (Config::kCluster > 1) {
            if (lane_index() < Config::kCluster) barrier_arrive_relaxed_remote(&shared.empty[slot], lane_index());
        } else {
            if (lane_index() == 0) barrier_arrive_relaxed(&shared.empty[slot]);
        }
    };

    Tile tile = shared.ring.read(taken, p.status);
    while (i32(uniform(u32(tile.expert))) >= 0) {
        if (i32(uniform(u32(tile.rows - i32(group * kGroupRows)))) <= 0) {
            // All 64 rows lie beyond the expert's end: let the stages pass.
            for (i32 step = 0; step < steps; ++step) {
                barrier_wait(&shared.full[at.slot], at.round_parity, Role::kConsumer, at.slot, p.status);
                release(at.slot);
                at.advance();
            }
            tile = shared.ring.read(taken, p.status);
            continue;
        }
        u32 previous = 0;
        for (i32 step = 0; step < steps; ++step) {
            u32 slot = at.slot;
            barrier_wait(&shared.full[slot], at.round_parity, Role::kConsumer, slot, p.status);
            // Gathered rows were written through the generic proxy; wgmma reads through the async one.
            if constexpr (Config::kGatherA) fence_async_shared();
            u64 a = operand_descriptor<Major::kK>(shared.stage[slot] + group * kGroupRows * 128);
            u64 b = operand_descriptor<Config::kMajorB>(shared.stage[slot] + Config::kABytes);
            wgmma_fence();
#pragma unroll
            for (u32 k = 0; k < kTileK / 16; ++k) {
                Mma::step(acc, a + k * kDescriptorStep<Major::kK>, b + k * kDescriptorStep<Config::kMajorB>, step > 0 || k > 0);
            }
            wgmma_commit();
            wgmma_wait<1>();
            if (step > 0) release(previous);
            previous = slot;
            at.advance();
        }
        // The next tile was published before this one was filled.
        Tile next = shared.ring.read(taken, p.status);
        wgmma_wait<0>();
        pin(acc);
        release(previous);
        epilogue.finish(acc, rows_of_group(tile, group));
        tile = next;
    }
}

// The writer warp serves both consumer groups.
template <class Config, class Epilogue>
__device__ __forceinline__ void write(GemmShared<Config, Epilogue>& shared, const GroupedGemmMaps& maps,
                                      const GroupedGemmParams& p) {
    typename Epilogue::Writer writer(maps, p, shared.epilogue, shared.slots);
    RingPosition<kTileRing> taken;
    for (;;) {
        Tile tile = shared.ring.read(taken, p.status);
        if (i32(uniform(u32(tile.expert))) < 0) break;
        writer.write(rows_of_group(tile, 0), rows_of_group(tile, 1));
    }
    if (elect_lane()) store_wait<0>();
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
        for (u32 group = 0; group < kConsumerGroups; ++group) shared.slots[group].init();
        barrier_init_fence();
    }
    __syncthreads();
    // A remote arrival or a multicast must not meet an uninitialised barrier.
    if constexpr (Config::kCluster > 1) cluster_barrier();

    if (threadIdx.x < kWarpgroup) {
        shrink_registers<kProducerRegisters>();
        u32 warp = uniform(threadIdx.x / 32);
        if (warp == 0) {
            Producer<Config, Shared>(shared, maps, p, rank).run_scheduling_warp();
        } else if (warp == kWriterWarp) {
            write<Config, Epilogue>(shared, maps, p);
        } else if constexpr (Config::kGatherA) {
            Producer<Config, Shared>(shared, maps, p, rank).run_gathering_warp();
        }
    } else {
        grow_registers<kConsumerRegisters>();
        consume<Config, Epilogue>(shared, p);
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
