// What happens to the sum over one group of K before it joins the accumulator.
// apply: acc += scale(group) * part. finish: once, after all groups.
#pragma once

#include "dot.h"

namespace moeq::cpu::MOEQ_ISA {

template <int Rows>
MOEQ_INLINE void multiply_add(F32 (&acc)[Rows], const F32 (&part)[Rows], F32 scale) {
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) acc[row] = fma(scale, part[row], acc[row]);
}

template <int Rows>
MOEQ_INLINE void multiply(F32 (&acc)[Rows], F32 scale) {
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) acc[row] = mul(scale, acc[row]);
}

// Sixteen scales as stored.
template <DType kType>
MOEQ_INLINE F32 load_scales(const uint8_t* p) {
  if constexpr (kType == DType::kBFloat16) return load_bf16(p);
  if constexpr (kType == DType::kFloat16) return load_f16(p);
  return load_f32(p);
}

struct NoScale {
  static constexpr int kGroupBytes = 0;  // of the scales of a panel's group
  template <int Rows>
  static MOEQ_INLINE void apply(F32 (&acc)[Rows], const F32 (&part)[Rows], const DotCall&, int64_t) {
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) acc[row] = add(acc[row], part[row]);
  }
  template <int Rows>
  static MOEQ_INLINE void finish(F32 (&)[Rows], const DotCall&) {}
};

// One e4m3 scale per row of the panel and group, in [group][16]; their common factor comes at the end.
struct E4m3Scale {
  static constexpr int kGroupBytes = kPanelRows;
  template <int Rows>
  static MOEQ_INLINE void apply(F32 (&acc)[Rows], const F32 (&part)[Rows], const DotCall& call, int64_t group) {
    multiply_add(acc, part, e4m3_scales(call.scale + group * kPanelRows));
  }
  template <int Rows>
  static MOEQ_INLINE void finish(F32 (&acc)[Rows], const DotCall&) {
    const float factor = 256.0f;
    multiply(acc, broadcast(&factor));
  }
};

// One e8m0 scale per row of the panel and group.
struct E8m0Scale : NoScale {
  static constexpr int kGroupBytes = kPanelRows;
  template <int Rows>
  static MOEQ_INLINE void apply(F32 (&acc)[Rows], const F32 (&part)[Rows], const DotCall& call, int64_t group) {
    multiply_add(acc, part, e8m0_scales(call.scale + group * kPanelRows));
  }
};

// One float scale per row of the panel and group (a whole row of weights is one group, too).
template <DType kType>
struct FloatScale : NoScale {
  static constexpr int kGroupBytes = kPanelRows * (kType == DType::kFloat32 ? 4 : 2);
  template <int Rows>
  static MOEQ_INLINE void apply(F32 (&acc)[Rows], const F32 (&part)[Rows], const DotCall& call, int64_t group) {
    multiply_add(acc, part, load_scales<kType>(call.scale + group * kGroupBytes));
  }
};

// One float scale per panel and 128 of K, times the activation's own for the same 128, where it has one.
struct TileScale : NoScale {
  template <int Rows>
  static MOEQ_INLINE void apply(F32 (&acc)[Rows], const F32 (&part)[Rows], const DotCall& call, int64_t group) {
    const float weight = reinterpret_cast<const float*>(call.scale)[group];
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      const float scale = call.row_scales[row] == nullptr ? weight : weight * call.row_scales[row][group];
      acc[row] = fma(broadcast(&scale), part[row], acc[row]);
    }
  }
};

}  // namespace moeq::cpu::MOEQ_ISA
