// Boxes of 64 rows between a warpgroup's accumulator fragments and global memory.
//
// A consumer warpgroup owns 64 rows of the output tile, each of its warps 16. Columns leave 64 or 32 at
// a time through a box in shared memory whose lines carry the swizzle of their own width, so that
// stmatrix meets no bank twice and one TMA store takes the box. Where the expert ends inside the 64
// rows, the rows that exist are stored 16 bytes at a time: TMA would write the next expert's rows.
#pragma once
#include "sm90/types.cuh"
#include "sm90/copy.cuh"
#include "sm90/warp.cuh"

namespace sonic {

constexpr u32 kBoxRows = 64;

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

// The 16 rows of this warp inside its warpgroup's box.
template <u32 kColumns>
__device__ __forceinline__ u32 rows_of_this_warp(u32 box) {
    return box + threadIdx.x / 32 % 4 * (16 * kColumns * 2);
}

// `pairs[2j]` holds columns 8j + 2(l%4) + {0,1} of row l/4 and `pairs[2j+1]` of row l/4 + 8, packed.
// `rows` are the warp's 16 rows of a box; `line` is where row l%16 of the fragment goes: l%16 itself,
// unless the rows were permuted.
template <u32 kColumns>
__device__ __forceinline__ void write_rows(u32 rows, const u32* pairs, u32 line) {
    u32 address = rows + box_offset<kColumns>(line, lane_index() / 16);
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

// One warp stores the first kCount or `rows` rows of a box, whichever is less, 16 bytes a lane.
template <u32 kColumns, u32 kCount>
__device__ __forceinline__ void store_rows(u32 box, bf16* matrix, i32 stride, i32 row, i32 rows, i32 column) {
    constexpr u32 kLanesPerRow = kColumns / 8;
    constexpr u32 kRowsAtOnce = 32 / kLanesPerRow;
    constexpr u32 kTimes = 16 / kRowsAtOnce;
    u32 chunk = lane_index() % kLanesPerRow;
    bool inside = column + i32(chunk * 8) < stride;
#pragma unroll 1
    for (u32 first = 0; first < kCount && i32(first) < rows; first += 16) {
        u32 line = first + lane_index() / kLanesPerRow;
        bf16* target = matrix + i64(row + i32(line)) * stride + column + chunk * 8;
        Chunk values[kTimes];
#pragma unroll
        for (u32 i = 0; i < kTimes; ++i) values[i] = load_shared_16(box + box_offset<kColumns>(line + i * kRowsAtOnce, chunk));
#pragma unroll
        for (u32 i = 0; i < kTimes; ++i) {
            bool exists = inside && i32(line + i * kRowsAtOnce) < rows;
            if (exists) store_global_16(target + i64(i * kRowsAtOnce) * stride, values[i]);
        }
    }
}

// Called by the converged writer warp. `row` is the box's first row, `rows` how many exist. The caller
// commits the group and frees the box only after it was read.
template <u32 kColumns>
__device__ __forceinline__ void store_box(u32 box, const BoxTarget& target, i32 row, i32 rows, i32 column) {
    if (rows >= i32(kBoxRows)) {
        if (elect_lane()) tma_store_2d(target.map, box, column, row);
    } else {
        store_rows<kColumns, kBoxRows>(box, target.matrix, target.stride, row, rows, column);
        fence_async_shared();
    }
    __syncwarp();
}

}  // namespace sonic
