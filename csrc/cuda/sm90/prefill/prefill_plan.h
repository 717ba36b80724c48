// What the plans of a prefill have in common, whatever the weights are.
#pragma once
#include "../gemm/gemm_variant.h"
#include "prefill_kernels.cuh"
#include "../problem/workspace.h"

namespace moeq::sm90 {

// Results of single slots keep float32 where the output is finer than bfloat16.
inline bool is_wide(const Problem& p) { return p.out_type != OutType::kBfloat16; }
inline int64_t result_bytes(const Problem& p) { return is_wide(p) ? 4 : 2; }

// The longest array decides.
inline int tokens_of_piece(const Problem& p) {
  return tokens_at_once(p, (p.hidden > p.inter ? p.hidden : p.inter) * result_bytes(p) * p.top_k);
}

inline Finish finish_of(const Problem& p) {
  if (!p.gated) return Finish::kPlain;
  return p.activation == Activation::kSilu || p.activation == Activation::kSwigluoai ? Finish::kSwiglu : Finish::kGated;
}

// Both GEMMs in blocks of so many tiles of weight rows; the caller says where the arrays lie.
inline GemmArgs gemms_of(const Problem& p, const Schedule& schedule, int block_tiles) {
  GemmArgs gemm{};
  gemm.problem = p;
  gemm.schedule = schedule;
  gemm.rows = max_rows(p.tokens * p.top_k, p.experts);
  gemm.y_wide = is_wide(p);
  const int k_step = has_bytes(p.format) ? w4a8::kTileK : kTileK;
  gemm.hidden_padded = ceil_div(p.hidden, k_step) * k_step;
  gemm.inter_padded = ceil_div(p.inter, k_step) * k_step;
  gemm.tiles13 = row_tiles13(p.inter, p.gated);
  gemm.tiles2 = ceil_div(p.hidden, kTileRows);
  gemm.blocks13 = ceil_div(gemm.tiles13, block_tiles);
  gemm.blocks2 = ceil_div(gemm.tiles2, block_tiles);
  gemm.first = gemm.second = true;
  return gemm;
}

}  // namespace moeq::sm90
