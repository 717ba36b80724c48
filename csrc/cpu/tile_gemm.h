// Panels of weights times blocks of rows by matrix tiles. A tile of weights is decoded once, in bf16, and multiplied
// with all rows of the call.
//
// A result is the same whatever shares its call: its products are added in the order of K, 32 at a time, by one
// instruction that treats every row alike, and the sums of groups meet their scales in the same order.
#pragma once

#include <type_traits>

#include "tile_decode.h"
#include "tile_registers.h"
#include "tile_rows.h"

namespace moeq::cpu::MOEQ_ISA {

constexpr int kMaxBlocks = 8;    // of 32 values of K, decoded before they are multiplied
constexpr int kUnitsInPass = 4;  // decoded so where registers hold all sums: decoding overlaps multiplying

// Units [begin, end) of K, at most kMaxBlocks blocks, decoded.
template <class P, int Panels>
struct DecodedUnits {
  alignas(64) uint8_t tiles[kMaxBlocks][Panels][kTileBytes];
  int64_t begin;
  int64_t end;

  // Sums of codes end with their group; scaled ones go over many.
  static MOEQ_INLINE int64_t group_of(int64_t unit, int64_t group) {
    if constexpr (P::kScaled && P::kGroupUnits > 0) return unit / P::kGroupUnits;
    return group;
  }

  MOEQ_INLINE void decode(const TileCall& call, int64_t first, int64_t last, int64_t group) {
    begin = first;
    end = last;
    for (int64_t unit = begin, block = 0; unit < end; unit += 2, ++block) {
      for (int panel = 0; panel < Panels; ++panel) {
        const DotCall& weights = call.panels[panel];
        const uint8_t* ahead = weights.codes + unit * P::Codes::kUnitBytes + P::kPrefetchBytes;
#pragma GCC unroll 16
        for (int line = 0; line < 2 * P::Codes::kUnitBytes; line += 64) prefetch(ahead + line);
        if (P::kInPlace && unit + 1 < end) continue;
        uint8_t* tile = tiles[block][panel];
        P::Tiles::decode(weights, unit, group_of(unit, group), tile);
        if (unit + 1 < end) {
          P::Tiles::decode(weights, unit + 1, group_of(unit + 1, group), tile + kTileUnitBytes);
        } else {
          std::memset(tile + kTileUnitBytes, 0, kTileUnitBytes);
        }
      }
    }
  }

