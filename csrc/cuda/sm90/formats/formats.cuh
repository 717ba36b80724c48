// The formats of weights that the Hopper kernels decode. A format is a struct without state:
//
//   kTileScaleBytes     bytes of scales that belong to a tile of 64 rows by 64 values of K (layout.h)
//   kAccumulatorScale   what a sum of products of decoded weights must be multiplied by
//   ScaleWord           what one thread needs of a tile's scales, one load
//   scale_offset(t)     where thread t of the tile's 128 finds it, in bytes
//   Scales scales(word) the same, ready for
//   decode(word, s, a)  one of the thread's four words of codes -> the four registers of its fragment in that K-step
//
// The decode kernels multiply sums over a tile by rows' scales where kScalesSums<format>: what `decode` makes has none.
//   factors(word)       those of a thread's two rows, float32
#pragma once
#include <type_traits>

#include "weights_int4.cuh"
#include "weights_fp4.cuh"

namespace moeq::sm90 {

template <class Format>
constexpr bool kScalesSums = std::is_base_of_v<Int4Sums, Format>;

#if defined(__CUDACC__)
// Volatile: such a load must not move across the barriers that say when the bytes are there.
__device__ __forceinline__ void load_shared(uint16_t& word, uint32_t address) {
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(word) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_shared(uint32_t& word, uint32_t address) {
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_shared(PairOfWords& words, uint32_t address) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(words.low_row), "=r"(words.high_row)
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_shared(PairOfFloats& words, uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.low_row), "=r"(words.low_zero), "=r"(words.high_row), "=r"(words.high_zero)
               : "r"(address)
               : "memory");
}
#endif

}  // namespace moeq::sm90
