// Asynchronous copies: TMA boxes (with multicast), 16-byte cp.async for gathered rows, stores.
#pragma once
#include "sm90/types.cuh"
#include "sm90/barrier.cuh"

namespace sonic {

// L2 hints of TMA loads: createpolicy.fractional with a fraction of 1, as constants.
constexpr u64 kEvictNormal = 0x1000000000000000ull;
constexpr u64 kEvictFirst = 0x12F0000000000000ull;
constexpr u64 kEvictLast = 0x14F0000000000000ull;

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads the box at (c0, c1), c0 along the contiguous dimension; signals `barrier` with its bytes.
__device__ __forceinline__ void tma_load_2d(void* shared, const TensorMap* map, u64* barrier, i32 c0, i32 c1,
                                            u64 hint = kEvictNormal) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4}], [%2], %5;"
        ::"r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "l"(hint)
        : "memory");
}

__device__ __forceinline__ void tma_load_3d(void* shared, const TensorMap* map, u64* barrier, i32 c0, i32 c1, i32 c2,
                                            u64 hint = kEvictNormal) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;"
        ::"r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "l"(hint)
        : "memory");
}

// The same box into the same shared offset of every block of the cluster whose bit is set in
// `blocks`; signals the barrier at the same offset of each of them.
__device__ __forceinline__ void tma_load_2d_multicast(void* shared, const TensorMap* map, u64* barrier, i32 c0, i32 c1,
                                                      u16 blocks, u64 hint = kEvictNormal) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;"
        ::"r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "h"(blocks), "l"(hint)
        : "memory");
}

__device__ __forceinline__ void tma_load_3d_multicast(void* shared, const TensorMap* map, u64* barrier, i32 c0, i32 c1,
                                                      i32 c2, u16 blocks, u64 hint = kEvictNormal) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6, %7;"
        ::"r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "h"(blocks),
        "l"(hint) : "memory");
}

// Stores a box from shared memory; the hardware clips it at the tensor's edges. Commit and wait are
// per thread: the thread that stores is the thread that waits.
__device__ __forceinline__ void tma_store_2d(const TensorMap* map, u32 shared, i32 c0, i32 c1) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(map), "r"(shared), "r"(c0), "r"(c1) : "memory");
}

__device__ __forceinline__ void tma_store_3d(const TensorMap* map, u32 shared, i32 c0, i32 c1, i32 c2) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];"
                 ::"l"(map), "r"(shared), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

// `bytes` contiguous bytes, a multiple of 16, both addresses 16-byte aligned.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(global), "r"(shared_address(shared)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most kPending groups still READ shared memory (so it may be overwritten).
template <u32 kPending>
__device__ __forceinline__ void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Until at most kPending groups are incomplete (their writes not yet made).
template <u32 kPending>
__device__ __forceinline__ void store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Brings `bytes` (a multiple of 16, 16-byte aligned) into L2 and nowhere else.
__device__ __forceinline__ void prefetch_l2(const void* global, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// 16 bytes from global to shared memory past L1; !valid writes 16 zero bytes and reads nothing,
// but `global` must still be a legal address.
__device__ __forceinline__ void copy_16(u32 shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 ::"r"(shared), "l"(global), "r"(valid ? 16u : 0u) : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <u32 kPending>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Orders this thread's view of generic-proxy accesses to shared memory (ordinary stores, stmatrix,
// cp.async that it has observed as complete) before later async-proxy accesses (wgmma operands, TMA).
__device__ __forceinline__ void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Byte offset of 16-byte chunk `chunk` (0..8) of line `line` in a tile of 128-byte lines under the
// 128-byte swizzle that TMA writes and wgmma reads. The tile is 1024-byte aligned.
__device__ __forceinline__ u32 swizzled_offset(u32 line, u32 chunk) { return line * 128 + ((chunk ^ (line & 7)) << 4); }

__device__ __forceinline__ Chunk load_shared_16(u32 address) {
    Chunk v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ void store_shared_16(u32 address, Chunk v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void store_shared_4(u32 address, u32 v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

__device__ __forceinline__ void store_shared_2(u32 address, bf16 v) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(v.bits) : "memory");
}

// Streaming 16-byte accesses: data touched once, kept out of L1.
__device__ __forceinline__ Chunk load_global_16(const void* global) {
    Chunk v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(global) : "memory");
    return v;
}

__device__ __forceinline__ void store_global_16(void* global, Chunk v) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(global), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

}  // namespace sonic
