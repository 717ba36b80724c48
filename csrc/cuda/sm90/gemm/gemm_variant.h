// The persistent kernels of both GEMMs, those of a format in a file, and what a launch has to know of them.
#pragma once
#include "gemm_args.cuh"

namespace moeq::sm90 {

// The end of GEMM1: silu and swigluoai, the other gated activations, those without a gate.
enum class Finish { kSwiglu, kGated, kPlain };

struct GemmVariant {
  void (*kernel)(GemmArgs);
  int shared_bytes;
  int threads;
  int blocks;        // of a multiprocessor
  int block_tiles;   // of 64 weight rows that a thread block multiplies at a time
  int max_width;     // tokens of a tile
};

struct GemmVariants {
  GemmVariant of_shape[kShapes];
};

template <class Format, Finish finish>
GemmVariants gemm_variants();

}  // namespace moeq::sm90
