// Boxes of 16 rows between a warp's accumulator fragment and global memory.
//
// A warp owns 16 rows of the output tile. Columns leave 64 or 32 at a time through a box in shared
// memory whose lines carry the swizzle of their own width, so that stmatrix meets no bank twice and
// TMA stores the box while the warp goes on. Where the expert ends inside the 16 rows, the rows that
// exist are stored with ordinary 16-byte stores instead: TMA would write the next expert's rows.
#pragma once
#include "sm90/types.cuh"
#include "sm90/copy.cuh"
#include "sm90/warp.cuh"

namespace sonic {

constexpr u32 kBoxRows = 16;

template <u32 kColumns>
constexpr u32 kBoxBytes = kBoxRows * kColumns * 2;

// Byte offset of 16-byte chunk `chunk` of row `row`. Boxes of 64 columns are 1024-byte aligned, of 32
// columns 512-byte aligned.
template <u32 kColumns>
__device__ __forceinline__ u32 box_offset(u32 row, u32 chunk) {
    static_assert(kColumns == 64 || kColumns == 32, "a line is one swizzle span");
    if constexpr (kColumns == 64) return row * 128 + ((chunk ^ (row & 7)) << 4);
    return row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4);
}

// `pairs[2j]` holds columns 8j + 2(l%4) + {0,1} of row l/4 and `pairs[2j+1]` of row l/4 + 8, packed.
// `line` is where row l%16 of the fragment goes: l%16 itself, unless the rows were permuted.
template <u32 kColumns>
__device__ __forceinline__ void write_box(u32 box, const u32* pairs, u32 line) {
    u32 address = box + box_offset<kColumns>(line, lane_index() / 16);
#pragma unroll
    for (u32 j = 0; j < kColumns / 8; j += 2) {
        store_matrix_x4(address ^ (j << 4), pairs[2 * j], pairs[2 * j + 1], pairs[2 * j + 2], pairs[2 * j + 3]);
    }
}

// Where a box goes: a row-major matrix and its tensor map.
struct BoxTarget {
    const TensorMap* map;
    bf16* matrix;
    i32 stride;
};

// Rows beyond the expert's end stay out: 16-byte stores of the `rows` < 16 that exist.
template <u32 kColumns>
__device__ __forceinline__ void store_partial_box(u32 box, const BoxTarget& target, i32 row, i32 rows, i32 column) {
    constexpr u32 kLanesPerRow = kColumns / 8;
    constexpr u32 kRowsAtOnce = 32 / kLanesPerRow;
    u32 line = lane_index() / kLanesPerRow, chunk = lane_index() % kLanesPerRow;
    if (column + i32(chunk * 8) < target.stride) {
#pragma unroll 1
        for (u32 r = line; i32(r) < rows; r += kRowsAtOnce) {
            Chunk v = load_shared_16(box + box_offset<kColumns>(r, chunk));
            store_global_16(target.matrix + i64(row + i32(r)) * target.stride + column + chunk * 8, v);
        }
    }
    fence_async_shared();
    __syncwarp();
}

// Called by the converged warp after publish_box. `row` is the box's first row, `rows` how many exist.
// The caller commits the group and reuses the box only after wait_for_box.
template <u32 kColumns>
__device__ __forceinline__ void store_box(u32 box, const BoxTarget& target, i32 row, i32 rows, i32 column) {
    if (rows >= i32(kBoxRows)) {
        if (elect_lane()) tma_store_2d(target.map, box, column, row);
    } else {
        store_partial_box<kColumns>(box, target, row, rows, column);
    }
}

// Before writing into a box: until at most kPending younger groups still read shared memory.
template <u32 kPending>
__device__ __forceinline__ void wait_for_box() {
    if (elect_lane()) store_wait_read<kPending>();
    __syncwarp();
}

// After writing into boxes, before store_box: makes the writes visible to TMA.
__device__ __forceinline__ void publish_box() {
    fence_async_shared();
    __syncwarp();
}

__device__ __forceinline__ void commit_boxes() {
    if (elect_lane()) store_commit();
}

}  // namespace sonic
