// The formats of weights that the Hopper kernels decode. A format is a struct without state:
//
//   kTileScaleBytes     bytes of scales that belong to a tile of 64 rows by 64 values of K (layout.h)
//   kAccumulatorScale   what a sum of products of decoded weights must be multiplied by
//   ScaleWord           what one thread needs of a tile's scales, one load
//   scale_offset(t)     where thread t of the tile's 128 finds it, in bytes
//   Scales scales(word) the same, ready for
//   decode(word, s, a)  one of the thread's four words of codes -> the four registers of its fragment in that K-step
//
// The decode kernels multiply sums over a tile by rows' scales where kScalesSums<format>: what `decode` makes has none.
//   factors(word)       those of a thread's two rows, float32
#pragma once
#include <type_traits>

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

// NVFP4 and MXFP4 weights become fragments by placing bits. Exact: e2m1 times e4m3 needs six bits.
struct Nvfp4Format {
  static constexpr int kTileScaleBytes = tile_scale_bytes(Format::kNvfp4);
  static constexpr float kAccumulatorScale = 0x1p38f;  // codes come out as 2^-126 of their value, scales as 2^88
  using ScaleWord = uint16_t;

  struct Scales {
    uint32_t low, high;  // {s, s} of rows g and g + 8
  };

  MOEQ_HOST_DEVICE static int scale_offset(int thread) { return 2 * thread; }

  MOEQ_HOST_DEVICE static Scales scales(ScaleWord bytes) { return {scale_pair(bytes, 0), scale_pair(bytes, 1)}; }

  MOEQ_HOST_DEVICE static void decode(uint32_t word, const Scales& s, uint32_t (&a)[4]) {
    decode_step(word, s.low, s.high, a);
  }
};

// The same as float16, which holds all of their values: from 2^-10 to 2688.
struct Nvfp4HalfFormat {
  static constexpr int kTileScaleBytes = Nvfp4Format::kTileScaleBytes;
  static constexpr float kAccumulatorScale = 0x1p8f;  // codes come out as 2^-14 of their value, scales as 2^6
  using ScaleWord = Nvfp4Format::ScaleWord;
  using Scales = Nvfp4Format::Scales;

  MOEQ_HOST_DEVICE static int scale_offset(int thread) { return Nvfp4Format::scale_offset(thread); }

  // A byte's exponent is larger by two than that of the float16; one of zero stays zero.
  MOEQ_HOST_DEVICE static uint32_t scale_pair(uint32_t bytes, uint32_t selector) {
    constexpr uint32_t kLess = 2u << 10 | 2u << 26;
    return max_u16x2(pick_bytes(bytes, 0, selector) * 128u, kLess) - kLess;
  }
  MOEQ_HOST_DEVICE static Scales scales(ScaleWord bytes) {
    return {scale_pair(bytes, 0x4040), scale_pair(bytes, 0x4141)};
  }

  // The sign stays where bfloat16 has it; what has three bits of exponent less begins three bits higher.
  MOEQ_HOST_DEVICE static uint32_t value(uint32_t placed, uint32_t scale) {
    constexpr uint32_t kSign = 0x80008000u, kSize = 0x0E000E00u;
    return mul_f16x2((placed & kSign) | (placed << 3 & kSize), scale);
  }
  MOEQ_HOST_DEVICE static void decode(uint32_t w, const Scales& s, uint32_t (&a)[4]) {
    a[0] = value(w << 6, s.low);
    a[1] = value(w << 2, s.high);
    a[2] = value(rotate_right(w, 4), s.low);
    a[3] = value(w ^ (w >> 8), s.high);
  }
};

