// INT4 weights of the layout of 4-bit weights (layout.h) -> e4m3 fragments, without their scales.
//
// Up to its fifth bit, the pattern n of an e4m3 number is worth n * 2^-9 (subnormal numbers, and the first normal
// ones). So a magnitude of code minus zero point, at most 15, is a number already, and exact. Scales multiply sums over
// 128 of K.
//
// Masks take the four codes of a row out of a word, K in the order 0, 2, 1, 3: the token operand has its bytes so.
#pragma once
#include "../device/async.cuh"
#include "../w4a8/w4a8_shared.cuh"
#include "formats.cuh"

namespace moeq::sm90::w4a8 {

// The scales of a thread's two rows, float32, times 2^9, which codes lack.
struct RowScales {
  float low, high;
};

// Codes of row g of a word, and of row g + 8, in the lower halves of bytes.
__device__ __forceinline__ uint32_t codes_of_row(uint32_t word) { return word & 0x0F0F0F0Fu; }
__device__ __forceinline__ uint32_t codes_below(uint32_t word) { return word >> 4 & 0x0F0F0F0Fu; }

// Signs and magnitudes of the differences of codes and zero points; those whose byte of `not_negative` has its upper
// bit are not negative.
__device__ __forceinline__ uint32_t differences(uint32_t codes, uint32_t points, uint32_t not_negative) {
  return __vabsdiffu4(codes, points) | (~not_negative & 0x80808080u);
}

// Scales in the layout are multiplied by 2^112 or, in the row eight below, by 2^108.
constexpr float kLowerScale = 0x1p-103f, kLowerScaleBelow = 0x1p-99f;

// bfloat16 scales, zero point 8.
struct PackedInt4 {
  static constexpr bool kInt4 = true;
  static constexpr int kScaleBytes = tile_scale_bytes(Format::kInt4Per64);
  RowScales scales;

  // A code's upper bit says that it is not negative.
  __device__ __forceinline__ uint32_t low(uint32_t word) const {
    return differences(codes_of_row(word), 0x08080808u, word << 4);
  }
  __device__ __forceinline__ uint32_t high(uint32_t word) const {
    return differences(codes_below(word), 0x08080808u, word);
  }

  __device__ __forceinline__ PackedInt4(const uint8_t* tile_scales, int thread) {
    const uint32_t both = *reinterpret_cast<const uint32_t*>(tile_scales + thread / 4 * 4);
    scales = {__uint_as_float(both << 16) * kLowerScale, __uint_as_float(both & 0xFFFF0000u) * kLowerScaleBelow};
  }
};

// bfloat16 or float16 scales, and zero points.
struct PackedInt4Zero {
  static constexpr bool kInt4 = true;
  static constexpr int kScaleBytes = tile_scale_bytes(Format::kInt4Zero);
  RowScales scales;

  __device__ __forceinline__ uint32_t low(uint32_t word) const { return of(codes_of_row(word), low_points); }
  __device__ __forceinline__ uint32_t high(uint32_t word) const { return of(codes_below(word), high_points); }

  __device__ __forceinline__ PackedInt4Zero(const uint8_t* tile_scales, int thread)
      : PackedInt4Zero(*reinterpret_cast<const uint2*>(tile_scales + thread / 4 * 8)) {}

 private:
  uint32_t low_points, high_points;  // in each byte

  // 128 more than a difference: no byte borrows.
  static __device__ __forceinline__ uint32_t of(uint32_t codes, uint32_t points) {
    return differences(codes, points, codes + (0x80808080u - points));
  }

  __device__ __forceinline__ explicit PackedInt4Zero(uint2 words)
      : low_points((words.x >> 16 & 15) * 0x01010101u), high_points((words.y >> 16 & 15) * 0x01010101u) {
    scales = {Int4SumsFormat::factor(words.x) * kLowerScale, Int4SumsFormat::factor(words.y) * kLowerScaleBelow};
  }
};

// The fragments of a tile's four K-steps, as decode_tile of weights_packed.cuh; the rows' scales, which have been read
// when the fragments are multiplied: the stage is free before sums are multiplied by them.
template <class Codes>
__device__ __forceinline__ RowScales decode_int4_tile(const uint8_t* codes, const uint8_t* tile_scales, int thread,
                                                      uint32_t (&a)[4][4]) {
  uint4 words[2];
  words[0] = *reinterpret_cast<const uint4*>(codes + thread * 16);
  words[1] = *reinterpret_cast<const uint4*>(codes + kPackedBytes / 2 + thread * 16);
  const Codes rows(tile_scales, thread);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint32_t of_half[4] = {words[half].x, words[half].y, words[half].z, words[half].w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint32_t* to = &a[2 * half + j / 2][2 * (j % 2)];
      to[0] = rows.low(of_half[j]);
      to[1] = rows.high(of_half[j]);
    }
  }
  // So that a fragment, which products wait for, waits for the scales, too.
  const uint32_t scales = __float_as_uint(rows.scales.low) | __float_as_uint(rows.scales.high);
  a[3][3] = once_loaded(a[3][3], scales);
  return rows.scales;
}

}  // namespace moeq::sm90::w4a8
