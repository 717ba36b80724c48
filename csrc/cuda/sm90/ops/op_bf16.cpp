// moeq_C::experts_sm90_bf16: one layer of bfloat16 weights, as the checkpoint has them.
#include "../problem/problem.h"
#include "op_layer.h"

namespace moeq::sm90 {
namespace {

constexpr const char* kOp = "experts_sm90_bf16";

void bind_weights(Problem& p, const LayerCall& call) {
  STD_TORCH_CHECK(call.w13.dim() == 3 && call.w2.dim() == 3, "moeq_C::", kOp, ": w13 and w2 must be matrices");
  p.experts = size_of(kOp, call.w13, 0);
  p.inter = size_of(kOp, call.w2, 2);
  STD_TORCH_CHECK(p.hidden % kBf16SizeMultiple == 0 && p.inter % kBf16SizeMultiple == 0, "moeq_C::", kOp,
                  ": sizes must be multiples of ", kBf16SizeMultiple);
  const int64_t each = int64_t{p.experts} * p.hidden * p.inter;
  p.w13 = aligned_data_of<uint8_t>(kOp, "w13", call.w13, ScalarType::BFloat16, p.gated ? 2 * each : each, call.out);
  p.w2 = aligned_data_of<uint8_t>(kOp, "w2", call.w2, ScalarType::BFloat16, each, call.out);
}

// Fills out [tokens, hidden]. What belongs to quantized weights is absent.
void experts_sm90_bf16(const ExpertsSm90Bf16Call& call) {
  const bool scaled = call.w13_scale.has_value() || call.w2_scale.has_value() || call.hidden_states_scale.has_value();
  STD_TORCH_CHECK(!scaled, "moeq_C::", kOp, ": nothing must have scales");
  Problem p{};
  run_layer(p, Layer(kOp, call), Kernels<Problem>{"bf16", bf16_workspace, bf16_run},
            [&](Problem& problem) { bind_weights(problem, call); });
}

}  // namespace
}  // namespace moeq::sm90

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CUDA, m) {
  m.impl("experts_sm90_bf16", MOEQ_BOX(moeq::ExpertsSm90Bf16Call, moeq::sm90::experts_sm90_bf16));
}
