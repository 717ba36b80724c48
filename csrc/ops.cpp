// Private ops of the CPU backend, namespace moeq_C, on the LibTorch stable ABI. Python validates and calls them.
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "boxed.h"
#include "check.h"
#include "cpu/accepted.h"
#include "cpu/bind.h"
#include "cpu/dispatch.h"
#include "cpu/experts.h"
#include "cpu/host_function.h"
#include "cpu/host_jobs.h"
#include "cpu/integers.h"

namespace {

using namespace moeq::cpu;
using moeq::OptionalTensor;
using moeq::Tensor;
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
  MOEQ_CHECK(kOp, moeq::parse(name, value), argument, " must be a known name, got '", name, "'");
  return value;
}

void bind_tokens(ExpertsArgs& args, const moeq::LayerCall& call) {
  MOEQ_CHECK(kOp, call.topk_ids.has_value() && call.topk_weights.has_value(),
             "topk_ids and topk_weights must be given");
  const Tensor &out = call.out, &hidden_states = call.hidden_states;
  const Tensor &topk_ids = *call.topk_ids, &topk_weights = *call.topk_weights;
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
  const ActLayout& layout = kActLayouts[static_cast<int>(format)];
  if (layout.pack == 0) return {0, 0};
  const int64_t block = format == ActFormat::kFp8 ? layout_of(scheme).fp8_group : layout.block;
  return {size / layout.pack, (block > 0 ? (size + block - 1) / block : 1) * layout.scale_bytes};
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
  MOEQ_CHECK(kOp, bytes == args.num_tokens * row.scales, "hidden_states_scale must have ", row.scales,
             " bytes per token");
  args.hidden_scale = static_cast<const uint8_t*>(scale->const_data_ptr());
  args.hidden_scale_row_bytes = row.scales;
  args.hidden_dtype = args.out_dtype;
}

// Both weights take the same kernel, so what chooses it must agree.
DotKey dot_key(const ExpertsArgs& args, ActFormat format) {
  const bool agree = args.w13.scale_dtype == args.w2.scale_dtype &&
                     (args.w13.scale == nullptr) == (args.w2.scale == nullptr) &&
                     (args.w13.zero_point == nullptr) == (args.w2.zero_point == nullptr);
  MOEQ_CHECK(kOp, agree, "w13 and w2 must have scales of one dtype, and zero points both or neither");
  const bool integers = args.scheme == Scheme::kInt4 || args.scheme == Scheme::kInt8;
  MOEQ_CHECK(kOp, integers || args.w13.zero_point == nullptr, "zero points must go with int4 or int8 weights");
  return {
      args.scheme, args.weight_dtype, args.w13.scale_dtype, args.w13.scale != nullptr, args.w13.zero_point != nullptr,
      format,      args.hidden_dtype};
}

void bind_weights(ExpertsArgs& args, const moeq::LayerCall& call) {
  const Tensor &w13 = call.w13, &w2 = call.w2;
  MOEQ_CHECK(kOp, w13.dim() == 4 && w2.dim() == 4 && w13.size(0) == w2.size(0),
             "w13 and w2 must be packed, with as many experts");
  args.num_experts = w13.size(0);
  const int64_t halves = is_gated(args.activation) ? 2 : 1;
  const int64_t hidden_units = (args.hidden_size + kUnit - 1) / kUnit;
  args.w13 = bind_weight("w13", {w13, call.w13_scale, call.w13_zero_point, call.g1_alphas, call.w13_bias}, args.scheme,
                         hidden_units, halves);
  args.w2 = bind_weight("w2", {w2, call.w2_scale, call.w2_zero_point, call.g2_alphas, call.w2_bias}, args.scheme,
                        w2.size(2), 1);
  MOEQ_CHECK(kOp, args.w13.panels == halves * args.w2.units && args.w2.panels == hidden_units,
             "w13 and w2 must have matching panels");
  MOEQ_CHECK(kOp, args.w2.bias == nullptr || args.w2.bias_rows == args.hidden_size, "w2_bias must have ",
             args.hidden_size, " columns");
  if (args.scheme == Scheme::kNone) args.weight_dtype = dtype_of(w13, "w13");
}

// Values of K that share a scale apart from the operand; 0: the whole row, or scales are in the operand.
int64_t scale_group(Scheme scheme, ActFormat format, OperandType operand) {
  if (format == ActFormat::kFp8) return layout_of(scheme).fp8_group;
  return operand == OperandType::kInt8 ? kActLayouts[static_cast<int>(format)].block : 0;
}

Parallel torch_threads() {
  return {std::max<int>(1, static_cast<int>(torch::stable::get_num_threads())), run_on_torch_threads};
}

// Everything but the threads; of a call without tokens, its sizes alone.
HostJob bind(const moeq::ExpertsCall& call) {
  HostJob job;
  ExpertsArgs& args = job.args;
  bind_tokens(args, call);
  if (args.num_tokens == 0) return job;
  args.scheme = parse_name<Scheme>("scheme", call.scheme);
  args.activation = parse_name<moeq::Activation>("activation", call.activation);
  const auto format = parse_name<ActFormat>("act_format", call.act_format);
  bind_hidden(args, call.hidden_states, call.hidden_states_scale, format);
  args.alpha = static_cast<float>(call.swiglu_alpha);
  args.beta = static_cast<float>(call.swiglu_beta);
  args.limit = static_cast<float>(call.swiglu_limit);
  args.expert_offset = call.local_expert_offset;
  args.weight_on_input = call.router_weight_on_input;
  MOEQ_CHECK(kOp, !args.weight_on_input || args.top_k == 1, "router_weight_on_input must go with top_k 1");
  bind_weights(args, call);
  args.a1 = bind_act("a1_gscale", format, args.hidden_dtype, call.a1_gscale, args.num_experts);
  args.a2 = bind_act("a2_gscale", format, args.hidden_dtype, call.a2_gscale, args.num_experts);
  job.isa = &isa_table();
  job.dot = find_dot(dot_key(args, format), *job.isa);
  args.a1.group = args.a2.group = scale_group(args.scheme, format, job.dot.operand);
  return job;
}

