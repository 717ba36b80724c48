// The arguments of compiled ops. Written by scripts/kernel_headers.py: change what it reads, not this.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace moeq {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// What every op that runs experts gets of a call (torch_moe_ops/core/call.py).
struct LayerCall {
  Tensor out;
  Tensor hidden_states;
  OptionalTensor hidden_states_scale;
  OptionalTensor topk_ids;
  OptionalTensor topk_weights;
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
  std::string activation;
  double swiglu_alpha;
  double swiglu_beta;
  double swiglu_limit;
  int64_t local_expert_offset;
  bool router_weight_on_input;
};

// A router, as moeq::route's arguments.
struct RouterCall {
  OptionalTensor router_logits;
  OptionalTensor routing_bias;
  std::string score;
  std::string weight;
  bool renormalize;
  int64_t top_k;
  int64_t n_group;
  int64_t topk_group;
  double routed_scaling_factor;
};

struct ExpertsCall : LayerCall {
  std::string scheme;
  std::string act_format;
  static constexpr const char* kSchema =
      "experts(Tensor(a!) out, Tensor hidden_states, Tensor? hidden_states_scale, Tensor? topk_ids, Tensor? "
      "topk_weights, Tensor w13, Tensor? w13_scale, Tensor? w13_zero_point, Tensor? g1_alphas, Tensor? w13_bias, "
      "Tensor w2, Tensor? w2_scale, Tensor? w2_zero_point, Tensor? g2_alphas, Tensor? w2_bias, Tensor? a1_gscale, "
      "Tensor? a2_gscale, str activation, float swiglu_alpha, float swiglu_beta, float swiglu_limit, int "
      "local_expert_offset, bool router_weight_on_input, str scheme, str act_format) -> ()";
  using Types = std::tuple<
      Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor, Tensor, OptionalTensor, OptionalTensor,
      OptionalTensor, OptionalTensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor,
      OptionalTensor, OptionalTensor, std::string, double, double, double, int64_t, bool, std::string, std::string>;
};

struct ExpertsSm90Call : LayerCall, RouterCall {
  std::string act_format;
  bool quantize_hidden;
  bool quantize_intermediate;
  int64_t kernel;
  static constexpr const char* kSchema =
      "experts_sm90(Tensor(a!) out, Tensor hidden_states, Tensor? hidden_states_scale, Tensor? topk_ids, Tensor? "
      "topk_weights, Tensor w13, Tensor? w13_scale, Tensor? w13_zero_point, Tensor? g1_alphas, Tensor? w13_bias, "
      "Tensor w2, Tensor? w2_scale, Tensor? w2_zero_point, Tensor? g2_alphas, Tensor? w2_bias, Tensor? a1_gscale, "
      "Tensor? a2_gscale, str activation, float swiglu_alpha, float swiglu_beta, float swiglu_limit, int "
      "local_expert_offset, bool router_weight_on_input, Tensor? router_logits, Tensor? routing_bias, str score, str "
      "weight, bool renormalize, int top_k, int n_group, int topk_group, float routed_scaling_factor, str act_format, "
      "bool quantize_hidden, bool quantize_intermediate, int kernel) -> ()";
  using Types = std::tuple<
      Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor, Tensor, OptionalTensor, OptionalTensor,
      OptionalTensor, OptionalTensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor,
      OptionalTensor, OptionalTensor, std::string, double, double, double, int64_t, bool, OptionalTensor,
      OptionalTensor, std::string, std::string, bool, int64_t, int64_t, int64_t, double, std::string, bool, bool,
      int64_t>;
};

struct ExpertsSm90RowsCall : LayerCall {
  OptionalTensor low;
  OptionalTensor factor;
  OptionalTensor rows;
  Tensor kept;
  bool second;
  int64_t kernel;
  static constexpr const char* kSchema =
      "experts_sm90_rows(Tensor(a!) out, Tensor hidden_states, Tensor? hidden_states_scale, Tensor? topk_ids, Tensor? "
      "topk_weights, Tensor w13, Tensor? w13_scale, Tensor? w13_zero_point, Tensor? g1_alphas, Tensor? w13_bias, "
      "Tensor w2, Tensor? w2_scale, Tensor? w2_zero_point, Tensor? g2_alphas, Tensor? w2_bias, Tensor? a1_gscale, "
      "Tensor? a2_gscale, str activation, float swiglu_alpha, float swiglu_beta, float swiglu_limit, int "
      "local_expert_offset, bool router_weight_on_input, Tensor? low, Tensor? factor, Tensor(b!)? rows, Tensor(c!) "
      "kept, bool second, int kernel) -> ()";
  using Types = std::tuple<
      Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor, Tensor, OptionalTensor, OptionalTensor,
      OptionalTensor, OptionalTensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor,
      OptionalTensor, OptionalTensor, std::string, double, double, double, int64_t, bool, OptionalTensor,
      OptionalTensor, OptionalTensor, Tensor, bool, int64_t>;
};

