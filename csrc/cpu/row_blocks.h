// Blocks of up to eight rows times up to four panels, by bf16 products of AVX-512: where an expert has several rows.
//
// Eight rows of one panel are eight chains of sums, and an instruction that adds to one waits for the one before: with
// a second panel beside it twice as many are under way, and an operand that was loaded is multiplied twice. Fewer rows
// have more panels beside them. Each row sees the operations of dot.h in their order, so that its bits are those of a
// row by itself.
#pragma once

#include "dot.h"

namespace moeq::cpu::MOEQ_ISA {

constexpr int kBlockRows = 8;

// Rows of an expert from which on a block is faster than row by row. Weights of 16 bits are bound by memory for longer,
// which two panels side by side get less of than one after the other.
template <class W>
constexpr int64_t kFirstBlockRows = W::Codes::kUnitBytes > 256 ? 6 : 4;

// Blocks of an expert's rows, as even as can be.
constexpr int64_t blocks_of(int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }

// Panels that blocks of so many rows take side by side: 14 to 21 chains. The wider weights are, the sooner memory is
// the limit, which more streams get less of.
template <class W>
int panels_of(int64_t rows) {
  const int64_t number = blocks_of(rows);
  const int64_t smallest = rows / number;
  const int64_t largest = (rows + number - 1) / number;
  if (W::Codes::kUnitBytes > 256 || smallest > 6 || smallest < 4) return 2;
  if (largest > 4) return 3;
  return W::Codes::kUnitBytes > 128 ? 2 : 4;
}

// Whether such blocks come about, other than at the end of very many rows.
constexpr bool is_block(int panels, int rows) {
  return panels <= 2 || (panels == 3 && rows >= 4 && rows <= 7) || (panels == 4 && rows == 4);
}

// Rows are `stride` bytes apart. Their addresses are sums of few registers, made anew for every unit: kept as eight
// pointers they would not all find one.
struct StridedRows {
  const uint8_t* first;
  int64_t stride, three, five, seven;

  MOEQ_INLINE StridedRows(const uint8_t* rows, int64_t bytes)
      : first(rows), stride(bytes), three(3 * bytes), five(5 * bytes), seven(7 * bytes) {}

