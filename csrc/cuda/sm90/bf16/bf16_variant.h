// The persistent kernels for bfloat16 weights.
#pragma once
#include <cuda.h>

#include "../gemm/gemm_variant.h"

namespace moeq::sm90 {

// The weights as the copy engine sees them: K, eight rows, halves (gate and up), eights of rows, experts. A box is 64
// of K by 256 rows, gate and up rows of w13 in turns of eight as the epilogue wants them, swizzled over 128 bytes.
// Where there are no halves, the rows of an expert are the second dimension.
struct Bf16Args {
  GemmArgs gemm;
  CUtensorMap w13, w2;
};

struct Bf16Kernel {
  void (*kernel)(Bf16Args);
  int shared_bytes;
  int threads;
  int block_tiles;   // of 64 weight rows that a thread block multiplies at a time
  int max_width;     // tokens of a tile
};

template <Finish finish>
Bf16Kernel bf16_kernel_of();

}  // namespace moeq::sm90
