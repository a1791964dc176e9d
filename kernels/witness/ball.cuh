// Ball arithmetic in f64, for the witness: a number of the truth, `mid`, and a bound `rad` on how far from it
// a correct kernel may be. The a-priori bounds of every oracle, for SwiGLU with f32 sums and bf16 tensors; the
// constants come from the host.
#pragma once
#include "sm90/types.cuh"

namespace sonic {

using f64 = double;

struct Ball {
    f64 mid, rad;
};

// One rounding: relative error of a normal result, absolute error below the normal range, largest result.
struct Rounding {
    f64 unit, underflow, largest;
};

struct WitnessNumerics {
    Rounding accumulate;  // one operation in the accumulator
    Rounding storage;     // one store to the tensors' type
    f64 function_ulps;    // of an elementary function, in units of accumulate.unit
    f64 function_underflow;
};

__device__ __forceinline__ f64 infinity() { return __longlong_as_double(0x7ff0000000000000ll); }

__device__ __forceinline__ f64 to_f64(bf16 v) { return f64(to_f32(v)); }
__device__ __forceinline__ f64 larger(f64 a, f64 b) { return a > b ? a : b; }
__device__ __forceinline__ f64 smaller(f64 a, f64 b) { return a < b ? a : b; }
__device__ __forceinline__ f64 known(f64 rad) { return rad != rad ? infinity() : rad; }
__device__ __forceinline__ f64 magnitude(Ball a) { return fabs(a.mid) + a.rad; }

// E += max(u(|v| + E), min(η, |v| + E))
__device__ __forceinline__ Ball round_ball(const Rounding& r, Ball a) {
    f64 size = magnitude(a);
    if (!(size <= r.largest)) return {a.mid, infinity()};
    return {a.mid, a.rad + larger(r.unit * size, smaller(r.underflow, size))};
}

// E = E_a|b| + |a|E_b + E_aE_b
__device__ __forceinline__ Ball product(Ball a, Ball b) {
    return {a.mid * b.mid, known(a.rad * fabs(b.mid) + magnitude(a) * b.rad)};
}

__device__ __forceinline__ Ball multiply(const WitnessNumerics& n, Ball a, Ball b) {
    return round_ball(n.accumulate, product(a, b));
}

// γ_m = m·u/(1 − m·u)
__device__ __forceinline__ f64 gamma_of(const Rounding& r, f64 m) {
    f64 mu = m * r.unit;
    return mu < 1.0 ? mu / (1.0 - mu) : infinity();
}

// A product of matrices with Σ|terms| = size: E = γ_m·size and each term's underflow.
__device__ __forceinline__ Ball dot_product(const WitnessNumerics& n, f64 sum, f64 size, f64 terms) {
    if (size > n.accumulate.largest) return {sum, infinity()};
    f64 underflow = (2.0 * terms + 1.0) * n.accumulate.underflow;
    return {sum, known(gamma_of(n.accumulate, terms) * size + smaller(underflow, size))};
}

// σ(x) and 1 − σ(x), each to full relative accuracy.
struct Logistic {
    f64 on, off;
};
__device__ __forceinline__ Logistic logistic(f64 x) {
    f64 tail = exp(-fabs(x));
    f64 large = 1.0 / (1.0 + tail), small = tail / (1.0 + tail);
    return x >= 0.0 ? Logistic{large, small} : Logistic{small, large};
}

constexpr f64 kSecondOrder = 1.01;

// Adds the evaluation's own error.
__device__ __forceinline__ Ball evaluated(const WitnessNumerics& n, Ball a, f64 roundings, f64 weight) {
    if (roundings == 0.0) return a;
    f64 own = kSecondOrder * n.accumulate.unit * roundings + n.function_underflow * weight + 4.0 * n.accumulate.underflow;
    return {a.mid, a.rad + own};
}

// silu(x): |f″| ≤ min(1/2, (2 + |x|)e^−|x|)
__device__ __forceinline__ Ball silu(const WitnessNumerics& n, Ball x) {
    Logistic s = logistic(x.mid);
    f64 value = x.mid * s.on, slope = s.on + x.mid * s.on * s.off;
    if (!(x.rad < infinity())) return {value, infinity()};
    f64 least = larger(fabs(x.mid) - x.rad, 0.0);
    f64 second = smaller((2.0 + least) * exp(-least), 0.5);
    f64 rad = fabs(slope) * x.rad + 0.5 * second * x.rad * x.rad;
    return evaluated(n, {value, rad}, (n.function_ulps + 2.0) * (fabs(value) + rad), magnitude(x));
}

// silu′(x) at an exact x.
__device__ __forceinline__ Ball silu_slope(const WitnessNumerics& n, f64 x) {
    Logistic s = logistic(x);
    f64 ulps = n.function_ulps;
    f64 roundings = s.on * (ulps + 3.0 + fabs(x) * (3.0 * ulps + 6.0));
    return evaluated(n, {s.on + x * s.on * s.off, 0.0}, roundings, 4.0 * (1.0 + fabs(x)));
}

// What the judged elements of one tensor came to: all of it u64, so that any order of atomics gives the same.
struct Tally {
    u64 worst;    // the largest error / bound, as the bits of a non-negative f64
    u64 judged;
    u64 skipped;  // truth and bound reach beyond the type's range
    u64 failing;
    u64 first;    // the smallest index of a failing element
};

// One thread's part of a tally.
struct Verdicts {
    f64 worst = 0.0;
    u32 judged = 0, skipped = 0, failing = 0;
    u64 first = ~0ull;

    __device__ __forceinline__ void judge(f64 value, Ball truth, f64 largest, u64 index) {
        if (!(fabs(truth.mid) + truth.rad <= largest)) {
            ++skipped;
            return;
        }
        ++judged;
        bool finite = fabs(value) <= 1.7976931348623157e308;
        f64 error = finite ? fabs(value - truth.mid) : infinity();
        f64 ratio = error == 0.0 ? 0.0 : error / truth.rad;
        worst = larger(worst, ratio);
        if (!(error <= truth.rad)) {
            ++failing;
            first = index < first ? index : first;
        }
    }

    // Every lane of the warp takes part.
    __device__ __forceinline__ void add_to(Tally* tally) {
#pragma unroll
        for (u32 distance = 16; distance > 0; distance /= 2) {
            worst = larger(worst, __shfl_xor_sync(0xffffffffu, worst, distance));
            judged += __shfl_xor_sync(0xffffffffu, judged, distance);
            skipped += __shfl_xor_sync(0xffffffffu, skipped, distance);
            failing += __shfl_xor_sync(0xffffffffu, failing, distance);
            u64 other = __shfl_xor_sync(0xffffffffu, first, distance);
            first = other < first ? other : first;
        }
        if (threadIdx.x % 32 != 0) return;
        atomicMax(&tally->worst, u64(__double_as_longlong(worst)));
        atomicAdd(&tally->judged, u64(judged));
        if (skipped != 0) atomicAdd(&tally->skipped, u64(skipped));
        if (failing != 0) atomicAdd(&tally->failing, u64(failing));
        if (failing != 0) atomicMin(&tally->first, first);
    }
};

}  // namespace sonic
