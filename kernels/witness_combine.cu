// The witness of the combines: every element of o or dx against the f64 sum of the token's stored rows.
//
// grid     tokens, or fewer
// block    256
#include "witness/ball.cuh"

using namespace sonic;

extern "C" __global__ void __launch_bounds__(256)
witness_combine(const bf16* __restrict__ rows,         // (R, d)
                const f32* __restrict__ scores,        // (R), or null: unweighted
                const i32* __restrict__ token_offsets, // (tokens + 1)
                const i32* __restrict__ token_rows,    // (R)
                const bf16* __restrict__ out,          // (tokens, d), judged
                Tally* __restrict__ tally, u32 tokens, u32 d, const __grid_constant__ WitnessNumerics numerics) {
    Verdicts verdicts;
    for (u32 token = blockIdx.x; token < tokens; token += gridDim.x) {
        const i32 begin = token_offsets[token], end = token_offsets[token + 1];
        // A sum of m products takes m roundings, one of m rows m − 1.
        const f64 roundings = f64(scores != nullptr ? end - begin : larger(f64(end - begin - 1), 0.0));
        for (u32 column = threadIdx.x; column < d; column += blockDim.x) {
            f64 sum = 0.0, size = 0.0;
            for (i32 at = begin; at < end; ++at) {
                const i64 row = token_rows[at];
                const f64 value = to_f64(rows[row * d + column]) * (scores != nullptr ? f64(scores[row]) : 1.0);
                sum += value, size += fabs(value);
            }
            f64 rad = 0.0;
            if (size > numerics.accumulate.largest) rad = infinity();
            else if (size != 0.0 && roundings != 0.0)
                rad = gamma_of(numerics.accumulate, roundings) * size + smaller(2.0 * roundings * numerics.accumulate.underflow, size);
            const i64 at = i64(token) * d + column;
            verdicts.judge(to_f64(out[at]), round_ball(numerics.storage, {sum, rad}), numerics.storage.largest, u64(at));
        }
    }
    __syncwarp();
    verdicts.add_to(tally);
}
