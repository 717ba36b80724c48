// A layer on many tokens: sort and prepare, both GEMMs in one persistent kernel, combine.
#include <atomic>

#include "prefill_plan.h"

namespace moeq::sm90 {
namespace {

struct Plan {
  Shape shape;
  OperandArgs operand;
  RequantizeArgs requantize;
  GemmArgs gemm;
  CombineArgs combine;
  size_t bytes;
};

constexpr int kFinishes = 3;

template <class Format>
GemmVariants variants_of(Finish finish) {
  switch (finish) {
    case Finish::kSwiglu:
      return gemm_variants<Format, Finish::kSwiglu>();
    case Finish::kGated:
      return gemm_variants<Format, Finish::kGated>();
    default:
      return gemm_variants<Format, Finish::kPlain>();
  }
}

GemmVariants variants_of(const Problem& p) {
  switch (p.format) {
    case Format::kNvfp4:
      return variants_of<Nvfp4Format>(finish_of(p));
    case Format::kMxfp4:
      return variants_of<Mxfp4Format>(finish_of(p));
    case Format::kInt4Per32:
      return variants_of<Int4Format<32>>(finish_of(p));
    case Format::kInt4Per64:
      return variants_of<Int4Format<64>>(finish_of(p));
    default:
      return variants_of<Int4ZeroFormat>(finish_of(p));
  }
}

GemmVariant variant_for(const Problem& p, Shape shape) { return variants_of(p).of_shape[static_cast<int>(shape)]; }

// `p.tokens` of at most one piece.
Plan make_plan(const Problem& p, Shape shape) {
  Plan plan{};
  plan.shape = shape;
  Arena arena(p.workspace);
  const int slots = p.tokens * p.top_k;
  const Schedule schedule = take_sorted_schedule(arena, slots, p.experts);
  const GemmVariant variant = variant_for(p, shape);
  GemmArgs& gemm = plan.gemm;
  gemm = gemms_of(p, schedule, variant.block_tiles);
  const int rows = gemm.rows;
  OperandArgs& operand = plan.operand;
  operand = {p, schedule, nullptr, nullptr, nullptr, rows, gemm.hidden_padded, variant.max_width};
  operand.operand = arena.take<__nv_bfloat16>(int64_t{rows} * gemm.hidden_padded);
  if (p.a1 == ActScale::kToken) {
    operand.row_gscale = arena.take<float>(p.tokens);
    operand.factor = arena.take<float>(p.tokens);
  }
  gemm.operand = operand.operand;
  gemm.operand_factor = operand.factor;
  float* h_factor = nullptr;
  if (p.a2 == ActScale::kToken) {
    gemm.h_wide = arena.take<float>(int64_t{rows} * gemm.inter_padded);
    h_factor = arena.take<float>(rows);
    gemm.h_factor = h_factor;
  }
  gemm.h = arena.take<__nv_bfloat16>(int64_t{rows} * gemm.inter_padded);
  gemm.y = arena.take<uint8_t>(int64_t{slots} * p.hidden * result_bytes(p));
  plan.requantize = {p, schedule, gemm.h_wide, gemm.h, h_factor, rows, gemm.inter_padded};
  plan.combine = {p, gemm.y, gemm.y_wide};
  plan.bytes = arena.used();
  return plan;
}

// Asked for once a device and kernel: the answers never change, and calls are frequent.
cudaError_t multiprocessors_for(const Problem& p, Shape shape, const GemmVariant& variant, int& count) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices][kFormats][kFinishes][kShapes];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  auto& of_kernel = known[device % kDevices][static_cast<int>(p.format)][static_cast<int>(finish_of(p))]
                         [static_cast<int>(shape)];
  count = device < kDevices ? of_kernel.load(std::memory_order_relaxed) : 0;
  if (count != 0) return cudaSuccess;
  error = cudaFuncSetAttribute(variant.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, variant.shared_bytes);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess && device < kDevices) of_kernel.store(count, std::memory_order_relaxed);
  return error;
}

cudaError_t launch_gemms(const GemmArgs& args, Shape shape) {
  const GemmVariant variant = variant_for(args.problem, shape);
  int multiprocessors = 0;
  const cudaError_t error = multiprocessors_for(args.problem, shape, variant, multiprocessors);
  if (error != cudaSuccess) return error;
  return launch_dependent(variant.kernel, args, multiprocessors * variant.blocks, variant.threads,
                          variant.shared_bytes);
}

// GEMM2 in a launch of its own, where the quantization between the two needs whole rows.
cudaError_t launch_apart(const Plan& plan) {
  GemmArgs args = plan.gemm;
  args.second = false;
  cudaError_t error = launch_gemms(args, plan.shape);
  if (error == cudaSuccess) error = launch_requantize(plan.requantize);
  args.first = false;
  args.second = true;
  return error == cudaSuccess ? launch_gemms(args, plan.shape) : error;
}

cudaError_t run_piece(const Problem& p, Shape shape) {
  const Plan plan = make_plan(p, shape);
  cudaError_t error = launch_schedule(plan.operand);
  if (error == cudaSuccess) error = launch_operand(plan.operand);
  if (error == cudaSuccess) error = p.a2 == ActScale::kToken ? launch_apart(plan) : launch_gemms(plan.gemm, shape);
  if (error == cudaSuccess) error = launch_combine(plan.combine);
  return error;
}

}  // namespace

size_t prefill_workspace(const Problem& p, Shape shape) {
  Problem piece = p;
  piece.tokens = tokens_of_piece(p);
  piece.workspace = nullptr;
  return make_plan(piece, shape).bytes;
}

cudaError_t prefill_run(const Problem& p, Shape shape) {
  if (p.experts > kMaxExperts) return cudaErrorInvalidValue;
  return run_in_pieces(p, tokens_of_piece(p), [shape](const Problem& piece) { return run_piece(piece, shape); });
}

}  // namespace moeq::sm90
