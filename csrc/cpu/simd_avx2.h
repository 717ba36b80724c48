// Sixteen accumulators in two 256-bit registers (AVX2, FMA, F16C).
#pragma once

#include <immintrin.h>

#include "vec.h"

namespace moeq::cpu::MOEQ_ISA {

constexpr int kTile = 4;  // sums of groups in registers; accumulators, needed once a group, may leave them
constexpr bool kHasBf16 = false;

struct F32 {
  __m256 lo;
  __m256 hi;
};

MOEQ_INLINE F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
MOEQ_INLINE F32 broadcast(const float* p) {
  const __m256 v = _mm256_broadcast_ss(p);
  return {v, v};
}
MOEQ_INLINE F32 fma(F32 a, F32 b, F32 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
MOEQ_INLINE F32 add(F32 a, F32 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
MOEQ_INLINE F32 sub(F32 a, F32 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
MOEQ_INLINE F32 mul(F32 a, F32 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
MOEQ_INLINE void store(float* p, F32 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
MOEQ_INLINE F32 load_f32(const uint8_t* p) {
  return {_mm256_loadu_ps(reinterpret_cast<const float*>(p)), _mm256_loadu_ps(reinterpret_cast<const float*>(p) + 8)};
}

// Sixteen halves to float.
MOEQ_INLINE F32 halves_to_float(__m256i halves) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
MOEQ_INLINE F32 load_f16(const uint8_t* p) {
  return halves_to_float(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// Block scales of a panel, each divided by 256: an e4m3 byte moved up by 7 is a half with that value.
MOEQ_INLINE F32 e4m3_scales(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return halves_to_float(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbf80)));
}

// Sixteen bytes to dwords.
struct Bytes16 {
  __m128i lo;
  __m128i hi;
};
MOEQ_INLINE Bytes16 load_bytes(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {bytes, _mm_srli_si128(bytes, 8)};
}
MOEQ_INLINE F32 to_float(__m256i lo, __m256i hi) { return {_mm256_cvtepi32_ps(lo), _mm256_cvtepi32_ps(hi)}; }

// Sixteen powers of two; byte 0 is 2^-127, a subnormal float.
MOEQ_INLINE F32 e8m0_scales(const uint8_t* p) {
  const Bytes16 b = load_bytes(p);
  const __m256i smallest = _mm256_set1_epi32(0x00400000);
  return {_mm256_castsi256_ps(_mm256_max_epu32(_mm256_slli_epi32(_mm256_cvtepu8_epi32(b.lo), 23), smallest)),
          _mm256_castsi256_ps(_mm256_max_epu32(_mm256_slli_epi32(_mm256_cvtepu8_epi32(b.hi), 23), smallest))};
}
MOEQ_INLINE F32 load_bf16(const uint8_t* p) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1)), 16))};
}
MOEQ_INLINE F32 load_u8(const uint8_t* p) {
  const Bytes16 b = load_bytes(p);
  return to_float(_mm256_cvtepu8_epi32(b.lo), _mm256_cvtepu8_epi32(b.hi));
}
MOEQ_INLINE F32 load_i8(const uint8_t* p) {
  const Bytes16 b = load_bytes(p);
  return to_float(_mm256_cvtepi8_epi32(b.lo), _mm256_cvtepi8_epi32(b.hi));
}

// Sixteen dwords, one per row, each with a bf16 pair: element 0 low, element 1 high.
struct Words {
  __m256i lo;
  __m256i hi;
};
MOEQ_INLINE Words load_words(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + 1)};
}
MOEQ_INLINE F32 low_bf16(Words w) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(w.lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(w.hi, 16))};
}
MOEQ_INLINE F32 high_bf16(Words w) {
  const __m256i mask = _mm256_set1_epi32((int)0xffff0000);
  return {_mm256_castsi256_ps(_mm256_and_si256(w.lo, mask)), _mm256_castsi256_ps(_mm256_and_si256(w.hi, mask))};
}

// table[(word >> Shift) & 15]: a permute reads 3 bits of the index, the fourth one selects the half.
template <int Shift>
MOEQ_INLINE __m256 look_up_half(__m256i words, F32 table) {
  const __m256i index = _mm256_srli_epi32(words, Shift);
  const __m256 below = _mm256_permutevar8x32_ps(table.lo, index);
  const __m256 above = _mm256_permutevar8x32_ps(table.hi, index);
  return _mm256_blendv_ps(below, above, _mm256_castsi256_ps(_mm256_slli_epi32(words, 28 - Shift)));
}
template <int Shift>
MOEQ_INLINE F32 look_up(Words w, F32 table) {
  return {look_up_half<Shift>(w.lo, table), look_up_half<Shift>(w.hi, table)};
}
template <int Shift>
MOEQ_INLINE F32 look_up(Words w, const float* table) {
  return look_up<Shift>(w, load_f32(reinterpret_cast<const uint8_t*>(table)));
}

// The same among signed bytes, to float: a third of the instructions, for one shuffle looks up four codes of a dword.
#define MOEQ_BYTE_LOOK_UP
template <int Shift>
MOEQ_INLINE __m256 look_up_byte_half(__m256i words, __m256i table) {
  const __m256i nibbles = _mm256_and_si256(Shift % 8 == 0 ? words : _mm256_srli_epi16(words, 4), _mm256_set1_epi8(15));
  const __m256i bytes = _mm256_shuffle_epi8(table, nibbles);
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(bytes, 24 - Shift / 8 * 8), 24));
}
template <int Shift>
MOEQ_INLINE F32 look_up_byte(Words w, const int8_t (&table)[16]) {
  const __m256i bytes = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  return {look_up_byte_half<Shift>(w.lo, bytes), look_up_byte_half<Shift>(w.hi, bytes)};
}

// Byte pairs of a block of 64 bytes, [l 4][s 2][row % 4][2]: pair s of row 4 l + row % 4 as the low bytes
// of both halves of a dword.
template <int S>
MOEQ_INLINE Words byte_pairs(const uint8_t* p) {
  const Words w = load_words(p);
  const __m256i zeros = _mm256_setzero_si256();
  if (S == 0) return {_mm256_unpacklo_epi8(w.lo, zeros), _mm256_unpacklo_epi8(w.hi, zeros)};
  return {_mm256_unpackhi_epi8(w.lo, zeros), _mm256_unpackhi_epi8(w.hi, zeros)};
}
template <int Half>
MOEQ_INLINE F32 e4m3_bytes(Words w) {
  const __m256i mask = _mm256_set1_epi32(0xff);
  const __m256i lo = _mm256_and_si256(_mm256_srli_epi32(w.lo, 16 * Half), mask);
  const __m256i hi = _mm256_and_si256(_mm256_srli_epi32(w.hi, 16 * Half), mask);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8);
  // Exponent and mantissa move to bits 7..13; adding the sign bit to itself carries it to bit 15.
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(packed, _mm256_set1_epi16(0x80)), 7);
  const F32 half = halves_to_float(_mm256_add_epi16(_mm256_slli_epi16(packed, 7), sign));
  const __m256 factor = _mm256_set1_ps(256.0f);
  return {_mm256_mul_ps(half.lo, factor), _mm256_mul_ps(half.hi, factor)};
}
template <int Half>
MOEQ_INLINE F32 int8_bytes(Words w) {
  return to_float(_mm256_srai_epi32(_mm256_slli_epi32(w.lo, 24 - 16 * Half), 24),
                  _mm256_srai_epi32(_mm256_slli_epi32(w.hi, 24 - 16 * Half), 24));
}

MOEQ_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace moeq::cpu::MOEQ_ISA
