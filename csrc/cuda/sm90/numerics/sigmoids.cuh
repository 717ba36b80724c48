// Functions of sigmoid and tanh, in float32 (formulas: torch_moe_ops/activations.py). A host compiles them, too: with
// its own exp and quotients, which are more exact than the device's approximations.
#pragma once
#include "../../rounding.cuh"

namespace moeq::sm90 {

// Within 2 + 1.2 |x| units in the last place on the device.
MOEQ_HOST_DEVICE float exponential(float x) {
#if defined(__CUDA_ARCH__)
  return __expf(x);
#else
  return std::exp(x);
#endif
}

// Within 2 units in the last place on the device, where b is below 2^126; 0 beyond that.
MOEQ_HOST_DEVICE float quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdividef(a, b);
#else
  return a / b;
#endif
}

MOEQ_HOST_DEVICE float sigmoid(float x) { return quotient(1.0f, 1.0f + exponential(-x)); }

// Relative error at most 1.5 * 2^-24 below 0.7 (the polynomial's own is 1.5e-8), and from there on at most 8 * 2^-24
// with the device's exp and quotient: what is subtracted is 0.4 there, beside a result of 0.6, and falls. (2 sigmoid(2
// x) - 1 has an absolute error of 2^-24 however small x is.)
MOEQ_HOST_DEVICE float tanh_of(float x) {
  const float size = std::fabs(x);
  const float square = multiply(size, size);
  float series = fused_multiply_add(-0.0051386617f, square, 0.02009197f);
  series = fused_multiply_add(series, square, -0.05355886f);
  series = fused_multiply_add(series, square, 0.13329111f);
  series = fused_multiply_add(series, square, -0.3333319f);
  const float near_zero = fused_multiply_add(multiply(size, square), series, size);
  const float beyond = fused_multiply_add(-2.0f, quotient(1.0f, 1.0f + exponential(2.0f * size)), 1.0f);
  return std::copysign(size < 0.7f ? near_zero : beyond, x);
}

// 0.5 (1 + tanh y) is sigmoid(2 y), which does not cancel.
MOEQ_HOST_DEVICE float gelu_tanh(float x) {
  return x * sigmoid((x + 0.044715f * x * x * x) * 1.5957691216f);   // 2 sqrt(2 / pi)
}

MOEQ_HOST_DEVICE float situ(float alpha, float beta, float gate, float up) {
  const float bounded = alpha * tanh_of(gate / alpha) * sigmoid(gate) * (beta * tanh_of(up / beta));
  return nan_unless_finite(nan_unless_finite(bounded, gate), up);
}

}  // namespace moeq::sm90
