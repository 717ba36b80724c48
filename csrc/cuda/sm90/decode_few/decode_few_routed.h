// A decode launch for very few tokens that multiplies by the router first (decode_few_product.cuh).
#pragma once
#include "../routing/route_hidden.h"
#include "decode_few.h"

namespace moeq::sm90::few {

constexpr int kRouterRows = 8;  // experts of a block at most: rows of a tensor core's tile
constexpr int kMaxRouterParts = 128;

// What a launch gets besides a layer's call, whose router's logits it writes.
struct RouterProduct {
  const void* weight;  // bfloat16 [experts, hidden], rows weight_stride elements apart, at multiples of 16 bytes
  int64_t weight_stride;
  const void* bias;  // [experts] of bias_type; null: none
  LogitType bias_type;
  int parts;  // of K, that a logit is the sum of
  float inverse_parts;
  int32_t* ids;  // [tokens, top_k], written
  float* weights;  // likewise
};

struct RoutedArgs {
  Args args;
  RouterProduct product;
  int logits;  // where they begin in the exchange, in numbers of 8 bytes
};

struct RoutedPlan {
  Plan plan;
  RouterProduct product;
  int logits;
};

// fits: whether the kernel takes the problem with such a router.
cudaError_t make_routed_plan(const Problem& p, const RouterProduct& product, RoutedPlan& plan, bool& fits);
cudaError_t run_routed(RoutedPlan& plan);

}  // namespace moeq::sm90::few
