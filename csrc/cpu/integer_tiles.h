// Integer codes times int8 activations by matrix tiles: panels of weights, brought into tiles once for all rows of the
// call. Sums are exact, so that the bits are those of integer_dot.h, and few rows may go there.
#pragma once

#include "integer_dot.h"
#include "tile_registers.h"

namespace moeq::cpu::MOEQ_ISA {

constexpr int64_t kUnitsInTile = 4;  // of K: 64 bytes of a row
constexpr int kTilesAtOnce = 8;      // a panel, decoded before they are multiplied

// Units [begin, end) of a span as tiles; behind the last unit they are zero.
template <class Codes, int Panels>
struct IntegerTiles {
  alignas(64) uint8_t tiles[kTilesAtOnce][Panels][kTileBytes];
  int64_t begin;
  int64_t end;

  MOEQ_INLINE void decode(const TileCall& call, int64_t first, int64_t last) {
    constexpr int64_t kBytes = kTileBytes / kUnitsInTile;
    begin = first;
    end = last;
    const int64_t whole = (end - begin + kUnitsInTile - 1) / kUnitsInTile * kUnitsInTile;
    for (int64_t unit = 0; unit < whole; ++unit) {
      for (int panel = 0; panel < Panels; ++panel) {
        uint8_t* out = tiles[unit / kUnitsInTile][panel] + unit % kUnitsInTile * kBytes;
        if (begin + unit >= end) {
          std::memset(out, 0, kBytes);
          continue;
        }
        const uint8_t* codes = call.panels[panel].codes + (begin + unit) * Codes::kUnitBytes;
#pragma GCC unroll 4
        for (int line = 0; line < Codes::kUnitBytes; line += 64) prefetch(codes + 4096 + line);
        unroll<4>([&](auto index) __attribute__((always_inline)) {
          constexpr int q = decltype(index)::value;
          store_quads(out + 64 * q, Codes::template quad<q>(codes));
        });
      }
    }
  }
};

// parts[panel] [rows, 16] = or += products of the decoded units with up to 32 rows from `first` on.
template <class Codes, int Panels, int Blocks>
inline void add_integer_rows(const TileCall& call, const IntegerTiles<Codes, Panels>& units, int first, bool fresh,
                             int32_t* const (&parts)[Panels]) {
  using Registers = TileSums<Panels, Blocks, ByteProducts>;
  if (fresh) {
    Registers::zero();
  } else {
    Registers::load(parts);
  }
  const uint8_t* rows = call.rows + first * call.row_bytes;
  for (int64_t unit = units.begin, i = 0; unit < units.end; unit += kUnitsInTile, ++i) {
    const uint8_t* weights[Panels];
    for (int panel = 0; panel < Panels; ++panel) weights[panel] = units.tiles[i][panel];
    Registers::add(weights, rows + unit * kUnit, call.row_bytes);
  }
  Registers::store(parts);
}

template <class Codes, int Panels>
inline void add_integer_units(const TileCall& call, const IntegerTiles<Codes, Panels>& units, bool fresh,
                              int32_t (&parts)[Panels][kTileCallRows * kPanelRows]) {
  for (int first = 0; first < call.count; first += kPassRows) {
    const int count = call.count - first < kPassRows ? call.count - first : kPassRows;
    if (call.count > kPassRows) configure_rows(count);
    int32_t* of_rows[Panels];
    for (int panel = 0; panel < Panels; ++panel) of_rows[panel] = parts[panel] + first * kPanelRows;
    if (count > kTileRows) {
      add_integer_rows<Codes, Panels, 2>(call, units, first, fresh, of_rows);
    } else {
      add_integer_rows<Codes, Panels, 1>(call, units, first, fresh, of_rows);
    }
  }
}

// The sums of span number `index` join the results of one panel.
template <class W>
inline void apply_integer_scales(const TileCall& call, const DotCall& panel, const Span& span, int64_t index,
                                 const int32_t* parts) {
  const F32 scale = group_scale<W::kScaleType>(panel, span.group);
  for (int row = 0; row < call.count; ++row) {
    float* out = panel.out + row * kPanelRows;
    const int32_t sum = call.row_sums[row * call.sum_groups + index];
    const Sums whole = plus(load_sums(parts + row * kPanelRows), W::Offset::owed(panel, span.group, sum));
    const F32 acc = index == 0 ? zero() : load_f32(reinterpret_cast<const uint8_t*>(out));
    store(out, add(acc, mul(scale, sums_to_float(whole))));
  }
}

template <class W, int Panels>
inline void multiply_integer_panels(const TileCall& call) {
  using Codes = typename W::Codes;
  constexpr int64_t kStep = kUnitsInTile * kTilesAtOnce;
  IntegerTiles<Codes, Panels> decoded;
  alignas(64) int32_t parts[Panels][kTileCallRows * kPanelRows];
  const int64_t units = call.panels[0].units;
  const int64_t group_units = call.panels[0].group_units;
  if (call.count <= kPassRows) configure_rows(call.count);
  int64_t index = 0;
  for (Span span = first_span(units, group_units); span.begin < units;
       span = next_span(span, units, group_units), ++index) {
    for (int64_t begin = span.begin; begin < span.end; begin += kStep) {
      decoded.decode(call, begin, begin + kStep < span.end ? begin + kStep : span.end);
      add_integer_units<Codes, Panels>(call, decoded, begin == span.begin, parts);
    }
    for (int panel = 0; panel < Panels; ++panel) {
      apply_integer_scales<W>(call, call.panels[panel], span, index, parts[panel]);
    }
  }
  release_tiles();
}

// Groups shorter than a tile would leave it half empty, and read its sums back too often.
template <class W>
inline void multiply_integers_by_rows(const TileCall& call) {
  for (int panel = 0; panel < call.num_panels; ++panel) {
    DotCall part = call.panels[panel];
    for (int first = 0; first < call.count; first += kTile) {
      part.count = call.count - first < kTile ? call.count - first : kTile;
      for (int row = 0; row < part.count; ++row) {
        part.rows[row] = call.rows + (first + row) * call.row_bytes;
        part.row_sums[row] = call.row_sums + (first + row) * call.sum_groups;
      }
      part.out = call.panels[panel].out + first * kPanelRows;
      integer_dot<W>(part);
    }
  }
}

template <class W>
void multiply_integers(const TileCall& call) {
  if (call.panels[0].group_units < kUnitsInTile) return multiply_integers_by_rows<W>(call);
  if (call.num_panels == 2) return multiply_integer_panels<W, 2>(call);
  multiply_integer_panels<W, 1>(call);
}

}  // namespace moeq::cpu::MOEQ_ISA
