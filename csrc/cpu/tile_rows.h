// Operand rows for weights that tiles hold divided by 2^112.
#pragma once

#include "isa.h"
#include "vec.h"

namespace moeq::cpu::MOEQ_ISA {

// Multiplies a bf16 row by the power of two that brings its largest magnitude to 2^112..2^113, so that no product with
// a small weight becomes subnormal, and its row_scale by what is then owed for row and weights together. What falls
// below 2^-126, 2^-238 of the largest, is zero. A row that is not finite stays as it is.
inline void normalize_row(const RowCall& call) {
  constexpr int kExponent = 0x7f80;
  constexpr int kInfinite = 255 << 7;
  constexpr int kTarget = (112 + 127) << 7;
  uint16_t* row = static_cast<uint16_t*>(call.operand);
  int largest = 0;
  for (int64_t k = 0; k < call.padded_size; ++k) {
    const int exponent = row[k] & kExponent;
    largest = exponent > largest ? exponent : largest;
  }
  if (largest == kInfinite) return;
  const int shift = kTarget - largest;
  for (int64_t k = 0; k < call.padded_size; ++k) {
    const int exponent = row[k] & kExponent;
    const bool is_normal = exponent != 0 && exponent + shift > 0;
    row[k] = static_cast<uint16_t>(is_normal ? row[k] + shift : 0);
  }
  if (largest == 0) return;
  const uint32_t bits = static_cast<uint32_t>(largest) << 16;  // 2^-112 of the factor is owed by the weights
  float factor;
  std::memcpy(&factor, &bits, sizeof(factor));
  *call.row_scale *= factor;
}

}  // namespace moeq::cpu::MOEQ_ISA
