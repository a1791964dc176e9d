// The producer warps: one chooses tiles and issues TMA loads, two gather rows of A.
#pragma once
#include "sm90/types.cuh"
#include "sm90/barrier.cuh"
#include "sm90/copy.cuh"
#include "sm90/gemm_config.cuh"
#include "sm90/launch.cuh"
#include "sm90/tile_schedule.cuh"
#include "sm90/warp.cuh"

namespace sonic {

// Fills the ring with this block's tiles.
template <class Config, class Shared>
class Producer {
  public:
    __device__ __forceinline__ Producer(Shared& shared, const GroupedGemmMaps& maps, const GroupedGemmParams& p, u32 rank)
        : shared_(shared), maps_(maps), p_(p), rank_(rank), warp_(uniform(threadIdx.x / 32)) {}

    // Chooses tiles and issues the TMA loads. The next tile is claimed shortly before the current one's last
    // loads: late, so that tiles which are claimed together run together, and yet in time for whoever waits for it.
    __device__ __forceinline__ void run_scheduling_warp() {
        TileCursor<kTileM, Config::kTileN, Config::kCluster, Config::kBand> cursor(p_.expert_offsets, p_.experts, p_.n);
        TileQueue<Config::kCluster> queue(p_.tile_queue);
        RingPosition<kTileRing> published;
        Tile tile = cursor.seek(queue.first(), rank_);
        shared_.ring.publish(tile, published, p_.status);
        i32 steps = ceil_div(p_.k, i32(kTileK));
        i32 told = told_at(steps);
        while (tile.expert >= 0) {
            Tile next{};
            for (i32 step = 0; step < steps; ++step) {
                if (step == max_of(told - 1, 0)) queue.claim();
                wait_until_empty();
                if (elect_lane()) issue_tma(tile, step, at_.slot);
                __syncwarp();
                at_.advance();
                if (step == told) {
                    next = cursor.seek(queue.claimed(), rank_);
                    shared_.ring.publish(next, published, p_.status);
                }
            }
            tile = next;
        }
        queue.leave();
    }

    __device__ __forceinline__ void run_gathering_warp() {
        RingPosition<kTileRing> taken;
        Tile tile = shared_.ring.read(taken, p_.status);
        i32 tokens[2];
        load_tokens(tile, tokens);
        i32 steps = ceil_div(p_.k, i32(kTileK));
        i32 told = told_at(steps);
        while (tile.expert >= 0) {
            Tile next{};
            begin_gather(tile, tokens);
            for (i32 step = 0; step < steps; ++step) {
                wait_until_empty();
                gather(step, at_.slot);
                jitter(at_.slot);
                barrier_arrive_after_copies(&shared_.full[at_.slot]);
                at_.advance();
                if (step == told) {
                    next = shared_.ring.read(taken, p_.status);
                    load_tokens(next, tokens);
                }
            }
            tile = next;
        }
    }

  private:
    // The step after whose copies the next tile is published; the gathering warps read it there, and its tokens
    // travel during the steps that follow.
    static __device__ __forceinline__ i32 told_at(i32 steps) { return min_of(max_of(steps - 5, 1), steps - 1); }

    __device__ __forceinline__ void wait_until_empty() {
        barrier_wait(&shared_.empty[at_.slot], at_.round_parity ^ 1, Role::kProducer, at_.slot, p_.status);
    }

    // Lines of A that this warp gathers, and the row of the tile behind line l or l + 32 of them.
    static constexpr u32 kLines = kTileM / kGatherWarps;
    __device__ __forceinline__ u32 first_line() const { return (warp_ - 1) * kLines; }
    __device__ __forceinline__ i32 row_of_lane(u32 half) const {
        return i32(row_of_line<Config::kRows>(first_line() + half * 32 + lane_index()));
    }

    // Lane l holds the tokens of lines l and l + 32 of its warp; loaded one tile ahead of their use.
    __device__ __forceinline__ void load_tokens(const Tile& tile, i32 (&tokens)[2]) const {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            i32 row = row_of_lane(half);
            tokens[half] = tile.expert >= 0 && row < tile.rows ? __ldg(p_.row_token + tile.row + row) : 0;
        }
    }

    // This lane copies chunk l%8 of its warp's lines 4i + l/8. Offsets count 16-byte chunks, so that 32
    // bits reach 64 GB of gathered rows.
    __device__ __forceinline__ void begin_gather(const Tile& tile, const i32 (&tokens)[2]) {
        u32 chunks_per_row = u32(p_.k) / 8;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            lines_[half] = __ballot_sync(0xffffffffu, row_of_lane(half) < tile.rows) >> (lane_index() / 8);
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                u32 token = u32(__shfl_sync(0xffffffffu, tokens[half], 4 * i + lane_index() / 8));
                source_[8 * half + i] = token * chunks_per_row + lane_index() % 8;
            }
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
        u32 target = shared_address(shared_.stage[slot]) + first_line() * 128 + swizzled_offset(lane_row, lane_chunk);
        bool inside = step * 8 + i32(lane_chunk) < p_.k / 8;
        const u8* base = reinterpret_cast<const u8*>(p_.gathered);
#pragma unroll
        for (u32 i = 0; i < kLines / 4; ++i) {
            // Four lines further down the swizzle flips bit 2 of the chunk index.
            u32 line = (target + (i / 2) * 1024 + (i % 2) * 512) ^ ((i % 2) * 64);
            u64 chunk = inside ? u64(source_[i]) + u64(u32(step) * 8) : 0;
            if (lines_[i / 8] >> (4 * (i % 8)) & 1) copy_16(line, base + chunk * 16, inside);
        }
    }

    Shared& shared_;
    const GroupedGemmMaps& maps_;
    const GroupedGemmParams& p_;
    u32 rank_;
    u32 warp_;
    RingPosition<Config::kStages> at_;
    u32 source_[kLines / 4];
    u32 lines_[2] = {0, 0};  // bit 4i: line 4i + l/8, or 32 further, has a row
};

}  // namespace sonic
