// INT4 weights on fp8 activations that fp8 tensor cores multiply (w4a8_int4.cu): the tiles of layout.h, whose scales
// are those of 128 values of K or more.
#pragma once
#include "tiled_problem.h"

namespace moeq::sm90 {

// With zero points, or with float16 scales.
inline bool has_zero_points(const W4a8Problem& p) {
  return p.format == Format::kInt4Zero || p.format == Format::kInt4ZeroBf16;
}

inline bool has_int4(const W4a8Problem& p) {
  return p.weights == Weights::kPacked && (p.format == Format::kInt4Per64 || has_zero_points(p));
}

}  // namespace moeq::sm90
