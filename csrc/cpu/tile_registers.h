// What the eight tile registers hold while panels of weights are multiplied with blocks of rows.
#pragma once

#include "dot.h"

namespace moeq::cpu::MOEQ_ISA {

// Tile registers: 2 * block + panel hold sums, kRowTile + block rows, kWeightTile + panel weights.
constexpr int kRowTile = 4;
constexpr int kWeightTile = 6;
constexpr int kTileRows = 16;
constexpr int kPassRows = 2 * kTileRows;  // rows whose sums the registers hold

MOEQ_INLINE void configure_rows(int count) {
  TileShapes shapes;
  const int rows[2] = {count < kTileRows ? count : kTileRows, count < kTileRows ? 0 : count - kTileRows};
  for (int block = 0; block < 2; ++block) {
    shapes.set(2 * block, rows[block]);
    shapes.set(2 * block + 1, rows[block]);
    shapes.set(kRowTile + block, rows[block]);
  }
  shapes.set(kWeightTile, kTileRows);
  shapes.set(kWeightTile + 1, kTileRows);
  configure(shapes);
}

struct Bf16Products {
  template <int Acc, int A, int B>
  static MOEQ_INLINE void add() {
    multiply_tiles<Acc, A, B>();
  }
};
struct ByteProducts {
  template <int Acc, int A, int B>
  static MOEQ_INLINE void add() {
    multiply_byte_tiles<Acc, A, B>();
  }
};

// The sums of up to 32 rows in registers, for some panels and one or two blocks of 16 rows. Sums in memory have four
// bytes, float32 or int32 as the products are.
template <int Panels, int Blocks, class Products>
struct TileSums {
  template <class F>
  static MOEQ_INLINE void each(const F& f) {
    unroll<Panels * Blocks>([&](auto i) __attribute__((always_inline)) {
      constexpr int panel = decltype(i)::value % Panels;
      constexpr int block = decltype(i)::value / Panels;
      f(Index<panel>{}, Index<block>{});
    });
  }
  static MOEQ_INLINE void zero() {
    each([](auto panel, auto block)
             __attribute__((always_inline)) { zero_tile<2 * decltype(block)::value + decltype(panel)::value>(); });
  }
  template <class T>
  static MOEQ_INLINE void load(T* const (&sums)[Panels]) {
    each([&](auto panel, auto block) __attribute__((always_inline)) {
      constexpr int p = decltype(panel)::value, b = decltype(block)::value;
      load_tile<2 * b + p>(sums[p] + b * kTileRows * kPanelRows, 64);
    });
  }
  template <class T>
  static MOEQ_INLINE void store(T* const (&sums)[Panels]) {
    each([&](auto panel, auto block) __attribute__((always_inline)) {
      constexpr int p = decltype(panel)::value, b = decltype(block)::value;
      store_tile<2 * b + p>(sums[p] + b * kTileRows * kPanelRows, 64);
    });
  }
  // 64 bytes of each row, from the operands of the first row at this K.
  static MOEQ_INLINE void load_rows(const uint8_t* rows, int64_t row_bytes) {
    unroll<Blocks>([&](auto block) __attribute__((always_inline)) {
      constexpr int b = decltype(block)::value;
      load_tile<kRowTile + b>(rows + b * kTileRows * row_bytes, row_bytes);
    });
  }
  // Those rows times a tile of weights of one panel.
  template <int Panel>
  static MOEQ_INLINE void add_panel(const uint8_t* weights) {
    load_tile<kWeightTile + Panel>(weights, 64);
    unroll<Blocks>([](auto block) __attribute__((always_inline)) {
      constexpr int b = decltype(block)::value;
      Products::template add<2 * b + Panel, kRowTile + b, kWeightTile + Panel>();
    });
  }
  // `weights` are tiles, one a panel.
  static MOEQ_INLINE void add(const uint8_t* const (&weights)[Panels], const uint8_t* rows, int64_t row_bytes) {
    load_rows(rows, row_bytes);
    unroll<Panels>([&](auto panel) __attribute__((always_inline)) {
      add_panel<decltype(panel)::value>(weights[decltype(panel)::value]);
    });
  }
};

}  // namespace moeq::cpu::MOEQ_ISA
