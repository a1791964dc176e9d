// Waits for what never comes, so that the report of a stall can be tried on a device. One block of one warp.
//
// grid     1
// block    32
// shared   0 dynamic
// cluster  1
#include "sm90/barrier.cuh"

using namespace sonic;

extern "C" __global__ void __launch_bounds__(32)
stall(u32* status) {  // kStatusWords u32 of mapped host memory
    __shared__ u64 barrier;
    if (threadIdx.x == 0) {
        barrier_init(&barrier, 1);
        barrier_init_fence();
    }
    __syncwarp();
    barrier_wait(&barrier, 0, Role::kEpilogue, 3, status);
}
