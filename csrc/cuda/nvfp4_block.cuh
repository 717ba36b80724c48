// NVFP4 activation quantization of one block of 16 values: the canonical algorithm, step by step.
#pragma once

#include "e2m1.cuh"
#include "e4m3.cuh"

namespace moeq {

constexpr int kNvfp4Block = 16;
constexpr float kOneSixth = 0x1.555556p-3f;          // fl(1/6), bits 0x3e2aaaab
constexpr float kNvfp4Range = kE2m1Max * kE4m3Max;   // 2688: largest value a block can hold when gscale is 1
constexpr float kMaxGscale = 0x1p118f;   // of dynamic ones: no reciprocal below overflows with it
constexpr float kLargestFloat = 0x1.fffffep127f;

// min(fl(2688 / amax), 2^118) of a row; 1 for zeros, NaN where amax is NaN or infinite. Magnitudes are compared as
// bits, whose order is the same, with NaN above infinity.
MOEQ_HOST_DEVICE float nvfp4_dynamic_gscale(uint32_t amax_bits) {
  if (amax_bits == 0) {
    return 1.0f;
  }
  const float amax = float_of(amax_bits);
  return nan_unless_finite(min_or_nan(divide(kNvfp4Range, amax), kMaxGscale), amax);
}

struct BlockScale {
  uint32_t code;       // e4m3fn byte
  float value;         // of that
  float quantize_by;   // r: multiplies a value before it becomes e2m1
};

// gscale (> 0) multiplies a value before quantization. `amax` is the block's largest magnitude; NaN or infinity gives
// the scale NaN, and so does a NaN gscale.
MOEQ_HOST_DEVICE BlockScale nvfp4_block_scale(float amax, float gscale) {
  const float scale = min_or_nan(multiply(gscale, multiply(amax, kOneSixth)), kE4m3Max);
  const E4m3 rounded = e4m3_round(nan_unless_finite(scale, amax));
  const float product = multiply(rounded.value, reciprocal(gscale));
  // A block that underflows e4m3 is lost by contract: its codes are zeros, not 1/0.
  return {rounded.code, rounded.value, rounded.value == 0.0f ? 0.0f : min_or_nan(reciprocal(product), kLargestFloat)};
}

struct Nvfp4Block {
  uint32_t codes[2];
  uint32_t scale;
};

MOEQ_HOST_DEVICE Nvfp4Block nvfp4_quantize_block(const float (&values)[kNvfp4Block], float amax, float gscale) {
  const BlockScale scale = nvfp4_block_scale(amax, gscale);
  // The factor is not negative, so signs are those of the values.
  const uint32_t signs[2] = {sign_nibbles(values), sign_nibbles(values + 8)};
  float scaled[kNvfp4Block];
  MOEQ_UNROLL
  for (int i = 0; i < kNvfp4Block; ++i) {
    scaled[i] = fabsf(multiply(values[i], scale.quantize_by));
  }
  // Rounding is monotone, so the block's largest scaled magnitude is that of its largest value. It needs saturation
  // only where the block scale was rounded down far (subnormal) or saturated itself; a NaN takes that branch too.
  if (multiply(amax, scale.quantize_by) < kE2m1SafeBelow) {
    return {{signs[0] | e2m1_pack8<false>(scaled), signs[1] | e2m1_pack8<false>(scaled + 8)}, scale.code};
  }
  const uint32_t kept = scale.code == kE4m3Nan ? 0u : ~0u;   // all codes of a NaN block are 7
  return {{(signs[0] & kept) | e2m1_pack8<true>(scaled), (signs[1] & kept) | e2m1_pack8<true>(scaled + 8)}, scale.code};
}

}  // namespace moeq
