// Of the kernel for hidden states of routers. Written by scripts/kernel_headers.py: change what it reads, not this.
#pragma once
#include "calls.h"

namespace moeq::sm90::hidden {

// A block has all logits of a token, and the parts that they are sums of.
constexpr int kMaxRouterExperts = 512;
// Of a block.
constexpr int kMaxWarps = 16;
// Of the hidden size, in elements: loads have 16 bytes.
constexpr int kSizeMultiple = 8;

}  // namespace moeq::sm90::hidden

namespace moeq {

struct RouteHiddenSm90Call : RouterCall {
  Tensor ids;
  Tensor weights;
  Tensor hidden_states;
  Tensor router_weight;
  OptionalTensor router_bias;
  int64_t num_shared_experts;
  OptionalTensor shared_expert_weights;
  int64_t blocks;
  int64_t warps;
  static constexpr const char* kSchema =
      "route_hidden_sm90(Tensor(c!)? router_logits, Tensor? routing_bias, str score, str weight, bool renormalize, int "
      "top_k, int n_group, int topk_group, float routed_scaling_factor, Tensor(a!) ids, Tensor(b!) weights, Tensor "
      "hidden_states, Tensor router_weight, Tensor? router_bias, int num_shared_experts, Tensor? "
      "shared_expert_weights, int blocks, int warps) -> ()";
  using Types = std::tuple<
      OptionalTensor, OptionalTensor, std::string, std::string, bool, int64_t, int64_t, int64_t, double, Tensor,
      Tensor, Tensor, Tensor, OptionalTensor, int64_t, OptionalTensor, int64_t, int64_t>;
};

}  // namespace moeq
