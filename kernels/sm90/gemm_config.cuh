// Sizes, roles and shared memory of a grouped GEMM block.
#pragma once
#include "sm90/types.cuh"
#include "sm90/slot_ring.cuh"
#include "sm90/tile_schedule.cuh"
#include "sm90/warp.cuh"
#include "sm90/wgmma.cuh"

namespace sonic {

constexpr u32 kTileM = 128;
constexpr u32 kTileK = 64;
constexpr u32 kConsumerGroups = 2;
constexpr u32 kConsumerWarps = 4 * kConsumerGroups;
constexpr u32 kGroupRows = kTileM / kConsumerGroups;
// The first warpgroup: one warp chooses tiles and issues TMA loads, two gather, one writes results.
constexpr u32 kGatherWarps = 2;
constexpr u32 kWriterWarp = 3;
constexpr u32 kGemmThreads = (1 + kConsumerGroups) * kWarpgroup;
constexpr u32 kProducerRegisters = 56;
constexpr u32 kConsumerRegisters = 224;
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
    static constexpr u32 kFullArrivals = kGatherA ? 1 + kGatherWarps * 32 : 1;
    static constexpr u32 kEmptyArrivals = kConsumerWarps * kCluster;
    static constexpr u32 kTileReaders = kConsumerWarps + 1 + (kGatherA ? kGatherWarps : 0);
    static constexpr u32 kBBoxRows = kMajorB == Major::kK ? kTileN / kCluster : 64;

    static_assert(kCluster == 1 || kCluster == 2, "clusters of one or two blocks along M");
    static_assert(kTileN % (64 * kCluster) == 0 && kTileN <= 256, "the B tile splits into 64-wide boxes");
};

// An epilogue declares `Shared`, 1024-byte aligned, the shared memory of one consumer warpgroup, and
// `Slots`, the barriers of the slots in it that pass between that group and the writer.
template <class Config, class Epilogue>
struct GemmShared {
    alignas(1024) u8 stage[Config::kStages][Config::kStageBytes];
    typename Epilogue::Shared epilogue[kConsumerGroups];
    typename Epilogue::Slots slots[kConsumerGroups];
    u64 full[Config::kStages];
    u64 empty[Config::kStages];
    TileRing ring;
};

// The 64 rows of a tile that one consumer warpgroup owns.
struct GroupRows {
    i32 expert;
    i32 row;     // the first of them
    i32 rows;    // rows of the expert from there on; may exceed 64 or be ≤ 0
    i32 column;  // the tile's first column
};

__device__ __forceinline__ GroupRows rows_of_group(const Tile& tile, u32 group) {
    i32 first = i32(group * kGroupRows);
    return GroupRows{tile.expert, tile.row + first, tile.rows - first, tile.column};
}

}  // namespace sonic
