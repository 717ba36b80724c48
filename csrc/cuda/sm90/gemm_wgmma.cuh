// The tensor cores' part of a K-step: a branch over the widths of a tile of tokens.
#pragma once
#include <cstdint>

namespace moeq::sm90 {

// The upper word of the operand's description: atoms of 1024 bytes one after another, swizzled over 128 bytes.
constexpr uint32_t kTokenOperandHigh = 1u << 30 | 1024 / 16;

// d[64 rows, tokens] += a[64, 64] * b[64, tokens] for 8 * (index + 1) tokens, at most max_width: bfloat16 with float32
// sums, a in registers, b in shared memory (its address / 16; K-major, swizzled over 128 bytes, see kTokenOperandHigh).
// Asynchronous, one group. The branch is inside the assembly because the compiler gives the accumulators of each
// instruction that it sees registers of their own, and there are not enough. It also means that the compiler takes `a`
// for dead once the statement is over, while it is still read: see `keep`.
template <int max_width>
__device__ __forceinline__ void multiply_step(float* d, const uint32_t (&a)[4][4], uint32_t b, int index);

// Two steps, the tokens of the second where a stage of tokens of max_width has them.
template <int max_width>
__device__ __forceinline__ void multiply_two_steps(float* d, const uint32_t (&a)[2][4][4], uint32_t b, int index);

// One step of two tiles of weights: d[2][max_width / 2].
template <int max_width>
__device__ __forceinline__ void multiply_two_tiles(float* d, const uint32_t (&a)[2][4][4], uint32_t b, int index);

// The same with a in shared memory, too, like b: tiles of 64 rows, 8192 bytes each, one after another.
template <int max_width>
__device__ __forceinline__ void multiply_shared(float* d, uint32_t a, uint32_t b, int index);

}  // namespace moeq::sm90
