// Arguments of the Hopper ops, from tensors to the pointers and sizes of a Problem. Python has checked the arguments;
// what is checked here guards memory. `op`: the one that was called, for messages.
#pragma once
#include <torch/csrc/stable/library.h>

#include <string>

#include "../../../generated/calls.h"
#include "../../launch.h"
#include "../problem/problem.h"

namespace moeq::sm90 {

// An enum by the name that Python gives it.
template <class Enum>
Enum named(const char* op, const char* argument, const std::string& name) {
  Enum value{};
  STD_TORCH_CHECK(parse(name, value), "moeq_C::", op, ": ", argument, " must be a known name, got '", name, "'");
  return value;
}

inline OutType out_type_of(const char* op, const Tensor& out) {
  switch (out.scalar_type()) {
    case ScalarType::BFloat16:
      return OutType::kBfloat16;
    case ScalarType::Half:
      return OutType::kFloat16;
    default:
      STD_TORCH_CHECK(out.scalar_type() == ScalarType::Float, "moeq_C::", op,
                      ": out must have dtype bfloat16, float16 or float32");
      return OutType::kFloat32;
  }
}

inline bool is_aligned(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0; }

// The tensor's data, once its device, dtype and size have been checked: `count` elements of type T.
template <typename T>
const T* data_of(const char* op, const char* name, const Tensor& tensor, ScalarType dtype, int64_t count,
                 const Tensor& beside) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == beside.get_device_index() &&
                      tensor.is_contiguous() && tensor.scalar_type() == dtype && tensor.numel() == count,
                  "moeq_C::", op, ": ", name, " must be contiguous, on the device of out, with ", count,
                  " elements of its dtype, got ", tensor.numel());
  return static_cast<const T*>(tensor.const_data_ptr());
}

inline const uint8_t* tiles_of(const char* op, const char* name, const Tensor& tensor, int64_t count,
                               const Tensor& beside) {
  STD_TORCH_CHECK(is_aligned(tensor), "moeq_C::", op, ": ", name, " must start at a multiple of 16 bytes");
  return data_of<uint8_t>(op, name, tensor, ScalarType::Byte, count, beside);
}

inline const float* floats_of(const char* op, const char* name, const OptionalTensor& tensor, int64_t count,
                              const Tensor& beside) {
  return tensor.has_value() ? data_of<float>(op, name, *tensor, ScalarType::Float, count, beside) : nullptr;
}

inline int size_of(const char* op, const Tensor& tensor, int dim) {
  const int64_t size = tensor.size(dim);
  STD_TORCH_CHECK(size > 0 && size <= INT32_MAX, "moeq_C::", op, ": sizes must be from 1 to 2^31 - 1, got ", size);
  return static_cast<int>(size);
}

// How a GEMM's activations are quantized: not at all, or by a scale of the tensor, of each expert, of each token.
inline ActScale bind_gscale(const char* op, const char* name, bool quantize, const OptionalTensor& gscale,
                            const float*& data, const Problem& p, const Tensor& beside) {
  data = nullptr;
  if (!quantize) return ActScale::kNone;
  if (!gscale.has_value()) return ActScale::kToken;
  const bool one = gscale->dim() == 0;
  data = floats_of(op, name, gscale, one ? 1 : p.experts, beside);
  return one ? ActScale::kTensor : ActScale::kExpert;
}

}  // namespace moeq::sm90
