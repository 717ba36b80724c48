// moeq_C::route_hidden_sm90: router product and routing in one launch.
#include "../../../boxed.h"
#include "op_router.cuh"
#include "../launch/partition.h"
#include "../routing/route_hidden.h"

namespace moeq::sm90 {
namespace {

constexpr const char* kOp = "route_hidden_sm90";
constexpr int kPortableBlocks = 8;

// bfloat16 [rows, columns], rows at multiples of 16 bytes.
const void* rows_of(const char* name, const Tensor& tensor, int64_t rows, int64_t columns, const Tensor& beside) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == beside.get_device_index() && tensor.dim() == 2 &&
                      tensor.size(0) == rows && tensor.size(1) == columns && tensor.stride(1) == 1 &&
                      tensor.stride(0) % hidden::kSizeMultiple == 0 && tensor.scalar_type() == ScalarType::BFloat16 &&
                      is_aligned(tensor),
                  "moeq_C::", kOp, ": ", name, " must be a bfloat16 matrix [", rows, ", ", columns,
                  "] on the device of ids, rows at multiples of 16 bytes");
  return tensor.const_data_ptr();
}

// Contiguous, of any type that logits may have; null where it is absent.
const void* values_of(const char* name, const OptionalTensor& tensor, int64_t count, const Tensor& beside,
                      LogitType& type) {
  if (!tensor.has_value()) return nullptr;
  type = logit_type_of(kOp, *tensor);
  STD_TORCH_CHECK(tensor->is_cuda() && tensor->get_device_index() == beside.get_device_index() &&
                      tensor->is_contiguous() && tensor->numel() == count,
                  "moeq_C::", kOp, ": ", name, " must be contiguous, on the device of ids, with ", count, " elements");
  return tensor->const_data_ptr();
}

void bind_results(RouteHidden& call, const RouteHiddenSm90Call& given) {
  const Tensor& ids = given.ids;
  const Tensor& logits = *given.router_logits;
  STD_TORCH_CHECK(
      logits.is_contiguous() && given.num_shared_experts >= 0 && given.top_k + given.num_shared_experts <= kRouteTopK,
      "moeq_C::", kOp, ": router_logits must be contiguous, columns of ids at most ", kRouteTopK);
  STD_TORCH_CHECK(ids.size(1) == given.top_k + given.num_shared_experts, "moeq_C::", kOp,
                  ": ids must have a column for each expert of a token");
  call.ids = const_cast<int32_t*>(data_of<int32_t>(kOp, "ids", ids, ScalarType::Int, ids.numel(), ids));
  call.weights = const_cast<float*>(data_of<float>(kOp, "weights", given.weights, ScalarType::Float, ids.numel(), ids));
}

// Fills ids [tokens, top_k + shared experts] int32, weights likewise float32, and the router's logits.
void route_hidden_sm90(const RouteHiddenSm90Call& given) {
  const Tensor &ids = given.ids, &x = given.hidden_states;
  STD_TORCH_CHECK(ids.is_cuda() && ids.dim() == 2 && given.router_logits.has_value() && x.dim() == 2, "moeq_C::", kOp,
                  ": ids must be a CUDA matrix, router_logits given");
  if (ids.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(ids.get_device_index());
  RouteHidden call{};
  call.tokens = size_of(kOp, ids, 0);
  call.hidden = size_of(kOp, x, 1);
  bind_router(kOp, call.router, given, call.tokens, ids);
  const int experts = call.router.experts;
  STD_TORCH_CHECK(experts <= hidden::kMaxRouterExperts && call.hidden % hidden::kSizeMultiple == 0, "moeq_C::", kOp,
                  ": experts must be at most ", hidden::kMaxRouterExperts, ", hidden_size a multiple of ",
                  hidden::kSizeMultiple);
  bind_results(call, given);
  call.x = rows_of("hidden_states", x, call.tokens, call.hidden, ids);
  call.x_stride = x.stride(0);
  call.weight = rows_of("router_weight", given.router_weight, experts, call.hidden, ids);
  call.weight_stride = given.router_weight.stride(0);
  call.bias = values_of("router_bias", given.router_bias, experts, ids, call.bias_type);
  call.shared = static_cast<int>(given.num_shared_experts);
  call.shared_weights = values_of("shared_expert_weights", given.shared_expert_weights,
                                  int64_t{call.tokens} * call.shared, ids, call.shared_type);
  const int64_t blocks = given.blocks, warps = given.warps;
  STD_TORCH_CHECK(
      (blocks == kPortableBlocks || blocks == 2 * kPortableBlocks) && warps >= 1 && warps <= hidden::kMaxWarps,
      "moeq_C::", kOp, ": blocks must be 8 or 16, warps at most ", hidden::kMaxWarps);
  const cudaStream_t stream = current_stream(ids);
  Partition partition{};
  cudaError_t error = partition_of(stream, partition);
  STD_TORCH_CHECK(error == cudaSuccess, "moeq_C::", kOp, ": ", cudaGetErrorString(error));
  // Sixteen multiprocessors side by side are there for sure where nobody else has a share of the device.
  const int most = partition.whole_device ? 2 * kPortableBlocks : kPortableBlocks;
  const RouteHiddenPlan plan = {static_cast<int>(blocks < most ? blocks : most), static_cast<int>(warps)};
  error = route_hidden_run(call, plan, stream);
  STD_TORCH_CHECK(error == cudaSuccess, "moeq_C::", kOp, ": ", cudaGetErrorString(error));
}

}  // namespace
}  // namespace moeq::sm90

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CUDA, m) {
  m.impl("route_hidden_sm90", MOEQ_BOX(moeq::RouteHiddenSm90Call, moeq::sm90::route_hidden_sm90));
}
