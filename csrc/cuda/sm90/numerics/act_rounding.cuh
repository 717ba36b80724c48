// Activations as bfloat16 operands: rounded to e4m3 and to NVFP4, codes, and values of codes, which are exact; and
// float16 ones.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../nvfp4_block.cuh"
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

namespace moeq::sm90 {

// Activations rounded to e4m3, as values: those of codes are exact in bfloat16.

// How values become those of codes.
struct Rounding {
  float by;       // they are divided by it (`divide`) or multiplied
  float within;   // the values of codes are multiplied by it: of mxfp8, a power of two; else 1
  float factor;   // sums of their products are: of mxfp8 1
  bool divide;
};

__device__ __forceinline__ Rounding dynamic_rounding(uint32_t amax) {
  const float scale = w4a8::scale_of(__uint_as_float(amax));
  return {scale, 1.0f, scale, true};
}

__device__ __forceinline__ Rounding given_rounding(float gscale) { return {gscale, 1.0f, reciprocal(gscale), false}; }

// 2^(byte - 127).
__device__ __forceinline__ float power_of_byte(uint32_t byte) {
  return __uint_as_float(byte == 0 ? 1u << 22 : byte << 23);
}

// Of a block of 32: the power of two next to fl(amax / 448), not below it; NaN where amax is not finite.
__device__ __forceinline__ Rounding mx_rounding(float amax) {
  if (!(amax <= 0x1.fffffep127f)) {
    const float nan = __uint_as_float(0x7fffffffu);
    return {nan, nan, 1.0f, false};
  }
  const uint32_t bits = __float_as_uint(__fdiv_rn(amax, w4a8::kMaxCode));
  const uint32_t byte = bits <= 1u << 22 ? 0 : (bits + 0x7fffff) >> 23;
  return {power_of_byte(254 - byte), power_of_byte(byte), 1.0f, false};
}

// Values of four codes, which float16 holds.
__device__ __forceinline__ uint2 decode4_to_half(uint32_t codes) {
  uint2 values;
  asm("{ .reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high; }"
      : "=r"(values.x), "=r"(values.y)
      : "r"(codes));
  return values;
}

__device__ __forceinline__ float4 decode4(uint32_t codes) {
  const uint2 values = decode4_to_half(codes);
  const float2 a = __half22float2(reinterpret_cast<const __half2&>(values.x));
  const float2 b = __half22float2(reinterpret_cast<const __half2&>(values.y));
  return make_float4(a.x, a.y, b.x, b.y);
}

// The nearest values of codes.
__device__ __forceinline__ float2 round_two_to_e4m3(float a, float b) {
  uint32_t both;
  asm("{ .reg .b16 codes;\n"
      "cvt.rn.satfinite.e4m3x2.f32 codes, %2, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, codes; }"
      : "=r"(both)
      : "f"(a), "f"(b));
  return __half22float2(reinterpret_cast<const __half2&>(both));
}

// Multiples of four values.
template <int count>
__device__ __forceinline__ void round_to_e4m3(float (&values)[count], const Rounding& rounding) {
  struct Codes {
    uint32_t words[count / 4];
  };
  const Codes codes = w4a8::with_scaling(rounding.by, rounding.divide, [&](auto scaled) {
    Codes made;
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      made.words[i / 4] =
          w4a8::encode4(scaled(values[i]), scaled(values[i + 1]), scaled(values[i + 2]), scaled(values[i + 3]));
    }
    return made;
  });
#pragma unroll
  for (int i = 0; i < count; i += 4) {
    const float4 four = decode4(codes.words[i / 4]);
    values[i] = four.x * rounding.within;
    values[i + 1] = four.y * rounding.within;
    values[i + 2] = four.z * rounding.within;
    values[i + 3] = four.w * rounding.within;
  }
}

// NVFP4 by the canonical algorithm, to values: code * block scale.
struct BlockFactors {
  float quantize_by;   // multiplies a value before it becomes e2m1
  float step;          // the block scale: multiplies e2m1
};

__device__ __forceinline__ BlockFactors block_factors(float amax, float gscale) {
  const BlockScale scale = nvfp4_block_scale(amax, gscale);
  return {scale.quantize_by, scale.value};
}

// The e2m1 value nearest to |y|, ties to even: its steps are half a power of two, at least a half. Adding and taking
// off 1.5 * 2^22 times that power rounds to them. NaN comes out as 6, and its block's step is NaN.
__device__ __forceinline__ float rounded_e2m1(float y) {
  const uint32_t power = max(bits_of(y) & 0x7F800000u, 0x3F800000u);
  const float shift = float_of(power + 0x0B400000u);
  return fminf(__fadd_rn(__fadd_rn(fabsf(y), shift), -shift), kE2m1Max);
}

__device__ __forceinline__ float quantized_value(float value, BlockFactors block) {
  return copysignf(rounded_e2m1(multiply(value, block.quantize_by)) * block.step, value);
}

// 16 values -> code * block scale.
__device__ __forceinline__ void quantize(float (&values)[16], float gscale) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; i++) amax = max_magnitude(amax, values[i]);
  const BlockFactors block = block_factors(amax, gscale);
#pragma unroll
  for (int i = 0; i < 16; i++) values[i] = quantized_value(values[i], block);
}

// Float16 hidden states, for kernels whose operands are bfloat16: a float16 has 11 bits, and is the sum of two
// bfloat16, the nearest one and what that leaves, exactly. So a token is two rows of an operand, and the sum of their
// products is the token's. Weights are those of bfloat16 hidden states, of any range.

constexpr float kHalfMax = 65504.0f;

// What the nearest bfloat16 of a float16's value leaves. Infinities and NaN are in the first part alone.
__device__ __forceinline__ float rest_of_half(float x) {
  return fabsf(x) <= kHalfMax ? x - __bfloat162float(__float2bfloat16_rn(x)) : 0.0f;
}

// To the nearest float16, and back.
__device__ __forceinline__ float round_to_half(float x) { return __half2float(__float2half_rn(x)); }

// The values of two bfloat16, or float16, of a word.
__device__ __forceinline__ float2 widen_two(uint32_t word, bool half) {
  if (half) return __half22float2(reinterpret_cast<const __half2&>(word));
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

// Two float16 of a word as two of the nearest bfloat16, and two of what these leave.
struct TwoParts {
  uint32_t first, rest;
};

__device__ __forceinline__ TwoParts parts_of(uint32_t halves) {
  const float2 x = widen_two(halves, true);
  const __nv_bfloat162 first = __floats2bfloat162_rn(x.x, x.y);
  const __nv_bfloat162 rest = __floats2bfloat162_rn(rest_of_half(x.x), rest_of_half(x.y));
  return {reinterpret_cast<const uint32_t&>(first), reinterpret_cast<const uint32_t&>(rest)};
}

}  // namespace moeq::sm90
