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
  bool are_moderate;  // no product of a value with a code leaves the normal numbers: all are zero or 2^-122 to 2^122
};

inline WideRows widen_rows(const TileCall& call) {
  static thread_local std::vector<float> values;
  const int64_t size = call.panels[0].units * kUnit;
  const int64_t stride = size + kUnit;
  if (values.size() < static_cast<size_t>(call.count * stride)) values.resize(static_cast<size_t>(call.count * stride));
  constexpr int kSmallest = (127 - 122) << 7;
  constexpr int kLargest = (127 + 122) << 7;
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
      outside |= is_normal & ((magnitude < isplat(kSmallest)) | (magnitude > isplat(kLargest)));
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

// One panel after the other: weights are made of codes and scales, then multiplied.
template <class P, int Panels, int Rows>
MOEQ_INLINE void add_weights(Chains<Panels, Rows>& chains, const DotCall* weights, const WideRows& rows, int64_t unit,
                             int64_t group) {
  const float* x = rows.values + unit * kUnit;
  unroll<Panels>([&](auto panel) __attribute__((always_inline)) {
    constexpr int i = decltype(panel)::value;
    const typename P::Tiles::Floats codes(weights[i], unit, group_of<P>(unit, group));
    unroll<8>([&](auto pair) __attribute__((always_inline)) {
      constexpr int p = decltype(pair)::value;
      const F32 even = codes.template even<p>();
      const F32 odd = codes.template odd<p>();
      unroll<Rows>([&](auto row) __attribute__((always_inline)) {
        constexpr int r = decltype(row)::value;
        const float* values = x + r * rows.stride + 2 * p;
        chains.even[i][r] = fma(even, broadcast(values), chains.even[i][r]);
        chains.odd[i][r] = fma(odd, broadcast(values + 1), chains.odd[i][r]);
      });
    });
  });
}

// The same sums, with (code * value) * scale for (code * scale) * value, which are the same exact products.
template <class P, int Panels>
MOEQ_INLINE void add_products(Chains<Panels, 1>& chains, const DotCall* weights, const WideRows& rows, int64_t unit,
                              int64_t group) {
  using Products = typename P::Tiles::Products;
  const float* x = rows.values + unit * kUnit;
  F32 scales[Panels];
  unroll<Panels>([&](auto panel) __attribute__((always_inline)) {
    constexpr int i = decltype(panel)::value;
    scales[i] = P::Tiles::scales_of(weights[i].scale + group_of<P>(unit, group) * kPanelRows);
  });
  unroll<2>([&](auto half) __attribute__((always_inline)) {
    constexpr int h = decltype(half)::value;
    Words codes[Panels];
    unroll<Panels>([&](auto panel) __attribute__((always_inline)) {
      constexpr int i = decltype(panel)::value;
      codes[i] = load_words(weights[i].codes + unit * P::Codes::kUnitBytes + 64 * h);
    });
    unroll<4>([&](auto pair) __attribute__((always_inline)) {
      constexpr int p = decltype(pair)::value;
      const Products even(x + 8 * h + 2 * p);
      const Products odd(x + 8 * h + 2 * p + 1);
      unroll<Panels>([&](auto panel) __attribute__((always_inline)) {
        constexpr int i = decltype(panel)::value;
        chains.even[i][0] = fma(even.template of<4 * p>(codes[i]), scales[i], chains.even[i][0]);
        chains.odd[i][0] = fma(odd.template of<16 + 4 * p>(codes[i]), scales[i], chains.odd[i][0]);
      });
    });
  });
}

template <class P, int Panels>
MOEQ_INLINE bool have_moderate_scales(const DotCall* weights, int64_t unit, int64_t group) {
  bool all = true;
  for (int i = 0; i < Panels; ++i)
    all &= P::Tiles::are_moderate(weights[i].scale + group_of<P>(unit, group) * kPanelRows);
  return all;
}

// Asks for the same units of the panels that follow: what the processor foresees by itself ends with a page.
template <class P, int Panels>
struct PanelsAhead {
  int64_t codes = P::kPrefetchBytes;
  int64_t scales = 0;

  explicit PanelsAhead(const DotCall* weights) {
    if constexpr (Panels > 1) {
      codes = Panels * (weights[1].codes - weights[0].codes);
      scales = Panels * (weights[1].scale - weights[0].scale);
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

// sums[panel] [16] = products of units [begin, end): 32 values of K at a time, the even ones and the odd ones in chains
// of their own, whose sum joins the accumulator.
template <class P, int Panels, int Rows>
__attribute__((noinline)) void multiply_rows(const DotCall* weights, const WideRows& rows, int64_t begin, int64_t end,
                                             int64_t group, float* const* sums) {
  constexpr bool kLooksUp = Rows == 1 && !std::is_same_v<typename P::Tiles::Products, NoProducts>;
  const PanelsAhead<P, Panels> later(weights);
  using Registers = F32[Panels][Rows];
  const auto each = [](const auto& f) __attribute__((always_inline)) {
    unroll<Panels * Rows>([&](auto i) __attribute__((always_inline)) { f(i.value / Rows, i.value % Rows); });
  };
  Registers acc;
  each([&](int i, int r) __attribute__((always_inline)) { acc[i][r] = zero(); });
  for (int64_t block = begin; block < end; block += 2) {
    Chains<Panels, Rows> chains;
    each([&](int i, int r) __attribute__((always_inline)) { chains.even[i][r] = chains.odd[i][r] = zero(); });
    for (int64_t unit = block; unit < block + 2 && unit < end; ++unit) {
      later.prefetch_unit(weights, unit, group_of<P>(unit, group));
      if constexpr (kLooksUp) {
        if (__builtin_expect(rows.are_moderate && have_moderate_scales<P, Panels>(weights, unit, group), 1)) {
          add_products<P, Panels>(chains, weights, rows, unit, group);
          continue;
        }
      }
      add_weights<P, Panels, Rows>(chains, weights, rows, unit, group);
    }
    each([&](int i, int r)
             __attribute__((always_inline)) { acc[i][r] = add(acc[i][r], add(chains.even[i][r], chains.odd[i][r])); });
  }
  each([&](int i, int r) __attribute__((always_inline)) { store(sums[i] + r * kPanelRows, acc[i][r]); });
}

}  // namespace moeq::cpu::MOEQ_ISA
