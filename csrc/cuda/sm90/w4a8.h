// A layer of NVFP4 weights on fp8 activations, for many tokens: what the kernels are asked to run.
#pragma once
#include "problem.h"

namespace moeq::sm90 {

// The weights lie as w4a8_layout.h says; `inter` is a multiple of 128, `hidden` one of 16. a1 and a2 are kTensor,
// kExpert (a calibrated gscale multiplies) or kToken. Everything else as in Problem.
struct W4a8Problem : Problem {
  bool folded;
};

// Sizes depend on shapes alone. An error is that of a failed launch; nothing synchronizes.
size_t w4a8_workspace(const W4a8Problem& p);
cudaError_t w4a8_run(const W4a8Problem& p);

}  // namespace moeq::sm90
