// INT4 weights of the tiled layout -> fragments of bfloat16. Up to its eighth bit, the pattern n of a bfloat16 is worth
// n * 2^-133 (subnormal numbers, and the first normal ones), so that a code among these bits is a number already: no
// constant has to be taken off. Code minus zero point, times scale, has more bits than bfloat16 holds; it is rounded
// once.
#pragma once
#include "../../../generated/sm90.h"
#include "../numerics/bf16x2.cuh"

namespace moeq::sm90 {

constexpr float kInt4AccumulatorScale = 0x1p21f;
// Codes come out as 2^-133 of their value for row g, 2^-129 for row g + 8; scales as 2^112 and 2^108.
constexpr uint32_t kInt4Low = 0x000F000Fu;
constexpr uint32_t kInt4High = 0x00F000F0u;

// bfloat16 scales, zero point 8. kScaleK values of K share a scale in the layout: 32 or 64.
template <int kScaleK>
struct Int4Format {
  static_assert(kScaleK == 32 || kScaleK == 64, "a tile holds 64 values of K");
  static constexpr int kTileScaleBytes = tile_scale_bytes(kScaleK == 32 ? Format::kInt4Per32 : Format::kInt4Per64);
  static constexpr float kAccumulatorScale = kInt4AccumulatorScale;
  static constexpr int kTerms = 1;
  using ScaleWord = uint32_t;

  struct Scales {
    uint32_t low, high;  // {s, s} of rows g and g + 8
    uint32_t zero_low, zero_high;  // -8 s
  };

  MOEQ_HOST_DEVICE static int scale_offset(int thread) { return kScaleK == 32 ? thread / 2 * 4 : thread / 4 * 4; }

  MOEQ_HOST_DEVICE static Scales scales(ScaleWord word) {
    constexpr uint32_t kMinusEightLow = 0x80088008u, kMinusEightHigh = 0x80808080u;
    const uint32_t low = low_half_twice(word), high = high_half_twice(word);
    return {low, high, mul_bf16x2(low, kMinusEightLow), mul_bf16x2(high, kMinusEightHigh)};
  }

  // code * s - 8 * s, and 8 * s is exact.
  MOEQ_HOST_DEVICE static void decode(uint32_t w, const Scales& s, uint32_t (&a)[4]) {
    a[0] = fma_bf16x2(w & kInt4Low, s.low, s.zero_low);
    a[1] = fma_bf16x2(w & kInt4High, s.high, s.zero_high);
    a[2] = fma_bf16x2(w >> 8 & kInt4Low, s.low, s.zero_low);
    a[3] = fma_bf16x2(w >> 8 & kInt4High, s.high, s.zero_high);
  }
};

struct alignas(8) PairOfWords {
  uint32_t low_row, high_row;
};

// A zero point for every scale, and scales of float16 as well: a scale is the sum of two bfloat16, of which the second
// has two bits, so that its product with a difference of codes is exact and the sum of both products is rounded once.
struct Int4ZeroFormat {
  static constexpr int kTileScaleBytes = tile_scale_bytes(Format::kInt4Zero);
  static constexpr float kAccumulatorScale = kInt4AccumulatorScale;
  static constexpr int kTerms = 1;
  using ScaleWord = PairOfWords;

  struct Row {
    uint32_t scale, rest, zero;  // each twice; zero where the codes are
  };
  struct Scales {
    Row low, high;
  };

  MOEQ_HOST_DEVICE static int scale_offset(int thread) { return thread / 4 * 8; }

  MOEQ_HOST_DEVICE static Row row_of(uint32_t word, uint32_t zero_unit) {
    const uint32_t other = high_half_twice(word);
    return {low_half_twice(word), other & 0xFFC0FFC0u, (other & kInt4Low) * zero_unit};
  }

  MOEQ_HOST_DEVICE static Scales scales(ScaleWord words) {
    return {row_of(words.low_row, 1), row_of(words.high_row, 16)};
  }

  MOEQ_HOST_DEVICE static uint32_t times(uint32_t codes, const Row& row) {
    const uint32_t difference = sub_bf16x2(codes, row.zero);
    return fma_bf16x2(difference, row.scale, mul_bf16x2(difference, row.rest));
  }

  MOEQ_HOST_DEVICE static void decode(uint32_t w, const Scales& s, uint32_t (&a)[4]) {
    a[0] = times(w & kInt4Low, s.low);
    a[1] = times(w & kInt4High, s.high);
    a[2] = times(w >> 8 & kInt4Low, s.low);
    a[3] = times(w >> 8 & kInt4High, s.high);
  }
};

}  // namespace moeq::sm90
