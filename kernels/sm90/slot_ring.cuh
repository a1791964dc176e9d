// Slots of shared memory through which one consumer warpgroup hands rows to the writer warp.
//
// A consumer that issued its own TMA stores would wait for the copy engine (about 36 cycles for each
// box of 16 rows and 128 bytes with eight warps at once); the writer waits in its place.
//   ready[s]   the slot may be written (or: its operand has landed); 1 arrival by the writer
//   filled[s]  the consumers are done with the slot; 1 arrival by each of the four warps
#pragma once
#include "sm90/types.cuh"
#include "sm90/barrier.cuh"
#include "sm90/copy.cuh"
#include "sm90/warp.cuh"

namespace sonic {

template <u32 kSlots>
struct SlotBarriers {
    u64 ready[kSlots];
    u64 filled[kSlots];

    __device__ __forceinline__ void init() {
        for (u32 i = 0; i < kSlots; ++i) {
            barrier_init(&ready[i], 1);
            barrier_init(&filled[i], 4);
        }
    }
};

// One consumer warp's side. kLoaded: the writer loads each slot before it is first used; otherwise
// fresh slots are ready. Every call by the converged warp.
template <u32 kSlots, bool kLoaded>
class SlotUser {
  public:
    __device__ __forceinline__ SlotUser(SlotBarriers<kSlots>& barriers, u32* status) : barriers_(barriers), status_(status) {}

    // Waits for the next slot and returns its index.
    __device__ __forceinline__ u32 acquire() {
        barrier_wait(&barriers_.ready[at_.slot], at_.round_parity ^ (kLoaded ? 0 : 1), Role::kEpilogue, at_.slot, status_);
        return at_.slot;
    }

    // Hands the slot over: what every lane wrote is visible to TMA and to the writer's lanes, and what it
    // read has arrived. The fence is needed where the slot was only read, too: a bare arrival overtook
    // the warp's ld.shared, and TMA overwrote the slot under them.
    __device__ __forceinline__ void publish() {
        fence_async_shared();
        __syncwarp();
        if (elect_lane()) barrier_arrive(&barriers_.filled[at_.slot]);
        at_.advance();
    }

  private:
    SlotBarriers<kSlots>& barriers_;
    u32* status_;
    RingPosition<kSlots> at_;
};

// The writer's side of one group's slots. Every call by the converged warp.
template <u32 kSlots>
class SlotServer {
  public:
    __device__ __forceinline__ SlotServer(SlotBarriers<kSlots>& barriers, u32* status) : barriers_(barriers), status_(status) {}

    __device__ __forceinline__ u32 slot() const { return at_.slot; }

    __device__ __forceinline__ void wait_filled() {
        barrier_wait(&barriers_.filled[at_.slot], at_.round_parity, Role::kWriter, at_.slot, status_);
    }

    // Goes on to the next slot; returns the barrier that gives the current one back.
    __device__ __forceinline__ u64* pass() {
        u64* ready = &barriers_.ready[at_.slot];
        at_.advance();
        return ready;
    }

  private:
    SlotBarriers<kSlots>& barriers_;
    u32* status_;
    RingPosition<kSlots> at_;
};

// Gives each slot back once TMA has read it, one store later, so that the writer need not wait for it.
class DeferredRelease {
  public:
    // Commits the stores issued since the last call; `ready` follows when they have been read.
    __device__ __forceinline__ void after_read(u64* ready) {
        if (elect_lane()) {
            store_commit();
            if (pending_ != nullptr) {
                store_wait_read<1>();
                barrier_arrive(pending_);
            }
        }
        __syncwarp();
        pending_ = ready;
    }

    __device__ __forceinline__ void flush() {
        if (pending_ != nullptr && elect_lane()) {
            store_wait_read<0>();
            barrier_arrive(pending_);
        }
        __syncwarp();
        pending_ = nullptr;
    }

  private:
    u64* pending_ = nullptr;
};

}  // namespace sonic
