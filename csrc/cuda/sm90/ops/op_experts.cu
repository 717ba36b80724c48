// moeq_C::experts_sm90: one layer's call on the Hopper kernels. Python has checked the arguments; what is checked here
// guards memory.
#include "../formats/formats.cuh"
#include "../layout/layout.h"
#include "op_layer.cuh"
#include "../problem/rounded_problem.h"

namespace moeq::sm90 {
namespace {

constexpr const char* kOp = "experts_sm90";

// The size of a scale and that of a tile's scales tell the formats apart.
Format format_of(const Tensor& scale) {
  const int64_t each = scale.element_size(), all = each * scale.size(scale.dim() - 1);
  for (int format = 0; format < kFormats; ++format) {
    if (each == kEachScaleBytes[format] && all == kTileScaleBytes[format]) return static_cast<Format>(format);
  }
  STD_TORCH_CHECK(false, "moeq_C::", kOp, ": scales must be those of a known format, got ", all, " bytes a tile");
  return Format::kNvfp4;  // not reached
}

const uint8_t* scales_of(const char* name, const Tensor& scale, int64_t bytes, const Tensor& beside) {
  STD_TORCH_CHECK(is_aligned(scale), "moeq_C::", kOp, ": ", name, " must start at a multiple of 16 bytes");
  const int64_t count = bytes / scale.element_size();
  return static_cast<const uint8_t*>(data_of<void>(kOp, name, scale, scale.scalar_type(), count, beside));
}

void bind_weights(Problem& p, const LayerCall& call) {
  STD_TORCH_CHECK(call.w13.dim() == 4 && call.w2.dim() == 4, "moeq_C::", kOp, ": w13 and w2 must be tiled");
  STD_TORCH_CHECK(p.hidden % kTileK == 0, "moeq_C::", kOp, ": the hidden size must be a multiple of 64");
  STD_TORCH_CHECK(call.w13_scale.has_value() && call.w2_scale.has_value(), "moeq_C::", kOp,
                  ": w13_scale and w2_scale must be given");
  p.format = format_of(*call.w13_scale);
  STD_TORCH_CHECK(p.format == format_of(*call.w2_scale), "moeq_C::", kOp, ": w13 and w2 must have one format");
  STD_TORCH_CHECK((p.format == Format::kNvfp4) == (call.g1_alphas.has_value() && call.g2_alphas.has_value()),
                  "moeq_C::", kOp, ": alphas must come with nvfp4 weights alone");
  p.experts = size_of(kOp, call.w13, 0);
  p.inter = size_of(kOp, call.w2, 2) * kTileK;
  const int64_t tiles13 = int64_t{p.experts} * row_tiles13(p.inter, p.gated) * k_tiles(p.hidden);
  const int64_t tiles2 = int64_t{p.experts} * k_tiles(p.hidden) * k_tiles(p.inter);
  const int64_t scale_bytes = tile_scale_bytes(p.format);
  p.w13 = tiles_of(kOp, "w13", call.w13, tiles13 * kTileCodeBytes, call.out);
  p.w13_scale = scales_of("w13_scale", *call.w13_scale, tiles13 * scale_bytes, call.out);
  p.w2 = tiles_of(kOp, "w2", call.w2, tiles2 * kTileCodeBytes, call.out);
  p.w2_scale = scales_of("w2_scale", *call.w2_scale, tiles2 * scale_bytes, call.out);
}

template <Shape shape>
size_t prefill_workspace_of(const RoundedProblem& p) {
  return prefill_workspace(p, shape);
}

template <Shape shape>
cudaError_t prefill_run_of(const RoundedProblem& p) {
  return prefill_run(p, shape);
}

template <Shape shape>
constexpr Kernels<RoundedProblem> prefill_of() {
  return {kKernelNames[1 + static_cast<int>(shape)], prefill_workspace_of<shape>, prefill_run_of<shape>, nullptr};
}

// By their numbers, in the order of kKernelNames.
constexpr Kernels<RoundedProblem> kKernels[] = {
    {kKernelNames[0], decode_workspace, decode_run, decode_takes_logits},
    prefill_of<Shape::kSlim>(),
    prefill_of<Shape::kNarrow>(),
    prefill_of<Shape::kWide>(),
};
constexpr int64_t kKernelCount = 1 + kShapes;
static_assert(kKernelCount == sizeof(kKernels) / sizeof(kKernels[0]), "a kernel for each number");

void check_kernel(int64_t kernel, const Problem& p) {
  STD_TORCH_CHECK(kernel != 0 || p.tokens <= decode_max_tokens(p), "moeq_C::", kOp, ": kernel decode takes up to ",
                  decode_max_tokens(p), " tokens with top_k ", p.top_k, ", got ", p.tokens);
}

// Fills out [tokens, hidden] from ids and weights, or from logits. quantize_hidden, quantize_intermediate: to
// act_format. hidden_states_scale: float32 [tokens, 1], which multiplies hidden states that are values of codes.
void experts_sm90(const ExpertsSm90Call& call) {
  RoundedProblem p{};
  p.act_format = named<ActFormat>(kOp, "act_format", call.act_format);
  STD_TORCH_CHECK(call.kernel >= 0 && call.kernel < kKernelCount, "moeq_C::", kOp, ": kernel must be 0 to below ",
                  kKernelCount, ", got ", call.kernel);
  STD_TORCH_CHECK(!call.hidden_states_scale.has_value() || (!call.quantize_hidden && !call.router_weight_on_input),
                  "moeq_C::", kOp,
                  ": hidden_states_scale must be absent where hidden states are quantized or weighted");
  Layer layer(kOp, call);
  layer.router = &call;
  layer.quantize_hidden = call.quantize_hidden;
  layer.quantize_intermediate = call.quantize_intermediate;
  run_layer(p, layer, kKernels[call.kernel], [&](RoundedProblem& problem) {
    check_kernel(call.kernel, problem);
    bind_weights(problem, call);
    problem.x_factor = floats_of(kOp, "hidden_states_scale", call.hidden_states_scale, problem.tokens, call.out);
  });
}

}  // namespace
}  // namespace moeq::sm90

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CUDA, m) {
  m.impl("experts_sm90", MOEQ_BOX(moeq::ExpertsSm90Call, moeq::sm90::experts_sm90));
}
