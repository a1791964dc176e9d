// Warp, warpgroup, block and cluster helpers.
#pragma once
#include "sm90/types.cuh"
#include "sm90/barrier.cuh"

namespace sonic {

constexpr u32 kWarpgroup = 128;

// setmaxnreg: every warp of the warpgroup executes it; takes effect only under
// __launch_bounds__(threads, 1) with each role in one branch of a single if/else.
template <u32 kRegisters>
__device__ __forceinline__ void shrink_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <u32 kRegisters>
__device__ __forceinline__ void grow_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Named barrier among `kThreads` threads. Id 0 is __syncthreads.
template <u32 kThreads>
__device__ __forceinline__ void named_barrier(u32 id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// Arrives without waiting; kThreads counts the arrivals and the waiters together.
template <u32 kThreads>
__device__ __forceinline__ void named_barrier_arrive(u32 id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// A value that is the same in every lane, in a form the compiler keeps in a uniform register.
__device__ __forceinline__ u32 uniform(u32 v) { return __shfl_sync(0xffffffffu, v, 0); }

__device__ __forceinline__ u32 lane_index() { return threadIdx.x & 31u; }

// True in exactly one lane of a converged warp, always the same one. Unlike a test of the lane index it
// tells the compiler that one lane is left, so that TMA operands need no loop over distinct values.
__device__ __forceinline__ bool elect_lane() {
    u32 elected;
    asm volatile(
        "{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of all blocks of the cluster; orders shared-memory accesses among them.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Programmatic dependent launch: lets the next kernel of the stream start; waits for the previous
// kernel's memory. Both are no-ops when the launch did not ask for it.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Four 8×8 matrices of bf16 from the accumulator layout to shared memory: lane i of eight gives the
// address of row i%8 of matrix i/8.
__device__ __forceinline__ void store_matrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// The same with each 8×8 matrix transposed.
__device__ __forceinline__ void store_matrix_x4_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void load_matrix_x4(u32 address, u32& a, u32& b, u32& c, u32& d) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address) : "memory");
}

}  // namespace sonic
