// The ops of vLLM's CPU kernels of experts, under the names and schemas of its torch_bindings.cpp (0.32), for
// a library of these alone: build_vllm_cpu.sh.
#include <torch/all.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

using Optional = std::optional<at::Tensor>;

at::Tensor convert_weight_packed(at::Tensor& weight);
at::Tensor convert_scale_packed(at::Tensor& scale);
std::tuple<at::Tensor, at::Tensor, at::Tensor> convert_weight_packed_scale_zp(at::Tensor weight, at::Tensor qzeros,
                                                                              at::Tensor scales,
                                                                              int64_t quant_method_4bit);
void fused_experts_cpu(at::Tensor& out, at::Tensor& hidden_states, at::Tensor& w1, at::Tensor& w2,
                       at::Tensor& topk_weights, at::Tensor& topk_ids, int64_t moe_comp_method,
                       const Optional& w1_scale, const Optional& w2_scale, const Optional& w1_zero,
                       const Optional& w2_zero, const Optional& a1_scale,
                       const std::optional<std::vector<int64_t>> block_size, const Optional& w1_bias,
                       const Optional& w2_bias, const std::optional<double>& alpha, const std::optional<double>& limit,
                       bool is_vnni);
void prepack_moe_weight(const torch::Tensor& weight, torch::Tensor& packed_weight, const std::string& isa);
void cpu_fused_moe(torch::Tensor& output, const torch::Tensor& input, const torch::Tensor& w13, const torch::Tensor& w2,
                   const Optional& w13_bias, const Optional& w2_bias, const torch::Tensor& topk_weights,
                   const torch::Tensor& topk_id, const bool skip_weighted, const std::string& act,
                   const std::string& isa);

TORCH_LIBRARY(_C, ops) {
  ops.def("convert_weight_packed(Tensor! weight) -> Tensor");
  ops.impl("convert_weight_packed", torch::kCPU, &convert_weight_packed);
  ops.def("convert_scale_packed(Tensor! scale) -> Tensor");
  ops.impl("convert_scale_packed", torch::kCPU, &convert_scale_packed);
  ops.def(
      "convert_weight_packed_scale_zp(Tensor weight, Tensor qzeros, Tensor scales, int quant_method_4bit) -> "
      "(Tensor, Tensor, Tensor)");
  ops.impl("convert_weight_packed_scale_zp", torch::kCPU, &convert_weight_packed_scale_zp);
  ops.def(
      "fused_experts_cpu(Tensor(a0!) out, Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, "
      "Tensor topk_ids, int moe_comp_method, Tensor? w1_scale, Tensor? w2_scale, Tensor? w1_zero, Tensor? w2_zero, "
      "Tensor? a1_scale, int[]? block_size, Tensor? w1_bias, Tensor? w2_bias, float? alpha, float? limit, "
      "bool is_vnni) -> ()");
  ops.impl("fused_experts_cpu", torch::kCPU, &fused_experts_cpu);
  ops.def("prepack_moe_weight(Tensor weight, Tensor(a1!) packed_weight, str isa) -> ()");
  ops.impl("prepack_moe_weight", torch::kCPU, &prepack_moe_weight);
  ops.def(
      "cpu_fused_moe(Tensor(a0!) output, Tensor input, Tensor w13, Tensor w2, Tensor? w13_bias, Tensor? w2_bias, "
      "Tensor topk_weights, Tensor topk_id, bool skip_weighted, str act, str isa) -> ()");
  ops.impl("cpu_fused_moe", torch::kCPU, &cpu_fused_moe);
}
