// What the Hopper ops have in common: a call's tensors become a Problem, and a workspace is made for its launches.
#pragma once
#include "op_arguments.cuh"
#include "op_router.cuh"
#include "partition.h"

namespace moeq::sm90 {

// A call as the op gets it. a1_gscale, a2_gscale: f32 [], [experts], or absent (a scale per token) where the hidden
// states, and the intermediate, are quantized; g1_alphas f32 [experts] or [experts, 2]. See problem.h for the rest.
struct LayerCall {
  const char* op;
  Tensor out, hidden_states;
  OptionalTensor topk_ids, topk_weights;  // absent where a router is there
  Tensor w13, w13_scale;
  OptionalTensor g1_alphas;               // with g2_alphas; absent: 1
  OptionalTensor w13_bias;
  Tensor w2, w2_scale;
  OptionalTensor g2_alphas, w2_bias, a1_gscale, a2_gscale;
  bool quantize_hidden, quantize_intermediate;
  std::string activation;
  double alpha, beta, limit;
  int64_t expert_offset;
  bool weight_on_input;
  RouterCall router;
  ScalarType hidden_type = ScalarType::BFloat16;
};

// A kernel (or several) for a layer.
template <class AnyProblem>
struct Kernels {
  const char* name;
  size_t (*workspace)(const AnyProblem&);
  cudaError_t (*run)(const AnyProblem&);
  bool (*takes_logits)(const Problem&);  // null: never
};

inline void bind_sizes(Problem& p, const LayerCall& call) {
  STD_TORCH_CHECK(call.out.is_cuda() && call.out.is_contiguous() && call.out.dim() == 2, "moeq_C::", call.op,
                  ": out must be a contiguous CUDA matrix");
  STD_TORCH_CHECK(call.router.logits.has_value() || (call.topk_ids.has_value() && call.topk_weights.has_value()),
                  "moeq_C::", call.op, ": topk_ids and topk_weights, or router_logits, must be given");
  p.activation = activation_of(call.op, call.activation);
  p.gated = p.activation < Activation::kSiluNoMul;
  p.tokens = size_of(call.op, call.out, 0);
  p.hidden = size_of(call.op, call.out, 1);
  if (call.router.logits.has_value()) {
    bind_router(call.op, p.router, call.router, p.tokens, call.out);
    p.top_k = p.router.top_k;
  } else {
    p.top_k = size_of(call.op, *call.topk_ids, 1);
  }
  STD_TORCH_CHECK(!call.weight_on_input || p.top_k == 1, "moeq_C::", call.op, ": weight_on_input must go with top_k 1");
  STD_TORCH_CHECK(int64_t{p.tokens} * p.top_k <= INT32_MAX, "moeq_C::", call.op, ": tokens * top_k must be below 2^31");
}

// p.experts and p.inter are known by now, as the weights' shapes say them.
inline void bind_scalars(Problem& p, const LayerCall& call) {
  const Tensor& out = call.out;
  const int64_t halves = p.gated ? 2 : 1;
  p.alphas13 = call.g1_alphas.has_value() && call.g1_alphas->dim() == 2 ? size_of(call.op, *call.g1_alphas, 1) : 1;
  STD_TORCH_CHECK(p.alphas13 <= halves, "moeq_C::", call.op, ": g1_alphas must have one column per half of w13");
  p.g1_alphas = floats_of(call.op, "g1_alphas", call.g1_alphas, int64_t{p.experts} * p.alphas13, out);
  p.g2_alphas = floats_of(call.op, "g2_alphas", call.g2_alphas, p.experts, out);
  p.w13_bias = floats_of(call.op, "w13_bias", call.w13_bias, halves * p.experts * p.inter, out);
  p.w2_bias = floats_of(call.op, "w2_bias", call.w2_bias, int64_t{p.experts} * p.hidden, out);
  p.a1 = bind_gscale(call.op, "a1_gscale", call.quantize_hidden, call.a1_gscale, p.a1_gscale, p, out);
  p.a2 = bind_gscale(call.op, "a2_gscale", call.quantize_intermediate, call.a2_gscale, p.a2_gscale, p, out);
  p.out_type = out_type_of(call.op, out);
  p.expert_offset = static_cast<int>(call.expert_offset);
  p.alpha = static_cast<float>(call.alpha);
  p.beta = static_cast<float>(call.beta);
  p.limit = static_cast<float>(call.limit);
  p.weight_on_input = call.weight_on_input;
}

// Ids and weights: given, or made by a launch of their own unless the kernel routes by itself.
struct Chosen {
  OptionalTensor ids, weights;
};

inline Chosen choose(Problem& p, const LayerCall& call, bool kernel_routes) {
  const int64_t slots = int64_t{p.tokens} * p.top_k;
  if (p.router.logits == nullptr) {
    p.topk_ids = data_of<int32_t>(call.op, "topk_ids", *call.topk_ids, ScalarType::Int, slots, call.out);
    p.topk_weights = data_of<float>(call.op, "topk_weights", *call.topk_weights, ScalarType::Float, slots, call.out);
    return {};
  }
  if (kernel_routes) return {};
  const Tensor ids = torch::stable::new_empty(call.out, {slots}, ScalarType::Int);
  const Tensor weights = torch::stable::new_empty(call.out, {slots}, ScalarType::Float);
  int32_t* to = static_cast<int32_t*>(ids.mutable_data_ptr());
  const cudaError_t error = route_run(p, to, static_cast<float*>(weights.mutable_data_ptr()));
  STD_TORCH_CHECK(error == cudaSuccess, "moeq_C::", call.op, ": routing kernel: ", cudaGetErrorString(error));
  p.topk_ids = to;
  p.topk_weights = static_cast<const float*>(weights.const_data_ptr());
  p.router.logits = nullptr;
  return {ids, weights};
}

// What CUDA's own text does not say.
inline std::string hint_at(cudaError_t error, const Partition& partition) {
  if (error != cudaErrorCooperativeLaunchTooLarge) return "";
  return "; it begins on all " + std::to_string(partition.multiprocessors) +
         " multiprocessors of the stream's context at once, and CUDA has room for fewer: the backend \"triton\" has no "
         "such launch";
}

// bind_weights(p) sets the weights and what their shapes say.
template <class AnyProblem, class BindWeights>
void run_layer(AnyProblem& p, const LayerCall& call, const Kernels<AnyProblem>& kernels, BindWeights bind_weights) {
  const Tensor& out = call.out;
  bind_sizes(p, call);
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  bind_weights(p);
  bind_scalars(p, call);
  p.stream = current_stream(out);
  cudaError_t error = partition_of(p.stream, p.partition);
  STD_TORCH_CHECK(error == cudaSuccess, "moeq_C::", call.op, ": stream of device ", out.get_device_index(), ": ",
                  cudaGetErrorString(error));
  const Chosen chosen = choose(p, call, kernels.takes_logits != nullptr && kernels.takes_logits(p));
  // A view may start anywhere; the kernels move 16 bytes at a time.
  const Tensor x = is_aligned(call.hidden_states) ? call.hidden_states : torch::stable::clone(call.hidden_states);
  p.x = data_of<void>(call.op, "hidden_states", x, call.hidden_type, out.numel(), out);
  Tensor aligned_out = is_aligned(out) ? out : torch::stable::empty_like(out);
  p.out = aligned_out.mutable_data_ptr();
  // From torch's allocator at every call, so that a CUDA graph owns its own.
  const Tensor bytes = torch::stable::new_empty(out, {static_cast<int64_t>(kernels.workspace(p))}, ScalarType::Byte);
  p.workspace = const_cast<void*>(bytes.const_data_ptr());
  error = kernels.run(p);
  STD_TORCH_CHECK(error == cudaSuccess, "moeq_C::", call.op, ": ", kernels.name, " kernel: ",
                  cudaGetErrorString(error), hint_at(error, p.partition));
  if (!is_aligned(out)) {
    Tensor target = out;
    torch::stable::copy_(target, aligned_out);
  }
}

}  // namespace moeq::sm90
