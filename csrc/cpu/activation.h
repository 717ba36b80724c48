// Activation functions in float32 on sixteen lanes. exp is a polynomial (2 ulp), erf and tanh are libm's.
#pragma once

#include <cmath>

#include "vec.h"

namespace moeq::cpu::MOEQ_ISA {

// exp(x): infinite from 88.73 on, 0 below -103.98, and subnormal just above that.
MOEQ_INLINE Vec exp(Vec x) {
  x = at_least(at_most(x, splat(90.0f)), splat(-105.0f));
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
  // 2^n in two factors, each of which is a normal float.
  const IVec half = integer >> 1;
  return result * (Vec)((half + isplat(127)) << 23) * (Vec)((integer - half + isplat(127)) << 23);
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

MOEQ_INLINE Vec relu_squared(Vec x) { return x * at_least(x, Vec{}); }  // -infinity * 0 is NaN

// Limits without bounding NaN and infinities away.
MOEQ_INLINE Vec limited(Vec x, float limit) { return at_most(x, splat(limit)) + nan_unless_finite(x); }
MOEQ_INLINE Vec limited_both(Vec x, float limit) {
  return at_least(at_most(x, splat(limit)), splat(-limit)) + nan_unless_finite(x);
}

MOEQ_INLINE Vec situ(Vec gate, Vec up, float alpha, float beta) {
  const Vec bounded = splat(beta) * tanh(up / splat(beta)) * (splat(alpha) * tanh(gate / splat(alpha))) * sigmoid(gate);
  return bounded + nan_unless_finite(gate) + nan_unless_finite(up);
}

// act(gate, up); functions that are not gated take their argument from `up`.
inline Vec activate(Activation activation, Vec gate, Vec up, float alpha, float beta, float limit) {
  switch (activation) {
    case Activation::kSilu:
      gate = limited(gate, limit);
      return gate * sigmoid(gate) * limited_both(up, limit);
    case Activation::kGelu:
      return gelu_erf(gate) * up;
    case Activation::kGeluTanh:
      return gelu_tanh(gate) * up;
    case Activation::kRelu2:
      return relu_squared(gate) * up;
    case Activation::kSwigluoai:
      gate = limited(gate, limit);
      return (limited_both(up, limit) + splat(beta)) * gate * sigmoid(splat(alpha) * gate);
    case Activation::kSwiglustep:
      return limited(gate * sigmoid(gate), limit) * limited_both(up, limit);
    case Activation::kSitu:
      return situ(gate, up, alpha, beta);
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
