// e4m3 weights -> bfloat16, by placing bits. Exact, but for NaN, which prepare refuses.
#pragma once
#include "../numerics/bf16x2.cuh"

namespace moeq::sm90 {

// Four codes: the first and the third, and the second and the fourth.
struct E4m3Pairs {
  uint32_t even, odd;
};

// A code's exponent and mantissa lie at the same places of both numbers' lower ends, so that moved there a code, a
// subnormal one, too, is worth 2^-120 of its value.
MOEQ_HOST_DEVICE E4m3Pairs decode_e4m3(uint32_t codes) {
  constexpr uint32_t kSigns = 0x80008000u, kMagnitudes = 0x07F007F0u, kRaise = 0x7B807B80u;   // 2^120, twice
  const uint32_t even = (codes << 8 & kSigns) | (codes << 4 & kMagnitudes);
  const uint32_t odd = (codes & kSigns) | (codes >> 4 & kMagnitudes);
  return {mul_bf16x2(even, kRaise), mul_bf16x2(odd, kRaise)};
}

// Where lane l of a warp's ldmatrix finds its row, l % 8, of matrix l / 8 in 8 rows of 128 bytes of the layout
// (w4a8_layout.h): the first half's; the second one's at 64 more or less (^). Words of a thread are then codes of its
// 16 values of K, in their order.
MOEQ_HOST_DEVICE int matrix_row(int lane) { return lane % 8 * 128 + ((lane / 8) ^ (lane % 8)) * 16; }

}  // namespace moeq::sm90
