// Tensors of the op become the plain arguments of the kernels.
#pragma once

#include "../generated/calls.h"
#include "args.h"

namespace moeq::cpu {

// One weight as the op receives it.
struct WeightTensors {
  const Tensor& codes;
  const OptionalTensor& scale;
  const OptionalTensor& zero_point;
  const OptionalTensor& alphas;
  const OptionalTensor& bias;
};

// Fails unless the tensor is contiguous, on the CPU, aligned to its elements, and its memory is there.
void check_memory(const char* name, const Tensor& tensor);

DType dtype_of(const Tensor& tensor, const char* name);

// Fills the sizes, pointers and strides of `weight`: `units` of K, rows in `halves` halves.
// Fails where a shape would let a kernel read outside of a tensor.
Weight bind_weight(const char* name, const WeightTensors& tensors, Scheme scheme, int64_t units, int64_t halves);

// `gscale`: absent (dynamic), [] or [num_experts].
ActQuant bind_act(const char* name, ActFormat format, DType dtype, const OptionalTensor& gscale, int64_t num_experts);

// Null where the tensor is absent; fails unless it has `numel` elements (any number where negative).
const float* bind_floats(const char* name, const OptionalTensor& tensor, int64_t numel);

}  // namespace moeq::cpu
