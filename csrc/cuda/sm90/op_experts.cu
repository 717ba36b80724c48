// moeq_C::experts_sm90: one layer's call on the Hopper kernels. Python has checked the arguments; what is checked here
// guards memory.
#include "layout.h"
#include "op_arguments.cuh"

namespace moeq::sm90 {
namespace {

void bind_weights(Problem& p, const Tensor& w13, const Tensor& w13_scale, const Tensor& w2, const Tensor& w2_scale,
                  const Tensor& beside) {
  STD_TORCH_CHECK(w13.dim() == 4 && w2.dim() == 4, "moeq_C::", kOp, ": w13 and w2 must be tiled");
  p.experts = size_of(w13, 0);
  p.inter = size_of(w2, 2) * kTileK;
  const int64_t tiles13 = static_cast<int64_t>(p.experts) * row_tiles13(p.inter, p.gated) * k_tiles(p.hidden);
  const int64_t tiles2 = static_cast<int64_t>(p.experts) * k_tiles(p.hidden) * k_tiles(p.inter);
  p.w13 = tiles_of("w13", w13, tiles13 * kTileCodeBytes, beside);
  p.w13_scale = tiles_of("w13_scale", w13_scale, tiles13 * kTileScaleBytes, beside);
  p.w2 = tiles_of("w2", w2, tiles2 * kTileCodeBytes, beside);
  p.w2_scale = tiles_of("w2_scale", w2_scale, tiles2 * kTileScaleBytes, beside);
}

void run(Problem& p, bool decode, const Tensor& beside) {
  const size_t bytes = decode ? decode_workspace(p) : prefill_workspace(p);
  // From torch's allocator at every call, so that a CUDA graph owns its own.
  const Tensor workspace = torch::stable::new_empty(beside, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  p.workspace = const_cast<void*>(workspace.const_data_ptr());
  p.stream = current_stream(beside);
  const cudaError_t error = decode ? decode_run(p) : prefill_run(p);
  STD_TORCH_CHECK(error == cudaSuccess, "moeq_C::", kOp, ": ", decode ? "decode" : "prefill",
                  " kernel: ", cudaGetErrorString(error));
}

// Fills out [tokens, hidden]. a1_gscale, a2_gscale: f32 [], [experts], or absent (a scale per token) where the hidden
// states, and the intermediate, are quantized; g1_alphas f32 [experts] or [experts, 2]. See problem.h for the rest.
void experts_sm90(Tensor out, Tensor x_given, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w13_scale,
                  Tensor g1_alphas, OptionalTensor w13_bias, Tensor w2, Tensor w2_scale, Tensor g2_alphas,
                  OptionalTensor w2_bias, OptionalTensor a1_gscale, OptionalTensor a2_gscale, bool quantize_hidden,
                  bool quantize_intermediate, std::string activation, double alpha, double beta, double limit,
                  int64_t expert_offset, bool weight_on_input, bool decode) {
  STD_TORCH_CHECK(out.is_cuda() && out.is_contiguous() && out.dim() == 2 && topk_ids.dim() == 2, "moeq_C::", kOp,
                  ": out and topk_ids must be CUDA matrices, out contiguous");
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  Problem p{};
  p.activation = activation_of(activation);
  p.gated = p.activation < Activation::kSiluNoMul;
  p.tokens = size_of(out, 0);
  p.hidden = size_of(out, 1);
  p.top_k = size_of(topk_ids, 1);
  STD_TORCH_CHECK(p.hidden % kTileK == 0, "moeq_C::", kOp, ": the hidden size must be a multiple of 64");
  STD_TORCH_CHECK(!weight_on_input || p.top_k == 1, "moeq_C::", kOp, ": weight_on_input must go with top_k 1");
  const int64_t slots = static_cast<int64_t>(p.tokens) * p.top_k;
  STD_TORCH_CHECK(slots <= INT32_MAX, "moeq_C::", kOp, ": tokens * top_k must be below 2^31");
  bind_weights(p, w13, w13_scale, w2, w2_scale, out);
  const int64_t halves = p.gated ? 2 : 1;
  p.alphas13 = g1_alphas.dim() == 2 ? size_of(g1_alphas, 1) : 1;
  STD_TORCH_CHECK(p.alphas13 <= halves, "moeq_C::", kOp, ": g1_alphas must have one column per half of w13");
  p.g1_alphas = floats_of("g1_alphas", g1_alphas, static_cast<int64_t>(p.experts) * p.alphas13, out);
  p.g2_alphas = floats_of("g2_alphas", g2_alphas, p.experts, out);
  p.w13_bias = floats_of("w13_bias", w13_bias, halves * p.experts * p.inter, out);
  p.w2_bias = floats_of("w2_bias", w2_bias, static_cast<int64_t>(p.experts) * p.hidden, out);
  p.a1 = bind_gscale("a1_gscale", quantize_hidden, a1_gscale, p.a1_gscale, p, out);
  p.a2 = bind_gscale("a2_gscale", quantize_intermediate, a2_gscale, p.a2_gscale, p, out);
  p.topk_ids = data_of<int32_t>("topk_ids", topk_ids, ScalarType::Int, slots, out);
  p.topk_weights = data_of<float>("topk_weights", topk_weights, ScalarType::Float, slots, out);
  // A view may start anywhere; the kernels move 16 bytes at a time.
  const Tensor x = is_aligned(x_given) ? x_given : torch::stable::clone(x_given);
  p.x = data_of<void>("hidden_states", x, ScalarType::BFloat16, out.numel(), out);
  Tensor aligned_out = is_aligned(out) ? out : torch::stable::empty_like(out);
  p.out = aligned_out.mutable_data_ptr();
  p.out_type = out_type_of(out);
  p.expert_offset = static_cast<int>(expert_offset);
  p.alpha = static_cast<float>(alpha);
  p.beta = static_cast<float>(beta);
  p.limit = static_cast<float>(limit);
  p.weight_on_input = weight_on_input;
  run(p, decode, out);
  if (!is_aligned(out)) torch::stable::copy_(out, aligned_out);
}

}  // namespace
}  // namespace moeq::sm90

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CUDA, m) { m.impl("experts_sm90", TORCH_BOX(&moeq::sm90::experts_sm90)); }
