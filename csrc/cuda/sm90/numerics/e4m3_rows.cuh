// Rows of float32 values rounded to e4m3, eight values of a row at a time.
#pragma once
#include "bf16x2.cuh"
#include "e4m3_round.cuh"

namespace moeq::sm90 {

// How a row is rounded, worked out once for all of it.
struct RowRounding {
  Rounding rounding;
  float inverse;   // of what values are divided by; 0: not to be used
};

__device__ __forceinline__ RowRounding with_inverse(const Rounding& rounding) {
  const bool fast = rounding.divide && w4a8::has_reciprocal(rounding.by);
  return {rounding, fast ? __frcp_rn(rounding.by) : 0.0f};
}

// Eight values, as bfloat16.
__device__ __forceinline__ uint4 rounded_eight(const float2 (&v)[4], const RowRounding& how) {
  const auto encode = [&](auto scaled) {
    return make_uint2(w4a8::encode4(scaled(v[0].x), scaled(v[0].y), scaled(v[1].x), scaled(v[1].y)),
                      w4a8::encode4(scaled(v[2].x), scaled(v[2].y), scaled(v[3].x), scaled(v[3].y)));
  };
  uint2 codes;
  if (how.inverse != 0.0f) {
    codes = encode([&](float x) { return w4a8::quotient(x, how.rounding.by, how.inverse); });
  } else {
    codes = w4a8::with_scaling(how.rounding.by, how.rounding.divide, encode);
  }
  const float4 a = decode4(codes.x), b = decode4(codes.y);
  return make_uint4(pack_bf16(a.x, a.y), pack_bf16(a.z, a.w), pack_bf16(b.x, b.y), pack_bf16(b.z, b.w));
}

// Where a GEMM1 leaves an intermediate that is rounded row by row: [columns / 32, rows, 32], pieces of 16 bytes
// swizzled by the row. Of the pair of neighbours `pair` (0 to 7) of the `sixteen`-th (0, 1) 16 values of 32: an offset
// in bytes.
__device__ __forceinline__ int wide_pair_offset(int row_in_eight, int sixteen, int pair) {
  return ((sixteen * 4 + pair / 2) ^ row_in_eight) * 16 + pair % 2 * 8;
}

}  // namespace moeq::sm90
