// Rows of activations -> rows of the token operand: e4m3, in the order and with the swizzle of w4a8_layout.h.
#pragma once
#include "w4a8_schedule.cuh"

namespace moeq::sm90::w4a8 {

struct QuantizeArgs {
  W4a8Problem problem;
  Schedule schedule;
  const float* h;      // of GEMM1: [rows, inter] activated, or [rows, halves * inter] not yet
  bool activated;
  uint8_t* operand;    // [rows, K padded], see w4a8_schedule.cuh
  float* factor;       // [rows]: multiplies accumulators; kBlocks: [k tiles, rows], as the operand lies
  int k_tiles;
};

cudaError_t launch_quantize_tokens(const QuantizeArgs& args);
cudaError_t launch_quantize_intermediate(const QuantizeArgs& args, int rows);

}  // namespace moeq::sm90::w4a8
