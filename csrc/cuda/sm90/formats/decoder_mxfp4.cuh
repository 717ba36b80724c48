// MXFP4 weights of the tiled layout -> fragments of bfloat16. Codes as those of NVFP4; a scale is an exponent, so that
// every product is exact.
#pragma once
#include "decoder_nvfp4.cuh"

namespace moeq::sm90 {

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
