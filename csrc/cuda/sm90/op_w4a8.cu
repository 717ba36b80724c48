// moeq_C::experts_sm90_w4a8: one layer of NVFP4 weights on fp8 activations.
#include "op_layer.cuh"
#include "w4a8.h"
#include "w4a8_layout.h"

namespace moeq::sm90 {
namespace {

// Weights and what follows from their shapes; see w4a8_layout.h.
void bind_weights(W4a8Problem& p, const LayerCall& call) {
  STD_TORCH_CHECK(call.w13.dim() == 4 && call.w2.dim() == 4, "moeq_C::", kOp, ": w13 and w2 must be tiled");
  STD_TORCH_CHECK(p.hidden % 16 == 0, "moeq_C::", kOp, ": the hidden size must be a multiple of 16");
  p.experts = size_of(call.w13, 0);
  p.inter = size_of(call.w2, 2) * w4a8::kTileK;
  STD_TORCH_CHECK(p.experts <= w4a8::kMaxExperts, "moeq_C::", kOp, ": at most ", w4a8::kMaxExperts, " experts");
  STD_TORCH_CHECK(p.hidden <= w4a8::kMaxK && p.inter <= w4a8::kMaxK, "moeq_C::", kOp, ": sizes up to ", w4a8::kMaxK);
  const int64_t tile = p.folded ? w4a8::kFoldedBytes : w4a8::kPackedBytes, scale = p.folded ? 0 : w4a8::kScaleBytes;
  const int64_t k13 = w4a8::tiles(p.hidden, w4a8::kTileK), k2 = w4a8::tiles(p.inter, w4a8::kTileK);
  const int64_t rows13 = int64_t{p.experts} * w4a8::tiles(p.gated ? 2 * p.inter : p.inter, w4a8::kTileRows);
  const int64_t rows2 = int64_t{p.experts} * w4a8::tiles(p.hidden, w4a8::kTileRows);
  p.w13 = tiles_of("w13", call.w13, rows13 * k13 * tile, call.out);
  p.w13_scale = tiles_of("w13_scale", call.w13_scale, rows13 * (k13 * scale + w4a8::kTileRows), call.out);
  p.w2 = tiles_of("w2", call.w2, rows2 * k2 * tile, call.out);
  p.w2_scale = tiles_of("w2_scale", call.w2_scale, rows2 * (k2 * scale + w4a8::kTileRows), call.out);
}

// Fills out [tokens, hidden].
void experts_sm90_w4a8(Tensor out, Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor w13,
                       Tensor w13_scale, Tensor g1_alphas, OptionalTensor w13_bias, Tensor w2, Tensor w2_scale,
                       Tensor g2_alphas, OptionalTensor w2_bias, OptionalTensor a1_gscale, OptionalTensor a2_gscale,
                       std::string activation, double alpha, double beta, double limit, int64_t expert_offset,
                       bool weight_on_input, bool folded) {
  const LayerCall call{out,       hidden_states, topk_ids, topk_weights, w13,       w13_scale,  g1_alphas, w13_bias,
                       w2,        w2_scale,      g2_alphas, w2_bias,     a1_gscale, a2_gscale,  true,      true,
                       activation, alpha,        beta,     limit,        expert_offset, weight_on_input, {}};
  W4a8Problem p{};
  p.folded = folded;
  const Kernels<W4a8Problem> kernels = {"fp8", w4a8_workspace, w4a8_run, nullptr};
  run_layer(p, call, kernels, [&](W4a8Problem& problem) { bind_weights(problem, call); });
}

}  // namespace
}  // namespace moeq::sm90

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CUDA, m) { m.impl("experts_sm90_w4a8", TORCH_BOX(&moeq::sm90::experts_sm90_w4a8)); }
