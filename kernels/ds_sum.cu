// ds[r] = Σ_t ds_partial[r, t], t ascending (+ addend[r]): finishes kernel 4 where n spans several
// tiles, and adds ⟨dout, b2⟩ where there are biases.
//
//   ds_partial (rows, tiles) f32, addend f32[rows] or null, ds f32[rows]; `rows` lies on the device, which
//   may be the only one to know it. One thread a row, any grid.
#include "sm90/types.cuh"

extern "C" __global__ void __launch_bounds__(256)
    ds_sum(const sonic::f32* __restrict__ ds_partial, const sonic::f32* __restrict__ addend, sonic::f32* __restrict__ ds,
           const sonic::i32* __restrict__ rows_on_device, sonic::i32 tiles) {
    using namespace sonic;
    const i64 rows = __ldg(rows_on_device);
    for (i64 row = i64(blockIdx.x) * blockDim.x + threadIdx.x; row < rows; row += i64(gridDim.x) * blockDim.x) {
        const f32* partial = ds_partial + row * tiles;
        f32 sum = 0.0f;
        for (i32 t = 0; t < tiles; ++t) sum += partial[t];
        ds[row] = addend != nullptr ? sum + addend[row] : sum;
    }
}
