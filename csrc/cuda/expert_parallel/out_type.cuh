// The dtype of sums.
#pragma once
#include "../../check.h"
#include "../launch.cuh"
#include "combine.cuh"

namespace moeq::ep {

inline Out out_type_of(const char* op, const Tensor& out) {
  switch (out.scalar_type()) {
    case ScalarType::Float:
      return Out::kFloat32;
    case ScalarType::BFloat16:
      return Out::kBfloat16;
    case ScalarType::Half:
      return Out::kFloat16;
    default:
      MOEQ_CHECK(op, false, "out must have dtype float32, bfloat16 or float16");
      return Out::kFloat32;
  }
}

}  // namespace moeq::ep
