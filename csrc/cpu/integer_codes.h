// int4, mxint4 and int8 codes as unsigned bytes, four elements of K of a row in a dword, and what each stands for:
// the code less an offset.
#pragma once

#include "dot.h"

namespace moeq::cpu::MOEQ_ISA {

// Of the unit of 4-bit codes (decode_codes4.h), a mask and a shift give four dwords: operand rows lie in this order.
struct NibbleOrder {
  static constexpr int kOrder[kUnit] = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};
};
struct ByteOrder {
  static constexpr int kOrder[kUnit] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
};

// A row's elements, in the order of the codes.
template <class Codes>
MOEQ_INLINE void reorder(int8_t* row, int64_t units) {
  if (Codes::kOrder[1] == 1) return;
  for (int64_t unit = 0; unit < units; ++unit) {
    int8_t* elements = row + unit * kUnit;
    int8_t natural[kUnit];
    std::memcpy(natural, elements, sizeof(natural));
    for (int i = 0; i < kUnit; ++i) elements[i] = natural[Codes::kOrder[i]];
  }
}

// Flip: bits that make a code unsigned.
template <int32_t Flip>
struct Nibbles : NibbleOrder {
  static constexpr int kUnitBytes = 128;
  static constexpr bool kSmall = true;
  template <int Quad>
  static MOEQ_INLINE Quads quad(const uint8_t* unit) {
    const Words words = load_words(unit + Quad / 2 * 64);
    const Words codes = Flip == 0 ? words : flip(words, Flip);
    return Quad % 2 == 0 ? low_nibbles(codes) : high_nibbles(codes);
  }
};

struct SignedBytes : ByteOrder {
  static constexpr int kUnitBytes = 256;
  static constexpr bool kSmall = false;
  template <int Quad>
  static MOEQ_INLINE Quads quad(const uint8_t* unit) {
    return flip(load_quads(unit + Quad * 64), (int32_t)0x80808080);
  }
};

// Offsets. owed: what the products of a row with the codes of a group lack, `sum` being that of the row's elements, to
// be products with code less offset.
template <int32_t Value>
struct FixedOffset {
  static MOEQ_INLINE Sums owed(const DotCall&, int64_t, int32_t sum) { return splat_sums(-Value * sum); }
};
// The zero points of int4, 0 to 16, and of int8, -128 to 127, a byte per row and group.
struct ZeroPoint4 {
  static MOEQ_INLINE Sums owed(const DotCall& call, int64_t group, int32_t sum) {
    return times(load_sums_u8(call.zero_point + group * kPanelRows), -sum);
  }
};
struct ZeroPoint8 {
  static MOEQ_INLINE Sums owed(const DotCall& call, int64_t group, int32_t sum) {
    return plus(times(load_sums_i8(call.zero_point + group * kPanelRows), -sum), splat_sums(-128 * sum));
  }
};

template <class C, class O, DType kScale>
struct IntegerWeights {
  using Codes = C;
  using Offset = O;
  static constexpr DType kScaleType = kScale;
};

}  // namespace moeq::cpu::MOEQ_ISA
