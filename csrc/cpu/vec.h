// Sixteen floats in GCC's vector extension: the same source for every instruction set. Used where exact
// rounding matters more than instruction choice (quantizers, activations, epilogues); contraction is off.
#pragma once

#include <cstring>

#include "args.h"

#define MOEQ_INLINE inline __attribute__((always_inline))

namespace moeq::cpu::MOEQ_ISA {

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IVec __attribute__((vector_size(64)));
typedef uint16_t HVec __attribute__((vector_size(32)));

MOEQ_INLINE Vec splat(float value) { return value - Vec{}; }
MOEQ_INLINE IVec isplat(int32_t value) { return value - IVec{}; }

MOEQ_INLINE Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

MOEQ_INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }

// Integers of -128 to 127.
MOEQ_INLINE void store_int8(int8_t* p, Vec v) {
  typedef int8_t Bytes __attribute__((vector_size(16)));
  const Bytes bytes = __builtin_convertvector(__builtin_convertvector(v, IVec), Bytes);
  std::memcpy(p, &bytes, sizeof(bytes));
}

// NaN in `value` survives both: the comparison is false and `value` is kept.
MOEQ_INLINE Vec at_most(Vec value, Vec bound) { return value > bound ? bound : value; }
MOEQ_INLINE Vec at_least(Vec value, Vec bound) { return value < bound ? bound : value; }

MOEQ_INLINE Vec abs(Vec v) { return (Vec)((IVec)v & isplat(0x7fffffff)); }
MOEQ_INLINE Vec with_sign(Vec magnitude, Vec sign) { return (Vec)((IVec)magnitude | ((IVec)sign & isplat(INT32_MIN))); }

// 0, or NaN where v is NaN or infinite: added to a bounded function of v, it shows what the bound hides.
MOEQ_INLINE Vec nan_unless_finite(Vec v) { return v * Vec{}; }

// The largest magnitude of what it has seen. Magnitudes are compared as bits, in whose order NaN comes last.
class Amax {
 public:
  MOEQ_INLINE void see(Vec v) {
    const IVec bits = (IVec)abs(v);
    best_ = bits > best_ ? bits : best_;
  }

  // NaN where anything was NaN or infinite.
  MOEQ_INLINE float value() const {
    int32_t bits = best_[0];
    for (int i = 1; i < 16; ++i) bits = best_[i] > bits ? best_[i] : bits;
    float amax;
    std::memcpy(&amax, &bits, sizeof(amax));
    return amax + amax * 0.0f;
  }

 private:
  IVec best_{};
};

// Rounds magnitudes (finite, not above the format's maximum) to a small float with `mantissa` bits and
// subnormals below 2^min_exponent, to nearest even. Adding a power of two whose last place is the
// wanted step makes the hardware do the rounding.
MOEQ_INLINE Vec round_small_float(Vec magnitude, int mantissa, int min_exponent) {
  const IVec smallest = isplat((min_exponent + 127) << 23);
  IVec exponent = (IVec)magnitude & isplat(0x7f800000);
  exponent = exponent > smallest ? exponent : smallest;
  const Vec magic = (Vec)(exponent + isplat((23 - mantissa) << 23));
  return (magnitude + magic) - magic;
}

MOEQ_INLINE float lane_round_small_float(float magnitude, int mantissa, int min_exponent) {
  return round_small_float(splat(magnitude), mantissa, min_exponent)[0];
}

MOEQ_INLINE Vec bf16_to_float(const uint16_t* p) {
  HVec half;
  std::memcpy(&half, p, sizeof(half));
  return (Vec)(__builtin_convertvector(half, IVec) << 16);
}

MOEQ_INLINE HVec high_halves(Vec v) { return __builtin_convertvector((IVec)v >> 16, HVec); }

MOEQ_INLINE void store_bf16_bits(uint16_t* p, HVec bits) { std::memcpy(p, &bits, sizeof(bits)); }

// Round to nearest even; a NaN stays one.
MOEQ_INLINE Vec round_to_bf16(Vec v) {
  const IVec bits = (IVec)v;
  const IVec rounded = (bits + isplat(0x7fff) + ((bits >> 16) & 1)) & isplat((int32_t)0xffff0000);
  return v != v ? v : (Vec)rounded;
}

MOEQ_INLINE Vec round_to_f16(Vec v) {
  const Vec magnitude = abs(v);
  const Vec infinity = splat(__builtin_inff());
  const Vec rounded = round_small_float(at_most(magnitude, splat(131008.0f)), 10, -14);
  return with_sign(rounded > splat(65504.0f) ? infinity : rounded, v);
}

MOEQ_INLINE Vec round_to(Vec v, DType dtype) {
  if (dtype == DType::kBFloat16) return round_to_bf16(v);
  return dtype == DType::kFloat16 ? round_to_f16(v) : v;
}

// Bits of one IEEE half to float, subnormals included, whatever the flush-to-zero mode is.
MOEQ_INLINE float half_to_float(uint16_t bits) {
  const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  uint32_t word = sign | ((exponent + 112) << 23) | (mantissa << 13);
  if (exponent == 0x1f) word = sign | 0x7f800000u | (mantissa << 13);
  float value;
  if (exponent == 0) {
    value = (float)mantissa * 0x1p-24f;
    return sign ? -value : value;
  }
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

// Bits of a float that is already a half's value.
MOEQ_INLINE uint16_t float_to_half_bits(float value) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof(word));
  const uint32_t sign = (word >> 16) & 0x8000u;
  const uint32_t magnitude = word & 0x7fffffffu;
  if (magnitude >= 0x7f800000u) return (uint16_t)(sign | 0x7c00u | (magnitude > 0x7f800000u ? 0x200u : 0u));
  if (magnitude >= 0x38800000u) return (uint16_t)(sign | ((magnitude - 0x38000000u) >> 13));
  const float small = value < 0 ? -value : value;
  return (uint16_t)(sign | (uint32_t)(small * 0x1p24f));
}

// e4m3fn byte to float, NaN included.
MOEQ_INLINE float e4m3_to_float(uint8_t code) {
  if ((code & 0x7f) == 0x7f) return __builtin_nanf("");
  const uint16_t half = (uint16_t)(((code & 0x80) << 8) | ((code & 0x7f) << 7));
  return half_to_float(half) * 256.0f;
}

}  // namespace moeq::cpu::MOEQ_ISA
