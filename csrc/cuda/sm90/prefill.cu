// A layer on many tokens: sort and prepare, both GEMMs in one persistent kernel, combine.
#include <atomic>

#include "gemm_kernel.cuh"
#include "prefill_kernels.cuh"
#include "workspace.h"

namespace moeq::sm90 {
namespace {

int64_t element_bytes(bool wide) { return wide ? 4 : 2; }

// Results of single slots keep float32 where the output is finer than bfloat16.
bool is_wide(const Problem& p) { return p.out_type != OutType::kBfloat16; }

// The longest array decides.
int tokens_of_piece(const Problem& p) {
  return tokens_at_once(p, (p.hidden > p.inter ? p.hidden : p.inter) * element_bytes(is_wide(p)) * p.top_k);
}

struct Plan {
  OperandArgs operand;
  RequantizeArgs requantize;
  GemmArgs gemm;
  CombineArgs combine;
  size_t bytes;
};

Schedule take_schedule(Arena& arena, int slots, int experts) {
  Schedule schedule;
  schedule.tiles_total = arena.take<int>(1);
  schedule.rows_total = arena.take<int>(1);
  schedule.next_item = arena.take<int>(1);
  schedule.finished = arena.take<int>(experts);
  schedule.first_row = arena.take<int>(experts);
  schedule.rank = arena.take<int>(slots);
  schedule.slot_of_row = arena.take<int>(max_rows(slots, experts));
  schedule.tiles = arena.take<TokenTile>(max_token_tiles(slots, experts));
  return schedule;
}

// `p.tokens` of at most one piece.
Plan make_plan(const Problem& p) {
  Plan plan{};
  Arena arena(p.workspace);
  const int slots = p.tokens * p.top_k;
  const Schedule schedule = take_schedule(arena, slots, p.experts);
  const int rows = max_rows(slots, p.experts);
  const int hidden_padded = k_tiles(p.hidden) * kTileK, inter_padded = k_tiles(p.inter) * kTileK;
  OperandArgs& operand = plan.operand;
  operand = {p, schedule, nullptr, nullptr, nullptr, rows, hidden_padded};
  operand.operand = arena.take<__nv_bfloat16>(int64_t{rows} * hidden_padded);
  if (p.a1 == ActScale::kToken) {
    operand.row_gscale = arena.take<float>(p.tokens);
    operand.factor = arena.take<float>(p.tokens);
  }
  GemmArgs& gemm = plan.gemm;
  gemm.problem = p;
  gemm.schedule = schedule;
  gemm.rows = rows;
  gemm.operand = operand.operand;
  gemm.operand_factor = operand.factor;
  float* h_factor = nullptr;
  if (p.a2 == ActScale::kToken) {
    gemm.h_wide = arena.take<float>(int64_t{rows} * inter_padded);
    h_factor = arena.take<float>(rows);
    gemm.h_factor = h_factor;
  }
  gemm.h = arena.take<__nv_bfloat16>(int64_t{rows} * inter_padded);
  gemm.y = arena.take<uint8_t>(int64_t{slots} * p.hidden * element_bytes(is_wide(p)));
  gemm.y_wide = is_wide(p);
  gemm.hidden_padded = hidden_padded;
  gemm.inter_padded = inter_padded;
  gemm.tiles13 = row_tiles13(p.inter, p.gated);
  gemm.tiles2 = ceil_div(p.hidden, kTileRows);
  gemm.blocks13 = ceil_div(gemm.tiles13, kBlockTiles);
  gemm.blocks2 = ceil_div(gemm.tiles2, kBlockTiles);
  gemm.first = gemm.second = true;
  plan.requantize = {p, schedule, gemm.h_wide, gemm.h, h_factor, rows, inter_padded};
  plan.combine = {p, gemm.y, gemm.y_wide};
  plan.bytes = arena.used();
  return plan;
}

GemmKernel kernel_for(const Problem& p) {
  if (!p.gated) return nvfp4_plain_kernel();
  const bool swiglu = p.activation == Activation::kSilu || p.activation == Activation::kSwigluoai;
  return swiglu ? nvfp4_swiglu_kernel() : nvfp4_gated_kernel();
}

// Asked for once a device: the answers never change, and calls are frequent.
cudaError_t multiprocessors_of_device(int& count) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  count = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (count != 0) return cudaSuccess;
  for (GemmKernel kernel : {nvfp4_swiglu_kernel(), nvfp4_gated_kernel(), nvfp4_plain_kernel()}) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kGemmSharedBytes);
    if (error != cudaSuccess) return error;
  }
  error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess && device < kDevices) known[device].store(count, std::memory_order_relaxed);
  return error;
}

cudaError_t launch_gemms(const GemmArgs& args) {
  int multiprocessors = 0;
  const cudaError_t error = multiprocessors_of_device(multiprocessors);
  if (error != cudaSuccess) return error;
  return launch_dependent(kernel_for(args.problem), args, multiprocessors, kGemmThreads, kGemmSharedBytes);
}

// GEMM2 in a launch of its own, where the quantization between the two needs whole rows.
cudaError_t launch_apart(const Plan& plan) {
  GemmArgs args = plan.gemm;
  args.second = false;
  cudaError_t error = launch_gemms(args);
  if (error == cudaSuccess) error = launch_requantize(plan.requantize);
  args.first = false;
  args.second = true;
  return error == cudaSuccess ? launch_gemms(args) : error;
}

cudaError_t run_piece(const Problem& p) {
  const Plan plan = make_plan(p);
  cudaError_t error = launch_schedule(plan.operand);
  if (error == cudaSuccess) error = launch_operand(plan.operand);
  if (error == cudaSuccess) error = p.a2 == ActScale::kToken ? launch_apart(plan) : launch_gemms(plan.gemm);
  if (error == cudaSuccess) error = launch_combine(plan.combine);
  return error;
}

}  // namespace

size_t prefill_workspace(const Problem& p) {
  Problem piece = p;
  piece.tokens = tokens_of_piece(p);
  piece.workspace = nullptr;
  return make_plan(piece).bytes;
}

cudaError_t prefill_run(const Problem& p) {
  if (p.experts > kMaxExperts) return cudaErrorInvalidValue;
  return run_in_pieces(p, tokens_of_piece(p), run_piece);
}

}  // namespace moeq::sm90