// MXFP4 weights of the tiled layout -> fragments of bfloat16. Codes as those of NVFP4; a scale is an exponent, so that
// every product is exact.
struct Mxfp4Format {
  static constexpr int kTileScaleBytes = tile_scale_bytes(Format::kMxfp4);
  static constexpr float kAccumulatorScale = 0x1p32f;  // codes come out as 2^-126 of their value, scales as 2^94
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

// INT4 weights of the tiled layout -> fragments of bfloat16. Up to its eighth bit, the pattern n of a bfloat16 is worth
// n * 2^-133 (subnormal numbers, and the first normal ones), so that a code among these bits is a number already: no
// constant has to be taken off. Code minus zero point, times scale, has more bits than bfloat16 holds; it is rounded
// once.
//
// Scales come as pairs, row g in the low half and row g + 8 in the high one: which half multiplies is part of the
// instruction.
constexpr float kInt4AccumulatorScale = 0x1p21f;
// Codes come out as 2^-133 of their value for row g, 2^-129 for row g + 8; scales as 2^112 and 2^108.
constexpr uint32_t kInt4Low = 0x000F000Fu;
constexpr uint32_t kInt4High = 0x00F000F0u;

// The eight codes of a word, two of a row at a time, as `of_row(codes, high)` decodes those of row g or (high) g + 8.
template <class OfRow>
MOEQ_HOST_DEVICE void decode_int4(uint32_t w, uint32_t (&a)[4], OfRow of_row) {
  a[0] = of_row(w & kInt4Low, false);
  a[1] = of_row(w & kInt4High, true);
  a[2] = of_row(w >> 8 & kInt4Low, false);
  a[3] = of_row(w >> 8 & kInt4High, true);
}

MOEQ_HOST_DEVICE uint32_t half_twice(uint32_t word, bool high) {
  return high ? high_half_twice(word) : low_half_twice(word);
}

// bfloat16 scales, zero point 8. kScaleK values of K share a scale in the layout: 32 or 64.
template <int kScaleK>
struct Int4Format {
  static_assert(kScaleK == 32 || kScaleK == 64, "a tile holds 64 values of K");
  static constexpr int kTileScaleBytes = tile_scale_bytes(kScaleK == 32 ? Format::kInt4Per32 : Format::kInt4Per64);
  static constexpr float kAccumulatorScale = kInt4AccumulatorScale;
  using ScaleWord = uint32_t;

  struct Scales {
    uint32_t scale, zero;  // s, and -8 s where the codes are
  };

  MOEQ_HOST_DEVICE static int scale_offset(int thread) { return kScaleK == 32 ? thread / 2 * 4 : thread / 4 * 4; }

  MOEQ_HOST_DEVICE static Scales scales(ScaleWord word) {
    constexpr uint32_t kMinusEight = 0x80808008u;
    return {word, mul_bf16x2(word, kMinusEight)};
  }

