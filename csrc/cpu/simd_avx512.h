// Sixteen accumulators in one 512-bit register (AVX-512 F, BW, VL, DQ; with MOEQ_BF16 also BF16 and VBMI).
#pragma once

#include <immintrin.h>

#include "vec.h"

namespace moeq::cpu::MOEQ_ISA {

constexpr int kTile = 8;

struct F32 {
  __m512 v;
};

MOEQ_INLINE F32 zero() { return {_mm512_setzero_ps()}; }
MOEQ_INLINE F32 broadcast(const float* p) { return {_mm512_set1_ps(*p)}; }
MOEQ_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
MOEQ_INLINE F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
MOEQ_INLINE F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
MOEQ_INLINE F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
MOEQ_INLINE void store(float* p, F32 a) { _mm512_storeu_ps(p, a.v); }
MOEQ_INLINE F32 load_f32(const uint8_t* p) { return {_mm512_loadu_ps(p)}; }

// Sixteen halves to float.
MOEQ_INLINE F32 halves_to_float(__m256i halves) { return {_mm512_cvtph_ps(halves)}; }
MOEQ_INLINE F32 load_f16(const uint8_t* p) {
  return halves_to_float(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// Block scales of a panel, each divided by 256: an e4m3 byte moved up by 7 is a half with that value.
MOEQ_INLINE F32 e4m3_scales(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return halves_to_float(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbf80)));
}

MOEQ_INLINE __m128i load_bytes(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

// Sixteen powers of two; byte 0 is 2^-127, a subnormal float.
MOEQ_INLINE F32 e8m0_scales(const uint8_t* p) {
  const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(load_bytes(p)), 23);
  return {_mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(0x00400000)))};
}
MOEQ_INLINE F32 load_bf16(const uint8_t* p) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
MOEQ_INLINE F32 load_u8(const uint8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_bytes(p)))}; }
MOEQ_INLINE F32 load_i8(const uint8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bytes(p)))}; }

// Sixteen dwords, one per row, each with a bf16 pair: element 0 low, element 1 high.
struct Words {
  __m512i v;
};
MOEQ_INLINE Words load_words(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
MOEQ_INLINE F32 low_bf16(Words w) { return {_mm512_castsi512_ps(_mm512_slli_epi32(w.v, 16))}; }
MOEQ_INLINE F32 high_bf16(Words w) {
  return {_mm512_castsi512_ps(_mm512_and_si512(w.v, _mm512_set1_epi32((int)0xffff0000)))};
}

// table[(word >> Shift) & 15] for every row; the permute reads only the low four bits.
template <int Shift>
MOEQ_INLINE F32 look_up(Words w, const float* table) {
  return {_mm512_permutexvar_ps(_mm512_srli_epi32(w.v, Shift), _mm512_loadu_ps(table))};
}
template <int Shift>
MOEQ_INLINE F32 look_up(Words w, F32 table) {
  return {_mm512_permutexvar_ps(_mm512_srli_epi32(w.v, Shift), table.v)};
}

// Byte pairs of a block of 64 bytes, [l 4][s 2][row % 4][2]: pair s of row 4 l + row % 4 as the low bytes
// of both halves of a dword.
template <int S>
MOEQ_INLINE Words byte_pairs(const uint8_t* p) {
  const __m512i bytes = _mm512_loadu_si512(p);
  const __m512i zeros = _mm512_setzero_si512();
  return {S == 0 ? _mm512_unpacklo_epi8(bytes, zeros) : _mm512_unpackhi_epi8(bytes, zeros)};
}
template <int Half>
MOEQ_INLINE F32 e4m3_bytes(Words w) {
  const __m256i bytes = _mm512_cvtepi32_epi16(_mm512_srli_epi32(w.v, 16 * Half));
  // Exponent and mantissa move to bits 7..13; adding the sign bit to itself carries it to bit 15.
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(bytes, _mm256_set1_epi16(0x80)), 7);
  const F32 half = halves_to_float(_mm256_add_epi16(_mm256_slli_epi16(bytes, 7), sign));
  return {_mm512_mul_ps(half.v, _mm512_set1_ps(256.0f))};
}
template <int Half>
MOEQ_INLINE F32 int8_bytes(Words w) {
  return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(w.v, 24 - 16 * Half), 24))};
}

MOEQ_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
MOEQ_INLINE void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1); }
MOEQ_INLINE void prefetch_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

#ifdef MOEQ_BF16
constexpr bool kHasBf16 = true;

// table[(half >> Shift) & 31] for all 32 halves: sixteen bf16 pairs.
template <int Shift>
MOEQ_INLINE Words look_up_pairs(Words w, __m512i table) {
  return {_mm512_permutexvar_epi16(_mm512_srli_epi16(w.v, Shift), table)};
}

// Table look-ups of 64 bytes by their low seven bits: the two bytes of a bf16, low and high.
struct ByteTable {
  uint8_t low[128];
  uint8_t high[128];
};
struct BytePlanes {
  __m512i low;
  __m512i high;
};
MOEQ_INLINE __m512i look_up_bytes(const uint8_t* table, __m512i index) {
  return _mm512_permutex2var_epi8(_mm512_loadu_si512(table), index, _mm512_loadu_si512(table + 64));
}
MOEQ_INLINE BytePlanes look_up_planes(const ByteTable& table, __m512i index) {
  return {look_up_bytes(table.low, index), look_up_bytes(table.high, index)};
}
template <int S>
MOEQ_INLINE Words join_planes(BytePlanes planes) {
  return {S == 0 ? _mm512_unpacklo_epi8(planes.low, planes.high) : _mm512_unpackhi_epi8(planes.low, planes.high)};
}

// A bf16 pair in all sixteen dwords.
MOEQ_INLINE Words broadcast_pair(const void* x) {
  int32_t pair;
  std::memcpy(&pair, x, sizeof(pair));
  return {_mm512_set1_epi32(pair)};
}
// acc + pair * pair; products are exact, each sum is rounded.
MOEQ_INLINE F32 dot_words(F32 acc, Words w, Words x) { return {_mm512_dpbf16_ps(acc.v, (__m512bh)w.v, (__m512bh)x.v)}; }
MOEQ_INLINE F32 dot_pairs(F32 acc, Words w, const uint16_t* x) { return dot_words(acc, w, broadcast_pair(x)); }
#else
constexpr bool kHasBf16 = false;
#endif

}  // namespace moeq::cpu::MOEQ_ISA
