// A layer of weights of at most 8 bits on fp8 activations: what the kernels are asked to run.
#pragma once
#include "../problem/problem.h"

namespace moeq::sm90 {

// weights: kPacked: NVFP4 codes and block scales. kRows: e4m3 with a scale for each row, half of the rows, or matrix.
// kBlocks: e4m3 with a scale for 128 x 128, and activations with one for 128 of a row. w4a8_layout.h says how they lie.
//
// `inter` is a multiple of 128, `hidden` one of 16; both count padded rows, scales do not. a1 and a2 are kTensor,
// kExpert (a calibrated gscale multiplies) or kToken; kBlocks takes kToken only. Everything else as in Problem.
struct W4a8Problem : Problem {
  Weights weights;
  int decode_tokens;                // up to so many are for the decode kernel, where it takes the problem
  const float* x_scale;             // null, or x is e4m3 codes and this [tokens], kBlocks: [tokens, hidden / 128]
};

// Sizes depend on shapes alone. An error is that of a failed launch; nothing synchronizes.
size_t w4a8_workspace(const W4a8Problem& p);
cudaError_t w4a8_run(const W4a8Problem& p);

}  // namespace moeq::sm90