  // code * s - 8 * s, and 8 * s is exact.
  MOEQ_HOST_DEVICE static void decode(uint32_t w, const Scales& s, uint32_t (&a)[4]) {
    decode_int4(w, a, [&](uint32_t codes, bool high) {
      return fma_bf16x2(codes, half_twice(s.scale, high), half_twice(s.zero, high));
    });
  }
};

struct alignas(8) PairOfWords {
  uint32_t low_row, high_row;
};

// A float32 scale, times what those of its row are multiplied by, and a zero point, of both rows.
struct alignas(16) PairOfFloats {
  uint32_t low_row, low_zero, high_row, high_zero;
};

// The zero points of both rows, times `unit`: those of the codes' places in the low half, of 16 of them in the high
// one.
MOEQ_HOST_DEVICE uint32_t int4_zero_points(uint32_t high_halves_of_words, uint32_t unit) {
  return mul_bf16x2(high_halves_of_words & kInt4Low, unit);
}

// Scales and zero points of both rows, ready for differences of codes. A scale may be the sum of two bfloat16.
struct Int4Zeros {
  uint32_t scale, zero;  // zero where the codes are
};
struct Int4ZerosWithRest : Int4Zeros {
  uint32_t rest;
};
constexpr uint32_t kInt4Units = 0x41803F80u;  // of the codes' places: 1 and 16

MOEQ_HOST_DEVICE void decode_int4_differences(uint32_t w, const Int4Zeros& s, uint32_t (&a)[4]) {
  decode_int4(w, a, [&](uint32_t codes, bool high) {
    return mul_bf16x2(sub_bf16x2(codes, half_twice(s.zero, high)), half_twice(s.scale, high));
  });
}

MOEQ_HOST_DEVICE void decode_int4_differences(uint32_t w, const Int4ZerosWithRest& s, uint32_t (&a)[4]) {
  decode_int4(w, a, [&](uint32_t codes, bool high) {
    const uint32_t difference = sub_bf16x2(codes, half_twice(s.zero, high)), scale = half_twice(s.scale, high);
    return fma_bf16x2(difference, scale, mul_bf16x2(difference, half_twice(s.rest, high)));
  });
}

// A zero point for every scale. Scales are bfloat16, or (kHasRest) float16: the sum of two bfloat16, of which the
// second has two bits, so that its product with a difference of codes is exact and the sum of both products is rounded
// once. kScaleK values of K share one in the layout: 64, or 32, and then all of them may be float16.
template <bool kHasRest, int kScaleK = 64>
struct Int4ZeroFormat {
  static_assert(kScaleK == 64 || (kScaleK == 32 && kHasRest), "the formats that there are");
  static constexpr int kTileScaleBytes = tile_scale_bytes(kScaleK == 32 ? Format::kInt4ZeroPer32
                                                          : kHasRest    ? Format::kInt4Zero
                                                                        : Format::kInt4ZeroBf16);
  static constexpr float kAccumulatorScale = kInt4AccumulatorScale;
  using ScaleWord = PairOfWords;
  using Scales = std::conditional_t<kHasRest, Int4ZerosWithRest, Int4Zeros>;

  MOEQ_HOST_DEVICE static int scale_offset(int thread) { return kScaleK == 32 ? thread / 2 * 8 : thread / 4 * 8; }

  MOEQ_HOST_DEVICE static Scales scales(ScaleWord words) {
    constexpr uint32_t kRest = 0xFFC0FFC0u;
    const uint32_t others = high_halves(words.low_row, words.high_row);
    Scales s;
    s.scale = low_halves(words.low_row, words.high_row);
    s.zero = int4_zero_points(others, kInt4Units);
    if constexpr (kHasRest) s.rest = others & kRest;
    return s;
  }

  MOEQ_HOST_DEVICE static void decode(uint32_t w, const Scales& s, uint32_t (&a)[4]) {
    decode_int4_differences(w, s, a);
  }
};

// float32 scales, and zero points. What a scale is more than its upper half is rounded to bfloat16: it has 16 bits
// then, so that a weight is the nearest bfloat16 but where it lies within 2^-15 of the middle of two.
struct Int4FloatFormat {
  static constexpr int kTileScaleBytes = tile_scale_bytes(Format::kInt4Float);
  static constexpr float kAccumulatorScale = kInt4AccumulatorScale;
  using ScaleWord = PairOfFloats;
  using Scales = Int4ZerosWithRest;

  MOEQ_HOST_DEVICE static int scale_offset(int thread) { return thread / 4 * 16; }

  MOEQ_HOST_DEVICE static float rest_of(uint32_t word) { return float_of(word) - float_of(word & 0xFFFF0000u); }

  MOEQ_HOST_DEVICE static Scales scales(const ScaleWord& words) {
    Scales s;
    s.scale = high_halves(words.low_row, words.high_row);
    s.zero = int4_zero_points(low_halves(words.low_zero, words.high_zero), kInt4Units);
    s.rest = pack_bf16(rest_of(words.low_row), rest_of(words.high_row));
    return s;
  }

  MOEQ_HOST_DEVICE static void decode(uint32_t w, const Scales& s, uint32_t (&a)[4]) {
    decode_int4_differences(w, s, a);
  }
};

// The same weights, but those in groups of 32, where a thread's sums are few: what is multiplied are differences of
// codes, and sums over a tile are multiplied by their rows' scales in float32. Nothing is rounded, and less is to be
// done.
struct Int4Sums {
  static constexpr float kAccumulatorScale = 0x1p-40f;  // of sums times `factors`

