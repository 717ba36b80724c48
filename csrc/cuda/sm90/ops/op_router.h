// A router's logits and options, from what the op gets to the Router that the kernels read.
#pragma once
#include "op_arguments.h"

namespace moeq::sm90 {

inline LogitType logit_type_of(const char* op, const Tensor& logits) {
  switch (logits.scalar_type()) {
    case ScalarType::BFloat16:
      return LogitType::kBfloat16;
    case ScalarType::Half:
      return LogitType::kFloat16;
    default:
      STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float, "moeq_C::", op,
                      ": router_logits must have dtype bfloat16, float16 or float32");
      return LogitType::kFloat32;
  }
}

inline void bind_router(const char* op, Router& router, const RouterCall& call, int tokens, const Tensor& beside) {
  const Tensor& logits = *call.router_logits;
  STD_TORCH_CHECK(logits.is_cuda() && logits.get_device_index() == beside.get_device_index() && logits.dim() == 2 &&
                      logits.size(0) == tokens && logits.stride(1) == 1,
                  "moeq_C::", op, ": router_logits must be a matrix on the device of out, a row a token");
  router.logits = logits.const_data_ptr();
  router.type = logit_type_of(op, logits);
  router.row_stride = logits.stride(0);
  router.experts = size_of(op, logits, 1);
  router.bias = floats_of(op, "routing_bias", call.routing_bias, router.experts, beside);
  router.score = named<Score>(op, "score", call.score);
  router.weight = named<Score>(op, "weight", call.weight);
  router.renormalize = call.renormalize;
  const int64_t groups = call.n_group > 1 ? call.n_group : 1;
  STD_TORCH_CHECK(router.experts <= kRouteExperts && call.top_k >= 1 && call.top_k <= kRouteTopK &&
                      call.top_k <= router.experts && groups <= kRouteGroups && router.experts % groups == 0,
                  "moeq_C::", op, ": routing must be to at most ", kRouteTopK, " of ", kRouteExperts, " experts in ",
                  kRouteGroups, " equal groups");
  router.top_k = static_cast<int>(call.top_k);
  router.groups = static_cast<int>(groups);
  router.topk_group = groups > 1 ? static_cast<int>(call.topk_group) : 1;
  router.factor = static_cast<float>(call.routed_scaling_factor);
}

}  // namespace moeq::sm90
