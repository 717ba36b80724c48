// Private ops of the CPU backend, namespace moeq_C, on the LibTorch stable ABI. Python validates and calls them.
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <string>
#include <utility>

#include "check.h"
#include "cpu/bind.h"
#include "cpu/dispatch.h"
#include "cpu/experts.h"
#include "cpu/names.h"

namespace {

using namespace moeq::cpu;
using torch::headeronly::ScalarType;

constexpr const char* kOp = "experts";

void run_on_torch_threads(int threads, void (*body)(void*), void* context) {
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(context);
  });
}

template <class Enum>
Enum parse_name(const char* argument, const std::string& name) {
  Enum value{};
  MOEQ_CHECK(kOp, parse(name, value), argument, " must be a known name, got '", name, "'");
  return value;
}

void bind_tokens(ExpertsArgs& args, Tensor& out, const Tensor& hidden_states, const Tensor& topk_ids,
                 const Tensor& topk_weights) {
  const std::pair<const char*, const Tensor*> tensors[] = {
      {"out", &out}, {"hidden_states", &hidden_states}, {"topk_ids", &topk_ids}, {"topk_weights", &topk_weights}};
  for (const auto& [name, tensor] : tensors) {
    check_memory(name, *tensor);
    MOEQ_CHECK(kOp, tensor->dim() == 2, name, " must be a matrix");
  }
  args.num_tokens = topk_ids.size(0);
  args.top_k = topk_ids.size(1);
  args.hidden_size = out.size(1);
  MOEQ_CHECK(kOp, topk_ids.scalar_type() == ScalarType::Int, "topk_ids must have dtype int32");
  MOEQ_CHECK(kOp, topk_weights.scalar_type() == ScalarType::Float && topk_weights.numel() == topk_ids.numel(),
             "topk_weights must be float32, one per id");
  MOEQ_CHECK(kOp, out.size(0) == args.num_tokens && hidden_states.size(0) == args.num_tokens,
             "hidden_states must have one row per row of topk_ids");
  args.out = out.mutable_data_ptr();
  args.out_dtype = dtype_of(out, "out");
  args.hidden = static_cast<const uint8_t*>(hidden_states.const_data_ptr());
  args.hidden_row_bytes = hidden_states.size(1) * static_cast<int64_t>(hidden_states.element_size());
  args.topk_ids = static_cast<const int32_t*>(topk_ids.const_data_ptr());
  args.topk_weights = static_cast<const float*>(topk_weights.const_data_ptr());
}

// Bytes of one row of codes and of its scales, as each format stores them; {0, 0} for those that are never packed.
struct PackedRow {
  int64_t codes;
  int64_t scales;
};

PackedRow packed_row(ActFormat format, Scheme scheme, int64_t size) {
  switch (format) {
    case ActFormat::kNvfp4: return {size / 2, size / 16};
    case ActFormat::kMxfp4: return {size / 2, size / 32};
    case ActFormat::kMxfp8: return {size, size / 32};
    case ActFormat::kFp8: return {size, scheme == Scheme::kFp8Block ? (size + 127) / 128 * 4 : 4};
    case ActFormat::kInt8: return {size, 4};
    default: return {0, 0};
  }
}

void bind_hidden(ExpertsArgs& args, const Tensor& hidden_states, const OptionalTensor& scale, ActFormat format) {
  if (!scale.has_value()) {
    args.hidden_dtype = dtype_of(hidden_states, "hidden_states");
    MOEQ_CHECK(kOp, hidden_states.size(1) == args.hidden_size, "hidden_states must have ", args.hidden_size,
               " columns");
    return;
  }
  const PackedRow row = packed_row(format, args.scheme, args.hidden_size);
  MOEQ_CHECK(kOp, row.codes > 0 && args.hidden_row_bytes == row.codes, "hidden_states must have rows of ", row.codes,
             " bytes, got ", args.hidden_row_bytes);
  check_memory("hidden_states_scale", *scale);
  const int64_t bytes = scale->numel() * static_cast<int64_t>(scale->element_size());
  MOEQ_CHECK(kOp, bytes == args.num_tokens * row.scales,
             "hidden_states_scale must have ", row.scales, " bytes per token");
  args.hidden_scale = static_cast<const uint8_t*>(scale->const_data_ptr());
  args.hidden_scale_row_bytes = row.scales;
  args.hidden_dtype = args.out_dtype;
}

// Both weights take the same kernel, so what chooses it must agree.
DotKey dot_key(const ExpertsArgs& args, ActFormat format) {
  auto one_group = [](const Weight& weight) { return weight.group_units >= weight.units; };
  const bool agree = args.w13.scale_dtype == args.w2.scale_dtype &&
                     (args.w13.scale == nullptr) == (args.w2.scale == nullptr) &&
                     (args.w13.zero_point == nullptr) == (args.w2.zero_point == nullptr);
  MOEQ_CHECK(kOp, agree, "w13 and w2 must have scales of one dtype, and zero points both or neither");
  const bool integers = args.scheme == Scheme::kInt4 || args.scheme == Scheme::kInt8;
  MOEQ_CHECK(kOp, integers || args.w13.zero_point == nullptr, "zero points must go with int4 or int8 weights");
  return {args.scheme, args.weight_dtype, args.w13.scale_dtype, args.w13.scale != nullptr,
          args.w13.zero_point != nullptr, one_group(args.w13) && one_group(args.w2), format, args.hidden_dtype};
}

