// A layer: sort, quantize the tokens, GEMM1, quantize the intermediate, GEMM2, combine.
#include "prefill_kernels.cuh"
#include "w4a8_gemm.cuh"
#include "w4a8_quantize.cuh"
#include "workspace.h"

namespace moeq::sm90 {
namespace w4a8 {
namespace {

struct Plan {
  QuantizeArgs tokens, intermediate;
  GemmArgs first, second;
  CombineArgs combine;
  Finish finish;
  int rows;
  size_t bytes;
};

bool is_fused(const Problem& p) { return p.activation == Activation::kSilu || p.activation == Activation::kSwigluoai; }

Schedule take_schedule(Arena& arena, int slots, int experts) {
  Schedule schedule;
  schedule.tiles_total = arena.take<int>(1);
  schedule.next_item = arena.take<int>(2);
  schedule.start = arena.take<int>(experts + 1);
  schedule.count = arena.take<int>(experts);
  schedule.rank = arena.take<int>(slots);
  schedule.slot_of_row = arena.take<int>(max_rows(slots, experts));
  schedule.tiles = arena.take<TokenTile>(max_tiles(slots, experts));
  return schedule;
}

int halves_of_h(const Problem& p) { return p.gated && !is_fused(p) ? 2 : 1; }

Plan make_plan(const W4a8Problem& p) {
  Plan plan{};
  Arena arena(p.workspace);
  const int slots = p.tokens * p.top_k;
  const int rows = plan.rows = max_rows(slots, p.experts);
  const Schedule schedule = take_schedule(arena, slots, p.experts);
  const int k_tiles13 = tiles(p.hidden, kTileK), k_tiles2 = tiles(p.inter, kTileK);
  const bool wide = p.out_type == OutType::kFloat32;
  uint8_t* operand13 = arena.take<uint8_t>(int64_t{rows} * k_tiles13 * kTileK);
  uint8_t* operand2 = arena.take<uint8_t>(int64_t{rows} * k_tiles2 * kTileK);
  float* factor13 = arena.take<float>(rows);
  float* factor2 = arena.take<float>(rows);
  float* h = arena.take<float>(int64_t{rows} * p.inter * halves_of_h(p));
  void* y = arena.take<uint8_t>(int64_t{slots} * p.hidden * (wide ? 4 : 2));
  plan.finish = is_fused(p) ? Finish::kSwiglu : Finish::kLinear;
  plan.tokens = {p, schedule, nullptr, false, operand13, factor13, k_tiles13};
  plan.intermediate = {p, schedule, h, is_fused(p), operand2, factor2, k_tiles2};
  plan.first = {p, schedule, operand13, factor13, p.w13, p.w13_scale, h, nullptr, false, schedule.next_item, k_tiles13,
                tiles(p.gated ? 2 * p.inter : p.inter, kTileRows)};
  plan.second = {p, schedule, operand2, factor2, p.w2, p.w2_scale, nullptr, y, wide, schedule.next_item + 1, k_tiles2,
                 tiles(p.hidden, kTileRows)};
  plan.combine = {p, y, wide};
  plan.bytes = arena.used();
  return plan;
}

cudaError_t launch_gemm(const GemmArgs& args, Finish finish) {
  const W4a8Problem& p = args.problem;
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const GemmKernel kernel = p.folded ? folded_kernel(finish) : packed_kernel(finish);
  const int bytes = p.folded ? shared_bytes<Folded>() : shared_bytes<Packed>();
  if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  return launch_after(kernel, args, multiprocessors, kGemmThreads, bytes, p.stream);
}

cudaError_t run_piece(const W4a8Problem& p) {
  const Plan plan = make_plan(p);
  cudaError_t error = launch_schedule(p, plan.tokens.schedule);
  if (error == cudaSuccess) error = launch_quantize_tokens(plan.tokens);
  if (error == cudaSuccess) error = launch_gemm(plan.first, plan.finish);
  if (error == cudaSuccess) error = launch_quantize_intermediate(plan.intermediate, plan.rows);
  if (error == cudaSuccess) error = launch_gemm(plan.second, Finish::kOutput);
  if (error == cudaSuccess) error = launch_combine(plan.combine);
  return error;
}

// The intermediate is the longest array.
int tokens_of_piece(const Problem& p) {
  return tokens_at_once(p, int64_t{p.inter} * halves_of_h(p) * 4 * p.top_k);
}

}  // namespace
}  // namespace w4a8

size_t w4a8_workspace(const W4a8Problem& p) {
  W4a8Problem piece = p;
  piece.tokens = w4a8::tokens_of_piece(p);
  piece.workspace = nullptr;
  return w4a8::make_plan(piece).bytes;
}

cudaError_t w4a8_run(const W4a8Problem& p) {
  return run_in_pieces(p, w4a8::tokens_of_piece(p), w4a8::run_piece);
}

}  // namespace moeq::sm90
