// NVFP4 quantization of activations by the canonical algorithm, to values (code * block scale, exact in bfloat16).
#pragma once
#include <cuda_bf16.h>

#include "../../nvfp4_block.cuh"

namespace moeq::sm90 {

struct BlockFactors {
  float quantize_by;   // multiplies a value before it becomes e2m1
  float step;          // the block scale: multiplies e2m1
};

__device__ __forceinline__ BlockFactors block_factors(float amax, float gscale) {
  const BlockScale scale = nvfp4_block_scale(amax, gscale);
  return {scale.quantize_by, scale.value};
}

// The e2m1 value nearest to |y|, ties to even: its steps are half a power of two, at least a half. Adding and taking
// off 1.5 * 2^22 times that power rounds to them. NaN comes out as 6, and its block's step is NaN.
__device__ __forceinline__ float rounded_e2m1(float y) {
  const uint32_t power = max(bits_of(y) & 0x7F800000u, 0x3F800000u);
  const float shift = float_of(power + 0x0B400000u);
  return fminf(__fadd_rn(__fadd_rn(fabsf(y), shift), -shift), kE2m1Max);
}

__device__ __forceinline__ float quantized_value(float value, BlockFactors block) {
  return copysignf(rounded_e2m1(multiply(value, block.quantize_by)) * block.step, value);
}

// 16 values -> code * block scale.
__device__ __forceinline__ void quantize(float (&values)[16], float gscale) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; i++) amax = max_magnitude(amax, values[i]);
  const BlockFactors block = block_factors(amax, gscale);
#pragma unroll
  for (int i = 0; i < 16; i++) values[i] = quantized_value(values[i], block);
}

// A thread has 16 values of K (8 pairs), its quad 64. Pair 2 * j + u of the quad's four threads makes piece 2 * j + u
// of the row in the layout's order; of the eight pieces a thread gets the numbers threadIdx.x % 4 and that + 4.
__device__ __forceinline__ void exchange(const float (&values)[16], uint4 (&pieces)[2]) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    uint32_t mine[4], out[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values[half * 8 + 2 * i], values[half * 8 + 2 * i + 1]);
      mine[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const int other = c ^ r;
      const uint32_t word = other < 2 ? (other == 0 ? mine[0] : mine[1]) : (other == 2 ? mine[2] : mine[3]);
      const uint32_t got = __shfl_xor_sync(0xffffffffu, word, r);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (i == other) out[i] = got;
      }
    }
    pieces[half] = make_uint4(out[0], out[1], out[2], out[3]);
  }
}

// Into a row of 64 values, its 16-byte pieces swizzled by the row as wgmma wants them.
__device__ __forceinline__ void store_pieces(__nv_bfloat16* k_tile, int64_t row, const uint4 (&pieces)[2]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int piece = (half * 4 + threadIdx.x % 4) ^ (row % 8);
    *reinterpret_cast<uint4*>(k_tile + row * 64 + piece * 8) = pieces[half];
  }
}

}  // namespace moeq::sm90
