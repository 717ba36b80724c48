// Sixteen accumulators without any instruction set extension.
#pragma once

#include "vec.h"

namespace moeq::cpu::MOEQ_ISA {

constexpr int kTile = 2;
constexpr bool kHasBf16 = false;

struct F32 {
  Vec v;
};

MOEQ_INLINE F32 zero() { return {Vec{}}; }
MOEQ_INLINE F32 broadcast(const float* p) { return {splat(*p)}; }
MOEQ_INLINE F32 fma(F32 a, F32 b, F32 c) { return {a.v * b.v + c.v}; }
MOEQ_INLINE F32 add(F32 a, F32 b) { return {a.v + b.v}; }
MOEQ_INLINE F32 sub(F32 a, F32 b) { return {a.v - b.v}; }
MOEQ_INLINE F32 mul(F32 a, F32 b) { return {a.v * b.v}; }
MOEQ_INLINE void store(float* p, F32 a) { store(p, a.v); }
MOEQ_INLINE F32 load_f32(const uint8_t* p) {
  F32 r;
  std::memcpy(&r.v, p, sizeof(r.v));
  return r;
}

// Sixteen halves to float.
MOEQ_INLINE F32 load_f16(const uint8_t* p) {
  uint16_t halves[16];
  std::memcpy(halves, p, sizeof(halves));
  F32 r;
  for (int i = 0; i < 16; ++i) r.v[i] = half_to_float(halves[i]);
  return r;
}

// Block scales of a panel, each divided by 256.
MOEQ_INLINE F32 e4m3_scales(const uint8_t* p) {
  F32 r;
  for (int i = 0; i < 16; ++i) r.v[i] = e4m3_to_float(p[i]) * (1.0f / 256.0f);
  return r;
}

// Sixteen powers of two; byte 0 is 2^-127, a subnormal float.
MOEQ_INLINE F32 e8m0_scales(const uint8_t* p) {
  IVec bits;
  for (int i = 0; i < 16; ++i) bits[i] = p[i] == 0 ? 0x00400000 : (int32_t)p[i] << 23;
  return {(Vec)bits};
}
MOEQ_INLINE F32 load_bf16(const uint8_t* p) { return {bf16_to_float(reinterpret_cast<const uint16_t*>(p))}; }
MOEQ_INLINE F32 load_u8(const uint8_t* p) {
  F32 r;
  for (int i = 0; i < 16; ++i) r.v[i] = (float)p[i];
  return r;
}
MOEQ_INLINE F32 load_i8(const uint8_t* p) {
  F32 r;
  for (int i = 0; i < 16; ++i) r.v[i] = (float)(int8_t)p[i];
  return r;
}

// Sixteen dwords, one per row, each with a bf16 pair: element 0 low, element 1 high.
struct Words {
  IVec v;
};
MOEQ_INLINE Words load_words(const uint8_t* p) {
  Words w;
  std::memcpy(&w.v, p, sizeof(w.v));
  return w;
}
MOEQ_INLINE F32 low_bf16(Words w) { return {(Vec)(w.v << 16)}; }
MOEQ_INLINE F32 high_bf16(Words w) { return {(Vec)(w.v & isplat((int32_t)0xffff0000))}; }

// table[(word >> Shift) & 15] for every row.
template <int Shift>
MOEQ_INLINE F32 look_up(Words w, const float* table) {
  F32 r;
  for (int i = 0; i < 16; ++i) r.v[i] = table[((uint32_t)w.v[i] >> Shift) & 15];
  return r;
}

// Byte pairs of a block of 64 bytes, [l 4][s 2][row % 4][2]: pair s of row 4 l + row % 4 as the low bytes
// of both halves of a dword.
template <int S>
MOEQ_INLINE Words byte_pairs(const uint8_t* p) {
  Words w;
  for (int row = 0; row < 16; ++row) {
    const uint8_t* pair = p + row / 4 * 16 + S * 8 + row % 4 * 2;
    w.v[row] = pair[0] | pair[1] << 16;
  }
  return w;
}
template <int Half>
MOEQ_INLINE F32 e4m3_bytes(Words w) {
  F32 r;
  for (int i = 0; i < 16; ++i) r.v[i] = e4m3_to_float((uint8_t)(w.v[i] >> (16 * Half)));
  return r;
}
template <int Half>
MOEQ_INLINE F32 int8_bytes(Words w) {
  return {__builtin_convertvector((w.v << (24 - 16 * Half)) >> 24, Vec)};
}

MOEQ_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

}  // namespace moeq::cpu::MOEQ_ISA
