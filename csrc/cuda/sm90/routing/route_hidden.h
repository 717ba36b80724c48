// Hidden states to expert ids and weights in one launch: the router's product, and route.cuh's choice behind it.
#pragma once
#include "../../../generated/router.h"
#include "route.h"

namespace moeq::sm90 {

// One call, checked. Rows start at multiples of 16 bytes.
struct RouteHidden {
  Router router;  // its logits [tokens, experts], contiguous, are written here
  const void* x;  // bfloat16 [tokens, hidden], rows x_stride elements apart
  int64_t x_stride;
  const void* weight;  // bfloat16 [experts, hidden], rows weight_stride elements apart
  int64_t weight_stride;
  const void* bias;  // [experts] of bias_type, added to the sums; null: none
  LogitType bias_type;
  int tokens, hidden;  // hidden: a multiple of hidden::kSizeMultiple
  int32_t* ids;  // [tokens, top_k + shared.count]
  float* weights;  // likewise
  SharedExperts shared;
};

// How the work is laid out: blocks of a cluster, 8 or 16, and warps of a block, at most kMaxWarps. It decides which
// parts a logit is the sum of.
struct RouteHiddenPlan {
  int blocks, warps;
};

cudaError_t route_hidden_run(const RouteHidden& call, RouteHiddenPlan plan, cudaStream_t stream);

}  // namespace moeq::sm90
