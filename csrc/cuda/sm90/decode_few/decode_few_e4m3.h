// Decode of very few tokens with 4-bit weights beside activations rounded to e4m3 (decode_few_kernel.cuh).
#pragma once
#include "decode_few.h"
#include "../problem/tiled_problem.h"

namespace moeq::sm90::few {

// fits: whether the kernel takes the problem, and there is room for it.
cudaError_t make_e4m3_plan(const RoundedProblem& p, Plan& plan, bool& fits);

cudaError_t run_e4m3(Plan& plan);

}  // namespace moeq::sm90::few
