// One panel of weights times up to kTile rows: the inner loop of every scheme.
//
// A row's result never depends on how many rows share the call: each row sees the same operations
// in the same order, so a token's output does not depend on its neighbours.
#pragma once

#include "isa.h"

namespace moeq::cpu::MOEQ_ISA {

// Calls f with 0..N-1 as compile-time constants (shift counts must be immediates).
template <int I>
struct Index {
  static constexpr int value = I;
};
template <int N, int I = 0, class F>
MOEQ_INLINE void unroll(const F& f) {
  if constexpr (I < N) {
    f(Index<I>{});
    unroll<N, I + 1>(f);
  }
}

// Operand rows in float32.
struct OperandF32 {
  using Element = float;
  template <int Rows, class Codes>
  static MOEQ_INLINE void accumulate(F32 (&part)[Rows], const Codes& codes, const float* const (&x)[Rows], int64_t k) {
    unroll<8>([&](auto pair) __attribute__((always_inline)) {
      constexpr int p = decltype(pair)::value;
      const F32 even = codes.template even<p>();
      const F32 odd = codes.template odd<p>();
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) part[row] = fma(even, broadcast(x[row] + k + 2 * p), part[row]);
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) part[row] = fma(odd, broadcast(x[row] + k + 2 * p + 1), part[row]);
    });
  }
};

#ifdef MOEQ_BF16
// Operand rows in bf16, two elements of K per instruction.
struct OperandBf16 {
  using Element = uint16_t;
  template <int Rows, class Codes>
  static MOEQ_INLINE void accumulate(F32 (&part)[Rows], const Codes& codes, const uint16_t* const (&x)[Rows],
                                     int64_t k) {
    unroll<8>([&](auto pair) __attribute__((always_inline)) {
      constexpr int p = decltype(pair)::value;
      const Words w = codes.template pair<p>();
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) part[row] = dot_pairs(part[row], w, x[row] + k + 2 * p);
    });
  }
};
#endif

// Units whose products are summed up before they meet the scale: short chains.
constexpr int64_t kMaxChain = 8;

// Walks K: begin() before the units of a chain, unit(u, group) for each, end(group) where their sum meets its scale.
template <class W, class Begin, class Unit, class End>
MOEQ_INLINE void over_chains(const DotCall& call, const Begin& begin, const Unit& unit, const End& end) {
  const int64_t group_units = W::kGroupUnits > 0 ? W::kGroupUnits : call.group_units;
  int64_t group = 0;
  int64_t group_end = group_units;
  for (int64_t first = 0; first < call.units;) {
    begin();
    int64_t last = group_end;
    if (W::kGroupUnits == 0 || W::kGroupUnits > kMaxChain) last = last < first + kMaxChain ? last : first + kMaxChain;
    if (W::kGroupUnits != 1) last = last < call.units ? last : call.units;
    for (int64_t u = first; u < last; ++u) unit(u, group);
    end(group);
    first = last;
    if (first >= group_end) {
      ++group;
      group_end += group_units;
    }
  }
}

template <class W>
MOEQ_INLINE void prefetch_unit(const DotCall& call, int64_t unit) {
  const uint8_t* ahead = call.codes + unit * W::Codes::kUnitBytes + W::kPrefetchBytes;
#pragma GCC unroll 16
  for (int line = 0; line < W::Codes::kUnitBytes; line += 64) prefetch(ahead + line);
}

template <class W, int Rows>
MOEQ_INLINE void store_rows(F32 (&acc)[Rows], const DotCall& call) {
  W::Scale::finish(acc, call);
  constexpr float kFactor = W::Codes::kFactor;
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) {
    store(call.out + row * kPanelRows, kFactor == 1.0f ? acc[row] : mul(acc[row], broadcast(&kFactor)));
  }
}

// W: Codes (decoder), Scale, kGroupUnits (units per block scale, 0: the call says).
template <class W, class Operand, int Rows>
inline void dot_rows(const DotCall& call) {
  using Element = typename Operand::Element;
  const Element* x[Rows];
  F32 acc[Rows];
  F32 part[Rows];
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) {
    x[row] = static_cast<const Element*>(call.rows[row]);
    acc[row] = zero();
  }
  over_chains<W>(
      call,
      [&]() __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int row = 0; row < Rows; ++row) part[row] = zero();
      },
      [&](int64_t unit, int64_t group) __attribute__((always_inline)) {
        prefetch_unit<W>(call, unit);
        Operand::accumulate(part, typename W::Codes(call, unit, group), x, unit * kUnit);
      },
      [&](int64_t group) __attribute__((always_inline)) { W::Scale::apply(acc, part, call, group); });
  store_rows<W>(acc, call);
}

template <class W, class Operand>
void dot(const DotCall& call) {
  static_assert(kTile <= kMaxTile, "the call has room for kMaxTile rows");
  unroll<kTile>([&](auto index) {
    constexpr int rows = decltype(index)::value + 1;
    if (call.count == rows) dot_rows<W, Operand, rows>(call);
  });
}

}  // namespace moeq::cpu::MOEQ_ISA
