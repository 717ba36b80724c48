// Four-bit codes. One unit is 128 bytes: two halves of 8 elements of K, each 32 words of 16 bits;
// word 2 r + h holds, from its low nibble up, the elements k = h, 2 + h, 4 + h, 6 + h of row r.
// So one shift brings a pair (k, k + 1) of all sixteen rows under a table look-up.
#pragma once

#include "dot.h"

namespace moeq::cpu::MOEQ_ISA {

// Values by code, as floats, as bf16 bits (twice over, because the look-up reads five bits), and as bytes: integers,
// which kOfByte makes values of.
struct E2m1 {
  alignas(16) static constexpr int8_t kBytes[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  static constexpr float kOfByte = 0.5f;
  static constexpr float kValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                        -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  alignas(64) static constexpr uint16_t kBf16[32] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                                     0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
                                                     0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                                     0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
};

// Codes 0..15 stand for -8..7.
struct Offset8 {
  alignas(16) static constexpr int8_t kBytes[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  static constexpr float kOfByte = 1.0f;
  static constexpr float kValues[16] = {-8.0f, -7.0f, -6.0f, -5.0f, -4.0f, -3.0f, -2.0f, -1.0f,
                                        0.0f,  1.0f,  2.0f,  3.0f,  4.0f,  5.0f,  6.0f,  7.0f};
  alignas(64) static constexpr uint16_t kBf16[32] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                                     0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                                     0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                                     0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
};

// Two's complement.
struct Signed4 {
  alignas(16) static constexpr int8_t kBytes[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
  static constexpr float kOfByte = 1.0f;
  static constexpr float kValues[16] = {0.0f,  1.0f,  2.0f,  3.0f,  4.0f,  5.0f,  6.0f,  7.0f,
                                        -8.0f, -7.0f, -6.0f, -5.0f, -4.0f, -3.0f, -2.0f, -1.0f};
  alignas(64) static constexpr uint16_t kBf16[32] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                                     0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                                     0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                                     0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
};

// Codes from which a zero point is still to be subtracted. The differences -16..15 are looked up by
// their low five bits.
struct Unsigned4 {
  alignas(16) static constexpr int8_t kBytes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  static constexpr float kOfByte = 1.0f;
  static constexpr float kValues[16] = {0.0f, 1.0f, 2.0f,  3.0f,  4.0f,  5.0f,  6.0f,  7.0f,
                                        8.0f, 9.0f, 10.0f, 11.0f, 12.0f, 13.0f, 14.0f, 15.0f};
  alignas(64) static constexpr uint16_t kDifference[32] = {
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
      0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130,
      0xc120, 0xc110, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
};

// The code at bit Shift of every dword.
#if defined(MOEQ_BYTE_LOOK_UP) && !defined(MOEQ_TILES)
template <class Table>
constexpr float kOfLookUp = Table::kOfByte;
template <class Table, int Shift>
MOEQ_INLINE F32 look_up_code(Words w) {
  return look_up_byte<Shift>(w, Table::kBytes);
}
#else
template <class Table>
constexpr float kOfLookUp = 1.0f;
template <class Table, int Shift>
MOEQ_INLINE F32 look_up_code(Words w) {
  return look_up<Shift>(w, Table::kValues);
}
#endif

template <class Table>
struct Codes4 {
  static constexpr int kUnitBytes = 128;
  static constexpr float kFactor = kOfLookUp<Table>;  // of what even and odd give: a value
  Words half[2];

  MOEQ_INLINE Codes4(const DotCall& call, int64_t unit, int64_t)
      : half{load_words(call.codes + unit * kUnitBytes), load_words(call.codes + unit * kUnitBytes + 64)} {}

  template <int Pair>
  MOEQ_INLINE F32 even() const {
    return look_up_code<Table, 4 * (Pair % 4)>(half[Pair / 4]);
  }
  template <int Pair>
  MOEQ_INLINE F32 odd() const {
    return look_up_code<Table, 16 + 4 * (Pair % 4)>(half[Pair / 4]);
  }
#ifdef MOEQ_BF16
  template <int Pair>
  MOEQ_INLINE Words pair() const {
    return look_up_pairs<4 * (Pair % 4)>(half[Pair / 4], _mm512_load_si512(Table::kBf16));
  }
#endif
};

// With a zero point (0..16, one byte per row and group).
struct Codes4Zero {
  static constexpr int kUnitBytes = 128;
  static constexpr float kFactor = 1.0f;
  Words half[2];
  const uint8_t* zero_point;

  MOEQ_INLINE Codes4Zero(const DotCall& call, int64_t unit, int64_t group)
      : half{load_words(call.codes + unit * kUnitBytes), load_words(call.codes + unit * kUnitBytes + 64)},
        zero_point(call.zero_point + group * kPanelRows) {}

  template <int Pair>
  MOEQ_INLINE F32 even() const {
    return sub(look_up_code<Unsigned4, 4 * (Pair % 4)>(half[Pair / 4]), load_u8(zero_point));
  }
  template <int Pair>
  MOEQ_INLINE F32 odd() const {
    return sub(look_up_code<Unsigned4, 16 + 4 * (Pair % 4)>(half[Pair / 4]), load_u8(zero_point));
  }
#ifdef MOEQ_BF16
  template <int Pair>
  MOEQ_INLINE Words pair() const {
    const __m512i zero = _mm512_cvtepu8_epi32(load_bytes(zero_point));
    const __m512i both = _mm512_or_si512(zero, _mm512_slli_epi32(zero, 16));
    const __m512i code = _mm512_and_si512(_mm512_srli_epi16(half[Pair / 4].v, 4 * (Pair % 4)), _mm512_set1_epi16(15));
    return {_mm512_permutexvar_epi16(_mm512_sub_epi16(code, both), _mm512_load_si512(Unsigned4::kDifference))};
  }
#endif
};

}  // namespace moeq::cpu::MOEQ_ISA
