// A layer of weights of at most 8 bits on fp8 activations, for many tokens: what the kernels are asked to run.
#pragma once
#include "problem.h"

namespace moeq::sm90 {

// Float32 scales of e4m3 weights, which multiply. kRows: that of row r of a half at expert * e + half * h + row * r;
// kBlocks: at expert * e + half * h + row * (r / 128) + K / 128.
struct WeightScales {
  const float* data;
  int64_t expert;
  int half, row;
  int rows;      // of a half, without padding
};

// weights: kPacked: NVFP4 codes and block scales. kRows: e4m3 with a scale for each row, half of the rows, or matrix.
// kBlocks: e4m3 with a scale for 128 x 128, and activations with one for 128 of a row. w4a8_layout.h says how they lie.
//
// `inter` is a multiple of 128, `hidden` one of 16; both count padded rows, scales do not. a1 and a2 are kTensor,
// kExpert (a calibrated gscale multiplies) or kToken; kBlocks takes kToken only. Everything else as in Problem.
struct W4a8Problem : Problem {
  Weights weights;
  WeightScales scales13, scales2;   // but for kPacked
  const float* x_scale;             // null, or x is e4m3 codes and this [tokens], kBlocks: [tokens, hidden / 128]
};

// Sizes depend on shapes alone. An error is that of a failed launch; nothing synchronizes.
size_t w4a8_workspace(const W4a8Problem& p);
cudaError_t w4a8_run(const W4a8Problem& p);

}  // namespace moeq::sm90
