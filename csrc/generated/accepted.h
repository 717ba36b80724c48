// Of calls that need not be checked again (cpu/accepted.h). Written by scripts/kernel_headers.py: change what it reads, not this.
#pragma once
#include "calls.h"

namespace moeq {

struct ExpertsAcceptedCall {
  Tensor hidden_states;
  Tensor topk_ids;
  Tensor topk_weights;
  Tensor w13;
  OptionalTensor w13_scale;
  OptionalTensor w13_zero_point;
  OptionalTensor g1_alphas;
  OptionalTensor w13_bias;
  Tensor w2;
  OptionalTensor w2_scale;
  OptionalTensor w2_zero_point;
  OptionalTensor g2_alphas;
  OptionalTensor w2_bias;
  OptionalTensor a1_gscale;
  OptionalTensor a2_gscale;
  int64_t names;
  static constexpr const char* kSchema =
      "experts_accepted(Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor? w13_scale, "
      "Tensor? w13_zero_point, Tensor? g1_alphas, Tensor? w13_bias, Tensor w2, Tensor? w2_scale, Tensor? "
      "w2_zero_point, Tensor? g2_alphas, Tensor? w2_bias, Tensor? a1_gscale, Tensor? a2_gscale, int names) -> Tensor?";
  using Types = std::tuple<
      Tensor, Tensor, Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, Tensor,
      OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, int64_t>;
};

}  // namespace moeq
