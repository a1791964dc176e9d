// mbarriers whose every wait is bounded.
//
// A pipeline with a wrong arrival count hangs the card until its watchdog fires. Here a wait that
// lasts longer than SONIC_WAIT_LIMIT_NS writes who waited for what into the status words and traps.
#pragma once
#include "sm90/types.cuh"

#ifndef SONIC_WAIT_LIMIT_NS
#define SONIC_WAIT_LIMIT_NS 2000000000ull
#endif

// -DSONIC_JITTER=1 sleeps a pseudo-random time at the pipeline's joints. The bits of every result
// must not change.
#ifndef SONIC_JITTER
#define SONIC_JITTER 0
#endif

namespace sonic {

// Who waits. Written to the status words when a wait exceeds its bound.
enum class Role : u32 {
    kProducer = 1,   // waits until a stage is empty
    kConsumer = 2,   // waits until a stage is full
    kScheduler = 3,  // waits until a slot of the tile ring is empty
    kTileReader = 4, // waits until a slot of the tile ring is full
    kEpilogue = 5,   // waits for a slot of the epilogue, or for its operand
    kWriter = 6,     // waits until a slot of the epilogue is filled
};

// Status words: kStatusWords u32 in pinned, device-mapped HOST memory (device memory cannot be read
// after a trap), zeroed by the host before a launch. May be null.
//   [0] 0x5717a11 once a wait has exceeded its bound, else 0
//   [1] role  [2] stage  [3] parity waited for  [4] block  [5] thread
constexpr u32 kStatusWords = 6;
constexpr u32 kStatusStalled = 0x5717a11u;

__device__ __forceinline__ void jitter(u32 salt) {
#if SONIC_JITTER
    u32 clock;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
    u32 mix = (clock ^ (salt * 0x9e3779b9u) ^ (blockIdx.x * 0x85ebca6bu)) * 0xc2b2ae35u;
    __nanosleep((mix >> 20) & 2047u);
#else
    (void)salt;
#endif
}

__device__ __forceinline__ void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

// Makes initialised barriers visible to the async proxy and to the cluster; a block or cluster
// barrier must follow.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// An arrival that publishes no ordinary store: this thread says that reads which have already
// COMPLETED (wgmma after its wait) no longer need the slot. Without release semantics it costs no
// memory barrier in the main loop.
__device__ __forceinline__ void barrier_arrive_relaxed(u64* barrier) {
    asm volatile("mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// The same on the barrier at this shared address in block `rank` of the cluster. (With
// release.cluster it would be a MEMBAR.GPU in every step: measured at 20–50% of a GEMM's speed.)
__device__ __forceinline__ void barrier_arrive_relaxed_remote(u64* barrier, u32 rank) {
    asm volatile(
        "{\n .reg .b32 remote;\n"
        " mapa.shared::cluster.u32 remote, %0, %1;\n"
        " mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [remote];\n}"
        ::"r"(shared_address(barrier)), "r"(rank) : "memory");
}

// One arrival that also announces `bytes` of asynchronous copies. A TMA box counts whole, its
// out-of-range fill included.
__device__ __forceinline__ void barrier_arrive_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// The arrival of this thread, delivered when all its earlier cp.async have landed. It is one of the
// arrivals that the barrier was initialised with (noinc).
__device__ __forceinline__ void barrier_arrive_after_copies(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];"
                 ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ bool barrier_try_wait(u64* barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n .reg .pred p;\n"
        " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
    return done != 0;
}

__device__ __forceinline__ u64 global_nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

__device__ __noinline__ void stall_trap(u32* status, u32 role, u32 stage, u32 parity) {
    if (status != nullptr) {
        volatile u32* words = status;
        words[1] = role;
        words[2] = stage;
        words[3] = parity;
        words[4] = blockIdx.x;
        words[5] = threadIdx.x;
        __threadfence_system();
        words[0] = kStatusStalled;
        __threadfence_system();
    }
    __trap();
}

// Waits until the phase of `parity` completes. A fresh barrier has completed the phase of parity 1.
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity, Role role, u32 stage, u32* status) {
    jitter(stage + 16 * u32(role));
    if (barrier_try_wait(barrier, parity)) return;
    u64 start = global_nanoseconds();
    while (!barrier_try_wait(barrier, parity)) {
        if (global_nanoseconds() - start > SONIC_WAIT_LIMIT_NS) stall_trap(status, u32(role), stage, parity);
    }
}

// A position in a ring of kStages slots and the parity of its current round.
template <u32 kStages>
struct RingPosition {
    u32 slot = 0;
    u32 round_parity = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == kStages) {
            slot = 0;
            round_parity ^= 1;
        }
    }
};

}  // namespace sonic
