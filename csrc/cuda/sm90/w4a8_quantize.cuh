// The second launch: tokens -> rows of GEMM1's operand, a row for each of a token's slots.
#pragma once
#include "w4a8_schedule.cuh"

namespace moeq::sm90::w4a8 {

struct QuantizeArgs {
  W4a8Problem problem;
  Schedule schedule;
  uint8_t* operand;    // [rows, K padded], see w4a8_schedule.cuh
  float* factor;       // [rows]: multiplies accumulators; kBlocks: [k tiles, rows], as the operand lies
  int k_tiles;
};

cudaError_t launch_quantize_tokens(const QuantizeArgs& args);

}  // namespace moeq::sm90::w4a8
