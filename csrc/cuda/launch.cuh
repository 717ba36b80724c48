// What launches on activations of any element type need: the checks that protect memory, the type, the grid.
#pragma once

#include "launch.h"
#include "load16.cuh"

namespace moeq {

constexpr int kThreads = 256;

// Checks an activation matrix [rows, K] and gives it 16-byte alignment: a view may start anywhere.
inline Tensor aligned_activations(const char* op, const Tensor& x) {
  STD_TORCH_CHECK(x.is_cuda() && x.dim() == 2 && x.is_contiguous(), "moeq_C::", op,
                  ": x must be a contiguous CUDA matrix");
  STD_TORCH_CHECK(x.size(1) % 16 == 0, "moeq_C::", op, ": x.shape[1] must be a multiple of 16, got ", x.size(1));
  const bool aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  return aligned ? x : torch::stable::clone(x);
}

// Calls body(Element{}) with the element type of x.
template <typename Body>
void with_element(const char* op, const Tensor& x, Body body) {
  switch (x.scalar_type()) {
    case ScalarType::BFloat16:
      return body(Bfloat16{});
    case ScalarType::Half:
      return body(Float16{});
    case ScalarType::Float:
      return body(Float32{});
    default:
      STD_TORCH_CHECK(false, "moeq_C::", op, ": x must have dtype bfloat16, float16 or float32");
  }
}

// A one-dimensional grid; its limit of 2^31 - 1 blocks is far above what memory can hold, but never wraps silently.
inline unsigned grid_of(const char* op, int64_t blocks) {
  STD_TORCH_CHECK(blocks <= 0x7fffffff, "moeq_C::", op, ": x is too large, it needs ", blocks, " thread blocks");
  return static_cast<unsigned>(blocks);
}

}  // namespace moeq