void experts(Tensor out, Tensor hidden_states, OptionalTensor hidden_states_scale, Tensor topk_ids,
             Tensor topk_weights, Tensor w13, OptionalTensor w13_scale, OptionalTensor w13_zero_point,
             OptionalTensor g1_alphas, OptionalTensor w13_bias, Tensor w2, OptionalTensor w2_scale,
             OptionalTensor w2_zero_point, OptionalTensor g2_alphas, OptionalTensor w2_bias,
             OptionalTensor a1_gscale, OptionalTensor a2_gscale, std::string scheme, std::string act_format,
             std::string activation, double alpha, double beta, double limit, int64_t local_expert_offset,
             bool router_weight_on_input) {
  ExpertsArgs args;
  bind_tokens(args, out, hidden_states, topk_ids, topk_weights);
  if (args.num_tokens == 0) return;
  args.scheme = parse_name<Scheme>("scheme", scheme);
  args.activation = parse_name<Activation>("activation", activation);
  const auto format = parse_name<ActFormat>("act_format", act_format);
  bind_hidden(args, hidden_states, hidden_states_scale, format);
  args.alpha = static_cast<float>(alpha);
  args.beta = static_cast<float>(beta);
  args.limit = static_cast<float>(limit);
  args.expert_offset = local_expert_offset;
  args.weight_on_input = router_weight_on_input;
  MOEQ_CHECK(kOp, !router_weight_on_input || args.top_k == 1, "router_weight_on_input must go with top_k 1");
  MOEQ_CHECK(kOp, w13.dim() == 4 && w2.dim() == 4 && w13.size(0) == w2.size(0),
             "w13 and w2 must be packed, with as many experts");
  args.num_experts = w13.size(0);
  const int64_t halves = is_gated(args.activation) ? 2 : 1;
  const int64_t hidden_units = (args.hidden_size + kUnit - 1) / kUnit;
  args.w13 = bind_weight("w13", {w13, w13_scale, w13_zero_point, g1_alphas, w13_bias}, args.scheme, hidden_units,
                         halves);
  args.w2 = bind_weight("w2", {w2, w2_scale, w2_zero_point, g2_alphas, w2_bias}, args.scheme, w2.size(2), 1);
  MOEQ_CHECK(kOp, args.w13.panels == halves * args.w2.units && args.w2.panels == hidden_units,
             "w13 and w2 must have matching panels");
  MOEQ_CHECK(kOp, args.w2.bias == nullptr || args.w2.bias_rows == args.hidden_size, "w2_bias must have ",
             args.hidden_size, " columns");
  if (args.scheme == Scheme::kNone) args.weight_dtype = dtype_of(w13, "w13");
  args.a1 = bind_act("a1_gscale", format, args.hidden_dtype, a1_gscale, args.num_experts);
  args.a2 = bind_act("a2_gscale", format, args.hidden_dtype, a2_gscale, args.num_experts);

  if (args.scheme == Scheme::kFp8Block && format == ActFormat::kFp8) args.a1.group = args.a2.group = 128;

  const IsaTable& isa = isa_table();
  const Dot dot = isa.find_dot(dot_key(args, format));
  const int threads = std::max<int>(1, static_cast<int>(torch::stable::get_num_threads()));
  run_experts(args, isa, dot, {threads, run_on_torch_threads});
}

std::string cpu_isa() { return isa_table().name; }

}  // namespace

STABLE_TORCH_LIBRARY(moeq_C, m) {
  m.def(
      "experts(Tensor(a!) out, Tensor hidden_states, Tensor? hidden_states_scale, Tensor topk_ids, "
      "Tensor topk_weights, Tensor w13, Tensor? w13_scale, Tensor? w13_zero_point, Tensor? g1_alphas, "
      "Tensor? w13_bias, Tensor w2, Tensor? w2_scale, Tensor? w2_zero_point, Tensor? g2_alphas, Tensor? w2_bias, "
      "Tensor? a1_gscale, Tensor? a2_gscale, str scheme, str act_format, str activation, float alpha, float beta, "
      "float limit, int local_expert_offset, bool router_weight_on_input) -> ()");
  m.def("cpu_isa() -> str");
  m.def("use_cpu_isa(str isa) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CPU, m) { m.impl("experts", TORCH_BOX(&experts)); }

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
  m.impl("use_cpu_isa", TORCH_BOX(&use_isa));
}

// Lets `import torch_moe_ops._C` load this library; the ops register themselves.
PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
