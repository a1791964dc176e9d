// A writer that stores slots in the order in which the two consumer groups fill them.
#pragma once
#include "sm90/barrier.cuh"
#include "sm90/copy.cuh"
#include "sm90/grouped_gemm.cuh"
#include "sm90/launch.cuh"
#include "sm90/slot_ring.cuh"
#include "sm90/warp.cuh"

namespace sonic {

// Target says how many slots a tile fills, turns(column), and stores slot `slot`, the tile's `turn`-th:
// store(shared, slot, turn, rows).
template <class Shared, class Target, u32 kSlots>
class BoxWriter {
  public:
    __device__ __forceinline__ BoxWriter(const GroupedGemmMaps& maps, const GroupedGemmParams& p, Shared* shared,
                                         SlotBarriers<kSlots>* slots)
        : target_(maps, p), status_(p.status), shared_(shared), slots_(slots) {}

    __device__ __forceinline__ void write(const GroupRows& first, const GroupRows& second) {
        u32 turns = target_.turns(first.column);
        for (u32 turn = 0; turn < turns; ++turn) {
            store_next(0, turn, first);
            store_next(1, turn, second);
        }
    }

  private:
    __device__ __forceinline__ void store_next(u32 which, u32 turn, const GroupRows& group) {
        if (group.rows <= 0) return;
        RingPosition<kSlots>& at = at_[which];
        barrier_wait(&slots_[which].filled[at.slot], at.round_parity, Role::kWriter, at.slot, status_);
        target_.store(shared_[which], at.slot, turn, group);
        if (elect_lane()) {
            store_commit();
            store_wait_read<0>();
            barrier_arrive(&slots_[which].ready[at.slot]);
        }
        __syncwarp();
        at.advance();
    }

    Target target_;
    u32* status_;
    Shared* shared_;
    SlotBarriers<kSlots>* slots_;
    RingPosition<kSlots> at_[2];
};

}  // namespace sonic
