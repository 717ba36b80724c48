// A layer of bfloat16 weights as the checkpoint has them: w13 [experts, rows, hidden], w2 [experts, hidden, inter].
#pragma once
#include "../problem/problem.h"

namespace moeq::sm90 {

// As prefill_run does, of a problem without scales and without quantization; `format` says nothing here.
size_t bf16_workspace(const Problem& p);
cudaError_t bf16_run(const Problem& p);

}  // namespace moeq::sm90