  struct Scales {
    uint32_t zero;  // -2^61 times the zero points where the codes are
  };
  struct Factors {
    float low, high;
  };

  MOEQ_HOST_DEVICE static Scales of_zero_points(uint32_t points) {
    constexpr uint32_t kMinusUnits = 0xE000DE00u;  // -2^61 and -2^65
    return {int4_zero_points(points, kMinusUnits)};
  }

  // 2^61 times a difference: a number that is not subnormal.
  MOEQ_HOST_DEVICE static void decode(uint32_t w, const Scales& s, uint32_t (&a)[4]) {
    constexpr uint32_t kUnit = 0x5E005E00u;
    decode_int4(w, a, [&](uint32_t codes, bool high) { return fma_bf16x2(codes, kUnit, half_twice(s.zero, high)); });
  }
};

// Of bfloat16 and float16 scales.
struct Int4SumsFormat : Int4Sums {
  static constexpr int kTileScaleBytes = tile_scale_bytes(Format::kInt4Zero);
  using ScaleWord = PairOfWords;

  MOEQ_HOST_DEVICE static int scale_offset(int thread) { return thread / 4 * 8; }
  MOEQ_HOST_DEVICE static Scales scales(ScaleWord words) {
    return of_zero_points(high_halves(words.low_row, words.high_row));
  }
  MOEQ_HOST_DEVICE static float factor(uint32_t word) { return float_of(word << 16) + float_of(word & 0xFFC00000u); }
  MOEQ_HOST_DEVICE static Factors factors(ScaleWord words) { return {factor(words.low_row), factor(words.high_row)}; }
};
static_assert(tile_scale_bytes(Format::kInt4Zero) == tile_scale_bytes(Format::kInt4ZeroBf16), "it reads both");

// Of float32 ones, which need no more than that.
struct Int4FloatSumsFormat : Int4Sums {
  static constexpr int kTileScaleBytes = Int4FloatFormat::kTileScaleBytes;
  using ScaleWord = PairOfFloats;

  MOEQ_HOST_DEVICE static int scale_offset(int thread) { return Int4FloatFormat::scale_offset(thread); }
  MOEQ_HOST_DEVICE static Scales scales(const ScaleWord& words) {
    return of_zero_points(low_halves(words.low_zero, words.high_zero));
  }
  MOEQ_HOST_DEVICE static Factors factors(const ScaleWord& words) {
    return {float_of(words.low_row), float_of(words.high_row)};
  }
};

// The formats of weights that the Hopper kernels decode. A format is a struct without state:
//
//   kTileScaleBytes     bytes of scales that belong to a tile of 64 rows by 64 values of K (layout.h)
//   kAccumulatorScale   what a sum of products of decoded weights must be multiplied by
//   ScaleWord           what one thread needs of a tile's scales, one load
//   scale_offset(t)     where thread t of the tile's 128 finds it, in bytes
//   Scales scales(word) the same, ready for
//   decode(word, s, a)  one of the thread's four words of codes -> the four registers of its fragment in that K-step
//
// The decode kernels multiply sums over a tile by rows' scales where kScalesSums<format>: what `decode` makes has none.
//   factors(word)       those of a thread's two rows, float32
template <class Format>
constexpr bool kScalesSums = std::is_base_of_v<Int4Sums, Format>;

#if defined(__CUDACC__)
// Volatile: such a load must not move across the barriers that say when the bytes are there.
__device__ __forceinline__ void load_shared(uint16_t& word, uint32_t address) {
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(word) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_shared(uint32_t& word, uint32_t address) {
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_shared(PairOfWords& words, uint32_t address) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(words.low_row), "=r"(words.high_row)
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_shared(PairOfFloats& words, uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.low_row), "=r"(words.low_zero), "=r"(words.high_row), "=r"(words.high_zero)
               : "r"(address)
               : "memory");
}
#endif

}  // namespace moeq::sm90
