// One row of an expert without tiles, by float32 products in the order of TDPBF16PS: the bits of tiles.
//
// A tile of weights for one row costs its way through memory, a load that waits for the stores, and a product that is
// as long as that of eight rows. Here weights stay in registers. Several panels go together: each is read as a stream
// of its own, and where codes are looked up, the products of a value with all codes are made once for all of them.
#pragma once

#include <xmmintrin.h>

#include <type_traits>
#include <vector>

#include "tile_decode.h"

namespace moeq::cpu::MOEQ_ISA {

// Tiles give no subnormal numbers. Nothing that depends on it may be inlined beside it. Operands stay as they are: a
// scale may be subnormal that gives a normal weight.
class WithoutSubnormals {
 public:
  WithoutSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlushToZero); }
  WithoutSubnormals(const WithoutSubnormals&) = delete;
  WithoutSubnormals& operator=(const WithoutSubnormals&) = delete;
  ~WithoutSubnormals() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kFlushToZero = 0x8000;
  const unsigned before_;
};

// The operand rows of a call in float32. Tiles take subnormal operands for zero.
struct WideRows {
  const float* values;
  int64_t stride;
  bool are_moderate;  // magnitudes lie within the bounds of the tiles' kind, or are zero
};

template <class Tiles>
inline WideRows widen_rows(const TileCall& call) {
  static thread_local std::vector<float> values;
  const int64_t size = call.panels[0].units * kUnit;
  const int64_t stride = size + kUnit;
  if (values.size() < static_cast<size_t>(call.count * stride)) values.resize(static_cast<size_t>(call.count * stride));
  constexpr int kSmallest = (127 + Tiles::kModerateFrom) << 7;
  constexpr int kEnd = (127 + Tiles::kModerateTo) << 7;
  IVec outside = isplat(0);
  for (int row = 0; row < call.count; ++row) {
    const uint8_t* operand = call.rows + row * call.row_bytes;
    float* out = values.data() + row * stride;
    for (int64_t k = 0; k < size; k += kUnit) {
      HVec halves;
      std::memcpy(&halves, operand + 2 * k, sizeof(halves));
      const IVec wide = __builtin_convertvector(halves, IVec);
      const IVec is_normal = (wide & isplat(0x7f80)) != isplat(0);
      const IVec magnitude = wide & isplat(0x7fff);
      outside |= is_normal & ((magnitude < isplat(kSmallest)) | (magnitude >= isplat(kEnd)));
      store(out + k, (Vec)((wide << 16) & is_normal));
    }
  }
  bool are_moderate = true;
  for (int lane = 0; lane < kUnit; ++lane) are_moderate &= outside[lane] == 0;
  return {values.data(), stride, are_moderate};
}

// The two chains of 16 products of a block of 32 values of K, for each panel and row.
template <int Panels, int Rows>
struct Chains {
  F32 even[Panels][Rows];
  F32 odd[Panels][Rows];
};

// One panel after the other: weights are made of codes and scales, then multiplied. Numbers: Floats of the tiles, or
// codes alone.
template <class Numbers, int Panels, int Rows>
MOEQ_INLINE void add_weights(Chains<Panels, Rows>& chains, const DotCall* weights, const WideRows& rows, int64_t unit,
                             int64_t group) {
  const float* x = rows.values + unit * kUnit;
  unroll<Panels>([&](auto panel) __attribute__((always_inline)) {
    constexpr int i = decltype(panel)::value;
    const Numbers numbers(weights[i], unit, group);
    unroll<8>([&](auto pair) __attribute__((always_inline)) {
      constexpr int p = decltype(pair)::value;
      const F32 even = numbers.template even<p>();
      const F32 odd = numbers.template odd<p>();
      unroll<Rows>([&](auto row) __attribute__((always_inline)) {
        constexpr int r = decltype(row)::value;
        const float* values = x + r * rows.stride + 2 * p;
        chains.even[i][r] = fma(even, broadcast(values), chains.even[i][r]);
        chains.odd[i][r] = fma(odd, broadcast(values + 1), chains.odd[i][r]);
      });
    });
  });
}

// The products of one value with every code.
template <class Table>
struct CodeProducts {
  F32 of_code;

  explicit MOEQ_INLINE CodeProducts(const float* value)
      : of_code(mul(load_f32(reinterpret_cast<const uint8_t*>(Table::kValues)), broadcast(value))) {}

  template <int Shift>
  MOEQ_INLINE F32 of(Words codes) const {
    return look_up<Shift>(codes, of_code);
  }
};

