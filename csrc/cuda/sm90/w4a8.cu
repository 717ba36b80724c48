// A layer: sort, quantize the tokens, both GEMMs with what lies between them in one launch or three, combine.
#include "prefill_kernels.cuh"
#include "w4a8_gemm.cuh"
#include "w4a8_quantize.cuh"
#include "workspace.h"

namespace moeq::sm90 {
namespace w4a8 {
namespace {

// Up to so many rows of the operand both GEMMs and what lies between them are one launch: latency decides.
constexpr int kRowsOfOneLaunch = 4096;

struct Plan {
  QuantizeArgs tokens;
  GemmArgs gemms;
  CombineArgs combine;
  int rows;
  size_t bytes;
};

Schedule take_schedule(Arena& arena, int slots, int experts) {
  Schedule schedule;
  schedule.tiles_total = arena.take<int>(1);
  schedule.next_item = arena.take<int>(2);
  schedule.next_row = arena.take<int>(1);
  schedule.start = arena.take<int>(experts + 1);
  schedule.count = arena.take<int>(experts);
  schedule.finished = arena.take<int>(experts);
  schedule.quantized = arena.take<int>(experts);
  schedule.rank = arena.take<int>(slots);
  schedule.slot_of_row = arena.take<int>(max_rows(slots, experts));
  schedule.place_of_row = arena.take<Place>(max_rows(slots, experts));
  schedule.tiles = arena.take<TokenTile>(max_tiles(slots, experts));
  return schedule;
}

bool is_in_place(const Problem& p) {
  return p.activation == Activation::kSilu || p.activation == Activation::kSwigluoai;
}

// Of a token's slots in float32.
int64_t h_columns(const Problem& p) { return int64_t{p.inter} * (p.gated && !is_in_place(p) ? 2 : 1); }

Plan make_plan(const W4a8Problem& p) {
  Plan plan{};
  Arena arena(p.workspace);
  const int slots = p.tokens * p.top_k, rows = max_rows(slots, p.experts);
  const Schedule schedule = take_schedule(arena, slots, p.experts);
  const int k_tiles13 = tiles(p.hidden, kTileK), k_tiles2 = tiles(p.inter, kTileK);
  const bool wide = p.out_type == OutType::kFloat32, groups = p.weights == Weights::kBlocks;
  uint8_t* operand13 = arena.take<uint8_t>(int64_t{rows} * k_tiles13 * kTileK);
  uint8_t* operand2 = arena.take<uint8_t>(int64_t{rows} * k_tiles2 * kTileK);
  float* factor13 = arena.take<float>(int64_t{rows} * (groups ? k_tiles13 : 1));
  float* factor2 = arena.take<float>(int64_t{rows} * (groups ? k_tiles2 : 1));
  float* h = arena.take<float>(rows * h_columns(p));
  void* y = arena.take<uint8_t>(int64_t{slots} * p.hidden * (wide ? 4 : 2));
  const Gemm first{operand13, factor13, p.w13, p.w13_scale, p.scales13, k_tiles13,
                   tiles(p.gated ? 2 * p.inter : p.inter, kTileRows)};
  const Gemm second{operand2, factor2, p.w2, p.w2_scale, p.scales2, k_tiles2, tiles(p.hidden, kTileRows)};
  plan.tokens = {p, schedule, operand13, factor13, k_tiles13};
  plan.gemms = {p, schedule, first, second, h, operand2, factor2, y, wide, Launches::kBoth};
  plan.combine = {p, y, wide};
  plan.rows = rows;
  plan.bytes = arena.used();
  return plan;
}

LayerKernels kernels_of(const W4a8Problem& p) {
  const Finish finish = is_in_place(p) ? Finish::kSwiglu : Finish::kLinear;
  switch (p.weights) {
    case Weights::kPacked:
      return packed_kernels(finish);
    case Weights::kRows:
      return rows_kernels(finish);
    default:
      return blocks_kernels(finish);
  }
}

cudaError_t launch_gemm(const LayerKernels& kernels, GemmArgs args, Launches launches, int blocks) {
  args.launches = launches;
  return launch_after(kernels.gemm, args, blocks, kGemmThreads, kernels.shared_bytes, args.problem.stream);
}

// In one launch, or in three.
cudaError_t launch_gemms(const GemmArgs& args, int rows) {
  const W4a8Problem& p = args.problem;
  int device = 0, blocks = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device);
  const LayerKernels kernels = kernels_of(p);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernels.gemm, cudaFuncAttributeMaxDynamicSharedMemorySize, kernels.shared_bytes);
  }
  if (error != cudaSuccess) return error;
  if (rows <= kRowsOfOneLaunch) return launch_gemm(kernels, args, Launches::kBoth, blocks);
  error = launch_gemm(kernels, args, Launches::kFirst, blocks);
  const int threads = least_of(32 * args.second.k_tiles, kQuantizeThreads);
  if (error == cudaSuccess) error = launch_after(kernels.quantize, args, rows, threads, 0, p.stream);
  if (error == cudaSuccess) error = launch_gemm(kernels, args, Launches::kSecond, blocks);
  return error;
}

cudaError_t run_piece(const W4a8Problem& p) {
  const Plan plan = make_plan(p);
  cudaError_t error = launch_schedule(p, plan.tokens.schedule);
  if (error == cudaSuccess) error = launch_quantize_tokens(plan.tokens);
  if (error == cudaSuccess) error = launch_gemms(plan.gemms, plan.rows);
  if (error == cudaSuccess) error = launch_combine(plan.combine);
  return error;
}

// The intermediate is the longest array.
int tokens_of_piece(const Problem& p) { return tokens_at_once(p, h_columns(p) * 4 * p.top_k); }

// Of tokens that are quantized already, codes have other sizes than piece_of knows.
W4a8Problem with_codes(const W4a8Problem& whole, W4a8Problem piece) {
  if (whole.x_scale == nullptr) return piece;
  const int64_t first = (piece.topk_ids - whole.topk_ids) / whole.top_k;
  piece.x = static_cast<const uint8_t*>(whole.x) + first * whole.hidden;
  piece.x_scale = whole.x_scale + first * (whole.weights == Weights::kBlocks ? tiles(whole.hidden, kTileK) : 1);
  return piece;
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
  return run_in_pieces(p, w4a8::tokens_of_piece(p), [&](const W4a8Problem& piece) {
    return w4a8::run_piece(w4a8::with_codes(p, piece));
  });
}

}  // namespace moeq::sm90
