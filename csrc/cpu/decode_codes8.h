// Eight-bit codes. One unit is 256 bytes: four blocks of 64 bytes, block b with the pairs 2 b and 2 b + 1 of
// K as [l 4][s 2][row % 4][2] for row 4 l + row % 4 and pair 2 b + s. So a byte-wise look-up of 64 codes
// followed by one unpack of its low and high result bytes gives bf16 pairs in row order.
#pragma once

#include "dot.h"

namespace moeq::cpu::MOEQ_ISA {

#ifdef MOEQ_BF16
// bf16 bits of an integer or of an e4m3 magnitude, split in bytes by code.
constexpr uint16_t bf16_bits(int mantissa, int exponent) {  // mantissa * 2^exponent, |mantissa| < 256
  if (mantissa == 0) return 0;
  const int sign = mantissa < 0 ? 0x8000 : 0;
  int magnitude = mantissa < 0 ? -mantissa : mantissa;
  int power = exponent + 7;
  while (magnitude < 128) {
    magnitude *= 2;
    --power;
  }
  return static_cast<uint16_t>(sign | (power + 127) << 7 | (magnitude & 127));
}
constexpr uint16_t e4m3_bits(int code) {
  if (code == 127) return 0x7fc0;
  return code < 8 ? bf16_bits(code, -9) : bf16_bits(8 + (code & 7), (code >> 3) - 10);
}
template <class Bits>
constexpr ByteTable make_table(const Bits& bits) {
  ByteTable table{};
  for (int code = 0; code < 128; ++code) {
    table.low[code] = static_cast<uint8_t>(bits(code) & 0xff);
    table.high[code] = static_cast<uint8_t>(bits(code) >> 8);
  }
  return table;
}
alignas(64) static constexpr ByteTable kE4m3Table = make_table([](int code) { return e4m3_bits(code); });
alignas(64) static constexpr ByteTable kPositiveTable = make_table([](int code) { return bf16_bits(code, 0); });
alignas(64) static constexpr ByteTable kNegativeTable = make_table([](int code) { return bf16_bits(code - 128, 0); });
#endif

struct E4m3Bytes {
  template <int Half>
  static MOEQ_INLINE F32 value(Words w) {
    return e4m3_bytes<Half>(w);
  }
#ifdef MOEQ_BF16
  static MOEQ_INLINE BytePlanes planes(__m512i codes) {
    BytePlanes result = look_up_planes(kE4m3Table, codes);
    result.high = _mm512_or_si512(result.high, _mm512_and_si512(codes, _mm512_set1_epi8((char)0x80)));
    return result;
  }
#endif
};

struct Int8Bytes {
  template <int Half>
  static MOEQ_INLINE F32 value(Words w) {
    return int8_bytes<Half>(w);
  }
#ifdef MOEQ_BF16
  static MOEQ_INLINE BytePlanes planes(__m512i codes) {
    const BytePlanes positive = look_up_planes(kPositiveTable, codes);
    const BytePlanes negative = look_up_planes(kNegativeTable, codes);
    const __mmask64 is_negative = _mm512_movepi8_mask(codes);
    return {_mm512_mask_blend_epi8(is_negative, positive.low, negative.low),
            _mm512_mask_blend_epi8(is_negative, positive.high, negative.high)};
  }
#endif
};

template <class Bytes>
struct Codes8 {
  static constexpr int kUnitBytes = 256;
  static constexpr float kFactor = 1.0f;
  const uint8_t* p;
  MOEQ_INLINE Codes8(const DotCall& call, int64_t unit, int64_t) : p(call.codes + unit * kUnitBytes) {}

  template <int Pair>
  MOEQ_INLINE F32 even() const {
    return Bytes::template value<0>(byte_pairs<Pair % 2>(p + Pair / 2 * 64));
  }
  template <int Pair>
  MOEQ_INLINE F32 odd() const {
    return Bytes::template value<1>(byte_pairs<Pair % 2>(p + Pair / 2 * 64));
  }
#ifdef MOEQ_BF16
  template <int Pair>
  MOEQ_INLINE Words pair() const {
    return join_planes<Pair % 2>(Bytes::planes(_mm512_loadu_si512(p + Pair / 2 * 64)));
  }
#endif
};

// int8 with a zero point (int8, one per row and group). The difference may need nine bits: float only.
struct Int8Zero {
  static constexpr int kUnitBytes = 256;
  static constexpr float kFactor = 1.0f;
  Codes8<Int8Bytes> codes;
  const uint8_t* zero_point;
  MOEQ_INLINE Int8Zero(const DotCall& call, int64_t unit, int64_t group)
      : codes(call, unit, group), zero_point(call.zero_point + group * kPanelRows) {}

  template <int Pair>
  MOEQ_INLINE F32 even() const {
    return sub(codes.even<Pair>(), load_i8(zero_point));
  }
  template <int Pair>
  MOEQ_INLINE F32 odd() const {
    return sub(codes.odd<Pair>(), load_i8(zero_point));
  }
};

}  // namespace moeq::cpu::MOEQ_ISA
