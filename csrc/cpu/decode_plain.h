// Weights that are floats already. One unit is sixteen elements of K of sixteen rows.
#pragma once

#include "dot.h"

namespace moeq::cpu::MOEQ_ISA {

// bf16: eight pairs, each [row][2].
struct PlainBf16 {
  static constexpr int kUnitBytes = 512;
  static constexpr float kFactor = 1.0f;
  const uint8_t* p;
  MOEQ_INLINE PlainBf16(const DotCall& call, int64_t unit, int64_t) : p(call.codes + unit * kUnitBytes) {}
  template <int Pair>
  MOEQ_INLINE F32 even() const {
    return low_bf16(load_words(p + Pair * 64));
  }
  template <int Pair>
  MOEQ_INLINE F32 odd() const {
    return high_bf16(load_words(p + Pair * 64));
  }
  template <int Pair>
  MOEQ_INLINE Words pair() const {
    return load_words(p + Pair * 64);
  }
};

// f16: [k][row].
struct PlainF16 {
  static constexpr int kUnitBytes = 512;
  static constexpr float kFactor = 1.0f;
  const uint8_t* p;
  MOEQ_INLINE PlainF16(const DotCall& call, int64_t unit, int64_t) : p(call.codes + unit * kUnitBytes) {}
  template <int Pair>
  MOEQ_INLINE F32 even() const {
    return load_f16(p + Pair * 64);
  }
  template <int Pair>
  MOEQ_INLINE F32 odd() const {
    return load_f16(p + Pair * 64 + 32);
  }
};

// f32: [k][row].
struct PlainF32 {
  static constexpr int kUnitBytes = 1024;
  static constexpr float kFactor = 1.0f;
  const uint8_t* p;
  MOEQ_INLINE PlainF32(const DotCall& call, int64_t unit, int64_t) : p(call.codes + unit * kUnitBytes) {}
  template <int Pair>
  MOEQ_INLINE F32 even() const {
    return load_f32(p + Pair * 128);
  }
  template <int Pair>
  MOEQ_INLINE F32 odd() const {
    return load_f32(p + Pair * 128 + 64);
  }
};

}  // namespace moeq::cpu::MOEQ_ISA
