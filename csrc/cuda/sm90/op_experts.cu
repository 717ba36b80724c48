// moeq_C::experts_sm90: one layer's call on the Hopper kernels. Python has checked the arguments; what is checked here
// guards memory.
#include "formats.cuh"
#include "layout.h"
#include "op_layer.cuh"

namespace moeq::sm90 {
namespace {

constexpr const char* kOp = "experts_sm90";

// Two dtypes and a size tell the formats apart, as their layouts have them.
Format format_of(const Tensor& scale) {
  const int64_t each = scale.size(scale.dim() - 1);
  if (scale.scalar_type() == ScalarType::Byte) {
    return each == Nvfp4Format::kTileScaleBytes ? Format::kNvfp4 : Format::kMxfp4;
  }
  if (scale.scalar_type() == ScalarType::Int) return Format::kInt4Zero;
  return each == 2 * kTileRows ? Format::kInt4Per32 : Format::kInt4Per64;
}

int tile_scale_bytes(Format format) {
  switch (format) {
    case Format::kMxfp4:
      return Mxfp4Format::kTileScaleBytes;
    case Format::kInt4Per32:
      return Int4Format<32>::kTileScaleBytes;
    case Format::kInt4Per64:
      return Int4Format<64>::kTileScaleBytes;
    case Format::kInt4Zero:
      return Int4ZeroFormat::kTileScaleBytes;
    default:
      return Nvfp4Format::kTileScaleBytes;
  }
}

const uint8_t* scales_of(const char* name, const Tensor& scale, int64_t bytes, const Tensor& beside) {
  STD_TORCH_CHECK(is_aligned(scale), "moeq_C::", kOp, ": ", name, " must start at a multiple of 16 bytes");
  const int64_t count = bytes / scale.element_size();
  return static_cast<const uint8_t*>(data_of<void>(kOp, name, scale, scale.scalar_type(), count, beside));
}

void bind_weights(Problem& p, const LayerCall& call) {
  STD_TORCH_CHECK(call.w13.dim() == 4 && call.w2.dim() == 4, "moeq_C::", kOp, ": w13 and w2 must be tiled");
  STD_TORCH_CHECK(p.hidden % kTileK == 0, "moeq_C::", kOp, ": the hidden size must be a multiple of 64");
  p.format = format_of(call.w13_scale);
  STD_TORCH_CHECK(p.format == format_of(call.w2_scale), "moeq_C::", kOp, ": w13 and w2 must have one format");
  STD_TORCH_CHECK((p.format == Format::kNvfp4) == (call.g1_alphas.has_value() && call.g2_alphas.has_value()),
                  "moeq_C::", kOp, ": alphas must come with nvfp4 weights alone");
  p.experts = size_of(kOp, call.w13, 0);
  p.inter = size_of(kOp, call.w2, 2) * kTileK;
  const int64_t tiles13 = int64_t{p.experts} * row_tiles13(p.inter, p.gated) * k_tiles(p.hidden);
  const int64_t tiles2 = int64_t{p.experts} * k_tiles(p.hidden) * k_tiles(p.inter);
  const int scale_bytes = tile_scale_bytes(p.format);
  p.w13 = tiles_of(kOp, "w13", call.w13, tiles13 * kTileCodeBytes, call.out);
  p.w13_scale = scales_of("w13_scale", call.w13_scale, tiles13 * scale_bytes, call.out);
  p.w2 = tiles_of(kOp, "w2", call.w2, tiles2 * kTileCodeBytes, call.out);
  p.w2_scale = scales_of("w2_scale", call.w2_scale, tiles2 * scale_bytes, call.out);
}

template <Shape shape>
size_t prefill_workspace_of(const Problem& p) {
  return prefill_workspace(p, shape);
}

template <Shape shape>
cudaError_t prefill_run_of(const Problem& p) {
  return prefill_run(p, shape);
}

template <Shape shape>
constexpr Kernels<Problem> prefill_of(const char* name) {
  return {name, prefill_workspace_of<shape>, prefill_run_of<shape>, nullptr};
}

// By the numbers that Python gives them (KERNELS of torch_moe_ops/tuning/tuned_kernels.py).
constexpr Kernels<Problem> kKernels[] = {
    {"decode", decode_workspace, decode_run, decode_takes_logits},
    prefill_of<Shape::kSlim>("slim"),
    prefill_of<Shape::kNarrow>("narrow"),
    prefill_of<Shape::kWide>("wide"),
};
constexpr int64_t kKernelCount = sizeof(kKernels) / sizeof(kKernels[0]);

void check_kernel(int64_t kernel, const Problem& p) {
  STD_TORCH_CHECK(kernel != 0 || p.tokens <= decode_max_tokens(p), "moeq_C::", kOp, ": kernel decode takes up to ",
                  decode_max_tokens(p), " tokens with top_k ", p.top_k, ", got ", p.tokens);
}

// Fills out [tokens, hidden] from ids and weights, or from logits.
void experts_sm90(Tensor out, Tensor hidden_states, OptionalTensor topk_ids, OptionalTensor topk_weights, Tensor w13,
                  Tensor w13_scale, OptionalTensor g1_alphas, OptionalTensor w13_bias, Tensor w2, Tensor w2_scale,
                  OptionalTensor g2_alphas, OptionalTensor w2_bias, OptionalTensor a1_gscale, OptionalTensor a2_gscale,
                  bool quantize_hidden, bool quantize_intermediate, std::string activation, double alpha, double beta,
                  double limit, int64_t expert_offset, bool weight_on_input, int64_t kernel,
                  OptionalTensor router_logits, OptionalTensor routing_bias, std::string score, std::string weight,
                  bool renormalize, int64_t top_k, int64_t n_group, int64_t topk_group, double factor) {
  const RouterCall router{router_logits, routing_bias, score, weight, renormalize, top_k, n_group, topk_group, factor};
  const LayerCall call{kOp,
                       out,       hidden_states, topk_ids,   topk_weights,    w13,
                       w13_scale, g1_alphas,     w13_bias,   w2,              w2_scale,
                       g2_alphas, w2_bias,       a1_gscale,  a2_gscale,       quantize_hidden,
                       quantize_intermediate,    activation, alpha,           beta,
                       limit,     expert_offset, weight_on_input, router};
  Problem p{};
  STD_TORCH_CHECK(kernel >= 0 && kernel < kKernelCount, "moeq_C::", kOp, ": kernel must be 0 to below ", kKernelCount,
                  ", got ", kernel);
  run_layer(p, call, kKernels[kernel], [&](Problem& problem) {
    check_kernel(kernel, problem);
    bind_weights(problem, call);
  });
}

}  // namespace
}  // namespace moeq::sm90

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CUDA, m) { m.impl("experts_sm90", TORCH_BOX(&moeq::sm90::experts_sm90)); }
