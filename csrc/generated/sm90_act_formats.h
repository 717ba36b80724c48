// What the Hopper kernels round activations to. Written by scripts/kernel_headers.py: change what it reads, not this.
#pragma once
#include "../names.h"

namespace moeq::sm90 {

enum class ActFormat : int { kNvfp4, kFp8, kMxfp8 };

}  // namespace moeq::sm90

namespace moeq {

template <>
struct Names<sm90::ActFormat> {
  static constexpr const char* kAll[] = {"nvfp4", "fp8", "mxfp8"};
};

}  // namespace moeq
