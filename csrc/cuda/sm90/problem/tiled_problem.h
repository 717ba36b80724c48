// Layers of weights in the tiles of layout.h: what their kernels are asked to run besides a Problem.
#pragma once
#include <cstdint>

#include "problem.h"
#include "../../../generated/sm90_act_formats.h"

namespace moeq::sm90 {

constexpr int kMostRemoteRanks = 8;

// Token t of the call is row t / ranks of rank t % ranks, so that any range of tokens is spread over all links.
struct RemoteRows {
  int64_t x[kMostRemoteRanks];    // addresses: each rank's tokens, [rows, hidden]
  int64_t out[kMostRemoteRanks];  // addresses at each rank: what this rank gives it, [rows, hidden]
  int ranks;                      // 0: rows are those of the Problem
  int first;                      // the call's number of the piece's first token
};

struct RemoteRow {
  int rank;
  int64_t row;
};

#ifdef __CUDACC__
__device__ __forceinline__ RemoteRow remote_row(const RemoteRows& remote, int token) {
  const int of_call = remote.first + token;
  return {of_call % remote.ranks, of_call / remote.ranks};
}
#endif

// A layer of weights of layout.h whose activations are rounded to NVFP4, to e4m3 with a scale for each row or given
// ones, or to mxfp8.
struct RoundedProblem : Problem {
  ActFormat act_format;    // what `a1` and `a2` round to; of mxfp8 they are kNone or kToken
  const float* x_factor;   // where x holds values of codes: [tokens], multiplies GEMM1's sums, or of groups
                           // (rounds_groups) [tokens, hidden / 128], rounded up; null: 1
  RemoteRows remote;       // of prefill_run alone
  bool halves;  // likewise, made by it: operands are float16, either as hidden states are or values of codes
};

inline bool rounds_to_e4m3(const RoundedProblem& p) {
  return p.act_format != ActFormat::kNvfp4 && (p.a1 != ActScale::kNone || p.a2 != ActScale::kNone);
}

// e4m3 weights beside e4m3 activations; those of 128 x 128 beside scales of 128 values of a row.
inline bool is_w8a8(const RoundedProblem& p) { return p.format == Format::kFp8 && p.a2 != ActScale::kNone; }
inline bool rounds_groups(const RoundedProblem& p) { return is_w8a8(p) && p.scales13.blocks; }

// What kernels get that round to NVFP4 or not at all: someone else rounds to e4m3.
inline Problem without_e4m3(const RoundedProblem& p) {
  Problem plain = p;
  if (p.act_format != ActFormat::kNvfp4) plain.a1 = plain.a2 = ActScale::kNone;
  return plain;
}

// Each returns an error for a failed launch and never synchronizes. Sizes depend on shapes alone.
int decode_max_tokens(const Problem& p);  // more than that, whatever p.tokens, decode_run does not take
size_t decode_workspace(const RoundedProblem& p);
cudaError_t decode_run(const RoundedProblem& p);
size_t prefill_workspace(const RoundedProblem& p, Shape shape);
cudaError_t prefill_run(const RoundedProblem& p, Shape shape);

// One GEMM of a layer whose rows somebody else combines, with adapters beside its weights. Two calls make a layer: what
// lies between them, GEMM2's adapters see.

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

// A layer of weights of at most 8 bits on fp8 activations.
//
// weights: kPacked: NVFP4 or, as `format` says, MXFP4 codes and block scales, or INT4 (has_int4). kRows: e4m3
// with a scale for each row, half of the rows, or matrix. kBlocks: e4m3 with a scale for 128 x 128, and activations
// with one for 128 of a row. w4a8_layout.h says how they lie.
//
// `inter` is a multiple of 128 (INT4: 64), `hidden` one of 16; both count padded rows, scales do not. a1 and a2 are
// kTensor, kExpert (a calibrated gscale multiplies) or kToken; kBlocks takes kToken only. All else as in Problem.
struct W4a8Problem : Problem {
  Weights weights;
  int decode_tokens;  // up to so many are for the decode kernel, where it takes the problem
  const float* x_scale;  // null, or x is e4m3 codes and this [tokens], kBlocks: [tokens, hidden / 128]
};

inline bool has_mx_scales(const W4a8Problem& p) { return p.weights == Weights::kPacked && p.format == Format::kMxfp4; }

// INT4 weights that fp8 tensor cores multiply (w4a8_int4.cu): the tiles of layout.h, whose scales are those of 128
// values of K or more. With zero points, or with float16 scales.
inline bool has_zero_points(const W4a8Problem& p) {
  return p.format == Format::kInt4Zero || p.format == Format::kInt4ZeroBf16;
}

inline bool has_int4(const W4a8Problem& p) {
  return p.weights == Weights::kPacked && (p.format == Format::kInt4Per64 || has_zero_points(p));
}

// Sizes depend on shapes alone. An error is that of a failed launch; nothing synchronizes.
size_t w4a8_workspace(const W4a8Problem& p);
cudaError_t w4a8_run(const W4a8Problem& p);

}  // namespace moeq::sm90
