// NVFP4 activation quantization of one block of 16 values: the canonical algorithm, step by step.
#pragma once

#include "e2m1.cuh"
#include "e4m3.cuh"

namespace moeq {

constexpr int kNvfp4Block = 16;
constexpr float kOneSixth = 0x1.555556p-3f;          // fl(1/6), bits 0x3e2aaaab
constexpr float kNvfp4Range = kE2m1Max * kE4m3Max;   // 2688: largest value a block can hold when gscale is 1

struct BlockScale {
  uint32_t code;       // e4m3fn byte
  float quantize_by;   // r: multiplies a value before it becomes e2m1
};

// gscale (> 0) multiplies a value before quantization. `amax` is the block's largest magnitude; a NaN gives the
// scale NaN.
MOEQ_HOST_DEVICE BlockScale nvfp4_block_scale(float amax, float gscale) {
  const float sixth = multiply(amax, kOneSixth);
  // The dynamic gscale of a row below 8e-36 is infinite, and its product with a zero block would be NaN.
  const float scale = sixth == 0.0f ? 0.0f : multiply(gscale, sixth);
  const E4m3 rounded = e4m3_round(scale > kE4m3Max ? kE4m3Max : scale);
  const float product = multiply(rounded.value, reciprocal(gscale));
  // A block that underflows e4m3 is lost by contract: its codes are zeros, not 1/0.
  return {rounded.code, rounded.value == 0.0f ? 0.0f : reciprocal(product)};
}

struct Nvfp4Block {
  uint32_t codes[2];
  uint32_t scale;
};

MOEQ_HOST_DEVICE Nvfp4Block nvfp4_quantize_block(const float (&values)[kNvfp4Block], float amax, float gscale) {
  const BlockScale scale = nvfp4_block_scale(amax, gscale);
  // The factor is not negative, so signs are those of the values; and unlike those of products they are the same on
  // every machine where a product is NaN (0 times an infinite factor).
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
  return {{signs[0] | e2m1_pack8<true>(scaled), signs[1] | e2m1_pack8<true>(scaled + 8)}, scale.code};
}

}  // namespace moeq
