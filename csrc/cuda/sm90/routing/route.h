// Routers as their kernels see them, and the launch that routes logits.
#pragma once
#include <cstdint>
#include <cuda_runtime.h>

#include "../../../generated/activations.h"
#include "../../../generated/sm90.h"

namespace moeq::sm90 {

enum class LogitType : int { kBfloat16, kFloat16, kFloat32 };

// How logits become ids and weights, as moeq::route does it (route.cuh).
struct Router {
  const void* logits;        // [tokens, experts], columns adjacent
  LogitType type;
  int64_t row_stride;
  const float* bias;         // [experts], added for the choice only; null: none
  int experts, top_k;        // all experts, on any rank
  Score score;               // experts are chosen by it (and the bias)
  Score weight;              // a softmax is over all experts where `score` is one too, else over the chosen ones
  bool renormalize;          // weights are divided by their sum
  int groups, topk_group;  // experts of the best topk_group of `groups` equal groups are chosen from; groups 1: of all
  float factor;  // multiplies the weights
};

// Experts that every token goes to, whose columns are behind the router's. Their numbers begin behind its experts'.
struct SharedExperts {
  int count;
  const void* weights;  // [tokens, count] of `type`; null: 1
  LogitType type;
};

// Writes ids and weights [tokens, router.top_k + shared.count]; an error for a failed launch.
cudaError_t route_run(const Router& router, const SharedExperts& shared, int tokens, int32_t* ids, float* weights,
                      cudaStream_t stream);

}  // namespace moeq::sm90
