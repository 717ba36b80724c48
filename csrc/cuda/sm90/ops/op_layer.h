// Arguments of the Hopper ops, from tensors to the pointers and sizes of a Problem. Python has checked the arguments;
// what is checked here guards memory. `op`: the one that was called, for messages.
#pragma once
#include <string>
#include <torch/csrc/stable/library.h>

#include "../../../boxed.h"
#include "../../../generated/calls.h"
#include "../../launch.h"
#include "../problem/problem.h"
#include "../routing/route.h"

namespace moeq::sm90 {

// An enum by the name that Python gives it.
template <class Enum>
Enum named(const char* op, const char* argument, const std::string& name) {
  Enum value{};
  STD_TORCH_CHECK(parse(name, value), "moeq_C::", op, ": ", argument, " must be a known name, got '", name, "'");
  return value;
}

inline OutType out_type_of(const char* op, const Tensor& out) {
  switch (out.scalar_type()) {
    case ScalarType::BFloat16:
      return OutType::kBfloat16;
    case ScalarType::Half:
      return OutType::kFloat16;
    default:
      STD_TORCH_CHECK(out.scalar_type() == ScalarType::Float, "moeq_C::", op,
                      ": out must have dtype bfloat16, float16 or float32");
      return OutType::kFloat32;
  }
}

inline bool is_aligned(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0; }

// The tensor's data, once its device, dtype and size have been checked: `count` elements of type T.
template <typename T>
const T* data_of(const char* op, const char* name, const Tensor& tensor, ScalarType dtype, int64_t count,
                 const Tensor& beside) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == beside.get_device_index() &&
                      tensor.is_contiguous() && tensor.scalar_type() == dtype && tensor.numel() == count,
                  "moeq_C::", op, ": ", name, " must be contiguous, on the device of out, with ", count,
                  " elements of its dtype, got ", tensor.numel());
  return static_cast<const T*>(tensor.const_data_ptr());
}

// The same of what the kernels read 16 bytes at a time.
template <typename T>
const T* aligned_data_of(const char* op, const char* name, const Tensor& tensor, ScalarType dtype, int64_t count,
                         const Tensor& beside) {
  STD_TORCH_CHECK(is_aligned(tensor), "moeq_C::", op, ": ", name, " must start at a multiple of 16 bytes");
  return data_of<T>(op, name, tensor, dtype, count, beside);
}

inline const uint8_t* tiles_of(const char* op, const char* name, const Tensor& tensor, int64_t count,
                               const Tensor& beside, ScalarType dtype = ScalarType::Byte) {
  return aligned_data_of<uint8_t>(op, name, tensor, dtype, count, beside);
}

inline const float* floats_of(const char* op, const char* name, const OptionalTensor& tensor, int64_t count,
                              const Tensor& beside) {
  return tensor.has_value() ? data_of<float>(op, name, *tensor, ScalarType::Float, count, beside) : nullptr;
}

inline int size_of(const char* op, const Tensor& tensor, int dim) {
  const int64_t size = tensor.size(dim);
  STD_TORCH_CHECK(size > 0 && size <= INT32_MAX, "moeq_C::", op, ": sizes must be from 1 to 2^31 - 1, got ", size);
  return static_cast<int>(size);
}

// How a GEMM's activations are quantized: not at all, or by a scale of the tensor, of each expert, of each token.
inline ActScale bind_gscale(const char* op, const char* name, bool quantize, const OptionalTensor& gscale,
                            const float*& data, const Problem& p, const Tensor& beside) {
  data = nullptr;
  if (!quantize) return ActScale::kNone;
  if (!gscale.has_value()) return ActScale::kToken;
  const bool one = gscale->dim() == 0;
  data = floats_of(op, name, gscale, one ? 1 : p.experts, beside);
  return one ? ActScale::kTensor : ActScale::kExpert;
}

// A router's logits and options, from what the op gets to the Router that the kernels read.
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

// What the Hopper ops have in common: a call's tensors become a Problem, and a workspace is made for its launches.

