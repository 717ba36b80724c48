// NVFP4 and MXFP4 weights of the tiled layout -> fragments of bfloat16, by placing bits. Exact: e2m1 times e4m3 needs
// six bits, times an exponent fewer.
#pragma once
#include "../../../generated/sm90.h"
#include "../numerics/bf16x2.cuh"

namespace moeq::sm90 {

// The two scale bytes of a thread's tile (byte h: row g + 8 * h) -> {s, s} in bfloat16.
MOEQ_HOST_DEVICE uint32_t scale_pair(uint32_t bytes, int h) {
  return pick_bytes(bytes, 0, h ? 0x4141 : 0x4040) * 16u + 0x60006000u;
}

// The eight codes of one thread in one K-step, with the scales of its two rows -> the four registers of its fragment.
MOEQ_HOST_DEVICE void decode_step(uint32_t w, uint32_t scale_low_row, uint32_t scale_high_row, uint32_t (&a)[4]) {
  constexpr uint32_t kCode = 0x81C081C0u;
  a[0] = mul_bf16x2((w << 6) & kCode, scale_low_row);
  a[1] = mul_bf16x2((w << 2) & kCode, scale_high_row);
  a[2] = mul_bf16x2(rotate_right(w, 4) & kCode, scale_low_row);
  a[3] = mul_bf16x2((w ^ (w >> 8)) & kCode, scale_high_row);
}

// See formats.cuh for what the members of a format are.
struct Nvfp4Format {
  static constexpr int kTileScaleBytes = tile_scale_bytes(Format::kNvfp4);
  static constexpr float kAccumulatorScale = 0x1p38f;   // codes come out as 2^-126 of their value, scales as 2^88
  using ScaleWord = uint16_t;

  struct Scales {
    uint32_t low, high;   // {s, s} of rows g and g + 8
  };

  MOEQ_HOST_DEVICE static int scale_offset(int thread) { return 2 * thread; }

  MOEQ_HOST_DEVICE static Scales scales(ScaleWord bytes) { return {scale_pair(bytes, 0), scale_pair(bytes, 1)}; }

  MOEQ_HOST_DEVICE static void decode(uint32_t word, const Scales& s, uint32_t (&a)[4]) {
    decode_step(word, s.low, s.high, a);
  }
};

// MXFP4 weights of the tiled layout -> fragments of bfloat16. Codes as those of NVFP4; a scale is an exponent, so that
// every product is exact.
struct Mxfp4Format {
  static constexpr int kTileScaleBytes = tile_scale_bytes(Format::kMxfp4);
  static constexpr float kAccumulatorScale = 0x1p32f;   // codes come out as 2^-126 of their value, scales as 2^94
  using ScaleWord = uint16_t;
  using Scales = Nvfp4Format::Scales;

  // Two neighbouring threads have the same 32 values of K.
  MOEQ_HOST_DEVICE static int scale_offset(int thread) { return thread / 2 * 2; }

  MOEQ_HOST_DEVICE static Scales scales(ScaleWord bytes) {
    constexpr uint32_t kRaise = 94u << 7 | 94u << 23;
    return {pick_bytes(bytes, 0, 0x4040) * 128u + kRaise, pick_bytes(bytes, 0, 0x4141) * 128u + kRaise};
  }

  MOEQ_HOST_DEVICE static void decode(uint32_t word, const Scales& s, uint32_t (&a)[4]) {
    decode_step(word, s.low, s.high, a);
  }
};

}  // namespace moeq::sm90
