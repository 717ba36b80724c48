// moeq_C::experts_sm90: one layer's call on the Hopper kernels. Python has checked the arguments; what is checked here
// guards memory.
#include "../problem/tiled_problem.h"
#include "op_tiled_weights.h"

namespace moeq::sm90 {
namespace {

constexpr const char* kOp = "experts_sm90";
constexpr const char* kRowsOp = "experts_sm90_rows";
constexpr const char* kRemoteOp = "experts_sm90_remote";

// Functions that take a shape of tiles, with that given.
template <class AnyProblem, size_t (*workspace)(const AnyProblem&, Shape), cudaError_t (*run)(const AnyProblem&, Shape),
          Shape shape>
constexpr Kernels<AnyProblem> of_shape(const char* name) {
  return {name, [](const AnyProblem& p) { return workspace(p, shape); },
          [](const AnyProblem& p) { return run(p, shape); }};
}

template <Shape shape>
constexpr Kernels<RoundedProblem> prefill_of() {
  return of_shape<RoundedProblem, prefill_workspace, prefill_run, shape>(kKernelNames[1 + static_cast<int>(shape)]);
}

// By their numbers, in the order of kKernelNames.
constexpr Kernels<RoundedProblem> kDecode = {kKernelNames[0], decode_workspace, decode_run};
constexpr Kernels<RoundedProblem> kKernels[] = {
    kDecode,
    prefill_of<Shape::kSlim>(),
    prefill_of<Shape::kNarrow>(),
    prefill_of<Shape::kWide>(),
};
constexpr int64_t kKernelCount = 1 + kShapes;
static_assert(kKernelCount == sizeof(kKernels) / sizeof(kKernels[0]), "a kernel for each number");

void check_kernel(bool decodes, const Problem& p) {
  STD_TORCH_CHECK(!decodes || p.tokens <= decode_max_tokens(p), "moeq_C::", kOp, ": kernel decode takes up to ",
                  decode_max_tokens(p), " tokens with top_k ", p.top_k, ", got ", p.tokens);
}

// Fills out [tokens, hidden] from ids and weights, or from logits. quantize_hidden, quantize_intermediate: to
// act_format. hidden_states_scale: float32 [tokens, 1], beside fp8 weights in blocks [tokens, hidden / 128], which
// multiplies hidden states that are values of codes.
void experts_sm90(const ExpertsSm90Call& call) {
  RoundedProblem p{};
  p.act_format = named<ActFormat>(kOp, "act_format", call.act_format);
  p.gathers = call.kernel == few::kGatheredKernel;
  const bool decodes = call.kernel == 0 || p.gathers;
  STD_TORCH_CHECK(decodes || (call.kernel > 0 && call.kernel < kKernelCount), "moeq_C::", kOp,
                  ": kernel must be 0 to below ", kKernelCount, ", or ", few::kGatheredKernel, ", got ", call.kernel);
  STD_TORCH_CHECK(!call.hidden_states_scale.has_value() || (!call.quantize_hidden && !call.router_weight_on_input),
                  "moeq_C::", kOp,
                  ": hidden_states_scale must be absent where hidden states are quantized or weighted");
  Layer layer(kOp, call);
  layer.takes_half = true;
  layer.router = &call;
  layer.quantize_hidden = call.quantize_hidden;
  layer.quantize_intermediate = call.quantize_intermediate;
  run_layer(p, layer, decodes ? kDecode : kKernels[call.kernel], [&](RoundedProblem& problem) {
    check_kernel(decodes, problem);
    bind_tiled_weights(kOp, problem, call);
    check_rounding(problem, layer);
    problem.x_factor = factors_of(kOp, problem, layer);
  });
}

// Where the ranks' tokens and partial rows are: see csrc/cuda/expert_parallel/remote.cuh.
RemoteRows remote_rows_of(const ExpertsSm90RemoteCall& call) {
  const auto is_numbers = [](const Tensor& t) {
    return t.is_cpu() && t.dim() == 1 && t.is_contiguous() && t.scalar_type() == ScalarType::Long;
  };
  STD_TORCH_CHECK(is_numbers(call.heaps) && is_numbers(call.sizes) && call.sizes.size(0) == 3, "moeq_C::", kRemoteOp,
                  ": heaps and sizes must be vectors of int64 on the CPU, sizes of 3");
  const int64_t ranks = call.heaps.size(0), tokens = call.out.size(0);
  STD_TORCH_CHECK(ranks >= 1 && ranks <= kMostRemoteRanks && tokens % ranks == 0, "moeq_C::", kRemoteOp,
                  ": heaps must have 1 to ", kMostRemoteRanks, " elements that divide the rows of out, got ", ranks);
  STD_TORCH_CHECK(call.rank >= 0 && call.rank < ranks, "moeq_C::", kRemoteOp, ": rank must be in 0 ... ", ranks - 1,
                  ", got ", call.rank);
  const auto* heaps = static_cast<const int64_t*>(call.heaps.const_data_ptr());
  const auto* sizes = static_cast<const int64_t*>(call.sizes.const_data_ptr());
  const int64_t parts = sizes[0] + sizes[1] + sizes[2];
  const int64_t of_rank = call.out.numel() / ranks * static_cast<int64_t>(call.out.element_size());
  STD_TORCH_CHECK(reinterpret_cast<int64_t>(call.out.const_data_ptr()) == heaps[call.rank] + parts,
                  "moeq_C::", kRemoteOp, ": out must be the partial rows of this rank's heap");
  RemoteRows remote{};
  for (int64_t rank = 0; rank < ranks; ++rank) {
    remote.x[rank] = heaps[rank];
    remote.out[rank] = heaps[rank] + parts + call.rank * of_rank;
  }
  remote.ranks = static_cast<int>(ranks);
  return remote;
}

// As experts_sm90 on a kernel of prefill's, of the tokens in the heaps of all ranks: out [ranks * rows, hidden] is what
// this rank's heap has room for, filled by all ranks, hidden_states [rows, hidden] this rank's part of the tokens.
void experts_sm90_remote(const ExpertsSm90RemoteCall& call) {
  RoundedProblem p{};
  p.act_format = named<ActFormat>(kRemoteOp, "act_format", call.act_format);
  STD_TORCH_CHECK(call.kernel > 0 && call.kernel < kKernelCount && !call.hidden_states_scale.has_value(),
                  "moeq_C::", kRemoteOp, ": kernel must be one of prefill's, hidden states without scales, got kernel ",
                  call.kernel);
  Layer layer(kRemoteOp, call);
  layer.quantize_hidden = call.quantize_hidden;
  layer.quantize_intermediate = call.quantize_intermediate;
  layer.hidden_elements = call.out.numel() / (call.heaps.size(0) > 0 ? call.heaps.size(0) : 1);
  run_layer(p, layer, kKernels[call.kernel], [&](RoundedProblem& problem) {
    problem.remote = remote_rows_of(call);
    bind_tiled_weights(kRemoteOp, problem, call);
    check_rounding(problem, layer);
  });
}

template <Shape shape>
constexpr Kernels<RowsProblem> rows_of() {
  return of_shape<RowsProblem, rows_workspace, rows_run, shape>("rows");
}

// By slot, bfloat16, where it is given.
const void* rows_of_slots(const char* name, const OptionalTensor& rows, const Problem& p, int64_t columns,
                          const Tensor& beside) {
  if (!rows.has_value()) return nullptr;
  const int64_t count = int64_t{p.tokens} * p.top_k * columns;
  return aligned_data_of<void>(kRowsOp, name, *rows, ScalarType::BFloat16, count, beside);
}

void bind_adapters(RowsProblem& p, const ExpertsSm90RowsCall& call) {
  STD_TORCH_CHECK(call.low.has_value() == call.factor.has_value(), "moeq_C::", kRowsOp,
                  ": low and factor must be given together");
  if (!call.factor.has_value()) return;
  const Tensor& factor = *call.factor;
  STD_TORCH_CHECK(factor.dim() == 3 && is_aligned(factor), "moeq_C::", kRowsOp,
                  ": factor must have 3 dimensions and start at a multiple of 16 bytes");
  p.ranks = size_of(kRowsOp, factor, 2);
  STD_TORCH_CHECK(p.ranks > 0 && p.ranks % 8 == 0, "moeq_C::", kRowsOp, ": ranks must be a multiple of 8, got ",
                  p.ranks);
  const int64_t rows = int64_t{p.experts} * (p.second ? p.hidden : 2 * p.inter);
  p.factor = data_of<void>(kRowsOp, "factor", factor, ScalarType::BFloat16, rows * p.ranks, call.out);
  p.low = rows_of_slots("low", call.low, p, int64_t{2} * kRankChunk * rank_chunks(p.ranks), call.out);
}

// Fills rows, bfloat16 [slots, inter] or, if `second`, [slots, hidden], of slots with local experts. low, factor, and
// kept, bytes, which the first call leaves for the second one: problem/tiled_problem.h. Of `out` [tokens, hidden] only
// the sizes count.
void experts_sm90_rows(const ExpertsSm90RowsCall& call) {
  RowsProblem p{};
  constexpr Kernels<RowsProblem> kernels[] = {rows_of<Shape::kSlim>(), rows_of<Shape::kNarrow>(),
                                              rows_of<Shape::kWide>()};
  STD_TORCH_CHECK(call.kernel > 0 && call.kernel < kKernelCount && !call.hidden_states_scale.has_value() &&
                      !call.router_weight_on_input && (call.rows.has_value() || !call.second),
                  "moeq_C::", kRowsOp,
                  ": kernel must be one of prefill's, hidden states neither scaled nor weighted, rows of GEMM2 given");
  STD_TORCH_CHECK(is_aligned(call.kept), "moeq_C::", kRowsOp, ": kept must start at a multiple of 16 bytes");
  Layer layer(kRowsOp, call);
  layer.fills_out = false;
  run_layer(p, layer, kernels[call.kernel - 1], [&](RowsProblem& problem) {
    bind_tiled_weights(kRowsOp, problem, call);
    STD_TORCH_CHECK(rows_run_takes(problem), "moeq_C::", kRowsOp,
                    ": weights must be nvfp4 or mxfp4, the activation silu or swigluoai");
    problem.second = call.second;
    bind_adapters(problem, call);
    const int64_t columns = call.second ? problem.hidden : problem.inter;
    problem.rows = const_cast<void*>(rows_of_slots("rows", call.rows, problem, columns, call.out));
    problem.kept = const_cast<void*>(data_of<void>(kRowsOp, "kept", call.kept, ScalarType::Byte,
                                                   static_cast<int64_t>(rows_kept(problem)), call.out));
  });
}

// Bytes of `kept`.
int64_t experts_sm90_rows_kept(int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden, int64_t inter) {
  for (const int64_t size : {tokens, top_k, experts, hidden, inter}) {
    STD_TORCH_CHECK(size > 0 && size <= INT32_MAX, "moeq_C::", kRowsOp, "_kept: sizes must be from 1 to 2^31 - 1, got ",
                    size);
  }
  STD_TORCH_CHECK(tokens * top_k <= INT32_MAX, "moeq_C::", kRowsOp, "_kept: tokens * top_k must be below 2^31, got ",
                  tokens * top_k);
  Problem p{};
  p.tokens = static_cast<int>(tokens);
  p.top_k = static_cast<int>(top_k);
  p.experts = static_cast<int>(experts);
  p.hidden = static_cast<int>(hidden);
  p.inter = static_cast<int>(inter);
  return static_cast<int64_t>(rows_kept(p));
}

}  // namespace
}  // namespace moeq::sm90

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CUDA, m) {
  m.impl("experts_sm90", MOEQ_BOX(moeq::ExpertsSm90Call, moeq::sm90::experts_sm90));
  m.impl("experts_sm90_remote", MOEQ_BOX(moeq::ExpertsSm90RemoteCall, moeq::sm90::experts_sm90_remote));
  m.impl("experts_sm90_rows", MOEQ_BOX(moeq::ExpertsSm90RowsCall, moeq::sm90::experts_sm90_rows));
}

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CompositeExplicitAutograd, m) {
  m.impl("experts_sm90_rows_kept", TORCH_BOX(&moeq::sm90::experts_sm90_rows_kept));
}
