// Activations between the two GEMMs, in float32 (formulas: torch_moe_ops/core/activations.py).
#pragma once
#include "sigmoids.cuh"
#include "../problem/problem.h"

namespace moeq::sm90 {

__device__ __forceinline__ float silu(float x) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return x * inverse;
}
__device__ __forceinline__ float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678f)); }
__device__ __forceinline__ float relu_squared(float x) { return x * fmaxf(x, 0.0f); }   // NaN of NaN and -infinity

// Clamps that make NaN of NaN and of infinities.
__device__ __forceinline__ float at_most(float x, float limit) { return nan_unless_finite(fminf(x, limit), x); }
__device__ __forceinline__ float within(float x, float limit) {
  return nan_unless_finite(fmaxf(fminf(x, limit), -limit), x);
}

// silu and swigluoai.
__device__ __forceinline__ float swiglu(const Problem& p, float gate, float up) {
  gate = at_most(gate, p.limit);
  return gate * sigmoid(p.alpha * gate) * (within(up, p.limit) + p.beta);
}

// Any activation; `gate` is not looked at where there is none.
__device__ __forceinline__ float activate(Activation activation, const Problem& p, float gate, float up) {
  switch (activation) {
    case Activation::kSilu:
    case Activation::kSwigluoai:
      return swiglu(p, gate, up);
    case Activation::kSwiglustep:
      return at_most(gate * sigmoid(gate), p.limit) * within(up, p.limit);
    case Activation::kSitu:
      return situ(p.alpha, p.beta, gate, up);
    case Activation::kGelu:
      return gelu(gate) * up;
    case Activation::kGeluTanh:
      return gelu_tanh(gate) * up;
    case Activation::kRelu2:
      return relu_squared(gate) * up;
    case Activation::kSiluNoMul:
      return up * sigmoid(up);
    case Activation::kGeluNoMul:
      return gelu(up);
    case Activation::kRelu2NoMul:
      return relu_squared(up);
    default:
      return up;
  }
}

__device__ __forceinline__ float activate(const Problem& p, float gate, float up) {
  return activate(p.activation, p, gate, up);
}

}  // namespace moeq::sm90
