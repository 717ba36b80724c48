// Sixteen sums of integer products in two 256-bit registers: AVX-VNNI where MOEQ_VNNI says so, else AVX2.
#pragma once

#include "simd_avx2.h"

namespace moeq::cpu::MOEQ_ISA {

// Four codes of 0 to 255 of each of sixteen rows, as the bytes of a dword.
using Quads = Words;

MOEQ_INLINE Quads low_nibbles(Words w) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(w.lo, mask), _mm256_and_si256(w.hi, mask)};
}
MOEQ_INLINE Quads high_nibbles(Words w) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(w.lo, 4), mask), _mm256_and_si256(_mm256_srli_epi16(w.hi, 4), mask)};
}
MOEQ_INLINE Words flip(Words w, int32_t bits) {
  const __m256i flipped = _mm256_set1_epi32(bits);
  return {_mm256_xor_si256(w.lo, flipped), _mm256_xor_si256(w.hi, flipped)};
}

// Four elements of K of sixteen rows from a block of 64 bytes, [l 4][s 2][row % 4][2].
MOEQ_INLINE Quads load_quads(const uint8_t* p) {
  const __m256i order =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
  const Words w = load_words(p);
  return {_mm256_shuffle_epi8(w.lo, order), _mm256_shuffle_epi8(w.hi, order)};
}

MOEQ_INLINE void store_quads(uint8_t* p, Quads w) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), w.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + 1, w.hi);
}

struct Sums {
  __m256i lo;
  __m256i hi;
};
MOEQ_INLINE Sums splat_sums(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
MOEQ_INLINE Sums load_sums(const int32_t* p) {
  const Words w = load_words(reinterpret_cast<const uint8_t*>(p));
  return {w.lo, w.hi};
}
MOEQ_INLINE Sums load_sums_u8(const uint8_t* p) {
  const Bytes16 b = load_bytes(p);
  return {_mm256_cvtepu8_epi32(b.lo), _mm256_cvtepu8_epi32(b.hi)};
}
MOEQ_INLINE Sums load_sums_i8(const uint8_t* p) {
  const Bytes16 b = load_bytes(p);
  return {_mm256_cvtepi8_epi32(b.lo), _mm256_cvtepi8_epi32(b.hi)};
}
MOEQ_INLINE Sums times(Sums a, int32_t b) {
  const __m256i factor = _mm256_set1_epi32(b);
  return {_mm256_mullo_epi32(a.lo, factor), _mm256_mullo_epi32(a.hi, factor)};
}
MOEQ_INLINE Sums plus(Sums a, Sums b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
MOEQ_INLINE F32 sums_to_float(Sums s) { return to_float(s.lo, s.hi); }

// kSmall: codes are at most 15, so that two products with signed bytes fit into 16 bits.
template <bool kSmall>
MOEQ_INLINE __m256i add_products_half(__m256i sums, __m256i w, __m256i x) {
#ifdef MOEQ_VNNI
  return _mm256_dpbusd_avx_epi32(sums, w, x);
#else
  if constexpr (kSmall) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
  } else {  // bytes to 16 bits: the even ones, and the odd ones
    const __m256i even =
        _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0xff)), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
  }
#endif
}

// sums[row] += the products of a row's four codes with four signed bytes.
template <bool kSmall>
MOEQ_INLINE Sums add_products(Sums sums, Quads w, const int8_t* x) {
  int32_t quad;
  std::memcpy(&quad, x, sizeof(quad));
  const __m256i all = _mm256_set1_epi32(quad);
  return {add_products_half<kSmall>(sums.lo, w.lo, all), add_products_half<kSmall>(sums.hi, w.hi, all)};
}

// table[byte] for bytes of 0 to 15.
MOEQ_INLINE Quads look_up_bytes(Quads q, const uint8_t (&table)[16]) {
  const __m256i values = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(values, q.lo), _mm256_shuffle_epi8(values, q.hi)};
}

// Sums of so few small products that two of 16 bits hold those of a row; they start at what small_owed made of `owed`.
constexpr int kSmallRows = 4;  // in registers at once
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
  __m256i lo;
  __m256i hi;
};
MOEQ_INLINE int32_t small_owed(int32_t owed) { return owed & 0xffff; }
MOEQ_INLINE SmallSums start_small_sums(int32_t owed) { return {_mm256_set1_epi32(owed), _mm256_set1_epi32(owed)}; }
MOEQ_INLINE SmallSums add_small_products(SmallSums sums, Quads w, const int8_t* x) {
  int32_t quad;
  std::memcpy(&quad, x, sizeof(quad));
  const __m256i all = _mm256_set1_epi32(quad);
  return {_mm256_add_epi16(sums.lo, _mm256_maddubs_epi16(w.lo, all)),
          _mm256_add_epi16(sums.hi, _mm256_maddubs_epi16(w.hi, all))};
}
MOEQ_INLINE Sums whole_sums(SmallSums sums) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(sums.lo, ones), _mm256_madd_epi16(sums.hi, ones)};
}
#endif

}  // namespace moeq::cpu::MOEQ_ISA
