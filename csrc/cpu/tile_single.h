// One row of an expert without tiles, by float32 products in the order of TDPBF16PS: the bits of tiles.
//
// A tile of weights for one row costs its way through memory, a load that waits for the stores, and a product that is
// as long as that of eight rows. Here weights stay in registers.
#pragma once

#include <xmmintrin.h>

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
inline const float* widen_row(const TileCall& call) {
  static thread_local std::vector<float> row;
  const int64_t size = call.panels[0].units * kUnit;
  if (row.size() < static_cast<size_t>(size)) row.resize(static_cast<size_t>(size));
  for (int64_t k = 0; k < size; k += kUnit) {
    HVec halves;
    std::memcpy(&halves, call.rows + 2 * k, sizeof(halves));
    const IVec wide = __builtin_convertvector(halves, IVec);
    const IVec is_normal = (wide & isplat(0x7f80)) != isplat(0);
    store(row.data() + k, (Vec)((wide << 16) & is_normal));
  }
  return row.data();
}

// sums [16] = products of units [begin, end): 32 values of K at a time, the even ones and the odd ones in chains of
// their own, whose sum joins the accumulator.
template <class P>
__attribute__((noinline)) void multiply_row(const DotCall& weights, const float* row, int64_t begin, int64_t end,
                                            int64_t group, float* sums) {
  F32 acc = zero();
  for (int64_t block = begin; block < end; block += 2) {
    F32 even = zero();
    F32 odd = zero();
    for (int64_t unit = block; unit < block + 2 && unit < end; ++unit) {
      const uint8_t* ahead = weights.codes + unit * P::Codes::kUnitBytes + P::kPrefetchBytes;
#pragma GCC unroll 16
      for (int line = 0; line < P::Codes::kUnitBytes; line += 64) prefetch(ahead + line);
      const typename P::Tiles::Floats codes(weights, unit, group_of<P>(unit, group));
      const float* x = row + unit * kUnit;
      unroll<8>([&](auto pair) __attribute__((always_inline)) {
        constexpr int p = decltype(pair)::value;
        even = fma(codes.template even<p>(), broadcast(x + 2 * p), even);
        odd = fma(codes.template odd<p>(), broadcast(x + 2 * p + 1), odd);
      });
    }
    acc = add(acc, add(even, odd));
  }
  store(sums, acc);
}

template <class P, int Panels>
inline void multiply_single(const TileCall& call, const float* row, int64_t begin, int64_t end, int64_t group,
                            float* const (&sums)[Panels]) {
  const WithoutSubnormals scope;
  for (int panel = 0; panel < Panels; ++panel) {
    multiply_row<P>(call.panels[panel], row, begin, end, group, sums[panel]);
  }
}

}  // namespace moeq::cpu::MOEQ_ISA
