// Activation functions in float32 on sixteen lanes. exp is a polynomial (2 ulp), erf and tanh are libm's.
#pragma once

#include <cmath>

#include "vec.h"

namespace moeq::cpu::MOEQ_ISA {

// exp(x), x clamped to the range in which the result is a normal float.
MOEQ_INLINE Vec exp(Vec x) {
  x = at_least(at_most(x, splat(88.0f)), splat(-87.0f));
  // Round x / ln 2 to an integer n by adding 1.5 * 2^23; x = n ln 2 + r, |r| <= ln 2 / 2.
  const Vec magic = splat(12582912.0f);
  const Vec shifted = x * splat(1.44269504088896341f) + magic;
  const Vec n = shifted - magic;
  const IVec integer = (IVec)shifted - (IVec)magic;
  // ln 2 in two parts; n times the first one is exact.
  const Vec r = (x - n * splat(0.693359375f)) - n * splat(-2.12194440e-4f);
  Vec series = splat(1.0f / 5040.0f);  // Taylor to r^7: the rest is below 2^-27
  series = series * r + splat(1.0f / 720.0f);
  series = series * r + splat(1.0f / 120.0f);
  series = series * r + splat(1.0f / 24.0f);
  series = series * r + splat(1.0f / 6.0f);
  series = series * r + splat(0.5f);
  const Vec result = (series * r) * r + r + splat(1.0f);
  return result * (Vec)((integer + isplat(127)) << 23);
}

MOEQ_INLINE Vec sigmoid(Vec x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

MOEQ_INLINE Vec tanh(Vec x) {
  for (int i = 0; i < 16; ++i) x[i] = ::tanhf(x[i]);
  return x;
}

MOEQ_INLINE Vec gelu_erf(Vec x) {
  Vec erf;
  for (int i = 0; i < 16; ++i) erf[i] = ::erff(x[i] * 0.70710678118654752f);
  return splat(0.5f) * x * (splat(1.0f) + erf);
}

// 0.5 (1 + tanh y) is sigmoid(2 y), which does not cancel.
MOEQ_INLINE Vec gelu_tanh(Vec x) {
  const Vec inner = splat(0.79788456080286536f) * (x + splat(0.044715f) * x * x * x);
  return x * sigmoid(inner + inner);
}

MOEQ_INLINE Vec relu_squared(Vec x) {
  const Vec positive = at_least(x, Vec{});
  return positive * positive;
}

MOEQ_INLINE Vec clamp_both(Vec x, float limit) { return at_least(at_most(x, splat(limit)), splat(-limit)); }

// act(gate, up); functions that are not gated take their argument from `up`.
inline Vec activate(Activation activation, Vec gate, Vec up, float alpha, float beta, float limit) {
  switch (activation) {
    case Activation::kSilu:
      gate = at_most(gate, splat(limit));
      return gate * sigmoid(gate) * clamp_both(up, limit);
    case Activation::kGelu:
      return gelu_erf(gate) * up;
    case Activation::kGeluTanh:
      return gelu_tanh(gate) * up;
    case Activation::kRelu2:
      return relu_squared(gate) * up;
    case Activation::kSwigluOai:
      gate = at_most(gate, splat(limit));
      return (clamp_both(up, limit) + splat(beta)) * gate * sigmoid(splat(alpha) * gate);
    case Activation::kSwigluStep:
      return at_most(gate * sigmoid(gate), splat(limit)) * clamp_both(up, limit);
    case Activation::kSitu:
      return splat(beta) * tanh(up / splat(beta)) * (splat(alpha) * tanh(gate / splat(alpha))) * sigmoid(gate);
    case Activation::kSiluNoMul:
      return up * sigmoid(up);
    case Activation::kGeluNoMul:
      return gelu_erf(up);
    case Activation::kRelu2NoMul:
      return relu_squared(up);
    case Activation::kIdentityNoMul:
      break;
  }
  return up;
}

}  // namespace moeq::cpu::MOEQ_ISA