// The same sums, with (code * value) * scale for (code * scale) * value: the same exact products, of fewer
// multiplications the more panels there are.
//
// kBehind: there are bytes behind the unit. Then a byte of each dword comes to its lowest place by a load from further
// on, and one shift in two is left: shifts bound this loop, loads do not.
template <class Tiles, int Panels, bool kBehind>
MOEQ_INLINE void add_products(Chains<Panels, 1>& chains, const DotCall* weights, const WideRows& rows, int64_t unit,
                              int64_t group) {
  using Products = CodeProducts<typename Tiles::Table>;
  constexpr int64_t kUnitBytes = Codes4<typename Tiles::Table>::kUnitBytes;
  const float* x = rows.values + unit * kUnit;
  F32 scales[Panels];
  unroll<Panels>([&](auto panel) __attribute__((always_inline)) {
    constexpr int i = decltype(panel)::value;
    scales[i] = Tiles::scales_of(weights[i].scale + group * kPanelRows);
  });
  unroll<2>([&](auto half) __attribute__((always_inline)) {
    constexpr int h = decltype(half)::value;
    unroll<4>([&](auto pair) __attribute__((always_inline)) {
      constexpr int p = decltype(pair)::value;
      constexpr int kEvenShift = kBehind || h == 0 ? 4 * (p % 2) : 4 * p;
      constexpr int kOddShift = kBehind || h == 0 ? kEvenShift : 16 + 4 * p;
      const Products even(x + 8 * h + 2 * p);
      const Products odd(x + 8 * h + 2 * p + 1);
      unroll<Panels>([&](auto panel) __attribute__((always_inline)) {
        constexpr int i = decltype(panel)::value;
        const uint8_t* codes = weights[i].codes + unit * kUnitBytes + 64 * h;
        const Words evens = load_words(codes + (4 * p - kEvenShift) / 8);
        const Words odds = load_words(codes + (16 + 4 * p - kOddShift) / 8);
        chains.even[i][0] = fma(even.template of<kEvenShift>(evens), scales[i], chains.even[i][0]);
        chains.odd[i][0] = fma(odd.template of<kOddShift>(odds), scales[i], chains.odd[i][0]);
      });
    });
  });
}

// Asks for the same units of the panels that follow: what the processor foresees by itself ends with a page. Behind the
// last ones of a call they are where the call says; where it does not, only lines are asked for that are read anyway.
template <class P, int Panels>
struct PanelsAhead {
  int64_t codes = P::kPrefetchBytes;
  int64_t scales = 0;

  explicit PanelsAhead(const TileCall& call) {
    const DotCall* weights = call.panels;
    if constexpr (Panels > 1) {
      if (call.num_panels > Panels) {
        codes = weights[Panels].codes - weights[0].codes;
        scales = weights[Panels].scale - weights[0].scale;
      } else if (call.later_codes != nullptr) {
        codes = call.later_codes - weights[0].codes;
        scales = call.later_scale - weights[0].scale;
      } else {
        codes = 0;
      }
    }
  }

  MOEQ_INLINE void prefetch_unit(const DotCall* weights, int64_t unit, int64_t group) const {
    unroll<Panels>([&](auto panel) __attribute__((always_inline)) {
      const DotCall& call = weights[panel.value];
      const uint8_t* line = call.codes + unit * P::Codes::kUnitBytes + codes;
#pragma GCC unroll 16
      for (int byte = 0; byte < P::Codes::kUnitBytes; byte += 64) prefetch(line + byte);
      if constexpr (P::kScaled && P::Scale::kGroupBytes > 0) {
        if (unit % 4 == 0) prefetch(call.scale + group * P::Scale::kGroupBytes + scales);
      }
    });
  }
};

// All of K of some panels, once for a group of scales that meet sums, or once.
template <class P, int Panels, int Rows>
struct RowSums {
  static constexpr bool kProducts = P::Tiles::kSingleRow == SingleRow::kProducts && Rows == 1;
  static constexpr bool kScaleLast = P::Tiles::kSingleRow == SingleRow::kScaleLast;
  using Sums = F32[Panels][Rows];

  const DotCall* weights;
  const WideRows& rows;

  template <class F>
  static MOEQ_INLINE void each(const F& f) {
    unroll<Panels * Rows>([&](auto i) __attribute__((always_inline)) { f(i.value / Rows, i.value % Rows); });
  }
  static MOEQ_INLINE void clear(Sums& sums) {
    each([&](int i, int r) __attribute__((always_inline)) { sums[i][r] = zero(); });
  }

  MOEQ_INLINE bool has_moderate_scales(int64_t group) const {
    bool all = true;
    for (int i = 0; i < Panels; ++i) all &= P::Tiles::are_moderate(weights[i].scale + group * kPanelRows);
    return all;
  }

