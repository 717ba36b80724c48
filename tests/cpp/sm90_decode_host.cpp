// The decoders of the Hopper kernels behind a C interface, so that a test can run them without a GPU: what each of a
// tile's 128 threads makes of its codes and scales, in the natural order of rows and K.
#include "../../csrc/cuda/sm90/formats/weights_int8.cuh"
#include "../../csrc/cuda/sm90/formats/formats.cuh"
#include "../../csrc/cuda/sm90/layout/layout.h"

namespace {

using namespace moeq::sm90;

// What a thread holds; `out` is [tiles][64][64].
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
    }
  }
  return Format::kAccumulatorScale;
}

// What sums of products with a tile are multiplied by, out[tiles][64].
template <class Format>
void factors_of_sums(const uint8_t* scales, int64_t tiles, float* out) {
  for (int64_t row = 0; row < 32 * tiles; ++row) {
    const int thread = row % 32 * 4;
    typename Format::ScaleWord words;
    std::memcpy(&words, scales + row / 32 * Format::kTileScaleBytes + Format::scale_offset(thread), sizeof(words));
    const typename Format::Factors factors = Format::factors(words);
    float* of_tile = out + row / 32 * kTileRows + thread / 32 * 16 + thread % 32 / 4;
    of_tile[0] = factors.low;
    of_tile[8] = factors.high;
  }
}

// Values in the order of K, times powers of two of 32 values (or 1, without exponents): what thread t of a tile's
// 128 gets of half of its K, into its rows of [row][128].
void decode_byte_thread(const uint8_t* codes, const uint8_t* exponents, bool is_int8, int half, int t, uint16_t* out) {
  const int warp = t / 32, g = t % 32 / 4, c = t % 4;
  Raises raise = {kRaiseE4m3, kRaiseE4m3};
  if (exponents != nullptr) {
    uint16_t both;
    std::memcpy(&both, exponents + 128 * half + exponents_offset(t), sizeof(both));
    raise = raises_of(both);
  }
  for (int row = 0; row < 16; row += 8) {
    for (int m = 0; m < 4; ++m) {
      uint32_t word;
      std::memcpy(&word, codes + 128 * (16 * warp + row) + (matrix_row(8 * m + g) ^ 64 * half) + 4 * c, sizeof(word));
      const E4m3Halves pairs =
          is_int8 ? decode_int8_in_order(word) : decode_e4m3_in_order(word, row == 0 ? raise.low : raise.high);
      uint16_t* at = out + 128 * (16 * warp + row + g) + 64 * half + 16 * c + 4 * m;
      for (int i = 0; i < 2; ++i) {
        at[i] = static_cast<uint16_t>(pairs.first >> 16 * i);
        at[2 + i] = static_cast<uint16_t>(pairs.second >> 16 * i);
      }
    }
  }
}

}  // namespace

// Tiles of 64 rows by 128 values of K, e4m3 with 256 bytes of exponents each or none, or int8 -> bfloat16 patterns
// out[tiles][64 rows: warp 4, h 2, g 8][128]; returns what they must be multiplied by.
extern "C" float decode_byte_tiles(const uint8_t* codes, const uint8_t* exponents, bool is_int8, int64_t tiles,
                                   uint16_t* out) {
  for (int64_t tile = 0; tile < tiles; ++tile) {
    for (int thread = 0; thread < 256; ++thread) {
      decode_byte_thread(codes + 8192 * tile, exponents == nullptr ? nullptr : exponents + 256 * tile, is_int8,
                         thread / 128, thread % 128, out + 8192 * tile);
    }
  }
  return is_int8 ? kInt8AccumulatorScale : exponents == nullptr ? 1.0f : kMxfp8AccumulatorScale;
}

// bfloat16 patterns, or (half) float16 ones, out[tiles][64][64]; returns what they must be multiplied by.
extern "C" {
float decode_nvfp4(const uint8_t* codes, const uint8_t* scales, int64_t tiles, uint16_t* out) {
  return decode_tiles<Nvfp4Format>(codes, scales, tiles, out);
}
float decode_nvfp4_half(const uint8_t* codes, const uint8_t* scales, int64_t tiles, uint16_t* out) {
  return decode_tiles<Nvfp4HalfFormat>(codes, scales, tiles, out);
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
  return decode_tiles<Int4ZeroFormat<true>>(codes, scales, tiles, out);
}
float decode_int4_zero_bf16(const uint8_t* codes, const uint8_t* scales, int64_t tiles, uint16_t* out) {
  return decode_tiles<Int4ZeroFormat<false>>(codes, scales, tiles, out);
}
float decode_int4_zero_per_32(const uint8_t* codes, const uint8_t* scales, int64_t tiles, uint16_t* out) {
  return decode_tiles<Int4ZeroFormat<true, 32>>(codes, scales, tiles, out);
}
float decode_int4_float(const uint8_t* codes, const uint8_t* scales, int64_t tiles, uint16_t* out) {
  return decode_tiles<Int4FloatFormat>(codes, scales, tiles, out);
}
float decode_int4_float_sums(const uint8_t* codes, const uint8_t* scales, int64_t tiles, uint16_t* out) {
  return decode_tiles<Int4FloatSumsFormat>(codes, scales, tiles, out);
}
float decode_int4_sums(const uint8_t* codes, const uint8_t* scales, int64_t tiles, uint16_t* out) {
  return decode_tiles<Int4SumsFormat>(codes, scales, tiles, out);
}
void int4_sums_factors(const uint8_t* scales, int64_t tiles, float* out) {
  factors_of_sums<Int4SumsFormat>(scales, tiles, out);
}
void int4_float_sums_factors(const uint8_t* scales, int64_t tiles, float* out) {
  factors_of_sums<Int4FloatSumsFormat>(scales, tiles, out);
}
}