  MOEQ_INLINE const uint8_t* tile(const TileCall& call, int64_t unit, int panel) const {
    if (P::kInPlace && unit + 1 < end) return call.panels[panel].codes + unit * P::Codes::kUnitBytes;
    return tiles[(unit - begin) / 2][panel];
  }
};

// What sums do between two batches of decoded units.
struct Stay {
  bool fresh;   // they start at zero
  bool loaded;  // they come from memory
  bool stored;  // they go to memory
};

template <class P, int Panels, int Blocks>
inline void add_units(const TileCall& call, const DecodedUnits<P, Panels>& units, int first, Stay stay,
                      float* const (&sums)[Panels]) {
  using Registers = TileSums<Panels, Blocks, Bf16Products>;
  if (stay.fresh) Registers::zero();
  if (stay.loaded) Registers::load(sums);
  const uint8_t* rows = call.rows + first * call.row_bytes;
  for (int64_t unit = units.begin; unit < units.end; unit += 2) {
    const uint8_t* weights[Panels];
    for (int panel = 0; panel < Panels; ++panel) weights[panel] = units.tile(call, unit, panel);
    Registers::add(weights, rows + unit * kUnit * 2, call.row_bytes);
  }
  if (stay.stored) Registers::store(sums);
}

// sums[panel] [count, 16] = products of units [begin, end), whose block scales are in the tiles or come later.
template <class P, int Panels>
inline void multiply_units(const TileCall& call, int64_t begin, int64_t end, int64_t group,
                           float* const (&sums)[Panels]) {
  DecodedUnits<P, Panels> units;
  const bool one_pass = call.count <= kPassRows;  // then the sums stay in registers
  const int64_t step = one_pass ? kUnitsInPass : 2 * kMaxBlocks;
  for (int64_t unit = begin; unit < end; unit += step) {
    const int64_t last = unit + step < end ? unit + step : end;
    units.decode(call, unit, last, group);
    for (int first = 0; first < call.count; first += kPassRows) {
      const int count = call.count - first < kPassRows ? call.count - first : kPassRows;
      if (!one_pass) configure_rows(count);
      const Stay stay = {unit == begin, unit > begin && !one_pass, last == end || !one_pass};
      float* targets[Panels];
      for (int panel = 0; panel < Panels; ++panel) targets[panel] = sums[panel] + first * kPanelRows;
      if (count > kTileRows) {
        add_units<P, Panels, 2>(call, units, first, stay, targets);
      } else {
        add_units<P, Panels, 1>(call, units, first, stay, targets);
      }
    }
  }
}

// The sums of one group of K join the results.
template <class P, int Panels>
inline void apply_scales(const TileCall& call, int64_t group, const float* const (&sums)[Panels]) {
  for (int panel = 0; panel < Panels; ++panel) {
    DotCall weights = call.panels[panel];
    for (int row = 0; row < call.count; ++row) {
      weights.row_scales[0] = call.group_scales == nullptr ? nullptr : call.group_scales + row * call.groups;
      uint8_t* out = reinterpret_cast<uint8_t*>(weights.out + row * kPanelRows);
      const uint8_t* part = reinterpret_cast<const uint8_t*>(sums[panel] + row * kPanelRows);
      F32 acc[1] = {group == 0 ? zero() : load_f32(out)};
      const F32 parts[1] = {load_f32(part)};
      P::Scale::template apply<1>(acc, parts, weights, group);
      store(weights.out + row * kPanelRows, acc[0]);
    }
  }
}

template <class P, int Panels>
inline void finish_scales(const TileCall& call) {
  for (int panel = 0; panel < Panels; ++panel) {
    const DotCall& weights = call.panels[panel];
    for (int row = 0; row < call.count; ++row) {
      float* out = weights.out + row * kPanelRows;
      F32 acc[1] = {load_f32(reinterpret_cast<uint8_t*>(out))};
      P::Scale::template finish<1>(acc, weights);
      store(out, acc[0]);
    }
  }
}

template <class P, int Panels>
inline void multiply_panels(const TileCall& call) {
  const DotCall& first = call.panels[0];
  float* out[Panels];
  for (int panel = 0; panel < Panels; ++panel) out[panel] = call.panels[panel].out;
  if (call.count <= kPassRows) configure_rows(call.count);
  if constexpr (P::kScaled) {
    multiply_units<P, Panels>(call, 0, first.units, 0, out);
  } else {
    alignas(64) float sums[Panels][kTileCallRows * kPanelRows];
    float* parts[Panels];
    for (int panel = 0; panel < Panels; ++panel) parts[panel] = sums[panel];
    const int64_t group_units = P::kGroupUnits > 0 ? P::kGroupUnits : first.group_units;
    for (int64_t begin = 0, group = 0; begin < first.units; begin += group_units, ++group) {
      const int64_t end = begin + group_units < first.units ? begin + group_units : first.units;
      multiply_units<P, Panels>(call, begin, end, group, parts);
      apply_scales<P, Panels>(call, group, parts);
    }
    finish_scales<P, Panels>(call);
  }
  release_tiles();
}

template <class P>
void multiply(const TileCall& call) {
  if (call.num_panels == 2) return multiply_panels<P, 2>(call);
  multiply_panels<P, 1>(call);
}

// How tiles take the weights W. kScaled: its block scales are in the tiles, and one sum goes over all of K.
template <class W, class Decoder, bool scaled, bool in_place = false>
struct TilePolicy {
  using Codes = typename W::Codes;
  using Scale = typename W::Scale;
  using Tiles = Decoder;
  static constexpr int kGroupUnits = W::kGroupUnits;
  static constexpr int kPrefetchBytes = W::kPrefetchBytes;
  static constexpr bool kScaled = scaled;
  static constexpr bool kInPlace = in_place;
};
template <class W, class Scale = typename W::Scale>
struct TilesOf {
  using Policy = TilePolicy<W, CodeTiles<typename W::Codes>, false>;
};
template <class W>
struct TilesOf<W, NoScale> {
  using Policy = TilePolicy<W, CodeTiles<typename W::Codes>, true>;
};
template <class W>
struct TilesOf<W, E8m0Scale> {
  using Policy = TilePolicy<W, MxTiles<typename W::Codes>, true>;
};
template <class W>
struct TilesOf<W, E4m3Scale> {
  static_assert(W::Codes::kUnitBytes == 128 && W::kGroupUnits == 1, "Nvfp4Tiles decodes NVFP4");
  using Policy = TilePolicy<W, Nvfp4Tiles, true>;
};

template <class W>
Dot tile_dot() {
  using Policy = typename TilesOf<W>::Policy;
  constexpr bool normalized = std::is_same_v<typename Policy::Tiles, Nvfp4Tiles>;
  constexpr bool plain = std::is_same_v<typename W::Codes, PlainBf16>;
  if constexpr (plain) return {nullptr, OperandType::kBFloat16, multiply<TilePolicy<W, PlainTiles, true, true>>};
  return {nullptr, OperandType::kBFloat16, multiply<Policy>, normalized ? normalize_row : nullptr};
}

}  // namespace moeq::cpu::MOEQ_ISA
