// Decode of very few tokens with e4m3 weights (decode_few_kernel.cuh).
#pragma once
#include "decode_few.h"
#include "../problem/tiled_problem.h"

namespace moeq::sm90::few {

// fits: whether the kernel takes the problem, and there is room for it.
cudaError_t make_fp8_plan(const W4a8Problem& p, Plan& plan, bool& fits);

cudaError_t run_fp8(Plan& plan);

}  // namespace moeq::sm90::few
