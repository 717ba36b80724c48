// Weights as tile operands: one unit becomes eight rows of 64 bytes, row p with the pair (2 p, 2 p + 1) of K of
// all sixteen rows of the panel, in bf16. Where code times block scale is exact in bf16, the scale is in it.
#pragma once

#include "decode_codes4.h"
#include "decode_codes8.h"
#include "decode_plain.h"
#include "dot.h"
#include "scales.h"

namespace moeq::cpu::MOEQ_ISA {

constexpr int64_t kTileUnitBytes = kTileBytes / 2;

// Sums of codes end with their group; scaled ones go over many.
template <class P>
MOEQ_INLINE int64_t group_of(int64_t unit, int64_t group) {
  if constexpr (P::kScaled && P::kGroupUnits > 0) return unit / P::kGroupUnits;
  return group;
}

// Pairs of floats that are bf16 numbers; what does not fit is cut off.
MOEQ_INLINE void store_pairs(uint8_t* out, F32 even, F32 odd) {
  uint32_t low[16];
  uint32_t high[16];
  float values[16];
  store(values, even);
  std::memcpy(low, values, sizeof(low));
  store(values, odd);
  std::memcpy(high, values, sizeof(high));
  for (int i = 0; i < 16; ++i) low[i] = low[i] >> 16 | (high[i] & 0xffff0000u);
  std::memcpy(out, low, sizeof(low));
}

#ifdef MOEQ_BF16
MOEQ_INLINE void store_words(uint8_t* out, __m512i words) { _mm512_store_si512(out, words); }
#endif

// Codes as numbers in registers.
template <class Codes>
struct FloatsOf {
  using Type = Codes;
};

#ifdef MOEQ_BF16
// Where a look-up gives pairs in bf16, those are taken apart: fewer instructions than a conversion of bytes.
template <class Codes>
struct PairFloats {
  Codes codes;

  MOEQ_INLINE PairFloats(const DotCall& call, int64_t unit, int64_t group) : codes(call, unit, group) {}

  template <int Pair>
  MOEQ_INLINE F32 even() const {
    return low_bf16(codes.template pair<Pair>());
  }
  template <int Pair>
  MOEQ_INLINE F32 odd() const {
    return high_bf16(codes.template pair<Pair>());
  }
};
template <class Bytes>
struct FloatsOf<Codes8<Bytes>> {
  using Type = PairFloats<Codes8<Bytes>>;
};
#endif

// Codes with the scales of their unit: what a tile holds.
template <class Codes>
struct ScaledFloats {
  Codes codes;
  F32 scales;

  template <int Pair>
  MOEQ_INLINE F32 even() const {
    return mul(codes.template even<Pair>(), scales);
  }
  template <int Pair>
  MOEQ_INLINE F32 odd() const {
    return mul(codes.template odd<Pair>(), scales);
  }
};

// How one row is multiplied without tiles (tile_single.h): weights as tiles have them; the products of a value with
// every code looked up by the codes of all panels; or codes, whose sums of a block of 32 meet its power of two.
enum class SingleRow { kWeights, kProducts, kScaleLast };

// Powers of two between which values of a row must lie, or be zero, for the second and the third.
template <SingleRow kind>
struct Moderate {
  static constexpr SingleRow kSingleRow = kind;
  // Products of values and codes stay normal numbers, 2^-123 to 2^126; or sums of a block do, before scales and after.
  static constexpr int kModerateFrom = kind == SingleRow::kProducts ? -122 : -64;
  static constexpr int kModerateTo = kind == SingleRow::kProducts ? 123 : 41;
};

// Codes alone: their scales meet the sums of a group.
template <class Codes>
struct CodeTiles : Moderate<SingleRow::kWeights> {
  using Floats = typename FloatsOf<Codes>::Type;

  static MOEQ_INLINE void decode(const DotCall& call, int64_t unit, int64_t group, uint8_t* out) {
    const Codes codes(call, unit, group);
    unroll<8>([&](auto pair) __attribute__((always_inline)) {
      constexpr int p = decltype(pair)::value;
#ifdef MOEQ_BF16
      store_words(out + 64 * p, codes.template pair<p>().v);
#else
      store_pairs(out + 64 * p, codes.template even<p>(), codes.template odd<p>());
#endif
    });
  }
};

// Codes times powers of two. Below 2^-126 they count as zero, like every operand of a tile.
template <class Codes>
struct MxTiles : Moderate<SingleRow::kScaleLast> {
  using Numbers = typename FloatsOf<Codes>::Type;
  struct Floats : ScaledFloats<Numbers> {
    MOEQ_INLINE Floats(const DotCall& call, int64_t unit, int64_t group)
        : ScaledFloats<Numbers>{Numbers(call, unit, group), scales_of(call.scale + group * kPanelRows)} {}
  };

