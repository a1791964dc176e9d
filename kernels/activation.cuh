// Activations and their derivatives, f32.
//
// Gated: a = f(gate)·up. Ungated: a = f(h), and `up` is ignored.
#pragma once
#include "sm90/types.cuh"

// SONIC_ACTIVATION is one of these numbers.
#define SONIC_SWIGLU 0
#define SONIC_GEGLU_ERF 1
#define SONIC_GEGLU_TANH 2
#define SONIC_REGLU 3
#define SONIC_SILU 4
#define SONIC_GELU_ERF 5
#define SONIC_GELU_TANH 6
#define SONIC_RELU 7
#define SONIC_RELU_SQUARED 8

#ifndef SONIC_ACTIVATION
#define SONIC_ACTIVATION SONIC_SWIGLU
#endif

namespace sonic {

template <u32 kActivation>
constexpr bool kActivationIsGated = kActivation <= SONIC_REGLU;

__device__ __forceinline__ f32 reciprocal(f32 x) {
    f32 result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// 1 / (1 + 2^(−x·log₂e)): exactly 1 from 18 on, exactly 0 below −90, relative error a few 2⁻²² in
// between. (tanh.approx has an absolute error of 2⁻¹¹ and ruins the result for negative x.)
__device__ __forceinline__ f32 sigmoid(f32 x) {
    f32 power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
    return reciprocal(1.0f + power);
}

// exp(x²)·erfc(x) for x ≥ 0: (1 + p(q))/(1 + 2x) with q = (x − 2)/(x + 2). With the Gaussian factor of
// ex2.approx the relative error of erfc is below 10⁻⁵ up to x = 9, and below 3·10⁻⁷ for x ≤ 1.4.
__device__ __forceinline__ f32 scaled_erfc(f32 x) {
    f32 q = (x - 2.0f) * reciprocal(x + 2.0f);
    f32 p = -0x1.a4a000p-12f;
    p = p * q + -0x1.42a260p-10f;
    p = p * q + 0x1.585714p-10f;
    p = p * q + 0x1.1adcc4p-7f;
    p = p * q + -0x1.081b82p-7f;
    p = p * q + -0x1.bc0b6ap-5f;
    p = p * q + 0x1.4ffc46p-3f;
    p = p * q + -0x1.540840p-3f;
    p = p * q + -0x1.7bf616p-4f;
    p = p * q + 0x1.1ba03ap-2f;
    f32 scale = reciprocal(2.0f * x + 1.0f);
    return p * scale + scale;
}

struct ValueAndSlope {
    f32 value;
    f32 slope;
};

// f and f′ of one pre-activation.
template <u32 kActivation>
__device__ __forceinline__ ValueAndSlope activate_with_slope(f32 x) {
    if constexpr (kActivation == SONIC_SWIGLU || kActivation == SONIC_SILU) {
        f32 s = sigmoid(x);
        f32 value = x * s;
        return {value, s + value * (1.0f - s)};
    } else if constexpr (kActivation == SONIC_GEGLU_ERF || kActivation == SONIC_GELU_ERF) {
        // Φ(x) = erfc(−x/√2)/2, f′ = Φ + x·φ. Negative x take the tail itself and keep its relative accuracy.
        f32 gaussian;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(gaussian) : "f"(x * x * -0.72134752044448170f));
        f32 tail = 0.5f * gaussian * scaled_erfc(fabsf(x) * 0.70710678118654752f);
        f32 integral = x < 0.0f ? tail : 1.0f - tail;
        return {x * integral, integral + x * (gaussian * 0.39894228040143268f)};
    } else if constexpr (kActivation == SONIC_GEGLU_TANH || kActivation == SONIC_GELU_TANH) {
        // (1 + tanh u)/2 = σ(2u), u = √(2/π)(x + 0.044715x³). Beyond ±16 the slope of σ is 0, and
        // the clamp keeps u′ finite there.
        f32 s = sigmoid(1.5957691216057308f * x * (1.0f + 0.044715f * x * x));
        f32 inner = fminf(fmaxf(x, -16.0f), 16.0f);
        f32 slope_of_2u = 1.5957691216057308f * (1.0f + 0.134145f * inner * inner);
        return {x * s, s + inner * (s * (1.0f - s)) * slope_of_2u};
    } else if constexpr (kActivation == SONIC_REGLU || kActivation == SONIC_RELU) {
        return {x > 0.0f ? x : 0.0f, x > 0.0f ? 1.0f : 0.0f};
    } else {
        static_assert(kActivation == SONIC_RELU_SQUARED, "unknown SONIC_ACTIVATION");
        f32 positive = x > 0.0f ? x : 0.0f;
        return {positive * positive, 2.0f * positive};
    }
}

template <u32 kActivation>
__device__ __forceinline__ f32 activate(f32 gate, f32 up) {
    f32 value = activate_with_slope<kActivation>(gate).value;
    return kActivationIsGated<kActivation> ? value * up : value;
}

struct ActivationGradient {
    f32 a;      // the activation, recomputed
    f32 d_gate; // or dh of an ungated activation
    f32 d_up;   // 0 without a gate
};

// Gradient of the pre-activations for the gradient `d_a` of a.
template <u32 kActivation>
__device__ __forceinline__ ActivationGradient activate_backward(f32 gate, f32 up, f32 d_a) {
    ValueAndSlope f = activate_with_slope<kActivation>(gate);
    if constexpr (kActivationIsGated<kActivation>) {
        return {f.value * up, d_a * up * f.slope, d_a * f.value};
    } else {
        return {f.value, d_a * f.slope, 0.0f};
    }
}

}  // namespace sonic
