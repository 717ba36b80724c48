// One GEMM of a layer whose rows somebody else combines, with adapters beside its weights. Two calls make a layer: what
// lies between them, GEMM2's adapters see.
#pragma once
#include "problem.h"

namespace moeq::sm90 {

// Ranks that are multiplied at a time, each as two numbers of bfloat16: the chunk once, then what it lacks.
constexpr int kRankChunk = 16;
__host__ __device__ inline int rank_chunks(int ranks) { return (ranks + kRankChunk - 1) / kRankChunk; }

// By slot, bfloat16. A row of a slot whose expert is not here stays as it was. `out` of the Problem is not written,
// topk_weights and weight_on_input are not looked at.
struct RowsProblem : Problem {
  bool second;  // GEMM2, of what the call for GEMM1 has kept; else sort, gather, GEMM1
  const void* low;  // [slots, rank_chunks(ranks), 2, kRankChunk]: numbers and what they lack, zeros beyond the
                    // ranks; the factor times their sums is added to the slot's row of the product; null: nothing is
  const void* factor;  // [experts, rows of w13 or w2 without padding, ranks]
  int ranks;  // a multiple of 8
  void* rows;  // [slots, hidden]: what GEMM2 gives, with w2_bias; or [slots, inter]: the intermediate; null:
               // nobody wants that
  void* kept;  // rows_kept(...) bytes: the intermediate and how rows are sorted
};

// Whether rows_run has a kernel: NVFP4 and MXFP4 weights, silu and swigluoai.
bool rows_run_takes(const Problem& p);
size_t rows_kept(const Problem& p);
// As prefill_run, of activations that nothing rounds.
size_t rows_workspace(const RowsProblem& p, Shape shape);
cudaError_t rows_run(const RowsProblem& p, Shape shape);

}  // namespace moeq::sm90
