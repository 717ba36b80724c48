// moeq_C::route_sm90 and route_hidden_sm90: the routing launch by itself, and router product and routing in one.
#include "op_layer.h"
#include "../../../boxed.h"
#include "../routing/route_hidden.h"

namespace moeq::sm90 {
namespace {

// A router's weights, from what ops get to what kernels read, and how their product is divided.

// bfloat16 [rows, columns], rows at multiples of 16 bytes.
const void* rows_of(const char* op, const char* name, const Tensor& tensor, int64_t rows, int64_t columns,
                    const Tensor& beside) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == beside.get_device_index() && tensor.dim() == 2 &&
                      tensor.size(0) == rows && tensor.size(1) == columns && tensor.stride(1) == 1 &&
                      tensor.stride(0) % hidden::kSizeMultiple == 0 && tensor.scalar_type() == ScalarType::BFloat16 &&
                      is_aligned(tensor),
                  "moeq_C::", op, ": ", name, " must be a bfloat16 matrix [", rows, ", ", columns,
                  "] on the device of ids, rows at multiples of 16 bytes");
  return tensor.const_data_ptr();
}

// Contiguous, of any type that logits may have; null where it is absent.
const void* values_of(const char* op, const char* name, const OptionalTensor& tensor, int64_t count,
                      const Tensor& beside, LogitType& type) {
  if (!tensor.has_value()) return nullptr;
  type = logit_type_of(op, *tensor);
  STD_TORCH_CHECK(tensor->is_cuda() && tensor->get_device_index() == beside.get_device_index() &&
                      tensor->is_contiguous() && tensor->numel() == count,
                  "moeq_C::", op, ": ", name, " must be contiguous, on the device of ids, with ", count, " elements");
  return tensor->const_data_ptr();
}

// Sixteen multiprocessors side by side are there for sure where nobody else has a share of the device.
RouteHiddenPlan plan_of(const char* op, int64_t blocks, int64_t warps, const Partition& partition) {
  constexpr int kPortableBlocks = 8;
  STD_TORCH_CHECK(
      (blocks == kPortableBlocks || blocks == 2 * kPortableBlocks) && warps >= 1 && warps <= hidden::kMaxWarps,
      "moeq_C::", op, ": blocks must be 8 or 16, warps at most ", hidden::kMaxWarps);
  const int most = partition.whole_device ? 2 * kPortableBlocks : kPortableBlocks;
  return {static_cast<int>(blocks < most ? blocks : most), static_cast<int>(warps)};
}

// What a call says of experts that every token goes to: a RouteSm90Call or a RouteHiddenSm90Call.
template <class Call>
SharedExperts shared_of(const char* op, const Call& call, int tokens) {
  const int64_t count = call.num_shared_experts;
  STD_TORCH_CHECK(count >= 0 && call.top_k + count <= kRouteTopK && call.ids.size(1) == call.top_k + count,
                  "moeq_C::", op, ": ids must have a column for each expert of a token, at most ", kRouteTopK);
  SharedExperts shared{};
  shared.count = static_cast<int>(count);
  shared.weights =
      values_of(op, "shared_expert_weights", call.shared_expert_weights, tokens * count, call.ids, shared.type);
  return shared;
}

constexpr const char* kOp = "route_sm90";

// Fills ids [tokens, top_k + shared experts] int32 and weights likewise float32.
void route_sm90(const RouteSm90Call& call) {
  const Tensor& ids = call.ids;
  STD_TORCH_CHECK(ids.is_cuda() && ids.dim() == 2 && call.router_logits.has_value(), "moeq_C::", kOp,
                  ": ids must be a CUDA matrix, router_logits given");
  if (ids.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(ids.get_device_index());
  Router router{};
  const int tokens = size_of(kOp, ids, 0);
  bind_router(kOp, router, call, tokens, ids);
  const SharedExperts shared = shared_of(kOp, call, tokens);
  int32_t* to = const_cast<int32_t*>(data_of<int32_t>(kOp, "ids", ids, ScalarType::Int, ids.numel(), ids));
  float* of = const_cast<float*>(data_of<float>(kOp, "weights", call.weights, ScalarType::Float, ids.numel(), ids));
  const cudaError_t error = route_run(router, shared, tokens, to, of, current_stream(ids));
  STD_TORCH_CHECK(error == cudaSuccess, "moeq_C::", kOp, ": ", cudaGetErrorString(error));
}

constexpr const char* kHiddenOp = "route_hidden_sm90";

void bind_results(RouteHidden& call, const RouteHiddenSm90Call& given) {
  const Tensor& ids = given.ids;
  const Tensor& logits = *given.router_logits;
  STD_TORCH_CHECK(logits.is_contiguous(), "moeq_C::", kHiddenOp, ": router_logits must be contiguous");
  call.shared = shared_of(kHiddenOp, given, call.tokens);
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
