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
#include "tile_single.h"

namespace moeq::cpu::MOEQ_ISA {

constexpr int kMaxBlocks = 8;  // of 32 values of K, decoded before they are multiplied with more than kPassRows rows
constexpr int kRingTiles = 4;  // a page: more would lie at the same place of two pages, which loads take for one
constexpr int kStreams = 4;  // panels that one row meets at a time
constexpr int kTilesAhead = 3;  // decoded before the one that is multiplied: loads wait for stores to reach the cache

template <class P>
MOEQ_INLINE bool is_in_place(int64_t unit, int64_t end) {
  return P::kInPlace && unit + 1 < end;
}

// Units `unit` and the one behind it of a panel as a tile; from `end` on they are zero.
template <class P>
MOEQ_INLINE void decode_tile(const DotCall& weights, int64_t ahead, int64_t unit, int64_t end, int64_t group,
                             uint8_t* tile) {
  const uint8_t* later = weights.codes + unit * P::Codes::kUnitBytes + ahead;
#pragma GCC unroll 16
  for (int line = 0; line < 2 * P::Codes::kUnitBytes; line += 64) prefetch(later + line);
  if (is_in_place<P>(unit, end)) return;
  P::Tiles::decode(weights, unit, group_of<P>(unit, group), tile);
  if (unit + 1 < end) {
    P::Tiles::decode(weights, unit + 1, group_of<P>(unit + 1, group), tile + kTileUnitBytes);
  } else {
    std::memset(tile + kTileUnitBytes, 0, kTileUnitBytes);
  }
}

template <class P>
MOEQ_INLINE const uint8_t* tile_of(const DotCall& weights, int64_t unit, int64_t end, const uint8_t* decoded) {
  return is_in_place<P>(unit, end) ? weights.codes + unit * P::Codes::kUnitBytes : decoded;
}

// How far ahead of a unit weights are asked for: the same one of the panels that follow the call's. Tiles that lie in
// memory are too long for that.
template <class P, int Panels>
MOEQ_INLINE int64_t prefetch_bytes(const TileCall& call) {
  if constexpr (P::kInPlace || Panels == 1) return P::kPrefetchBytes;
  return 2 * (call.panels[Panels - 1].codes - call.panels[0].codes);
}

// sums[panel] [rows of up to two tiles, 16] = products of units [begin, end). Panels take turns, so that one tile is
// decoded while others wait in the ring.
template <class P, int Panels, int Blocks>
inline void multiply_in_registers(const TileCall& call, int64_t begin, int64_t end, int64_t group,
                                  float* const (&sums)[Panels]) {
  using Registers = TileSums<Panels, Blocks, Bf16Products>;
  alignas(64) uint8_t ring[kRingTiles][kTileBytes];
  const int64_t ahead = prefetch_bytes<P, Panels>(call);
  const int64_t tiles = (end - begin + 1) / 2 * Panels;
  auto decode = [&](int64_t index, auto panel) __attribute__((always_inline)) {
    if (index >= tiles) return;
    decode_tile<P>(call.panels[panel.value], ahead, begin + index / Panels * 2, end, group, ring[index % kRingTiles]);
  };
  Registers::zero();
  unroll<kTilesAhead>([&](auto i) __attribute__((always_inline)) { decode(i.value, Index<i.value % Panels>{}); });
  for (int64_t index = 0; index < tiles; index += Panels) {
    const int64_t unit = begin + index / Panels * 2;
    unroll<Panels>([&](auto panel) __attribute__((always_inline)) {
      constexpr int p = panel.value;
      decode(index + p + kTilesAhead, Index<(p + kTilesAhead) % Panels>{});
      if constexpr (p == 0) Registers::load_rows(call.rows + unit * kUnit * 2, call.row_bytes);
      Registers::template add_panel<p>(tile_of<P>(call.panels[p], unit, end, ring[(index + p) % kRingTiles]));
    });
  }
  Registers::store(sums);
}

// Units [begin, end) of K, at most kMaxBlocks blocks, decoded.
template <class P, int Panels>
struct DecodedUnits {
  alignas(64) uint8_t tiles[kMaxBlocks][Panels][kTileBytes];
  int64_t begin;
  int64_t end;