  static MOEQ_INLINE F32 scales_of(const uint8_t* scale) { return e8m0_scales(scale); }

  // Whether all scales of a group are First to First + Count - 1, as stored.
  template <uint8_t First, uint8_t Count>
  static MOEQ_INLINE bool lie_within(const uint8_t* scale) {
#ifdef MOEQ_BF16
    const __m128i above = _mm_sub_epi8(load_bytes(scale), _mm_set1_epi8(First));
    return _mm_cmpge_epu8_mask(above, _mm_set1_epi8((char)Count)) == 0;
#else
    bool all = true;
    for (int i = 0; i < kPanelRows; ++i) all &= static_cast<uint8_t>(scale[i] - First) < Count;
    return all;
#endif
  }
  // 2^-40 to 2^40: with moderate rows, no sum of products leaves the normal numbers, before its scale and after it.
  static MOEQ_INLINE bool are_moderate(const uint8_t* scale) { return lie_within<87, 81>(scale); }

  static void decode_any(const DotCall& call, int64_t unit, int64_t group, uint8_t* out) {
    const Floats floats(call, unit, group);
    unroll<8>([&](auto pair) __attribute__((always_inline)) {
      constexpr int p = decltype(pair)::value;
      store_pairs(out + 64 * p, floats.template even<p>(), floats.template odd<p>());
    });
  }

#ifdef MOEQ_BF16
  static constexpr bool kHasNan = Codes::kUnitBytes == Codes8<E4m3Bytes>::kUnitBytes;

  static MOEQ_INLINE void decode(const DotCall& call, int64_t unit, int64_t group, uint8_t* out) {
    const uint8_t* scales = call.scale + group * kPanelRows;
    // 2^-117 to 2^119, with which every code that is not zero stays a normal number.
    if (__builtin_expect(!lie_within<10, 237>(scales), 0)) return decode_any(call, unit, group, out);
    const Codes codes(call, unit, group);
    const __m512i wide = _mm512_cvtepu8_epi32(load_bytes(scales));
    const __m512i both = _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
    const __m512i exponents = _mm512_slli_epi16(_mm512_sub_epi16(both, _mm512_set1_epi16(127)), 7);
    unroll<8>([&](auto pair) __attribute__((always_inline)) {
      constexpr int p = decltype(pair)::value;
      const __m512i words = codes.template pair<p>().v;
      const __mmask32 not_zero = _mm512_test_epi16_mask(words, _mm512_set1_epi16(0x7fff));
      __m512i scaled = _mm512_maskz_add_epi16(not_zero, words, exponents);
      if constexpr (kHasNan) {
        const __m512i magnitude = _mm512_and_si512(words, _mm512_set1_epi16(0x7fff));
        const __mmask32 is_nan = _mm512_cmpgt_epi16_mask(magnitude, _mm512_set1_epi16(0x7f80));
        scaled = _mm512_mask_mov_epi16(scaled, is_nan, words);
      }
      store_words(out + 64 * p, scaled);
    });
  }
#else
  static MOEQ_INLINE void decode(const DotCall& call, int64_t unit, int64_t group, uint8_t* out) {
    decode_any(call, unit, group, out);
  }
#endif
};

// e2m1 codes times e4m3 scales times 2^-112: a half float moved three bits to the right is such a bf16, so that
// products of halves (exact: six bits, 2^-10 to 2880) need no other conversion. normalize_row owes the 2^112.
struct Nvfp4Tiles : Moderate<SingleRow::kProducts> {
  using Table = E2m1;
  struct Floats : ScaledFloats<Codes4<E2m1>> {
    MOEQ_INLINE Floats(const DotCall& call, int64_t unit, int64_t group)
        : ScaledFloats<Codes4<E2m1>>{Codes4<E2m1>(call, unit, group), scales_of(call.scale + group * kPanelRows)} {}
  };

#ifdef MOEQ_BF16
  // Moved up by 20 bits a byte is a float with its value times 2^-120.
  static MOEQ_INLINE F32 scales_of(const uint8_t* scale) {
    const __m512i moved = _mm512_slli_epi32(_mm512_cvtepi8_epi32(load_bytes(scale)), 20);
    const __m512i bits = _mm512_and_si512(moved, _mm512_set1_epi32((int)0x87f00000));
    return {_mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p8f))};
  }