// A call and how its op runs it. a1_gscale, a2_gscale: f32 [], [experts], or absent (a scale per token) where the
// hidden states, and the intermediate, are quantized; g1_alphas f32 [experts] or [experts, 2], with g2_alphas or
// absent: 1. See problem.h for the rest.
struct Layer {
  const char* op;
  const LayerCall& call;
  const RouterCall* router = nullptr;   // where the op takes one; without logits it does not count
  bool quantize_hidden = false, quantize_intermediate = false;
  bool fills_out = true;  // else it only has the sizes
  int64_t hidden_elements = 0;  // of hidden states; 0: as many as `out` has
  ScalarType hidden_type = ScalarType::BFloat16;
  bool takes_half = false;  // hidden states may be float16

  Layer(const char* name, const LayerCall& arguments) : op(name), call(arguments) {}
  bool has_logits() const { return router != nullptr && router->router_logits.has_value(); }
};

// A kernel (or several) for a layer.
template <class AnyProblem>
struct Kernels {
  const char* name;
  size_t (*workspace)(const AnyProblem&);
  cudaError_t (*run)(const AnyProblem&);
};

inline void bind_sizes(Problem& p, const Layer& layer) {
  const LayerCall& call = layer.call;
  STD_TORCH_CHECK(call.out.is_cuda() && call.out.is_contiguous() && call.out.dim() == 2, "moeq_C::", layer.op,
                  ": out must be a contiguous CUDA matrix");
  STD_TORCH_CHECK(layer.has_logits() || (call.topk_ids.has_value() && call.topk_weights.has_value()),
                  "moeq_C::", layer.op, ": topk_ids and topk_weights, or router_logits, must be given");
  p.activation = named<Activation>(layer.op, "activation", call.activation);
  p.gated = is_gated(p.activation);
  p.tokens = size_of(layer.op, call.out, 0);
  p.hidden = size_of(layer.op, call.out, 1);
  p.top_k = layer.has_logits() ? static_cast<int>(layer.router->top_k) : size_of(layer.op, *call.topk_ids, 1);
  STD_TORCH_CHECK(!call.router_weight_on_input || p.top_k == 1, "moeq_C::", layer.op,
                  ": router_weight_on_input must go with top_k 1");
  STD_TORCH_CHECK(int64_t{p.tokens} * p.top_k <= INT32_MAX, "moeq_C::", layer.op,
                  ": tokens * top_k must be below 2^31");
}

// p.experts and p.inter are known by now, as the weights' shapes say them.
inline void bind_scalars(Problem& p, const Layer& layer) {
  const LayerCall& call = layer.call;
  const char* op = layer.op;
  const Tensor& out = call.out;
  const int64_t halves = p.gated ? 2 : 1;
  p.alphas13 = call.g1_alphas.has_value() && call.g1_alphas->dim() == 2 ? size_of(op, *call.g1_alphas, 1) : 1;
  STD_TORCH_CHECK(p.alphas13 <= halves, "moeq_C::", op, ": g1_alphas must have one column per half of w13");
  p.g1_alphas = floats_of(op, "g1_alphas", call.g1_alphas, int64_t{p.experts} * p.alphas13, out);
  p.g2_alphas = floats_of(op, "g2_alphas", call.g2_alphas, p.experts, out);
  p.w13_bias = floats_of(op, "w13_bias", call.w13_bias, halves * p.experts * p.inter, out);
  p.w2_bias = floats_of(op, "w2_bias", call.w2_bias, int64_t{p.experts} * p.hidden, out);
  p.a1 = bind_gscale(op, "a1_gscale", layer.quantize_hidden, call.a1_gscale, p.a1_gscale, p, out);
  p.a2 = bind_gscale(op, "a2_gscale", layer.quantize_intermediate, call.a2_gscale, p.a2_gscale, p, out);
  p.out_type = out_type_of(op, out);
  p.expert_offset = static_cast<int>(call.local_expert_offset);
  p.alpha = static_cast<float>(call.swiglu_alpha);
  p.beta = static_cast<float>(call.swiglu_beta);
  p.limit = static_cast<float>(call.swiglu_limit);
  p.weight_on_input = call.router_weight_on_input;
}