  MOEQ_INLINE void decode(const TileCall& call, int64_t first, int64_t last, int64_t group) {
    begin = first;
    end = last;
    const int64_t ahead = prefetch_bytes<P, Panels>(call);
    for (int64_t unit = begin, block = 0; unit < end; unit += 2, ++block) {
      for (int panel = 0; panel < Panels; ++panel) {
        decode_tile<P>(call.panels[panel], ahead, unit, end, group, tiles[block][panel]);
      }
    }
  }
};

template <class P, int Panels, int Blocks>
inline void add_units(const TileCall& call, const DecodedUnits<P, Panels>& units, int first, bool fresh,
                      float* const (&sums)[Panels]) {
  using Registers = TileSums<Panels, Blocks, Bf16Products>;
  if (fresh) {
    Registers::zero();
  } else {
    Registers::load(sums);
  }
  const uint8_t* rows = call.rows + first * call.row_bytes;
  for (int64_t unit = units.begin, block = 0; unit < units.end; unit += 2, ++block) {
    const uint8_t* weights[Panels];
    for (int panel = 0; panel < Panels; ++panel) {
      weights[panel] = tile_of<P>(call.panels[panel], unit, units.end, units.tiles[block][panel]);
    }
    Registers::add(weights, rows + unit * kUnit * 2, call.row_bytes);
  }
  Registers::store(sums);
}

// The same for more rows than registers hold the sums of: those go to memory and back for every kMaxBlocks blocks.
template <class P, int Panels>
inline void multiply_in_passes(const TileCall& call, int64_t begin, int64_t end, int64_t group,
                               float* const (&sums)[Panels]) {
  DecodedUnits<P, Panels> units;
  for (int64_t unit = begin; unit < end; unit += 2 * kMaxBlocks) {
    units.decode(call, unit, unit + 2 * kMaxBlocks < end ? unit + 2 * kMaxBlocks : end, group);
    for (int first = 0; first < call.count; first += kPassRows) {
      const int count = call.count - first < kPassRows ? call.count - first : kPassRows;
      configure_rows(count);
      float* targets[Panels];
      for (int panel = 0; panel < Panels; ++panel) targets[panel] = sums[panel] + first * kPanelRows;
      if (count > kTileRows) {
        add_units<P, Panels, 2>(call, units, first, unit == begin, targets);
      } else {
        add_units<P, Panels, 1>(call, units, first, unit == begin, targets);
      }
    }
  }
}

// sums[panel] [count, 16] = products of units [begin, end), whose block scales are in the tiles or come later.
template <class P, int Panels>
inline void multiply_units(const TileCall& call, int64_t begin, int64_t end, int64_t group,
                           float* const (&sums)[Panels]) {
  if (call.count > kPassRows) return multiply_in_passes<P, Panels>(call, begin, end, group, sums);
  if (call.count > kTileRows) return multiply_in_registers<P, Panels, 2>(call, begin, end, group, sums);
  multiply_in_registers<P, Panels, 1>(call, begin, end, group, sums);
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
}

// multiply(panels, number) for the panels of a call, Panels at a time, and fewer at the end.
template <int Panels, class Multiply>
inline void over_panels(TileCall call, const Multiply& multiply) {
  for (; call.num_panels >= Panels; call.num_panels -= Panels, call.panels += Panels) multiply(call, Index<Panels>{});
  if constexpr (Panels > 1) over_panels<Panels / 2>(call, multiply);
}

template <class P>
__attribute__((noinline)) void multiply_call(const TileCall& call) {
  if constexpr (!P::kInPlace) {  // tiles as they lie in memory cost nothing to decode
    if (call.count == 1) {
      const WideRows rows = widen_rows<typename P::Tiles>(call);
      return over_panels<kStreams>(
          call, [&](const TileCall& some, auto panels) { multiply_rows<P, panels.value, 1>(some, rows); });
    }
  }
  if (call.count <= kPassRows) configure_rows(call.count);
  over_panels<2>(call, [&](const TileCall& some, auto panels) { multiply_panels<P, panels.value>(some); });
  release_tiles();
}

// Sums below the smallest normal number are zero whatever the number of rows, since tiles leave no choice.
template <class P>
void multiply(const TileCall& call) {
  if constexpr (P::kFlushed) {
    const WithoutSubnormals scope;
    multiply_call<P>(call);
  } else {
    multiply_call<P>(call);
  }
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
  // Scales of rows and panels are multiplied with each other first, and may be subnormal.
  static constexpr bool kFlushed = !std::is_same_v<Scale, TileScale>;
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
  Dot dot{nullptr, OperandType::kBFloat16};
  if constexpr (plain) {
    dot.tile = multiply<TilePolicy<W, PlainTiles, true, true>>;
    return dot;
  }
  dot.tile = multiply<Policy>;
  if (normalized) dot.finish = normalize_row;
  dot.few_rows = 1;
  return dot;
}

}  // namespace moeq::cpu::MOEQ_ISA
