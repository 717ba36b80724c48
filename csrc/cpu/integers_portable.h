// Sixteen sums of integer products, without any instruction set extension.
#pragma once

#include "simd_portable.h"

namespace moeq::cpu::MOEQ_ISA {

// Four codes of 0 to 255 of each of sixteen rows, as the bytes of a dword.
using Quads = Words;

MOEQ_INLINE Quads low_nibbles(Words w) { return {w.v & isplat(0x0f0f0f0f)}; }
MOEQ_INLINE Quads high_nibbles(Words w) { return {(w.v >> 4) & isplat(0x0f0f0f0f)}; }
MOEQ_INLINE Words flip(Words w, int32_t bits) { return {w.v ^ isplat(bits)}; }

// Four elements of K of sixteen rows from a block of 64 bytes, [l 4][s 2][row % 4][2].
MOEQ_INLINE Quads load_quads(const uint8_t* p) {
  Quads q;
  for (int row = 0; row < 16; ++row) {
    const uint8_t* pair = p + row / 4 * 16 + row % 4 * 2;
    q.v[row] = (int32_t)(pair[0] | pair[1] << 8 | pair[8] << 16 | (uint32_t)pair[9] << 24);
  }
  return q;
}

struct Sums {
  IVec v;
};
MOEQ_INLINE Sums splat_sums(int32_t value) { return {isplat(value)}; }
MOEQ_INLINE Sums load_sums_u8(const uint8_t* p) {
  Sums s;
  for (int i = 0; i < 16; ++i) s.v[i] = p[i];
  return s;
}
MOEQ_INLINE Sums load_sums_i8(const uint8_t* p) {
  Sums s;
  for (int i = 0; i < 16; ++i) s.v[i] = (int8_t)p[i];
  return s;
}
MOEQ_INLINE Sums times(Sums a, int32_t b) { return {a.v * isplat(b)}; }
MOEQ_INLINE Sums plus(Sums a, Sums b) { return {a.v + b.v}; }
MOEQ_INLINE F32 sums_to_float(Sums s) { return {__builtin_convertvector(s.v, Vec)}; }

// sums[row] += the products of a row's four codes with four signed bytes; kSmall: codes are at most 15.
template <bool kSmall>
MOEQ_INLINE Sums add_products(Sums sums, Quads w, const int8_t* x) {
  for (int i = 0; i < 4; ++i) sums.v += ((w.v >> (8 * i)) & isplat(0xff)) * isplat(x[i]);
  return sums;
}

// table[byte] for bytes of 0 to 15.
MOEQ_INLINE Quads look_up_bytes(Quads q, const uint8_t (&table)[16]) {
  uint8_t bytes[64];
  std::memcpy(bytes, &q.v, sizeof(bytes));
  for (uint8_t& byte : bytes) byte = table[byte];
  std::memcpy(&q.v, bytes, sizeof(bytes));
  return q;
}

// Sums of few small products; they start at what small_owed made of `owed`.
constexpr int kSmallRows = 2;  // at once
using SmallSums = Sums;
MOEQ_INLINE int32_t small_owed(int32_t owed) { return owed; }
MOEQ_INLINE SmallSums start_small_sums(int32_t owed) { return splat_sums(owed); }
MOEQ_INLINE SmallSums add_small_products(SmallSums sums, Quads w, const int8_t* x) {
  return add_products<true>(sums, w, x);
}
MOEQ_INLINE Sums whole_sums(SmallSums sums) { return sums; }

}  // namespace moeq::cpu::MOEQ_ISA
