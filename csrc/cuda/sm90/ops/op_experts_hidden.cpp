// moeq_C::experts_hidden_sm90: router and experts of few tokens, in one launch where the kernel takes them.
#include "../decode_few/decode_few_routed.h"
#include "op_tiled_weights.h"

namespace moeq::sm90 {
namespace {

constexpr const char* kOp = "experts_hidden_sm90";

// A layer that routes from its hidden states. The router's logits, ids and weights are results.
struct HiddenProblem : RoundedProblem {
  few::RouterProduct product;
  int64_t blocks, warps;
};

RouteHiddenPlan plan_of(const HiddenProblem& p) { return plan_of(kOp, p.blocks, p.warps, p.partition); }

// The parts of K that route_hidden's logits are sums of, so that these are the same.
int router_parts(const HiddenProblem& p) {
  const RouteHiddenPlan plan = plan_of(p);
  const int tiles = (p.router.experts + 15) / 16, slices = plan.warps / tiles;
  return plan.blocks * (slices > 1 ? slices : 1);
}

cudaError_t make_plan(const HiddenProblem& p, few::RoutedPlan& plan, bool& fits) {
  fits = !rounds_to_e4m3(p) && p.x_factor == nullptr && !has_bytes(p.format);
  if (!fits) return cudaSuccess;
  few::RouterProduct product = p.product;
  product.parts = router_parts(p);
  return few::make_routed_plan(p, product, plan, fits);
}

// The call behind a launch that routes.
RoundedProblem behind_router(const HiddenProblem& p) {
  RoundedProblem routed = p;
  routed.router.logits = nullptr;
  routed.topk_ids = p.product.ids;
  routed.topk_weights = p.product.weights;
  return routed;
}

size_t hidden_workspace(const HiddenProblem& p) {
  few::RoutedPlan plan;
  bool fits = false;
  if (make_plan(p, plan, fits) != cudaSuccess || !fits) return decode_workspace(behind_router(p));
  return p.partition.whole_device ? 0 : few::exchange_bytes(plan.plan);
}

RouteHidden router_of(const HiddenProblem& p) {
  RouteHidden call{};
  call.router = p.router;
  call.x = p.x;
  call.x_stride = p.hidden;
  call.weight = p.product.weight;
  call.weight_stride = p.product.weight_stride;
  call.bias = p.product.bias;
  call.bias_type = p.product.bias_type;
  call.tokens = p.tokens;
  call.hidden = p.hidden;
  call.ids = p.product.ids;
  call.weights = p.product.weights;
  return call;
}

cudaError_t hidden_run(const HiddenProblem& p) {
  few::RoutedPlan plan;
  bool fits = false;
  cudaError_t error = make_plan(p, plan, fits);
  if (error != cudaSuccess || fits) return error != cudaSuccess ? error : few::run_routed(plan);
  error = route_hidden_run(router_of(p), plan_of(p), p.stream);
  return error != cudaSuccess ? error : decode_run(behind_router(p));
}

bool always(const HiddenProblem&) { return true; }  // takes logits: nothing is launched in front

constexpr Kernels<HiddenProblem> kKernels = {"decode", hidden_workspace, hidden_run, always};

void bind_product(HiddenProblem& p, const ExpertsHiddenSm90Call& call) {
  const Tensor& out = call.out;
  const int64_t slots = int64_t{p.tokens} * p.top_k, experts = p.router.experts;
  STD_TORCH_CHECK(call.router_logits->is_contiguous() && experts <= hidden::kMaxRouterExperts &&
                      p.hidden % hidden::kSizeMultiple == 0 && p.tokens <= decode_max_tokens(p),
                  "moeq_C::", kOp, ": router_logits must be contiguous, experts at most ", hidden::kMaxRouterExperts,
                  ", tokens those of the decode kernel");
  p.product.weight = rows_of(kOp, "router_weight", call.router_weight, experts, p.hidden, out);
  p.product.weight_stride = call.router_weight.stride(0);
  p.product.bias = values_of(kOp, "router_bias", call.router_bias, experts, out, p.product.bias_type);
  p.product.ids = const_cast<int32_t*>(data_of<int32_t>(kOp, "topk_ids", *call.topk_ids, ScalarType::Int, slots, out));
  p.product.weights =
      const_cast<float*>(data_of<float>(kOp, "topk_weights", *call.topk_weights, ScalarType::Float, slots, out));
  p.blocks = call.blocks;
  p.warps = call.warps;
}

// Fills out [tokens, hidden], and what the router chose: topk_ids, topk_weights [tokens, top_k] and router_logits.
void experts_hidden_sm90(const ExpertsHiddenSm90Call& call) {
  HiddenProblem p{};
  p.act_format = named<ActFormat>(kOp, "act_format", call.act_format);
  STD_TORCH_CHECK(call.router_logits.has_value() && call.topk_ids.has_value() && call.topk_weights.has_value() &&
                      !call.hidden_states_scale.has_value(),
                  "moeq_C::", kOp, ": router_logits, topk_ids and topk_weights must be given, to be filled");
  Layer layer(kOp, call);
  layer.router = &call;
  layer.quantize_hidden = call.quantize_hidden;
  layer.quantize_intermediate = call.quantize_intermediate;
  run_layer(p, layer, kKernels, [&](HiddenProblem& problem) {
    bind_tiled_weights(kOp, problem, call);
    check_rounding(problem, layer);
    bind_product(problem, call);
  });
}

}  // namespace
}  // namespace moeq::sm90

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CUDA, m) {
  m.impl("experts_hidden_sm90", MOEQ_BOX(moeq::ExpertsHiddenSm90Call, moeq::sm90::experts_hidden_sm90));
}
