// Integer codes times activations quantized to int8. The products of a group of K are summed exactly, in int32 (those
// of a long group in spans, one after the other); then
//   acc = fl(acc + fl(scale(group) * fl(sum)))
// in ascending order, each step rounded: every instruction set gives the same bits.
#pragma once

#include "e2m1_dot.h"
#include "integer_codes.h"
#include "integer_spans.h"
#include "scales.h"

namespace moeq::cpu::MOEQ_ISA {

template <DType kType>
MOEQ_INLINE F32 group_scale(const DotCall& call, int64_t group) {
  constexpr int kBytes = kPanelRows * (kType == DType::kFloat32 ? 4 : 2);
  return load_scales<kType>(call.scale + group * kBytes);
}

template <class W, int Rows>
inline void integer_rows(const DotCall& call) {
  using Codes = typename W::Codes;
  constexpr int64_t kAhead = 4096;  // bytes that codes are asked for before they are needed
  constexpr int kChains = Rows == 1 ? 4 : Rows == 2 ? 2 : 1;  // of additions, which few rows would wait for
  const int8_t* x[Rows];
  F32 acc[Rows];
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) {
    x[row] = static_cast<const int8_t*>(call.rows[row]);
    acc[row] = zero();
  }
  int64_t index = 0;
  for (Span span = first_span(call.units, call.group_units); span.begin < call.units;
       span = next_span(span, call.units, call.group_units), ++index) {
    Sums part[Rows][kChains];
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      part[row][0] = W::Offset::owed(call, span.group, call.row_sums[row][index]);
#pragma GCC unroll 4
      for (int chain = 1; chain < kChains; ++chain) part[row][chain] = splat_sums(0);
    }
    for (int64_t unit = span.begin; unit < span.end; ++unit) {
      const uint8_t* codes = call.codes + unit * Codes::kUnitBytes;
#pragma GCC unroll 4
      for (int line = 0; line < Codes::kUnitBytes; line += 64) prefetch(codes + kAhead + line);
      unroll<4>([&](auto index) __attribute__((always_inline)) {
        constexpr int q = decltype(index)::value;
        const Quads w = Codes::template quad<q>(codes);
#pragma GCC unroll 8
        for (int row = 0; row < Rows; ++row) {
          Sums& chain = part[row][q % kChains];
          chain = add_products<Codes::kSmall>(chain, w, x[row] + unit * kUnit + 4 * q);
        }
      });
    }
    const F32 scale = group_scale<W::kScaleType>(call, span.group);
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 4
      for (int chain = 1; chain < kChains; ++chain) part[row][0] = plus(part[row][0], part[row][chain]);
      acc[row] = add(acc[row], mul(scale, sums_to_float(part[row][0])));
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) store(call.out + row * kPanelRows, acc[row]);
}

template <class W>
void integer_dot(const DotCall& call) {
  unroll<kTile>([&](auto index) {
    constexpr int rows = decltype(index)::value + 1;
    if (call.count == rows) integer_rows<W, rows>(call);
  });
}

// An operand row of int8: the order of the codes, and the sum of each span.
template <class Codes>
void arrange_row(const RowCall& call) {
  int8_t* row = static_cast<int8_t*>(call.operand);
  const int64_t units = call.padded_size / kUnit;
  int64_t index = 0;
  for (Span span = first_span(units, call.sum_units); span.begin < units;
       span = next_span(span, units, call.sum_units), ++index) {
    int32_t sum = 0;
    for (int64_t k = span.begin * kUnit; k < span.end * kUnit; ++k) sum += row[k];
    call.sums[index] = sum;
  }
  reorder<Codes>(row, units);
}

#ifdef MOEQ_TILES
constexpr int64_t kFewestTileRows = 8;  // of an expert: fewer are faster without tiles
template <class W>
void multiply_integers(const TileCall& call);  // integer_tiles.h
#endif

template <class Codes, class Offset, DType kType>
Dot integer_dot_of() {
  using W = IntegerWeights<Codes, Offset, kType>;
  Dot dot{integer_dot<W>, OperandType::kInt8, nullptr, arrange_row<Codes>};
  dot.rows = kTile;
#ifdef MOEQ_TILES
  dot.tile = multiply_integers<W>;
  dot.tile_rows = kFewestTileRows;
#endif
  return dot;
}

template <DType kType>
Dot choose_integer_dot(const DotKey& key) {
  if (key.scheme == Scheme::kInt8) {
    if (key.zero_points) return integer_dot_of<SignedBytes, ZeroPoint8, kType>();
    return integer_dot_of<SignedBytes, FixedOffset<128>, kType>();
  }
  if (key.zero_points) return integer_dot_of<Nibbles<0>, ZeroPoint4, kType>();
  return integer_dot_of<Nibbles<0>, FixedOffset<8>, kType>();
}

// For the schemes int4, mxint4 and int8 with activations in int8, and for nvfp4 and mxfp4 with activations in the same.
inline Dot find_integer_dot(const DotKey& key) {
  if (key.scheme == Scheme::kNvfp4) return e2m1_dot_of<E4m3Blocks>();
  if (key.scheme == Scheme::kMxfp4) return e2m1_dot_of<E8m0Blocks>();
  if (key.scheme == Scheme::kMxint4) {
    return integer_dot_of<Nibbles<(int32_t)0x88888888>, FixedOffset<8>, DType::kBFloat16>();
  }
  if (key.scale_dtype == DType::kBFloat16) return choose_integer_dot<DType::kBFloat16>(key);
  if (key.scale_dtype == DType::kFloat16) return choose_integer_dot<DType::kFloat16>(key);
  return choose_integer_dot<DType::kFloat32>(key);
}

}  // namespace moeq::cpu::MOEQ_ISA
