// Sixteen sums of integer products in one 512-bit register: AVX-512 VNNI where MOEQ_VNNI says so, else AVX-512 BW.
#pragma once

#include "simd_avx512.h"

namespace moeq::cpu::MOEQ_ISA {

// Four codes of 0 to 255 of each of sixteen rows, as the bytes of a dword.
using Quads = Words;

MOEQ_INLINE Quads low_nibbles(Words w) { return {_mm512_and_si512(w.v, _mm512_set1_epi8(15))}; }
MOEQ_INLINE Quads high_nibbles(Words w) { return {_mm512_and_si512(_mm512_srli_epi16(w.v, 4), _mm512_set1_epi8(15))}; }
MOEQ_INLINE Words flip(Words w, int32_t bits) { return {_mm512_xor_si512(w.v, _mm512_set1_epi32(bits))}; }

// Four elements of K of sixteen rows from a block of 64 bytes, [l 4][s 2][row % 4][2].
MOEQ_INLINE Quads load_quads(const uint8_t* p) {
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
  return {_mm512_shuffle_epi8(_mm512_loadu_si512(p), order)};
}

MOEQ_INLINE void store_quads(uint8_t* p, Quads w) { _mm512_storeu_si512(p, w.v); }

struct Sums {
  __m512i v;
};
MOEQ_INLINE Sums splat_sums(int32_t value) { return {_mm512_set1_epi32(value)}; }
MOEQ_INLINE Sums load_sums(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
MOEQ_INLINE Sums load_sums_u8(const uint8_t* p) { return {_mm512_cvtepu8_epi32(load_bytes(p))}; }
MOEQ_INLINE Sums load_sums_i8(const uint8_t* p) { return {_mm512_cvtepi8_epi32(load_bytes(p))}; }
MOEQ_INLINE Sums times(Sums a, int32_t b) { return {_mm512_mullo_epi32(a.v, _mm512_set1_epi32(b))}; }
MOEQ_INLINE Sums plus(Sums a, Sums b) { return {_mm512_add_epi32(a.v, b.v)}; }
MOEQ_INLINE F32 sums_to_float(Sums s) { return {_mm512_cvtepi32_ps(s.v)}; }

// sums[row] += the products of a row's four codes with four signed bytes. kSmall: codes are at most 15, so that two
// products fit into 16 bits.
template <bool kSmall>
MOEQ_INLINE Sums add_products(Sums sums, Quads w, const int8_t* x) {
  int32_t quad;
  std::memcpy(&quad, x, sizeof(quad));
  const __m512i all = _mm512_set1_epi32(quad);
#ifdef MOEQ_VNNI
  return {_mm512_dpbusd_epi32(sums.v, w.v, all)};
#else
  if constexpr (kSmall) {
    return {_mm512_add_epi32(sums.v, _mm512_madd_epi16(_mm512_maddubs_epi16(w.v, all), _mm512_set1_epi16(1)))};
  } else {  // bytes to 16 bits: the even ones, and the odd ones
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(w.v, _mm512_set1_epi16(0xff)),
                                           _mm512_srai_epi16(_mm512_slli_epi16(all, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(w.v, 8), _mm512_srai_epi16(all, 8));
    return {_mm512_add_epi32(sums.v, _mm512_add_epi32(even, odd))};
  }
#endif
}

// table[byte] for bytes of 0 to 15.
MOEQ_INLINE Quads look_up_bytes(Quads q, const uint8_t (&table)[16]) {
  const __m512i values = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm512_shuffle_epi8(values, q.v)};
}

// Sums of so few small products that two of 16 bits hold those of a row; they start at what small_owed made of `owed`.
constexpr int kSmallRows = 8;  // in registers at once
#ifdef MOEQ_VNNI
using SmallSums = Sums;
MOEQ_INLINE int32_t small_owed(int32_t owed) { return owed; }
MOEQ_INLINE SmallSums start_small_sums(int32_t owed) { return splat_sums(owed); }
MOEQ_INLINE SmallSums add_small_products(SmallSums sums, Quads w, const int8_t* x) {
  return add_products<true>(sums, w, x);
}
MOEQ_INLINE Sums whole_sums(SmallSums sums) { return sums; }
#else
struct SmallSums {
  __m512i v;
};
MOEQ_INLINE int32_t small_owed(int32_t owed) { return owed & 0xffff; }
MOEQ_INLINE SmallSums start_small_sums(int32_t owed) { return {_mm512_set1_epi32(owed)}; }
MOEQ_INLINE SmallSums add_small_products(SmallSums sums, Quads w, const int8_t* x) {
  int32_t quad;
  std::memcpy(&quad, x, sizeof(quad));
  return {_mm512_add_epi16(sums.v, _mm512_maddubs_epi16(w.v, _mm512_set1_epi32(quad)))};
}
MOEQ_INLINE Sums whole_sums(SmallSums sums) { return {_mm512_madd_epi16(sums.v, _mm512_set1_epi16(1))}; }
#endif

}  // namespace moeq::cpu::MOEQ_ISA