void experts(const moeq::ExpertsCall& call) {
  const HostJob job = bind(call);
  if (job.args.num_tokens > 0) run_experts(job.args, *job.isa, job.dot, torch_threads());
}

int64_t host_job(const moeq::ExpertsCall& call) {
  HostJob job = bind(call);
  MOEQ_CHECK(kOp, job.args.num_tokens > 0, "hidden_states must have a row");
  MOEQ_CHECK(kOp, job.args.out_dtype == DType::kFloat32, "out must have dtype float32");
  job.parallel = torch_threads();
  job.owned = std::make_shared<const moeq::ExpertsCall>(call);
  return add_host_job(std::move(job));
}

// None where the call is not like an accepted one, or might need a gradient: Python has to look at it.
OptionalTensor experts_accepted(const moeq::ExpertsAcceptedCall& given) {
  if (aoti_torch_grad_mode_is_enabled()) return std::nullopt;
  const AcceptedCall* accepted = find_accepted(given);
  if (accepted == nullptr) return std::nullopt;
  Tensor out = matrix_like(given.hidden_states);
  experts(accepted->on(given, out));
  return out;
}

// As boxed.h does it for calls that return nothing.
template <class Types>
struct BoxedExperts;

template <class... T>
struct BoxedExperts<std::tuple<T...>> {
  static int64_t job(T... arguments) { return host_job(moeq::ExpertsCall{std::move(arguments)...}); }
  static bool accept(T... arguments, int64_t names) {
    return add_accepted(moeq::ExpertsCall{std::move(arguments)...}, names);
  }
};

template <class Types>
struct BoxedAccepted;

template <class... T>
struct BoxedAccepted<std::tuple<T...>> {
  static OptionalTensor run(T... arguments) { return experts_accepted({std::move(arguments)...}); }
};

void* as_data(int64_t number) { return reinterpret_cast<void*>(static_cast<intptr_t>(number)); }

void run_job(int64_t number) { run_host_job(as_data(number)); }

void enqueue_job(int64_t number, int64_t stream) {
  const std::string reason = enqueue_host_function(as_data(stream), run_host_job, as_data(number));
  MOEQ_CHECK("enqueue_host_job", reason.empty(), "stream must take a host function: ", reason);
}

// "(...)" of a schema "name(...) -> ()".
std::string arguments_of(const std::string& schema) {
  const size_t begin = schema.find('(');
  return schema.substr(begin, schema.rfind(" -> ") - begin);
}

std::string cpu_isa() { return isa_table().name; }
std::string cpu_integer_isa() { return integer_isa(isa_table()); }

}  // namespace

STABLE_TORCH_LIBRARY(moeq_C, m) {
  m.def(moeq::ExpertsCall::kSchema);
  // A call of `experts` that is run later: its number.
  m.def(("host_job" + arguments_of(moeq::ExpertsCall::kSchema) + " -> int").c_str());
  // Says that a call of `experts` with these names was checked (cpu/accepted.h); false: there is no room to know it.
  const std::string arguments = arguments_of(moeq::ExpertsCall::kSchema);
  m.def(("accept_experts" + arguments.substr(0, arguments.size() - 1) + ", int names) -> bool").c_str());
  m.def(moeq::ExpertsAcceptedCall::kSchema);
  m.def("new_accepted_names() -> int");
  m.def("run_host_job(int job) -> ()");
  m.def("enqueue_host_job(int job, int stream) -> ()");
  m.def("replace_host_job(int job, int by) -> ()");
  m.def("drop_host_job(int job) -> ()");
  m.def("cpu_isa() -> str");
  m.def("use_cpu_isa(str isa) -> ()");
  m.def("cpu_isa_refusal(str isa) -> str");
  m.def("cpu_integer_isa() -> str");
  m.def("use_cpu_integer_isa(str isa) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CPU, m) {
  m.impl("experts", MOEQ_BOX(moeq::ExpertsCall, experts));
  m.impl("host_job", TORCH_BOX(&BoxedExperts<moeq::ExpertsCall::Types>::job));
  m.impl("accept_experts", TORCH_BOX(&BoxedExperts<moeq::ExpertsCall::Types>::accept));
  m.impl("experts_accepted", TORCH_BOX(&BoxedAccepted<moeq::ExpertsAcceptedCall::Types>::run));
}

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
  m.impl("run_host_job", TORCH_BOX(&run_job));
  m.impl("enqueue_host_job", TORCH_BOX(&enqueue_job));
  m.impl("replace_host_job", TORCH_BOX(&replace_host_job));
  m.impl("new_accepted_names", TORCH_BOX(&new_accepted_names));
  m.impl("drop_host_job", TORCH_BOX(&drop_host_job));
  m.impl("use_cpu_isa", TORCH_BOX(&use_isa));
  m.impl("cpu_isa_refusal", TORCH_BOX(&isa_refusal));
  m.impl("cpu_integer_isa", TORCH_BOX(&cpu_integer_isa));
  m.impl("use_cpu_integer_isa", TORCH_BOX(&use_integer_isa));
}

// Lets `import torch_moe_ops._C` load this library; the ops register themselves.
PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