  MOEQ_INLINE void add_unit(Chains<Panels, Rows>& chains, bool scale_last, int64_t unit, int64_t group) const {
    if constexpr (kProducts) {
      if (__builtin_expect(rows.are_moderate, 1)) {
        const bool is_last = unit + 1 == weights[0].units;
        if (__builtin_expect(!is_last, 1)) {
          return add_products<typename P::Tiles, Panels, true>(chains, weights, rows, unit, group);
        }
        return add_products<typename P::Tiles, Panels, false>(chains, weights, rows, unit, group);
      }
    }
    if constexpr (kScaleLast) {
      if (__builtin_expect(scale_last, 1)) {
        return add_weights<typename P::Tiles::Numbers, Panels, Rows>(chains, weights, rows, unit, group);
      }
    }
    add_weights<typename P::Tiles::Floats, Panels, Rows>(chains, weights, rows, unit, group);
  }

  // sums += products of units [begin, end): 32 values of K at a time, the even ones and the odd ones in chains of their
  // own, whose sum joins the accumulator.
  MOEQ_INLINE void add(Sums& sums, const PanelsAhead<P, Panels>& later, int64_t begin, int64_t end,
                       int64_t group) const {
    for (int64_t block = begin; block < end; block += 2) {
      Chains<Panels, Rows> chains;
      clear(chains.even);
      clear(chains.odd);
      bool scale_last = false;
      if constexpr (kScaleLast) {
        static_assert(P::kGroupUnits == 2, "a block of 32 has one scale");
        scale_last = rows.are_moderate && has_moderate_scales(group_of<P>(block, group));
      }
      for (int64_t unit = block; unit < block + 2 && unit < end; ++unit) {
        later.prefetch_unit(weights, unit, group_of<P>(unit, group));
        add_unit(chains, scale_last, unit, group_of<P>(unit, group));
      }
      if constexpr (kScaleLast) {
        if (__builtin_expect(scale_last, 1)) {
          // The power of two leaves every rounding before it as it was.
          each([&](int i, int r) __attribute__((always_inline)) {
            const F32 scale = P::Tiles::scales_of(weights[i].scale + group_of<P>(block, group) * kPanelRows);
            sums[i][r] = fma(scale, cpu::MOEQ_ISA::add(chains.even[i][r], chains.odd[i][r]), sums[i][r]);
          });
          continue;
        }
      }
      each([&](int i, int r) __attribute__((always_inline)) {
        sums[i][r] = cpu::MOEQ_ISA::add(sums[i][r], cpu::MOEQ_ISA::add(chains.even[i][r], chains.odd[i][r]));
      });
    }
  }
};

// Products alone without subnormal numbers, not what they are multiplied with.
template <class Engine, class Ahead>
__attribute__((noinline)) void add_group(const Engine& engine, typename Engine::Sums& part, const Ahead& later,
                                         int64_t begin, int64_t end, int64_t group) {
  engine.add(part, later, begin, end, group);
}
template <class Engine, class Ahead>
__attribute__((noinline)) void add_group_flushed(const Engine& engine, typename Engine::Sums& part, const Ahead& later,
                                                 int64_t begin, int64_t end, int64_t group) {
  const WithoutSubnormals scope;
  add_group(engine, part, later, begin, end, group);
}

// out [Rows, 16] of each panel.
template <class P, int Panels, int Rows>
inline void multiply_rows(const TileCall& call, const WideRows& rows) {
  using Engine = RowSums<P, Panels, Rows>;
  const DotCall& first = call.panels[0];
  const Engine engine{call.panels, rows};
  const PanelsAhead<P, Panels> later(call);
  typename Engine::Sums sums;
  Engine::clear(sums);
  if constexpr (P::kScaled) {
    engine.add(sums, later, 0, first.units, 0);
  } else {
    DotCall scales[Panels];
    for (int i = 0; i < Panels; ++i) {
      scales[i] = call.panels[i];
      for (int row = 0; row < Rows; ++row) {
        scales[i].row_scales[row] = call.group_scales == nullptr ? nullptr : call.group_scales + row * call.groups;
      }
    }
    const int64_t group_units = P::kGroupUnits > 0 ? P::kGroupUnits : first.group_units;
    for (int64_t begin = 0, group = 0; begin < first.units; begin += group_units, ++group) {
      typename Engine::Sums part;
      Engine::clear(part);
      const int64_t end = begin + group_units < first.units ? begin + group_units : first.units;
      if constexpr (P::kFlushed) {
        engine.add(part, later, begin, end, group);
      } else {
        add_group_flushed(engine, part, later, begin, end, group);
      }
      unroll<Panels>([&](auto panel) __attribute__((always_inline)) {
        P::Scale::template apply<Rows>(sums[panel.value], part[panel.value], scales[panel.value], group);
      });
    }
    unroll<Panels>([&](auto panel) __attribute__((always_inline)) {
      P::Scale::template finish<Rows>(sums[panel.value], scales[panel.value]);
    });
  }
  Engine::each([&](int i, int r)
                   __attribute__((always_inline)) { store(call.panels[i].out + r * kPanelRows, sums[i][r]); });
}

}  // namespace moeq::cpu::MOEQ_ISA
