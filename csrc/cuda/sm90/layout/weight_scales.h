// Scales of e4m3 weights, beside their codes.
#pragma once
#include <cstdint>

namespace moeq::sm90 {

// Float32 scales of e4m3 weights, which multiply: that of row r of a half at expert * e + half * h + row * r; blocks:
// at expert * e + half * h + row * (r / 128) + K / 128.
struct WeightScales {
  const float* data;
  int64_t expert;
  int half, row;
  int rows;      // of a half, without padding
  bool blocks;
};

}  // namespace moeq::sm90
