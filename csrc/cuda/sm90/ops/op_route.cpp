// moeq_C::route_sm90 and route_hidden_sm90: the routing launch by itself, and router product and routing in one.
#include "op_layer.h"
#include "../../../boxed.h"
#include "../routing/route_hidden.h"

namespace moeq::sm90 {
namespace {

constexpr const char* kOp = "route_sm90";

// Fills ids [tokens, top_k] int32 and weights likewise float32.
void route_sm90(const RouteSm90Call& call) {
  const Tensor& ids = call.ids;
  STD_TORCH_CHECK(ids.is_cuda() && ids.dim() == 2 && ids.size(1) == call.top_k, "moeq_C::", kOp,
                  ": ids must be a CUDA matrix of top_k columns");
  STD_TORCH_CHECK(call.router_logits.has_value(), "moeq_C::", kOp, ": router_logits must be given");
  if (ids.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(ids.get_device_index());
  Router router{};
  const int tokens = size_of(kOp, ids, 0);
  bind_router(kOp, router, call, tokens, ids);
  int32_t* to = const_cast<int32_t*>(data_of<int32_t>(kOp, "ids", ids, ScalarType::Int, ids.numel(), ids));
  float* of = const_cast<float*>(data_of<float>(kOp, "weights", call.weights, ScalarType::Float, ids.numel(), ids));
  const cudaError_t error = route_run(router, tokens, to, of, current_stream(ids));
  STD_TORCH_CHECK(error == cudaSuccess, "moeq_C::", kOp, ": ", cudaGetErrorString(error));
}

constexpr const char* kHiddenOp = "route_hidden_sm90";

void bind_results(RouteHidden& call, const RouteHiddenSm90Call& given) {
  const Tensor& ids = given.ids;
  const Tensor& logits = *given.router_logits;
  STD_TORCH_CHECK(
      logits.is_contiguous() && given.num_shared_experts >= 0 && given.top_k + given.num_shared_experts <= kRouteTopK,
      "moeq_C::", kHiddenOp, ": router_logits must be contiguous, columns of ids at most ", kRouteTopK);
  STD_TORCH_CHECK(ids.size(1) == given.top_k + given.num_shared_experts, "moeq_C::", kHiddenOp,
                  ": ids must have a column for each expert of a token");
  call.ids = const_cast<int32_t*>(data_of<int32_t>(kHiddenOp, "ids", ids, ScalarType::Int, ids.numel(), ids));
  call.weights =
      const_cast<float*>(data_of<float>(kHiddenOp, "weights", given.weights, ScalarType::Float, ids.numel(), ids));
}

// Fills ids [tokens, top_k + shared experts] int32, weights likewise float32, and the router's logits.
void route_hidden_sm90(const RouteHiddenSm90Call& given) {
  const Tensor &ids = given.ids, &x = given.hidden_states;
  STD_TORCH_CHECK(ids.is_cuda() && ids.dim() == 2 && given.router_logits.has_value() && x.dim() == 2,
                  "moeq_C::", kHiddenOp, ": ids must be a CUDA matrix, router_logits given");
  if (ids.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(ids.get_device_index());
  RouteHidden call{};
  call.tokens = size_of(kHiddenOp, ids, 0);
  call.hidden = size_of(kHiddenOp, x, 1);
  bind_router(kHiddenOp, call.router, given, call.tokens, ids);
  const int experts = call.router.experts;
  STD_TORCH_CHECK(experts <= hidden::kMaxRouterExperts && call.hidden % hidden::kSizeMultiple == 0,
                  "moeq_C::", kHiddenOp, ": experts must be at most ", hidden::kMaxRouterExperts,
                  ", hidden_size a multiple of ", hidden::kSizeMultiple);
  bind_results(call, given);
  call.x = rows_of(kHiddenOp, "hidden_states", x, call.tokens, call.hidden, ids);
  call.x_stride = x.stride(0);
  call.weight = rows_of(kHiddenOp, "router_weight", given.router_weight, experts, call.hidden, ids);
  call.weight_stride = given.router_weight.stride(0);
  call.bias = values_of(kHiddenOp, "router_bias", given.router_bias, experts, ids, call.bias_type);
  call.shared = static_cast<int>(given.num_shared_experts);
  call.shared_weights = values_of(kHiddenOp, "shared_expert_weights", given.shared_expert_weights,
                                  int64_t{call.tokens} * call.shared, ids, call.shared_type);
  const cudaStream_t stream = current_stream(ids);
  Partition partition{};
  cudaError_t error = partition_of(stream, partition);
  STD_TORCH_CHECK(error == cudaSuccess, "moeq_C::", kHiddenOp, ": ", cudaGetErrorString(error));
  error = route_hidden_run(call, plan_of(kHiddenOp, given.blocks, given.warps, partition), stream);
  STD_TORCH_CHECK(error == cudaSuccess, "moeq_C::", kHiddenOp, ": ", cudaGetErrorString(error));
}

}  // namespace
}  // namespace moeq::sm90

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CUDA, m) {
  m.impl("route_sm90", MOEQ_BOX(moeq::RouteSm90Call, moeq::sm90::route_sm90));
  m.impl("route_hidden_sm90", MOEQ_BOX(moeq::RouteHiddenSm90Call, moeq::sm90::route_hidden_sm90));
}
