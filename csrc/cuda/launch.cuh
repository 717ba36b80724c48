// What every launch needs: the argument checks that protect memory, the current stream, the element type.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "load16.cuh"

namespace moeq {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kThreads = 256;

// Kernels run on the caller's stream: on another one they would race with the producer of their input.
inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

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
