// moeq_C::route_sm90: the routing launch by itself.
#include "../../../boxed.h"
#include "op_router.h"

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
  Problem p{};
  p.tokens = size_of(kOp, ids, 0);
  bind_router(kOp, p.router, call, p.tokens, ids);
  p.stream = current_stream(ids);
  int32_t* to = const_cast<int32_t*>(data_of<int32_t>(kOp, "ids", ids, ScalarType::Int, ids.numel(), ids));
  float* of = const_cast<float*>(data_of<float>(kOp, "weights", call.weights, ScalarType::Float, ids.numel(), ids));
  const cudaError_t error = route_run(p, to, of);
  STD_TORCH_CHECK(error == cudaSuccess, "moeq_C::", kOp, ": ", cudaGetErrorString(error));
}

}  // namespace
}  // namespace moeq::sm90

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CUDA, m) {
  m.impl("route_sm90", MOEQ_BOX(moeq::RouteSm90Call, moeq::sm90::route_sm90));
}