#else
  static MOEQ_INLINE F32 scales_of(const uint8_t* scale) {
    const float rest = 0x1p-104f;  // e4m3_scales divides by 256
    return mul(e4m3_scales(scale), broadcast(&rest));
  }
#endif

#ifdef MOEQ_BF16
  // Code times 256 as a half float, twice over, because the look-up reads five bits.
  alignas(64) static constexpr uint16_t kHalves[32] = {0x0000, 0x5800, 0x5c00, 0x5e00, 0x6000, 0x6200, 0x6400, 0x6600,
                                                       0x8000, 0xd800, 0xdc00, 0xde00, 0xe000, 0xe200, 0xe400, 0xe600,
                                                       0x0000, 0x5800, 0x5c00, 0x5e00, 0x6000, 0x6200, 0x6400, 0x6600,
                                                       0x8000, 0xd800, 0xdc00, 0xde00, 0xe000, 0xe200, 0xe400, 0xe600};

  // Where in each quarter of a register the byte of a row goes: to the upper halves of both words.
  alignas(64) static constexpr uint8_t kUpperBytes[64] = {
      128, 0,  128, 0,  128, 1,  128, 1,  128, 2,  128, 2,  128, 3,  128, 3,  128, 4,  128, 4,  128, 5,
      128, 5,  128, 6,  128, 6,  128, 7,  128, 7,  128, 8,  128, 8,  128, 9,  128, 9,  128, 10, 128, 10,
      128, 11, 128, 11, 128, 12, 128, 12, 128, 13, 128, 13, 128, 14, 128, 14, 128, 15, 128, 15};

  // Scale over 256 of each row, twice: an e4m3 byte moved up by 7 is a half with that value.
  static MOEQ_INLINE __m512h row_scales(const uint8_t* scale) {
    const __m512i bytes = _mm512_broadcast_i32x4(load_bytes(scale));
    const __m512i both = _mm512_shuffle_epi8(bytes, _mm512_load_si512(kUpperBytes));
    return (__m512h)_mm512_and_si512(_mm512_srai_epi16(both, 1), _mm512_set1_epi16((short)0xbf80));
  }

  static MOEQ_INLINE void decode(const DotCall& call, int64_t unit, int64_t group, uint8_t* out) {
    const uint8_t* codes = call.codes + unit * Codes4<E2m1>::kUnitBytes;
    const __m512h scales = row_scales(call.scale + group * kPanelRows);
    const __m512i table = _mm512_load_si512(kHalves);
    unroll<8>([&](auto pair) __attribute__((always_inline)) {
      constexpr int p = decltype(pair)::value;
      const __m512h values = (__m512h)look_up_pairs<4 * (p % 4)>(load_words(codes + p / 4 * 64), table).v;
      const __m512i product = (__m512i)_mm512_mul_ph(values, scales);
      store_words(out + 64 * p, _mm512_and_si512(_mm512_srai_epi16(product, 3), _mm512_set1_epi16((short)0x8fff)));
    });
  }
#else
  static MOEQ_INLINE void decode(const DotCall& call, int64_t unit, int64_t group, uint8_t* out) {
    const Floats floats(call, unit, group);
    unroll<8>([&](auto pair) __attribute__((always_inline)) {
      constexpr int p = decltype(pair)::value;
      store_pairs(out + 64 * p, floats.even<p>(), floats.odd<p>());
    });
  }
#endif
};

// bf16 weights lie in memory as a tile takes them.
struct PlainTiles : Moderate<SingleRow::kWeights> {
  using Floats = PlainBf16;

  static MOEQ_INLINE void decode(const DotCall& call, int64_t unit, int64_t, uint8_t* out) {
    std::memcpy(out, call.codes + unit * PlainBf16::kUnitBytes, PlainBf16::kUnitBytes);
  }
};

}  // namespace moeq::cpu::MOEQ_ISA
