// One GEMM at a time of a layer on many tokens, with adapters, whose rows somebody else combines (tiled_problem.h):
// sort, gather and GEMM1, then GEMM2.
#include "../device/async.cuh"
#include "../gemm/gemm_args.cuh"
#include "../launch/launches.h"
#include "../problem/tiled_problem.h"
#include "prefill_plan.h"

namespace moeq::sm90 {
namespace {

template <class F>
RowsVariant variant_of(Shape shape) {
  if (shape == Shape::kSlim) return rows_variant<F, Shape::kSlim>();
  return shape == Shape::kNarrow ? rows_variant<F, Shape::kNarrow>() : rows_variant<F, Shape::kWide>();
}

RowsVariant variant_for(const Problem& p, Shape shape) {
  return p.format == Format::kNvfp4 ? variant_of<Nvfp4Format>(shape) : variant_of<Mxfp4Format>(shape);
}

// What the call for GEMM1 leaves to that for GEMM2.
struct Kept {
  Schedule schedule;
  int* next_item;   // of GEMM2; the schedule has GEMM1's
  __nv_bfloat16* h;
  size_t bytes;
};

Kept kept_of(const Problem& p, void* base) {
  Arena arena(base);
  const int slots = p.tokens * p.top_k;
  Kept kept{take_sorted_schedule(arena, slots, slots, p.experts)};
  kept.next_item = arena.take<int>(1);
  kept.h = arena.take<__nv_bfloat16>(int64_t{max_rows(slots, p.experts)} * k_tiles(p.inter) * kTileK);
  kept.bytes = arena.used();
  return kept;
}

// Bytes of the operand; it does not outlive GEMM1.
size_t operand_bytes(const Problem& p) {
  return int64_t{max_rows(p.tokens * p.top_k, p.experts)} * k_tiles(p.hidden) * kTileK * sizeof(__nv_bfloat16);
}

// Tokens of a piece, or all of them. Rows are bfloat16, whatever `out` would be.
int tokens_of_rows(const Problem& p) {
  return tokens_at_once(p, int64_t{p.hidden > p.inter ? p.hidden : p.inter} * sizeof(__nv_bfloat16) * p.top_k);
}

RowsArgs args_of(const RowsProblem& p, const Kept& kept, const RowsVariant& variant) {
  RowsArgs args{};
  static_cast<GemmArgs&>(args) = gemms_of(p, kept.schedule, variant.block_tiles);
  args.y_wide = false;
  args.h = kept.h;
  args.operand = static_cast<const __nv_bfloat16*>(p.workspace);
  args.first = !p.second;
  args.second = p.second;
  args.y = p.rows;
  args.hidden_rows = static_cast<__nv_bfloat16*>(p.rows);
  args.low = static_cast<const __nv_bfloat16*>(p.low);
  args.factor = static_cast<const __nv_bfloat16*>(p.factor);
  args.ranks = p.ranks;
  (p.second ? args.schedule.next_item : args.next_of_second) = kept.next_item;
  return args;
}

cudaError_t launch_gemm(const RowsArgs& args, const RowsVariant& variant, Shape shape) {
  static KnownDevices known[2][kShapes];
  const Problem& p = args.problem;
  return launch_variant(variant, args, p, known[p.format == Format::kNvfp4][static_cast<int>(shape)]);
}

cudaError_t run_piece(const RowsProblem& p, Shape shape) {
  const RowsVariant variant = variant_for(p, shape);
  const Kept kept = kept_of(p, p.kept);
  const RowsArgs args = args_of(p, kept, variant);
  if (p.second) return launch_gemm(args, variant, shape);
  OperandArgs operand{p, kept.schedule};
  operand.operand = static_cast<__nv_bfloat16*>(p.workspace);
  operand.rows = args.rows;
  operand.hidden_padded = args.hidden_padded;
  operand.max_width = variant.max_width;
  cudaError_t error = launch_schedule(operand);
  if (error == cudaSuccess) error = launch_operand(operand);
  return error == cudaSuccess ? launch_gemm(args, variant, shape) : error;
}

// Arrays by slot begin where the piece does; every piece keeps something of its own.
RowsProblem with_rows(const RowsProblem& whole, RowsProblem piece, int64_t bytes_kept) {
  const int64_t slots = piece.topk_ids - whole.topk_ids;
  const auto moved = [&](const void* rows, int64_t columns) -> void* {
    return rows == nullptr ? nullptr : static_cast<__nv_bfloat16*>(const_cast<void*>(rows)) + slots * columns;
  };
  piece.low = moved(whole.low, int64_t{2} * kRankChunk * rank_chunks(whole.ranks));
  piece.rows = moved(whole.rows, whole.second ? whole.hidden : whole.inter);
  piece.kept = static_cast<uint8_t*>(whole.kept) + slots / whole.top_k / tokens_of_rows(whole) * bytes_kept;
  return piece;
}

// The first piece, than which none is larger.
template <class AnyProblem>
AnyProblem largest_piece(AnyProblem p) {
  p.tokens = tokens_of_rows(p);
  return p;
}

}  // namespace

bool rows_run_takes(const Problem& p) {
  return (p.format == Format::kNvfp4 || p.format == Format::kMxfp4) && finish_of(p) == Finish::kSwiglu;
}

size_t rows_kept(const Problem& p) {
  return kept_of(largest_piece(p), nullptr).bytes * ceil_div(p.tokens, tokens_of_rows(p));
}

size_t rows_workspace(const RowsProblem& p, Shape) { return p.second ? 0 : operand_bytes(largest_piece(p)); }

cudaError_t rows_run(const RowsProblem& p, Shape shape) {
  if (p.experts > kMaxExperts || !rows_run_takes(p)) return cudaErrorInvalidValue;
  const size_t bytes = kept_of(largest_piece(p), nullptr).bytes;
  return run_in_pieces(p, tokens_of_rows(p),
                       [&](const RowsProblem& piece) { return run_piece(with_rows(p, piece, bytes), shape); });
}

}  // namespace moeq::sm90