// What hidden states are. a1 and a2 are known by now.
inline void bind_hidden_type(Problem& p, const Layer& layer) {
  p.x_half = layer.takes_half && layer.call.hidden_states.scalar_type() == ScalarType::Half;
  if (!p.x_half) return;
  p.splits = p.a1 == ActScale::kNone && p.a2 == ActScale::kNone;
  STD_TORCH_CHECK(p.splits || (p.a1 != ActScale::kNone && p.a2 != ActScale::kNone), "moeq_C::", layer.op,
                  ": of float16 hidden_states both GEMMs' activations must be quantized, or neither");
}

// Ids and weights: given, or made of logits by a launch of their own.
struct Chosen {
  OptionalTensor ids, weights;
};

inline Chosen choose(Problem& p, const Layer& layer) {
  const LayerCall& call = layer.call;
  const int64_t slots = int64_t{p.tokens} * p.top_k;
  if (!layer.has_logits()) {
    p.topk_ids = data_of<int32_t>(layer.op, "topk_ids", *call.topk_ids, ScalarType::Int, slots, call.out);
    p.topk_weights = data_of<float>(layer.op, "topk_weights", *call.topk_weights, ScalarType::Float, slots, call.out);
    return {};
  }
  Router router{};
  bind_router(layer.op, router, *layer.router, p.tokens, call.out);
  const Tensor ids = torch::stable::new_empty(call.out, {slots}, ScalarType::Int);
  const Tensor weights = torch::stable::new_empty(call.out, {slots}, ScalarType::Float);
  int32_t* to = static_cast<int32_t*>(ids.mutable_data_ptr());
  float* of = static_cast<float*>(weights.mutable_data_ptr());
  const cudaError_t error = route_run(router, {}, p.tokens, to, of, p.stream);
  STD_TORCH_CHECK(error == cudaSuccess, "moeq_C::", layer.op, ": routing kernel: ", cudaGetErrorString(error));
  p.topk_ids = to;
  p.topk_weights = static_cast<const float*>(weights.const_data_ptr());
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
void run_layer(AnyProblem& p, const Layer& layer, const Kernels<AnyProblem>& kernels, BindWeights bind_weights) {
  const Tensor& out = layer.call.out;
  bind_sizes(p, layer);
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  bind_weights(p);
  bind_scalars(p, layer);
  bind_hidden_type(p, layer);
  p.stream = current_stream(out);
  cudaError_t error = partition_of(p.stream, p.partition);
  STD_TORCH_CHECK(error == cudaSuccess, "moeq_C::", layer.op, ": stream of device ", out.get_device_index(), ": ",
                  cudaGetErrorString(error));
  const Chosen chosen = choose(p, layer);
  // A view may start anywhere; the kernels move 16 bytes at a time.
  const Tensor& given = layer.call.hidden_states;
  const Tensor x = is_aligned(given) ? given : torch::stable::clone(given);
  p.x = data_of<void>(layer.op, "hidden_states", x, p.x_half ? ScalarType::Half : layer.hidden_type,
                      layer.hidden_elements > 0 ? layer.hidden_elements : out.numel(), out);
  const bool direct = !layer.fills_out || is_aligned(out);
  Tensor aligned_out = direct ? out : torch::stable::empty_like(out);
  p.out = layer.fills_out ? aligned_out.mutable_data_ptr() : nullptr;
  // From torch's allocator at every call, so that a CUDA graph owns its own.
  const Tensor bytes = torch::stable::new_empty(out, {static_cast<int64_t>(kernels.workspace(p))}, ScalarType::Byte);
  p.workspace = const_cast<void*>(bytes.const_data_ptr());
  error = kernels.run(p);
  STD_TORCH_CHECK(error == cudaSuccess, "moeq_C::", layer.op, ": ", kernels.name,
                  " kernel: ", cudaGetErrorString(error), hint_at(error, p.partition));
  if (!direct) {
    Tensor target = out;
    torch::stable::copy_(target, aligned_out);
  }
}

}  // namespace moeq::sm90
