// Float32 scales of e4m3 weights, from tensors.
#pragma once
#include "op_arguments.h"
#include "../layout/w4a8_layout.h"

namespace moeq::sm90 {

// Of `rows` rows in `halves` halves: [experts, rows, 1], [experts, halves] or [experts, 1]; blocks: [experts, tiles of
// rows, tiles of K], of 128 x 128.
inline WeightScales weight_scales_of(const char* op, const char* name, const Tensor& tensor, bool blocks, int experts,
                                     int64_t rows, int halves, int64_t k, const Tensor& beside) {
  const int64_t of_half = rows / halves;
  WeightScales scales{nullptr, 0, 0, 0, static_cast<int>(of_half), blocks};
  if (blocks) {
    const int64_t row_blocks = w4a8::tiles(static_cast<int>(of_half), 128);
    const int64_t columns = w4a8::tiles(static_cast<int>(k), 128);
    scales.expert = halves * row_blocks * columns;
    scales.half = static_cast<int>(row_blocks * columns);
    scales.row = static_cast<int>(columns);
  } else if (tensor.dim() == 3) {
    scales.expert = rows;
    scales.half = static_cast<int>(of_half);
    scales.row = 1;
  } else {
    scales.expert = size_of(op, tensor, 1);
    scales.half = scales.expert == 2 ? 1 : 0;
  }
  scales.data = data_of<float>(op, name, tensor, ScalarType::Float, experts * scales.expert, beside);
  return scales;
}

}  // namespace moeq::sm90
