// moeq_C::experts_sm90_w4a8: one layer of NVFP4 weights on fp8 activations.
#include "op_arguments.cuh"
#include "w4a8.h"
#include "w4a8_layout.h"

namespace moeq::sm90 {
namespace {

// Weights and what follows from their shapes; see w4a8_layout.h. p.hidden and p.gated are known.
void bind_weights(W4a8Problem& p, const Tensor& w13, const Tensor& w13_scale, const Tensor& w2, const Tensor& w2_scale,
                  const Tensor& beside) {
  STD_TORCH_CHECK(w13.dim() == 4 && w2.dim() == 4, "moeq_C::", kOp, ": w13 and w2 must be tiled");
  p.experts = size_of(w13, 0);
  p.inter = size_of(w2, 2) * w4a8::kTileK;
  STD_TORCH_CHECK(p.experts <= w4a8::kMaxExperts, "moeq_C::", kOp, ": at most ", w4a8::kMaxExperts, " experts");
  STD_TORCH_CHECK(p.hidden <= w4a8::kMaxK && p.inter <= w4a8::kMaxK, "moeq_C::", kOp, ": sizes up to ", w4a8::kMaxK);
  const int64_t tile = p.folded ? w4a8::kFoldedBytes : w4a8::kPackedBytes, scale = p.folded ? 0 : w4a8::kScaleBytes;
  const int64_t k13 = w4a8::tiles(p.hidden, w4a8::kTileK), k2 = w4a8::tiles(p.inter, w4a8::kTileK);
  const int64_t rows13 = int64_t{p.experts} * w4a8::tiles(p.gated ? 2 * p.inter : p.inter, w4a8::kTileRows);
  const int64_t rows2 = int64_t{p.experts} * w4a8::tiles(p.hidden, w4a8::kTileRows);
  p.w13 = tiles_of("w13", w13, rows13 * k13 * tile, beside);
  p.w13_scale = tiles_of("w13_scale", w13_scale, rows13 * (k13 * scale + w4a8::kTileRows), beside);
  p.w2 = tiles_of("w2", w2, rows2 * k2 * tile, beside);
  p.w2_scale = tiles_of("w2_scale", w2_scale, rows2 * (k2 * scale + w4a8::kTileRows), beside);
}

// Fills out [tokens, hidden]. a1_gscale, a2_gscale: f32 [] or [experts], or absent: a scale per token.
void experts_sm90_w4a8(Tensor out, Tensor x_given, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w13_scale,
                       Tensor g1_alphas, OptionalTensor w13_bias, Tensor w2, Tensor w2_scale, Tensor g2_alphas,
                       OptionalTensor w2_bias, OptionalTensor a1_gscale, OptionalTensor a2_gscale,
                       std::string activation, double alpha, double beta, double limit, int64_t expert_offset,
                       bool weight_on_input, bool folded) {
  STD_TORCH_CHECK(out.is_cuda() && out.is_contiguous() && out.dim() == 2 && topk_ids.dim() == 2, "moeq_C::", kOp,
                  ": out and topk_ids must be CUDA matrices, out contiguous");
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  W4a8Problem p{};
  p.folded = folded;
  p.activation = activation_of(activation);
  p.gated = p.activation < Activation::kSiluNoMul;
  p.tokens = size_of(out, 0);
  p.hidden = size_of(out, 1);
  p.top_k = size_of(topk_ids, 1);
  STD_TORCH_CHECK(p.hidden % 16 == 0, "moeq_C::", kOp, ": the hidden size must be a multiple of 16");
  STD_TORCH_CHECK(!weight_on_input || p.top_k == 1, "moeq_C::", kOp, ": weight_on_input must go with top_k 1");
  const int64_t slots = int64_t{p.tokens} * p.top_k, halves = p.gated ? 2 : 1;
  STD_TORCH_CHECK(slots <= INT32_MAX, "moeq_C::", kOp, ": tokens * top_k must be below 2^31");
  bind_weights(p, w13, w13_scale, w2, w2_scale, out);
  p.alphas13 = g1_alphas.dim() == 2 ? size_of(g1_alphas, 1) : 1;
  STD_TORCH_CHECK(p.alphas13 <= halves, "moeq_C::", kOp, ": g1_alphas must have one column per half of w13");
  p.g1_alphas = floats_of("g1_alphas", g1_alphas, int64_t{p.experts} * p.alphas13, out);
  p.g2_alphas = floats_of("g2_alphas", g2_alphas, p.experts, out);
  p.w13_bias = floats_of("w13_bias", w13_bias, halves * p.experts * p.inter, out);
  p.w2_bias = floats_of("w2_bias", w2_bias, int64_t{p.experts} * p.hidden, out);
  p.a1 = bind_gscale("a1_gscale", true, a1_gscale, p.a1_gscale, p, out);
  p.a2 = bind_gscale("a2_gscale", true, a2_gscale, p.a2_gscale, p, out);
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
  // From torch's allocator at every call, so that a CUDA graph owns its own.
  const Tensor workspace =
      torch::stable::new_empty(out, {static_cast<int64_t>(w4a8_workspace(p))}, ScalarType::Byte);
  p.workspace = const_cast<void*>(workspace.const_data_ptr());
  p.stream = current_stream(out);
  const cudaError_t error = w4a8_run(p);
  STD_TORCH_CHECK(error == cudaSuccess, "moeq_C::", kOp, ": fp8 kernel: ", cudaGetErrorString(error));
  if (!is_aligned(out)) torch::stable::copy_(out, aligned_out);
}

}  // namespace
}  // namespace moeq::sm90

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CUDA, m) { m.impl("experts_sm90_w4a8", TORCH_BOX(&moeq::sm90::experts_sm90_w4a8)); }
