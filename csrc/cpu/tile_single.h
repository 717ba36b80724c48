// One row of an expert without tiles, by float32 products in the order of TDPBF16PS: the bits of tiles.
//
// A tile of weights for one row costs its way through memory, a load that waits for the stores, and a product that is
// as long as that of eight rows. Here weights stay in registers. Several panels go together: each is read as a stream of
// its own, and where codes are looked up, the products of a value with all codes are made once for all of them.
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

// The operand row of a call in float32. Tiles take subnormal operands for zero.
struct WideRow {
  const float* values;
  bool is_moderate;  // no product of a value with a code leaves the normal numbers: all are zero or 2^-122 to 2^122
};

inline WideRow widen_row(const TileCall& call) {
  static thread_local std::vector<float> row;
  const int64_t size = call.panels[0].units * kUnit;
  if (row.size() < static_cast<size_t>(size)) row.resize(static_cast<size_t>(size));
  constexpr int kSmallest = (127 - 122) << 7;
  constexpr int kLargest = (127 + 122) << 7;
  IVec outside = isplat(0);
  for (int64_t k = 0; k < size; k += kUnit) {
    HVec halves;
    std::memcpy(&halves, call.rows + 2 * k, sizeof(halves));
    const IVec wide = __builtin_convertvector(halves, IVec);
    const IVec is_normal = (wide & isplat(0x7f80)) != isplat(0);
    const IVec magnitude = wide & isplat(0x7fff);
    outside |= is_normal & ((magnitude < isplat(kSmallest)) | (magnitude > isplat(kLargest)));
    store(row.data() + k, (Vec)((wide << 16) & is_normal));
  }
  bool is_moderate = true;
  for (int lane = 0; lane < kUnit; ++lane) is_moderate &= outside[lane] == 0;
  return {row.data(), is_moderate};
}

// The two chains of 16 products of a block of 32 values of K, for each panel.
template <int Panels>
struct Chains {
  F32 even[Panels];
  F32 odd[Panels];
};

// One panel after the other: weights are made of codes and scales, then multiplied.
template <class P, int Panels>
MOEQ_INLINE void add_weights(Chains<Panels>& chains, const DotCall* weights, const float* x, int64_t unit,
                             int64_t group) {
  unroll<Panels>([&](auto panel) __attribute__((always_inline)) {
    constexpr int i = decltype(panel)::value;
    const typename P::Tiles::Floats codes(weights[i], unit, group_of<P>(unit, group));
    unroll<8>([&](auto pair) __attribute__((always_inline)) {
      constexpr int p = decltype(pair)::value;
      chains.even[i] = fma(codes.template even<p>(), broadcast(x + 2 * p), chains.even[i]);
      chains.odd[i] = fma(codes.template odd<p>(), broadcast(x + 2 * p + 1), chains.odd[i]);
    });
  });
}

// The same sums, with (code * value) * scale for (code * scale) * value, which are the same exact products.
template <class P, int Panels>
MOEQ_INLINE void add_products(Chains<Panels>& chains, const DotCall* weights, const float* x, int64_t unit,
                              int64_t group) {
  using Products = typename P::Tiles::Products;
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
        chains.even[i] = fma(even.template of<4 * p>(codes[i]), scales[i], chains.even[i]);
        chains.odd[i] = fma(odd.template of<16 + 4 * p>(codes[i]), scales[i], chains.odd[i]);
      });
    });
  });
}

template <class P, int Panels>
MOEQ_INLINE bool have_moderate_scales(const DotCall* weights, int64_t unit, int64_t group) {
  bool all = true;
  for (int i = 0; i < Panels; ++i) all &= P::Tiles::are_moderate(weights[i].scale + group_of<P>(unit, group) * kPanelRows);
  return all;
}

// sums[panel] [16] = products of units [begin, end): 32 values of K at a time, the even ones and the odd ones in chains
// of their own, whose sum joins the accumulator.
template <class P, int Panels>
__attribute__((noinline)) void multiply_row(const DotCall* weights, const WideRow& row, int64_t begin, int64_t end,
                                            int64_t group, float* const* sums) {
  constexpr bool kLooksUp = !std::is_same_v<typename P::Tiles::Products, NoProducts>;
  F32 acc[Panels];
  unroll<Panels>([&](auto panel) __attribute__((always_inline)) { acc[panel.value] = zero(); });
  for (int64_t block = begin; block < end; block += 2) {
    Chains<Panels> chains;
    unroll<Panels>([&](auto panel)
                       __attribute__((always_inline)) { chains.even[panel.value] = chains.odd[panel.value] = zero(); });
    for (int64_t unit = block; unit < block + 2 && unit < end; ++unit) {
      unroll<Panels>([&](auto panel) __attribute__((always_inline)) {
        const uint8_t* ahead = weights[panel.value].codes + unit * P::Codes::kUnitBytes + P::kPrefetchBytes;
#pragma GCC unroll 16
        for (int line = 0; line < P::Codes::kUnitBytes; line += 64) prefetch(ahead + line);
      });
      const float* x = row.values + unit * kUnit;
      if constexpr (kLooksUp) {
        if (__builtin_expect(row.is_moderate && have_moderate_scales<P, Panels>(weights, unit, group), 1)) {
          add_products<P, Panels>(chains, weights, x, unit, group);
          continue;
        }
      }
      add_weights<P, Panels>(chains, weights, x, unit, group);
    }
    unroll<Panels>([&](auto panel) __attribute__((always_inline)) {
      constexpr int i = decltype(panel)::value;
      acc[i] = add(acc[i], add(chains.even[i], chains.odd[i]));
    });
  }
  unroll<Panels>([&](auto panel) __attribute__((always_inline)) { store(sums[panel.value], acc[panel.value]); });
}

}  // namespace moeq::cpu::MOEQ_ISA
