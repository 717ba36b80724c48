// Arguments of the Hopper ops, from tensors to the pointers and sizes of a Problem. Python has checked the arguments;
// what is checked here guards memory. `op`: the one that was called, for messages.
#pragma once
#include <string>
#include <torch/csrc/stable/library.h>

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

// A router's logits and options, from what the op gets to the Router that the kernels read.
inline LogitType logit_type_of(const char* op, const Tensor& logits) {
  switch (logits.scalar_type()) {
    case ScalarType::BFloat16:
      return LogitType::kBfloat16;
    case ScalarType::Half:
      return LogitType::kFloat16;
    default:
      STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float, "moeq_C::", op,
                      ": router_logits must have dtype bfloat16, float16 or float32");
      return LogitType::kFloat32;
  }
}

inline void bind_router(const char* op, Router& router, const RouterCall& call, int tokens, const Tensor& beside) {
  const Tensor& logits = *call.router_logits;
  STD_TORCH_CHECK(logits.is_cuda() && logits.get_device_index() == beside.get_device_index() && logits.dim() == 2 &&
                      logits.size(0) == tokens && logits.stride(1) == 1,
                  "moeq_C::", op, ": router_logits must be a matrix on the device of out, a row a token");
  router.logits = logits.const_data_ptr();
  router.type = logit_type_of(op, logits);
  router.row_stride = logits.stride(0);
  router.experts = size_of(op, logits, 1);
  router.bias = floats_of(op, "routing_bias", call.routing_bias, router.experts, beside);
  router.score = named<Score>(op, "score", call.score);
  router.weight = named<Score>(op, "weight", call.weight);
  router.renormalize = call.renormalize;
  const int64_t groups = call.n_group > 1 ? call.n_group : 1;
  STD_TORCH_CHECK(router.experts <= kRouteExperts && call.top_k >= 1 && call.top_k <= kRouteTopK &&
                      call.top_k <= router.experts && groups <= kRouteGroups && router.experts % groups == 0,
                  "moeq_C::", op, ": routing must be to at most ", kRouteTopK, " of ", kRouteExperts, " experts in ",
                  kRouteGroups, " equal groups");
  router.top_k = static_cast<int>(call.top_k);
  router.groups = static_cast<int>(groups);
  router.topk_group = groups > 1 ? static_cast<int>(call.topk_group) : 1;
  router.factor = static_cast<float>(call.routed_scaling_factor);
}

}  // namespace moeq::sm90
