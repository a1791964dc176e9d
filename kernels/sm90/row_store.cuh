// From an accumulator fragment to rows in global memory, one warp at a time.
//
// A warp owns 16 rows of the tile. 64 columns at a time go through a private staging area with a
// pitch of 144 bytes (free of bank conflicts for stmatrix and for 16-byte reads) and leave as
// 16-byte stores, four rows of 128 contiguous bytes each. Rows beyond the expert's end and columns
// beyond the matrix are not stored, so a partial tile never touches the next expert's rows.
#pragma once
#include "sm90/types.cuh"
#include "sm90/copy.cuh"
#include "sm90/warp.cuh"

namespace sonic {

constexpr u32 kStagingPitch = 144;
constexpr u32 kStagingBytes = 16 * kStagingPitch;

// Where lane l writes its row address for stmatrix: matrices 0,1 are rows 0–7 and 8–15 of one
// 8-column block, matrices 2,3 of the next.
__device__ __forceinline__ u32 staging_matrix_offset() {
    u32 lane = lane_index();
    return (lane % 16) * kStagingPitch + (lane / 16) * 16;
}

// `pairs[2j]` holds columns 8j + 2(l%4) + {0,1} of row l/4 and `pairs[2j+1]` of row l/4 + 8, packed.
__device__ __forceinline__ void stage_columns(u32 staging, const u32 (&pairs)[16]) {
    u32 address = staging + staging_matrix_offset();
#pragma unroll
    for (u32 j = 0; j < 8; j += 2) {
        store_matrix_x4(address + j * 16, pairs[2 * j], pairs[2 * j + 1], pairs[2 * j + 2], pairs[2 * j + 3]);
    }
}

// Stores kColumns (64 or 32) staged columns: `out` is row-major with `stride` columns, `row` the
// warp's first row, of which `rows` exist, `column` the first column.
template <u32 kColumns, u32 kPitch>
__device__ __forceinline__ void store_staged(u32 staging, bf16* out, i64 row, i32 rows, i32 column, i32 stride) {
    constexpr u32 kLanesPerRow = kColumns / 8;
    constexpr u32 kRowsAtOnce = 32 / kLanesPerRow;
    u32 line = lane_index() / kLanesPerRow, chunk = lane_index() % kLanesPerRow;
    bf16* target = out + (row + line) * i64(stride) + column + chunk * 8;
    bool inside = column + i32(chunk * 8) < stride;
#pragma unroll
    for (u32 i = 0; i < 16 / kRowsAtOnce; ++i) {
        Chunk v = load_shared_16(staging + (line + i * kRowsAtOnce) * kPitch + chunk * 16);
        if (inside && i32(line + i * kRowsAtOnce) < rows) store_global_16(target + i64(i * kRowsAtOnce) * stride, v);
    }
}

}  // namespace sonic
