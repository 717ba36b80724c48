// A layer of weights of layout.h whose activations are rounded to NVFP4, to e4m3 with a scale for each row or given
// ones, or to mxfp8.
#pragma once
#include "../../../generated/sm90_act_formats.h"
#include "problem.h"
#include "remote_rows.h"

namespace moeq::sm90 {

struct RoundedProblem : Problem {
  ActFormat act_format;    // what `a1` and `a2` round to; of mxfp8 they are kNone or kToken
  const float* x_factor;   // [tokens]: multiplies GEMM1's sums, where x holds values of codes; null: 1
  RemoteRows remote;       // of prefill_run alone
};

inline bool rounds_to_e4m3(const RoundedProblem& p) {
  return p.act_format != ActFormat::kNvfp4 && (p.a1 != ActScale::kNone || p.a2 != ActScale::kNone);
}

// What kernels get that round to NVFP4 or not at all: someone else rounds to e4m3.
inline Problem without_e4m3(const RoundedProblem& p) {
  Problem plain = p;
  if (p.act_format != ActFormat::kNvfp4) plain.a1 = plain.a2 = ActScale::kNone;
  return plain;
}

// Each returns an error for a failed launch and never synchronizes. Sizes depend on shapes alone.
//
// Whether decode_run routes a problem of this shape by itself; else route_run goes before it, as before prefill_run.
bool decode_takes_logits(const RoundedProblem& p);
int decode_max_tokens(const Problem& p);   // more than that, whatever p.tokens, decode_run does not take
size_t decode_workspace(const RoundedProblem& p);
cudaError_t decode_run(const RoundedProblem& p);
size_t prefill_workspace(const RoundedProblem& p, Shape shape);
cudaError_t prefill_run(const RoundedProblem& p, Shape shape);

}  // namespace moeq::sm90