  MOEQ_INLINE void hold() {
#if defined(__x86_64__)
    __asm__("" : "+r"(stride), "+r"(three), "+r"(five), "+r"(seven));
#endif
  }
  template <int Row>
  MOEQ_INLINE const uint8_t* at(const uint8_t* base) const {
    constexpr int64_t kPower = Row & -Row;  // of the indices that an address can have: 1, 2, 4 and 8 times a register
    if constexpr (Row == 0) return base;
    if constexpr (Row == 3 || Row == 6) return base + three * kPower;
    if constexpr (Row == 5) return base + five;
    if constexpr (Row == 7) return base + seven;
    return base + stride * kPower;
  }
};

template <int Panels, int Rows>
using Sums = F32[Panels][Rows];

template <int Panels, int Rows>
MOEQ_INLINE void clear(Sums<Panels, Rows>& sums) {
  unroll<Panels * Rows>([&](auto i) __attribute__((always_inline)) { sums[i.value / Rows][i.value % Rows] = zero(); });
}

// part += a unit of K of each panel times the same of each row.
template <int Panels, int Rows, class Codes>
MOEQ_INLINE void multiply_unit(Sums<Panels, Rows>& part, const Codes* codes, const StridedRows& rows,
                               const uint8_t* x) {
  unroll<8>([&](auto pair) __attribute__((always_inline)) {
    constexpr int p = decltype(pair)::value;
    Words w[Panels];
    unroll<Panels>([&](auto panel)
                       __attribute__((always_inline)) { w[panel.value] = codes[panel.value].template pair<p>(); });
    unroll<Rows>([&](auto row) __attribute__((always_inline)) {
      const Words values = broadcast_pair(rows.at<row.value>(x) + 4 * p);
      unroll<Panels>([&](auto panel) __attribute__((always_inline)) {
        part[panel.value][row.value] = dot_words(part[panel.value][row.value], w[panel.value], values);
      });
    });
  });
}

template <class W>
MOEQ_INLINE void prefetch_later(const uint8_t* codes) {
#pragma GCC unroll 16
  for (int line = 0; line < W::Codes::kUnitBytes; line += 64) prefetch_l2(codes + line);
}

template <class W, int Panels, int Rows>
void block(const DotCall* calls, StridedRows rows) {
  Sums<Panels, Rows> acc;
  Sums<Panels, Rows> part;
  // The same units of the panels that follow.
  const int64_t ahead = Panels > 1 ? Panels * (calls[1].codes - calls[0].codes) : W::kPrefetchBytes;
  const int64_t scales_ahead = Panels > 1 ? Panels * (calls[1].scale - calls[0].scale) : 0;
  clear(acc);
  over_chains<W>(
      calls[0], [&]() __attribute__((always_inline)) { clear(part); },
      [&](int64_t unit, int64_t group) __attribute__((always_inline)) {
        rows.hold();
        unroll<Panels>([&](auto panel) __attribute__((always_inline)) {
          prefetch_later<W>(calls[panel.value].codes + unit * W::Codes::kUnitBytes + ahead);
        });
        const uint8_t* x = rows.first + unit * kUnit * 2;
        if constexpr (Panels == 4) {
          const typename W::Codes codes[] = {
              {calls[0], unit, group}, {calls[1], unit, group}, {calls[2], unit, group}, {calls[3], unit, group}};
          multiply_unit(part, codes, rows, x);
        } else if constexpr (Panels == 3) {
          const typename W::Codes codes[] = {{calls[0], unit, group}, {calls[1], unit, group}, {calls[2], unit, group}};
          multiply_unit(part, codes, rows, x);
        } else if constexpr (Panels == 2) {
          const typename W::Codes codes[] = {{calls[0], unit, group}, {calls[1], unit, group}};
          multiply_unit(part, codes, rows, x);
        } else {
          const typename W::Codes codes[] = {{calls[0], unit, group}};
          multiply_unit(part, codes, rows, x);
        }
      },
      [&](int64_t group) __attribute__((always_inline)) {
        unroll<Panels>([&](auto panel) __attribute__((always_inline)) {
          W::Scale::apply(acc[panel.value], part[panel.value], calls[panel.value], group);
          if constexpr (W::Scale::kGroupBytes > 0) {
            prefetch_l2(calls[panel.value].scale + group * W::Scale::kGroupBytes + scales_ahead);
          }
        });
      });
  unroll<Panels>([&](auto panel)
                     __attribute__((always_inline)) { store_rows<W>(acc[panel.value], calls[panel.value]); });
}

// Asks for the lines that results go to: the stores of many rows, each to a page of its own, else wait for memory, and
// sums that leave their registers wait behind them.
inline void prefetch_results(const TileCall& call) {
  for (int row = 0; row < call.count; ++row) {
    const float* results = call.results + row * call.result_stride;
    for (int panel = 0; panel < call.result_panels; ++panel) prefetch_to_write(results + panel * kPanelRows);
  }
}

// Some panels side by side, times all rows of a call.
template <class W, int Panels>
void blocks_of_panels(const TileCall& call, const DotCall* panels) {
  DotCall calls[Panels];
  for (int panel = 0; panel < Panels; ++panel) calls[panel] = panels[panel];
  const int64_t number = blocks_of(call.count);
  for (int64_t i = 0, first = 0; i < number; ++i) {
    const int64_t last = call.count * (i + 1) / number;
    const int count = static_cast<int>(last - first);
    for (DotCall& panel : calls) {
      panel.count = count;
      for (int row = 0; row < count; ++row) {
        panel.row_scales[row] =
            call.group_scales == nullptr ? nullptr : call.group_scales + (first + row) * call.groups;
      }
    }
    const StridedRows rows(call.rows + first * call.row_bytes, call.row_bytes);
    unroll<kBlockRows>([&](auto index) {
      constexpr int kRows = decltype(index)::value + 1;
      if constexpr (is_block(Panels, kRows)) {
        if (count == kRows) block<W, Panels, kRows>(calls, rows);
      }
    });
    for (DotCall& panel : calls) panel.out += count * kPanelRows;
    first = last;
  }
}

template <class W>
void blocks(const TileCall& call) {
  prefetch_results(call);
  const int together = panels_of<W>(call.count);
  for (int panel = 0; panel < call.num_panels;) {
    const DotCall* panels = call.panels + panel;
    const int left = call.num_panels - panel;
    if (together == 4 && left >= 4) {
      blocks_of_panels<W, 4>(call, panels);
      panel += 4;
    } else if (together == 3 && left >= 3) {
      blocks_of_panels<W, 3>(call, panels);
      panel += 3;
    } else if (left >= 2) {
      blocks_of_panels<W, 2>(call, panels);
      panel += 2;
    } else {
      blocks_of_panels<W, 1>(call, panels);
      panel += 1;
    }
  }
}

template <class W>
Dot block_dot() {
  Dot dot{MOEQ_ISA::dot<W, OperandBf16>, OperandType::kBFloat16};
  dot.tile = blocks<W>;
  dot.tile_rows = kFirstBlockRows<W>;
  dot.panels = panels_of<W>;
  return dot;
}

}  // namespace moeq::cpu::MOEQ_ISA
