// Activation rows become GEMM operands. Codes are never stored: a quantized element times its block
// scale is exact in bf16 for every format, so the operand holds that product.
#pragma once

#include "isa.h"
#include "vec.h"

namespace moeq::cpu::MOEQ_ISA {

MOEQ_INLINE float row_max(const float* values, int64_t size) {
  Vec best{};
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) best = at_least(best, abs(load(values + i)));
  float result = max_lane(best);
  for (; i < size; ++i) {
    const float magnitude = values[i] < 0 ? -values[i] : values[i];
    result = magnitude > result ? magnitude : result;
  }
  return result;
}

// Stores sixteen operand elements; bf16 operands are exact, so their low halves are zero.
MOEQ_INLINE void store_operand(const RowCall& call, int64_t k, Vec v) {
  if (call.bf16_operand) {
    store_bf16_bits(static_cast<uint16_t*>(call.operand) + k, high_halves(v));
  } else {
    store(static_cast<float*>(call.operand) + k, v);
  }
}

MOEQ_INLINE Vec load_padded(const RowCall& call, int64_t k) {
  if (k + 16 <= call.size) return load(call.values + k);
  Vec v{};
  for (int64_t i = k; i < call.size; ++i) v[i - k] = call.values[i];
  return v;
}

// sign(y) * round(min(|y|, max)) in the element format.
MOEQ_INLINE Vec round_element(Vec y, float max, int mantissa, int min_exponent) {
  return with_sign(round_small_float(at_most(abs(y), splat(max)), mantissa, min_exponent), y);
}

MOEQ_INLINE Vec round_e2m1(Vec y) { return round_element(y, 6.0f, 1, 0); }
MOEQ_INLINE Vec round_e4m3(Vec y) { return round_element(y, 448.0f, 3, -6); }

// One block of NVFP4: `inverse` is fl(1 / gscale). The two products and the two reciprocals are
// each rounded, in this order; that is what makes the codes reproducible.
MOEQ_INLINE Vec nvfp4_block(Vec x, float gscale, float inverse) {
  constexpr float kSixth = 1.0f / 6.0f;  // 0x3E2AAAAB
  float s = gscale * (max_lane(abs(x)) * kSixth);
  s = s > 448.0f ? 448.0f : s;
  const float scale = lane_round_small_float(s, 3, -6);
  const float reciprocal = scale == 0.0f ? 0.0f : 1.0f / (scale * inverse);
  return round_e2m1(x * splat(reciprocal)) * splat(scale);
}

MOEQ_INLINE void quantize_nvfp4(const RowCall& call) {
  const bool dynamic = call.quant->gscale == nullptr;
  float gscale = call.gscale;
  if (dynamic) {
    const float amax = row_max(call.values, call.size);
    gscale = amax == 0.0f ? 1.0f : 2688.0f / amax;
  }
  const float inverse = 1.0f / gscale;
  *call.row_scale = dynamic ? inverse : 1.0f;
  for (int64_t k = 0; k < call.padded_size; k += 16) {
    store_operand(call, k, nvfp4_block(load_padded(call, k), gscale, inverse));
  }
}

// Only rounded, to the dtype of the activations.
MOEQ_INLINE void round_row(const RowCall& call) {
  *call.row_scale = 1.0f;
  for (int64_t k = 0; k < call.padded_size; k += 16) {
    store_operand(call, k, round_to(load_padded(call, k), call.quant->dtype));
  }
}

inline void quantize_row(const RowCall& call) {
  switch (call.quant->format) {
    case ActFormat::kNvfp4:
      return quantize_nvfp4(call);
    default:
      return round_row(call);
  }
}

inline void load_row(const uint8_t* row, DType dtype, int64_t size, const float* weight, float* values) {
  if (dtype == DType::kFloat32) {
    std::memcpy(values, row, (size_t)size * sizeof(float));
  } else {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(row);
    int64_t i = 0;
    if (dtype == DType::kBFloat16) {
      for (; i + 16 <= size; i += 16) store(values + i, bf16_to_float(halves + i));
    }
    for (; i < size; ++i) {
      const uint32_t word = (uint32_t)halves[i] << 16;
      if (dtype == DType::kBFloat16) std::memcpy(values + i, &word, sizeof(word));
      if (dtype == DType::kFloat16) values[i] = half_to_float(halves[i]);
    }
  }
  if (weight == nullptr) return;
  for (int64_t i = 0; i < size; ++i) values[i] = round_to(splat(values[i] * *weight), dtype)[0];
}

inline void load_packed_row(const uint8_t* codes, const uint8_t* scales, ActFormat, int64_t size, bool bf16_operand,
                            void* operand, float* row_scale) {
  static const float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                  -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  RowCall call{};
  call.bf16_operand = bf16_operand;
  call.operand = operand;
  *row_scale = 1.0f;
  for (int64_t k = 0; k < size; k += 16) {
    Vec v;
    for (int i = 0; i < 16; ++i) v[i] = kE2m1[(codes[(k + i) / 2] >> (4 * (i & 1))) & 15];
    store_operand(call, k, v * splat(e4m3_to_float(scales[k / 16])));
  }
}

}  // namespace moeq::cpu::MOEQ_ISA
