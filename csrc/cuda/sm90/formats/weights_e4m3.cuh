// e4m3 weights -> bfloat16, by placing bits. Exact, but for NaN, which prepare refuses.
#pragma once
#include "../numerics/bf16x2.cuh"

namespace moeq::sm90 {

// Four codes, in their order: the first two and the last two.
struct E4m3Halves {
  uint32_t first, second;
};

constexpr uint32_t kRaiseE4m3 = 0x7B807B80u;   // 2^120, twice
// A block's power of two is raised by less, so that up to 2^33 it has a bfloat16; sums of products lack the rest.
constexpr uint32_t kRaiseMxfp8 = 94;
constexpr float kMxfp8AccumulatorScale = 0x1p26f;

// Two neighbouring codes of four, `second`: the last two, each below eight times its sign. (__byte_perm leaves out the
// selector's bits that ask for signs.)
MOEQ_HOST_DEVICE uint32_t signed_bytes(uint32_t codes, bool second) {
#if defined(__CUDA_ARCH__)
  uint32_t r;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(codes), "r"(second ? 0xB3A2u : 0x9180u));
  return r;
#else
  const uint32_t low = codes >> (second ? 16 : 0) & 0xFF, high = codes >> (second ? 24 : 8) & 0xFF;
  return low | (low & 0x80 ? 0xFF00u : 0) | high << 16 | (high & 0x80 ? 0xFF000000u : 0);
#endif
}

// A code's exponent and mantissa lie at the same places of bfloat16's lower ends, so that moved there a code, a
// subnormal one, too, is worth 2^-120 of its value. A shift leaves signs where they belong. `raise`: what codes are
// multiplied by, in both halves.
MOEQ_HOST_DEVICE E4m3Halves decode_e4m3_in_order(uint32_t codes, uint32_t raise) {
  constexpr uint32_t kBits = 0x87F087F0u;
  return {mul_bf16x2(signed_bytes(codes, false) << 4 & kBits, raise),
          mul_bf16x2(signed_bytes(codes, true) << 4 & kBits, raise)};
}

// What codes of a thread's two rows are multiplied by.
struct Raises {
  uint32_t low, high;
};

// From the exponents of both rows, the first one in the lowest bits.
MOEQ_HOST_DEVICE Raises raises_of(uint32_t exponents) {
  constexpr uint32_t kRaise = kRaiseMxfp8 << 7 | kRaiseMxfp8 << 23;
  return {pick_bytes(exponents, 0, 0x4040) * 128u + kRaise, pick_bytes(exponents, 0, 0x4141) * 128u + kRaise};
}

// Where thread t of a tile's 128 finds them, in the 128 bytes of a half.
MOEQ_HOST_DEVICE int exponents_offset(int t) { return t / 4 * 4 + t % 4 / 2 * 2; }

// Where lane l of a warp's ldmatrix finds its row, l % 8, of matrix l / 8 in 8 rows of 128 bytes of the layout
// (w4a8_layout.h): the first half's; the second one's at 64 more or less (^). Words of a thread are then codes of its
// 16 values of K, in their order.
MOEQ_HOST_DEVICE int matrix_row(int lane) { return lane % 8 * 128 + ((lane / 8) ^ (lane % 8)) * 16; }

}  // namespace moeq::sm90
