// moeq_C::experts_sm90_bf16: one layer of bfloat16 weights, as the checkpoint has them.
#include "bf16.h"
#include "op_layer.cuh"

namespace moeq::sm90 {
namespace {

constexpr const char* kOp = "experts_sm90_bf16";

const uint8_t* matrix_of(const char* name, const Tensor& tensor, int64_t count, const Tensor& beside) {
  STD_TORCH_CHECK(is_aligned(tensor), "moeq_C::", kOp, ": ", name, " must start at a multiple of 16 bytes");
  return static_cast<const uint8_t*>(data_of<void>(kOp, name, tensor, ScalarType::BFloat16, count, beside));
}

void bind_weights(Problem& p, const LayerCall& call) {
  STD_TORCH_CHECK(call.w13.dim() == 3 && call.w2.dim() == 3, "moeq_C::", kOp, ": w13 and w2 must be matrices");
  p.experts = size_of(kOp, call.w13, 0);
  p.inter = size_of(kOp, call.w2, 2);
  STD_TORCH_CHECK(p.hidden % kBf16SizeMultiple == 0 && p.inter % kBf16SizeMultiple == 0, "moeq_C::", kOp,
                  ": sizes must be multiples of ", kBf16SizeMultiple);
  const int64_t each = int64_t{p.experts} * p.hidden * p.inter;
  p.w13 = matrix_of("w13", call.w13, p.gated ? 2 * each : each, call.out);
  p.w2 = matrix_of("w2", call.w2, each, call.out);
}

// Fills out [tokens, hidden].
void experts_sm90_bf16(Tensor out, Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor w13,
                       OptionalTensor w13_bias, Tensor w2, OptionalTensor w2_bias, std::string activation, double alpha,
                       double beta, double limit, int64_t expert_offset, bool weight_on_input) {
  const OptionalTensor none;
  // There are no scales; the weights stand where a call has them.
  const LayerCall call{kOp,
                       out,        hidden_states, topk_ids, topk_weights, w13,           w13,
                       none,       w13_bias,      w2,       w2,           none,          w2_bias,
                       none,       none,          false,    false,        activation,    alpha,
                       beta,       limit,         expert_offset, weight_on_input, {}};
  Problem p{};
  run_layer(p, call, Kernels<Problem>{"bf16", bf16_workspace, bf16_run, nullptr},
            [&](Problem& problem) { bind_weights(problem, call); });
}

}  // namespace
}  // namespace moeq::sm90

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CUDA, m) { m.impl("experts_sm90_bf16", TORCH_BOX(&moeq::sm90::experts_sm90_bf16)); }
