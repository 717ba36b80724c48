// Four-bit floats times four-bit floats, NVFP4 or MXFP4 both: twice an e2m1 code is an integer of at most 12, so that
// the products of a block of K are summed exactly, as integers; then
//   acc = fl(acc + scale of the weights * scale of the activations * sum)
// in ascending order of blocks. What is added has at most 20 bits and is exact too (MX scales: unless it is subnormal
// or overflows), fused or not: every instruction set gives the same bits.
#pragma once

#include "integer_codes.h"
#include "scales.h"

namespace moeq::cpu::MOEQ_ISA {

// Twice the value of a code, and 12, which makes it unsigned.
constexpr int32_t kE2m1Offset = 12;
alignas(16) constexpr uint8_t kTwiceE2m1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// kFactor: what sixteen scales as they are loaded lack, and a quarter, for both codes are doubled.
struct E4m3Blocks {
  static constexpr int kUnits = layout_of(Scheme::kNvfp4).group_units;
  static constexpr float kFactor = 256.0f / 4.0f;
  static MOEQ_INLINE F32 scales(const uint8_t* p) { return e4m3_scales(p); }
};
struct E8m0Blocks {
  static constexpr int kUnits = layout_of(Scheme::kMxfp4).group_units;
  static constexpr float kFactor = 1.0f / 4.0f;
  static MOEQ_INLINE F32 scales(const uint8_t* p) { return e8m0_scales(p); }
};

// Four quads of K of a unit.
MOEQ_INLINE void decode_e2m1(const uint8_t* codes, Quads (&quads)[4]) {
  unroll<4>([&](auto index) __attribute__((always_inline)) {
    constexpr int q = decltype(index)::value;
    quads[q] = look_up_bytes(Nibbles<0>::template quad<q>(codes), kTwiceE2m1);
  });
}

MOEQ_INLINE SmallSums add_e2m1_unit(SmallSums sums, const Quads (&quads)[4], const int8_t* x) {
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) sums = add_small_products(sums, quads[q], x + 4 * q);
  return sums;
}

// The `Units` units of one block join the accumulators, one row after the other: AVX2 has no room for sums of more.
template <class Blocks, int Units, int Rows>
MOEQ_INLINE void add_e2m1_block(const DotCall& call, int64_t block, F32 (&acc)[Rows]) {
  constexpr int64_t kAhead = 4096;  // bytes that codes are asked for before they are needed
  constexpr int64_t kUnitBytes = Nibbles<0>::kUnitBytes;
  const int64_t first = block * Blocks::kUnits;
  Quads quads[Units][4];
  unroll<Units>([&](auto index) __attribute__((always_inline)) {
    constexpr int unit = decltype(index)::value;
    const uint8_t* codes = call.codes + (first + unit) * kUnitBytes;
#pragma GCC unroll 2
    for (int line = 0; line < kUnitBytes; line += 64) prefetch(codes + kAhead + line);
    decode_e2m1(codes, quads[unit]);
  });
  const F32 weights = Blocks::scales(call.scale + block * kPanelRows);
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) {
    const int8_t* x = static_cast<const int8_t*>(call.rows[row]) + first * kUnit;
    SmallSums sums = start_small_sums(call.row_sums[row][block]);
#pragma GCC unroll 2
    for (int unit = 0; unit < Units; ++unit) sums = add_e2m1_unit(sums, quads[unit], x + unit * kUnit);
    const F32 scale = mul(weights, broadcast(call.row_scales[row] + block));
    acc[row] = fma(scale, sums_to_float(whole_sums(sums)), acc[row]);
  }
}

template <class Blocks, int Rows>
inline void e2m1_rows(const DotCall& call) {
  F32 acc[Rows];
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) acc[row] = zero();
  const int64_t whole = call.units / Blocks::kUnits;
  for (int64_t block = 0; block < whole; ++block) add_e2m1_block<Blocks, Blocks::kUnits, Rows>(call, block, acc);
  if (Blocks::kUnits > 1 && call.units % Blocks::kUnits != 0) add_e2m1_block<Blocks, 1, Rows>(call, whole, acc);
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) store(call.out + row * kPanelRows, acc[row]);
}

template <class Blocks>
void e2m1_dot(const DotCall& call) {
  unroll<kSmallRows>([&](auto index) {
    constexpr int rows = decltype(index)::value + 1;
    if (call.count == rows) e2m1_rows<Blocks, rows>(call);
  });
}

// An operand row of doubled codes: their order, what the products of each block lack, and its scale as e2m1_rows
// multiplies it.
template <class Blocks>
void arrange_e2m1_row(const RowCall& call) {
  int8_t* row = static_cast<int8_t*>(call.operand);
  const int64_t units = call.padded_size / kUnit;
  for (int64_t begin = 0, block = 0; begin < units; begin += Blocks::kUnits, ++block) {
    const int64_t end = begin + Blocks::kUnits < units ? begin + Blocks::kUnits : units;
    int32_t sum = 0;
    for (int64_t k = begin * kUnit; k < end * kUnit; ++k) sum += row[k];
    call.sums[block] = small_owed(-kE2m1Offset * sum);
    call.group_scales[block] *= Blocks::kFactor;
  }
  reorder<NibbleOrder>(row, units);
}

template <class Blocks>
Dot e2m1_dot_of() {
  Dot dot{e2m1_dot<Blocks>, OperandType::kInt8, nullptr, arrange_e2m1_row<Blocks>};
  dot.rows = kSmallRows;
  return dot;
}

}  // namespace moeq::cpu::MOEQ_ISA
