// Activations -> e4m3 codes.
#pragma once
#include "../../rounding.cuh"

namespace moeq::sm90::w4a8 {

constexpr float kMaxCode = 448.0f;

// Nearest e4m3 codes of four numbers, saturating; a NaN stays one.
__device__ __forceinline__ uint32_t encode4(float a, float b, float c, float d) {
  uint32_t word;
  asm("{ .reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high}; }"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

__device__ __forceinline__ float scale_of(float amax) {
  const float scale = __fdiv_rn(amax, kMaxCode);
  return scale == 0.0f ? 1.0f : scale;
}

// fl(x / by) from the rounded reciprocal: the first correction comes within one unit of the last place, the second one
// is exact (Markstein, 1990) where nothing underflows; where it does, the code is zero either way.
__device__ __forceinline__ float quotient(float x, float by, float inverse) {
  float near = __fmul_rn(x, inverse);
  near = __fmaf_rn(__fmaf_rn(-near, by, x), inverse, near);
  return __fmaf_rn(__fmaf_rn(-near, by, x), inverse, near);
}

// Whether quotients may be made so.
__device__ __forceinline__ bool has_reciprocal(float by) { return by > 0x1p-100f && by < 0x1p100f; }

// encode(scaled), where scaled(x) is x divided by `by` or, if it is not `divide`, multiplied. What is not finite
// becomes NaN; a dynamic scale is NaN or infinite then, and the quotient is NaN by itself.
template <class Encode>
__device__ __forceinline__ auto with_scaling(float by, bool divide, Encode encode) {
  if (!divide) return encode([=](float x) { return nan_unless_finite(__fmul_rn(x, by), x); });
  if (!has_reciprocal(by)) return encode([=](float x) { return __fdiv_rn(x, by); });
  const float inverse = __frcp_rn(by);
  return encode([=](float x) { return quotient(x, by, inverse); });
}

}  // namespace moeq::sm90::w4a8