struct ExpertsSm90RemoteCall : LayerCall {
  std::string act_format;
  bool quantize_hidden;
  bool quantize_intermediate;
  int64_t kernel;
  Tensor heaps;
  Tensor sizes;
  int64_t rank;
  static constexpr const char* kSchema =
      "experts_sm90_remote(Tensor(a!) out, Tensor hidden_states, Tensor? hidden_states_scale, Tensor? topk_ids, "
      "Tensor? topk_weights, Tensor w13, Tensor? w13_scale, Tensor? w13_zero_point, Tensor? g1_alphas, Tensor? "
      "w13_bias, Tensor w2, Tensor? w2_scale, Tensor? w2_zero_point, Tensor? g2_alphas, Tensor? w2_bias, Tensor? "
      "a1_gscale, Tensor? a2_gscale, str activation, float swiglu_alpha, float swiglu_beta, float swiglu_limit, int "
      "local_expert_offset, bool router_weight_on_input, str act_format, bool quantize_hidden, bool "
      "quantize_intermediate, int kernel, Tensor heaps, Tensor sizes, int rank) -> ()";
  using Types = std::tuple<
      Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor, Tensor, OptionalTensor, OptionalTensor,
      OptionalTensor, OptionalTensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor,
      OptionalTensor, OptionalTensor, std::string, double, double, double, int64_t, bool, std::string, bool, bool,
      int64_t, Tensor, Tensor, int64_t>;
};

struct ExpertsSm90Bf16Call : LayerCall {
  static constexpr const char* kSchema =
      "experts_sm90_bf16(Tensor(a!) out, Tensor hidden_states, Tensor? hidden_states_scale, Tensor? topk_ids, Tensor? "
      "topk_weights, Tensor w13, Tensor? w13_scale, Tensor? w13_zero_point, Tensor? g1_alphas, Tensor? w13_bias, "
      "Tensor w2, Tensor? w2_scale, Tensor? w2_zero_point, Tensor? g2_alphas, Tensor? w2_bias, Tensor? a1_gscale, "
      "Tensor? a2_gscale, str activation, float swiglu_alpha, float swiglu_beta, float swiglu_limit, int "
      "local_expert_offset, bool router_weight_on_input) -> ()";
  using Types = std::tuple<
      Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor, Tensor, OptionalTensor, OptionalTensor,
      OptionalTensor, OptionalTensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor,
      OptionalTensor, OptionalTensor, std::string, double, double, double, int64_t, bool>;
};

struct ExpertsSm90W4a8Call : LayerCall {
  std::string weights;
  int64_t decode_tokens;
  static constexpr const char* kSchema =
      "experts_sm90_w4a8(Tensor(a!) out, Tensor hidden_states, Tensor? hidden_states_scale, Tensor? topk_ids, Tensor? "
      "topk_weights, Tensor w13, Tensor? w13_scale, Tensor? w13_zero_point, Tensor? g1_alphas, Tensor? w13_bias, "
      "Tensor w2, Tensor? w2_scale, Tensor? w2_zero_point, Tensor? g2_alphas, Tensor? w2_bias, Tensor? a1_gscale, "
      "Tensor? a2_gscale, str activation, float swiglu_alpha, float swiglu_beta, float swiglu_limit, int "
      "local_expert_offset, bool router_weight_on_input, str weights, int decode_tokens) -> ()";
  using Types = std::tuple<
      Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor, Tensor, OptionalTensor, OptionalTensor,
      OptionalTensor, OptionalTensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor,
      OptionalTensor, OptionalTensor, std::string, double, double, double, int64_t, bool, std::string, int64_t>;
};

struct RouteSm90Call : RouterCall {
  Tensor ids;
  Tensor weights;
  int64_t num_shared_experts;
  OptionalTensor shared_expert_weights;
  static constexpr const char* kSchema =
      "route_sm90(Tensor? router_logits, Tensor? routing_bias, str score, str weight, bool renormalize, int top_k, int "
      "n_group, int topk_group, float routed_scaling_factor, Tensor(a!) ids, Tensor(b!) weights, int "
      "num_shared_experts, Tensor? shared_expert_weights) -> ()";
  using Types = std::tuple<
      OptionalTensor, OptionalTensor, std::string, std::string, bool, int64_t, int64_t, int64_t, double, Tensor,
      Tensor, int64_t, OptionalTensor>;
};

}  // namespace moeq
