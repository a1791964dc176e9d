// Which output tile a block computes next.
//
// Blocks claim tiles from a counter when they come to need one. Tiles with neighbouring numbers, which share
// weights or rows, so begin at nearly the same time however long the tiles before them were, and the second
// finds in L2 what the first brought. (Under a static stride blocks drift apart by the half tiles at the
// experts' ends; at 256 rows an expert and 2 MB of weights a column of tiles, every weight came 2.2 times from
// memory.) Blocks of a cluster share a number and keep the stride.
//
// Tiles are numbered expert by expert. Within an expert, bands of kBand column tiles; within a band,
// the columns of one row tile first, so that gathered rows are read once from memory while the
// band's weights stay in L2. One warp walks the experts 32 at a time and publishes tiles through a
// ring in shared memory, ahead of the warps that read them.
#pragma once
#include "sm90/types.cuh"
#include "sm90/barrier.cuh"
#include "sm90/warp.cuh"

namespace sonic {

struct Tile {
    i32 expert;   // negative: no more tiles
    i32 row;      // first row of the tile, an index into the R sorted rows
    i32 rows;     // rows of the expert from `row` on; may exceed the tile, may be ≤ 0 for a block
                  // of a cluster beyond the expert's end
    i32 column;   // first output column
};

// Held by one converged warp; every lane calls every member.
template <u32 kTileM, u32 kTileN, u32 kCluster, u32 kBand>
class TileCursor {
  public:
    __device__ __forceinline__ TileCursor(const i32* offsets, i32 experts, i32 columns)
        : offsets_(offsets), experts_(experts), column_tiles_(ceil_div(u32(columns), kTileN)) {
        load_group();
    }

    // Tile number `index`, which must not decrease from call to call; `rank` is the block's place in
    // its cluster.
    __device__ __forceinline__ Tile seek(u32 index, u32 rank) {
        u32 total = __shfl_sync(kAll, inclusive_, 31);
        while (index >= before_ + total) {
            before_ += total;
            first_ += 32;
            if (first_ >= experts_) return Tile{-1, 0, 0, 0};
            load_group();
            total = __shfl_sync(kAll, inclusive_, 31);
        }
        u32 owner = __ffs(__ballot_sync(kAll, before_ + inclusive_ > index)) - 1;
        i32 begin = __shfl_sync(kAll, begin_, owner);
        i32 rows = __shfl_sync(kAll, rows_, owner);
        u32 row_tiles = ceil_div(u32(rows), kTileM * kCluster);
        u32 local = index - (before_ + __shfl_sync(kAll, inclusive_, owner) - row_tiles * column_tiles_);
        u32 band = local / (row_tiles * kBand);
        u32 rest = local - band * row_tiles * kBand;
        u32 width = min_of(kBand, column_tiles_ - band * kBand);
        u32 row_tile = rest / width;
        i32 first_row = i32((row_tile * kCluster + rank) * kTileM);
        return Tile{first_ + i32(owner), begin + first_row, rows - first_row,
                    i32((band * kBand + rest - row_tile * width) * kTileN)};
    }

  private:
    static constexpr u32 kAll = 0xffffffffu;

    __device__ __forceinline__ void load_group() {
        i32 expert = first_ + i32(lane_index());
        begin_ = __ldg(offsets_ + min_of(expert, experts_));
        rows_ = __ldg(offsets_ + min_of(expert + 1, experts_)) - begin_;
        inclusive_ = ceil_div(u32(rows_), kTileM * kCluster) * column_tiles_;
#pragma unroll
        for (u32 step = 1; step < 32; step *= 2) {
            u32 below = __shfl_up_sync(kAll, inclusive_, step);
            if (lane_index() >= step) inclusive_ += below;
        }
    }

    const i32* offsets_;
    i32 experts_;
    u32 column_tiles_;
    i32 first_ = 0;      // first expert of the group of 32
    u32 before_ = 0;     // tiles of all experts before the group
    i32 begin_ = 0;      // this lane's expert: first row, rows, tiles up to and including it
    i32 rows_ = 0;
    u32 inclusive_ = 0;
};

// Two words of device memory: the tiles claimed beyond the first of each block, and the blocks that are done. Both are
// zero between launches, since the last block that leaves puts them back.
struct TileQueueWords {
    u32 claimed;
    u32 left;
};

// Tile numbers of one block. Held by one converged warp; every lane calls every member.
template <u32 kCluster>
class TileQueue {
  public:
    __device__ __forceinline__ explicit TileQueue(TileQueueWords* words) : words_(words), index_(blockIdx.x / kCluster) {}

    __device__ __forceinline__ u32 first() const { return index_; }

    // Asks for the next number, which travels until claimed() needs it.
    __device__ __forceinline__ void claim() {
        if constexpr (kCluster > 1) {
            index_ += gridDim.x / kCluster;
        } else if (lane_index() == 0) {
            asm volatile("atom.global.relaxed.gpu.add.u32 %0, [%1], 1;" : "=r"(index_) : "l"(&words_->claimed) : "memory");
        }
    }

    __device__ __forceinline__ u32 claimed() const {
        if constexpr (kCluster > 1) return index_;
        return gridDim.x + __shfl_sync(0xffffffffu, index_, 0);
    }

    // After a number that is beyond the last tile. Every block's claims are done before it counts itself out.
    __device__ __forceinline__ void leave() {
        if constexpr (kCluster == 1) {
            if (elect_lane()) {
                u32 before;
                asm volatile("atom.global.relaxed.gpu.inc.u32 %0, [%1], %2;"
                             : "=r"(before) : "l"(&words_->left), "r"(gridDim.x - 1) : "memory");
                if (before == gridDim.x - 1) {
                    asm volatile("st.global.relaxed.gpu.u32 [%0], 0;" ::"l"(&words_->claimed) : "memory");
                }
            }
        }
    }

  private:
    TileQueueWords* words_;
    u32 index_;
};

constexpr u32 kTileRing = 4;

struct TileRing {
    Tile tiles[kTileRing];
    u64 full[kTileRing];   // 1 arrival: the publishing lane
    u64 empty[kTileRing];  // one arrival per reading warp

    __device__ __forceinline__ void init(u32 reading_warps) {
        for (u32 i = 0; i < kTileRing; ++i) {
            barrier_init(&full[i], 1);
            barrier_init(&empty[i], reading_warps);
        }
    }

    // One converged warp publishes; every lane holds the same tile.
    __device__ __forceinline__ void publish(const Tile& tile, RingPosition<kTileRing>& at, u32* status) {
        barrier_wait(&empty[at.slot], at.round_parity ^ 1, Role::kScheduler, at.slot, status);
        if (lane_index() == 0) {
            tiles[at.slot] = tile;
            barrier_arrive(&full[at.slot]);
        }
        __syncwarp();
        at.advance();
    }

    // Each reading warp, converged.
    __device__ __forceinline__ Tile read(RingPosition<kTileRing>& at, u32* status) {
        barrier_wait(&full[at.slot], at.round_parity, Role::kTileReader, at.slot, status);
        Tile tile = tiles[at.slot];
        // The read has to arrive before the slot may be published again.
        __threadfence_block();
        __syncwarp();
        if (lane_index() == 0) barrier_arrive(&empty[at.slot]);
        at.advance();
        return tile;
    }
};

}  // namespace sonic
