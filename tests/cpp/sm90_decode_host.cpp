// The decoders of the Hopper kernels behind a C interface, so that a test can run them without a GPU: what each of a
// tile's 128 threads makes of its codes and scales, in the natural order of rows and K.
#include "../../csrc/cuda/sm90/formats.cuh"
#include "../../csrc/cuda/sm90/layout.h"

namespace {

using namespace moeq::sm90;

template <class Format>
void decode_thread(const uint8_t* codes, const uint8_t* scales, int thread, uint16_t* out) {
  uint32_t words[4];
  typename Format::ScaleWord scale_word;
  std::memcpy(words, codes + 16 * thread, sizeof(words));
  std::memcpy(&scale_word, scales + Format::scale_offset(thread), sizeof(scale_word));
  const int warp = thread / 32, g = thread % 32 / 4, c = thread % 4;
  for (int step = 0; step < 4; ++step) {
    uint32_t a[4];
    Format::decode(words[step], Format::scales(scale_word), a);
    for (int i = 0; i < 4; ++i) {
      uint16_t* at = out + kTileK * (16 * warp + g + 8 * (i % 2)) + 16 * c + 4 * step + 2 * (i / 2);
      at[0] = static_cast<uint16_t>(a[i]);
      at[1] = static_cast<uint16_t>(a[i] >> 16);
    }
  }
}

template <class Format>
float decode_tiles(const uint8_t* codes, const uint8_t* scales, int64_t tiles, uint16_t* out) {
  for (int64_t tile = 0; tile < tiles; ++tile) {
    for (int thread = 0; thread < 128; ++thread) {
      decode_thread<Format>(codes + tile * kTileCodeBytes, scales + tile * Format::kTileScaleBytes, thread,
                            out + tile * kTileRows * kTileK);
    }
  }
  return Format::kAccumulatorScale;
}

}  // namespace

// bfloat16 patterns out[tiles][64][64]; returns what they must be multiplied by.
extern "C" {
float decode_nvfp4(const uint8_t* codes, const uint8_t* scales, int64_t tiles, uint16_t* out) {
  return decode_tiles<Nvfp4Format>(codes, scales, tiles, out);
}
float decode_mxfp4(const uint8_t* codes, const uint8_t* scales, int64_t tiles, uint16_t* out) {
  return decode_tiles<Mxfp4Format>(codes, scales, tiles, out);
}
float decode_int4_per_32(const uint8_t* codes, const uint8_t* scales, int64_t tiles, uint16_t* out) {
  return decode_tiles<Int4Format<32>>(codes, scales, tiles, out);
}
float decode_int4_per_64(const uint8_t* codes, const uint8_t* scales, int64_t tiles, uint16_t* out) {
  return decode_tiles<Int4Format<64>>(codes, scales, tiles, out);
}
float decode_int4_zero(const uint8_t* codes, const uint8_t* scales, int64_t tiles, uint16_t* out) {
  return decode_tiles<Int4ZeroFormat>(codes, scales, tiles, out);
}
}
