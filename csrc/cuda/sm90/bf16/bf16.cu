// A layer of bfloat16 weights on many tokens: sort and gather, both GEMMs in one persistent kernel, combine. As
// prefill.cu, but that weights are copied by tensor maps, which are made here.
#include "bf16.h"

#include "bf16_variant.h"
#include "../prefill/prefill_plan.h"
#include "../launch/driver.h"

namespace moeq::sm90 {

namespace {

Bf16Kernel kernel_for(const Problem& p) {
  switch (finish_of(p)) {
    case Finish::kSwiglu:
      return bf16_kernel_of<Finish::kSwiglu>();
    case Finish::kGated:
      return bf16_kernel_of<Finish::kGated>();
    default:
      return bf16_kernel_of<Finish::kPlain>();
  }
}

struct Plan {
  OperandArgs operand;
  Bf16Args gemm;
  CombineArgs combine;
  size_t bytes;
};

// `p.tokens` of at most one piece. The tensor maps are not made yet.
Plan make_plan(const Problem& p) {
  Plan plan{};
  Arena arena(p.workspace);
  const int slots = p.tokens * p.top_k;
  const Bf16Kernel kernel = kernel_for(p);
  const Schedule schedule = take_sorted_schedule(arena, slots, p.experts);
  GemmArgs& gemm = plan.gemm.gemm;
  gemm = gemms_of(p, schedule, kernel.block_tiles);
  plan.operand = {p, schedule, nullptr, nullptr, nullptr, gemm.rows, gemm.hidden_padded, kernel.max_width};
  plan.operand.operand = arena.take<__nv_bfloat16>(int64_t{gemm.rows} * gemm.hidden_padded);
  gemm.operand = plan.operand.operand;
  gemm.h = arena.take<__nv_bfloat16>(int64_t{gemm.rows} * gemm.inter_padded);
  gemm.y = arena.take<uint8_t>(int64_t{slots} * p.hidden * result_bytes(p));
  plan.combine = {p, gemm.y, gemm.y_wide, schedule.overdue};
  plan.bytes = arena.used();
  return plan;
}

// [experts, rows, k], a box of 64 of K by `box_rows` rows; in turns: eight rows of the first half, eight of the second.
cudaError_t map_weights(CUtensorMap& map, const uint8_t* weights, int experts, int rows, int k, int box_rows,
                        bool in_turns) {
  const uint64_t row = uint64_t{2} * k, all = row * rows;
  const auto u64 = [](int size) { return static_cast<uint64_t>(size); };
  const auto u32 = [](int size) { return static_cast<uint32_t>(size); };
  if (in_turns) {
    const TensorMapShape shape = {{u64(k), 8, 2, u64(rows / 16), u64(experts)},
                                  {row, all / 2, 8 * row, all},
                                  {kTileK, 8, 2, u32(box_rows / 16), 1}};
    return encode_bf16_map(map, weights, shape);
  }
  const TensorMapShape shape = {
      {u64(k), u64(rows), 1, 1, u64(experts)}, {row, all, all, all}, {kTileK, u32(box_rows), 1, 1, 1}};
  return encode_bf16_map(map, weights, shape);
}

cudaError_t make_maps(Bf16Args& args, int block_tiles) {
  const Problem& p = args.gemm.problem;
  const int rows = block_tiles * kTileRows, halves = p.gated ? 2 : 1;
  const cudaError_t error = map_weights(args.w13, p.w13, p.experts, halves * p.inter, p.hidden, rows, p.gated);
  return error == cudaSuccess ? map_weights(args.w2, p.w2, p.experts, p.hidden, p.inter, rows, false) : error;
}

cudaError_t launch_gemms(Bf16Args& args) {
  const Problem& p = args.gemm.problem;
  const Bf16Kernel kernel = kernel_for(p);
  cudaError_t error =
      cudaFuncSetAttribute(kernel.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes);
  if (error == cudaSuccess) error = make_maps(args, kernel.block_tiles);
  if (error != cudaSuccess) return error;
  return launch_after(kernel.kernel, args, p.partition.multiprocessors, kernel.threads, kernel.shared_bytes, p.stream);
}

cudaError_t run_piece(const Problem& p) {
  Plan plan = make_plan(p);
  cudaError_t error = launch_schedule(plan.operand);
  if (error == cudaSuccess) error = launch_bf16_operand(plan.operand);
  if (error == cudaSuccess) error = launch_gemms(plan.gemm);
  if (error == cudaSuccess) error = launch_combine(plan.combine);
  return error;
}

}  // namespace

size_t bf16_workspace(const Problem& p) {
  Problem piece = p;
  piece.tokens = tokens_of_piece(p);
  piece.workspace = nullptr;
  return make_plan(piece).bytes;
}

cudaError_t bf16_run(const Problem& p) {
  if (p.experts > kMaxExperts || p.hidden % kBf16SizeMultiple != 0 || p.inter % kBf16SizeMultiple != 0) {
    return cudaErrorInvalidValue;
  }
  return run_in_pieces(p, tokens_of_piece(p), run_piece);
}

}  // namespace moeq::sm90
