// Rows of hidden states as they come: floats to float32, or codes to operands.
#pragma once

#include "isa.h"
#include "quantize.h"
#include "vec.h"

namespace moeq::cpu::MOEQ_ISA {

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

MOEQ_INLINE float packed_element(ActFormat format, const uint8_t* codes, int64_t k) {
  static const float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                  -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  switch (format) {
    case ActFormat::kNvfp4:
    case ActFormat::kMxfp4:
      return kE2m1[codes[k / 2] >> (4 * (k & 1)) & 15];
    case ActFormat::kInt8:
      return (float)(int8_t)codes[k];
    default:
      return e4m3_to_float(codes[k]);
  }
}

// The scale of the 16 elements from k on.
MOEQ_INLINE float packed_block_scale(ActFormat format, const uint8_t* scales, int64_t k) {
  if (format == ActFormat::kNvfp4) return e4m3_to_float(scales[k / 16]);
  return scales[k / 32] == 255 ? __builtin_nanf("") : power_of_two((int)scales[k / 32] - 127);
}

// nvfp4 and mx codes: block scales as the operand takes them. fp8, int8: float32 scales, kept apart.
inline void load_packed_row(const RowCall& call, const uint8_t* codes, const uint8_t* scales) {
  const ActFormat format = call.quant->format;
  const bool apart = format == ActFormat::kFp8 || format == ActFormat::kInt8;
  *call.row_scale = 1.0f;
  if (apart && call.quant->group > 0) {
    const int64_t groups = (call.size + call.quant->group - 1) / call.quant->group;
    std::memcpy(call.group_scales, scales, (size_t)groups * sizeof(float));
  } else if (apart) {
    std::memcpy(call.row_scale, scales, sizeof(float));
  }
  for (int64_t k = 0; k < call.padded_size; k += 16) {
    Vec v{};
    const int64_t count = call.size - k < 16 ? call.size - k : 16;
    for (int64_t i = 0; i < count; ++i) v[i] = packed_element(format, codes, k + i);
    if (apart) {
      store_operand(call, k, v);
    } else {
      store_block(call, k, v, packed_block_scale(format, scales, k));
    }
  }
}

}  // namespace moeq::cpu::MOEQ_ISA
