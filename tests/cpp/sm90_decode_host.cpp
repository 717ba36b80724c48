// The decoders of the Hopper kernels behind a C interface, so that a test can run them without a GPU: what each of a
// tile's 128 threads makes of its codes and scales, in the natural order of rows and K.
#include "../../csrc/cuda/sm90/formats.cuh"
#include "../../csrc/cuda/sm90/layout.h"

namespace {

using namespace moeq::sm90;

// One term of what a thread holds; `out` is [terms][tiles][64][64].
template <class Format>
void decode_thread(const uint8_t* codes, const typename Format::Scales& scales, int thread, uint16_t* out) {
  uint32_t words[4];
  std::memcpy(words, codes + 16 * thread, sizeof(words));
  const int warp = thread / 32, g = thread % 32 / 4, c = thread % 4;
  for (int step = 0; step < 4; ++step) {
    uint32_t a[4];
    Format::decode(words[step], scales, a);
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
    const uint8_t* of_tile = codes + tile * kTileCodeBytes;
    uint16_t* to = out + tile * kTileRows * kTileK;
    for (int thread = 0; thread < 128; ++thread) {
      typename Format::ScaleWord word;
      std::memcpy(&word, scales + tile * Format::kTileScaleBytes + Format::scale_offset(thread), sizeof(word));
      decode_thread<Format>(of_tile, Format::scales(word), thread, to);
      if constexpr (Format::kTerms == 2) {
        decode_thread<Format>(of_tile, Format::rest_scales(word), thread, to + tiles * kTileRows * kTileK);
      }
    }
  }
  return Format::kAccumulatorScale;
}

}  // namespace

// bfloat16 patterns out[terms][tiles][64][64]; returns what they must be multiplied by.
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
