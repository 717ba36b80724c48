// Activations. Written by scripts/kernel_headers.py: change what it reads, not this.
#pragma once
#include "../names.h"

namespace moeq {

enum class Activation : int {
    kSilu, kSwigluoai, kSwiglustep, kSitu, kGelu, kGeluTanh, kRelu2, kSiluNoMul, kGeluNoMul, kRelu2NoMul, kIdentityNoMul
};

constexpr bool is_gated(Activation activation) { return activation < Activation::kSiluNoMul; }

}  // namespace moeq

namespace moeq {

template <>
struct Names<Activation> {
  static constexpr const char* kAll[] = {
      "silu", "swigluoai", "swiglustep", "situ", "gelu", "gelu_tanh", "relu2", "silu_no_mul", "gelu_no_mul",
      "relu2_no_mul", "identity_no_mul"
  };
};

}  // namespace moeq
