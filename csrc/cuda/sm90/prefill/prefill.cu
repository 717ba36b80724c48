// A layer on many tokens: sort and prepare, both GEMMs in one persistent kernel, combine.
#include "../gemm/gemm_args.cuh"
#include "../launch/launches.h"
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

bool has_blocks(const Problem& p) { return p.format == Format::kFp8 && p.scales13.blocks; }

// half: operands are float16.
GemmVariants variants_of(const Problem& p, bool half) {
  if (half) {
    return p.format == Format::kNvfp4 ? variants_of<Nvfp4HalfFormat>(finish_of(p))
                                      : variants_of<W8a8Format>(finish_of(p));
  }
  if (has_blocks(p)) return variants_of<ByteBlockFormat>(finish_of(p));
  if (p.format == Format::kInt8) return variants_of<ByteInt8Format>(finish_of(p));
  if (has_bytes(p.format)) return variants_of<ByteFormat>(finish_of(p));
  switch (p.format) {
    case Format::kNvfp4:
      return variants_of<Nvfp4Format>(finish_of(p));
    case Format::kMxfp4:
      return variants_of<Mxfp4Format>(finish_of(p));
    case Format::kInt4Per32:
      return variants_of<Int4Format<32>>(finish_of(p));
    case Format::kInt4Per64:
      return variants_of<Int4Format<64>>(finish_of(p));
    case Format::kInt4ZeroBf16:
      return variants_of<Int4ZeroFormat<false>>(finish_of(p));
    case Format::kInt4ZeroPer32:
      return variants_of<Int4ZeroFormat<true, 32>>(finish_of(p));
    case Format::kInt4Float:
      return variants_of<Int4FloatFormat>(finish_of(p));
    default:
      return variants_of<Int4ZeroFormat<true>>(finish_of(p));
  }
}

GemmVariant variant_for(const Problem& p, bool half, Shape shape) {
  return variants_of(p, half).of_shape[static_cast<int>(shape)];
}

// What operands are, of a whole call: its pieces share a workspace. Float16 hidden states are multiplied as they are,
// not as two bfloat16 each, by weights whose values float16 holds: by codes of e4m3, and by NVFP4 weights where there
// is more to multiply than to decode.
RoundedProblem with_operands(const RoundedProblem& p, Shape shape) {
  const bool many = int64_t{p.tokens} * p.top_k > int64_t{kHalfSlots} * p.experts;
  RoundedProblem decided = p;
  const bool are_held = p.format == Format::kFp8 || (p.format == Format::kNvfp4 && shape != Shape::kSlim && many);
  const bool as_they_are = p.splits && are_held;
  decided.splits = p.splits && !as_they_are;
  decided.halves = as_they_are || is_w8a8(p);
  return decided;
}

// Where 128 values of a row have a scale, of GEMM1's operand and of the intermediate.
void place_group_scales(const RoundedProblem& p, Arena& arena, Plan& plan) {
  GemmArgs& gemm = plan.gemm;
  plan.operand.group_scale = arena.take<float>(int64_t{gemm.hidden_padded} / 128 * gemm.rows);
  plan.operand.given_scale = p.x_factor;
  gemm.operand_scale = plan.operand.group_scale;
  gemm.h_scale = arena.take<float>(int64_t{gemm.inter_padded} / 128 * gemm.rows);
}

// Where rows of GEMM1's operand have factors of their own.
void place_factors(const RoundedProblem& p, Arena& arena, Plan& plan) {
  OperandArgs& operand = plan.operand;
  GemmArgs& gemm = plan.gemm;
  if (rounds_groups(p)) return place_group_scales(p, arena, plan);
  const bool nvfp4 = p.act_format == ActFormat::kNvfp4;
  if (nvfp4 && p.a1 == ActScale::kToken) operand.row_gscale = arena.take<float>(p.tokens);
  const bool rounds = nvfp4 ? p.a1 == ActScale::kToken : p.act_format == ActFormat::kFp8 && p.a1 != ActScale::kNone;
  operand.given_factor = p.x_factor;
  if (rounds || p.x_factor != nullptr) operand.factor = arena.take<float>(gemm.rows);
  gemm.operand_factor = operand.factor;
}

// Whether GEMM1 rounds the intermediate to mxfp8: where there are gates, a block is a warpgroup's.
bool rounds_to_mx(const RoundedProblem& p) {
  return p.act_format == ActFormat::kMxfp8 && p.a2 != ActScale::kNone && p.gated;
}

// Whether a launch between the GEMMs rounds the intermediate, which they have in float32 then.
bool is_apart(const RoundedProblem& p) {
  if (p.act_format == ActFormat::kNvfp4) return p.a2 == ActScale::kToken;
  return p.a2 != ActScale::kNone && !rounds_to_mx(p) && !rounds_groups(p);
}

// `p.tokens` of at most one piece.
Plan make_plan(const RoundedProblem& p, Shape shape) {
  Plan plan{};
  plan.shape = shape;
  Arena arena(p.workspace);
  const int slots = p.tokens * p.top_k;
  const Schedule schedule = take_sorted_schedule(arena, slots, slots * rows_of_slot(p), p.experts);
  const GemmVariant variant = variant_for(p, p.halves, shape);
  GemmArgs& gemm = plan.gemm;
  gemm = gemms_of(without_e4m3(p), schedule, variant.block_tiles);
  const int rows = gemm.rows;
  OperandArgs& operand = plan.operand;
  operand = {p,    schedule,           nullptr,           nullptr,      nullptr, nullptr,
             rows, gemm.hidden_padded, variant.max_width, p.act_format, p.remote};
  operand.half = p.halves;
  operand.operand = arena.take<__nv_bfloat16>(int64_t{rows} * gemm.hidden_padded);
  place_factors(p, arena, plan);
  gemm.operand = operand.operand;
  gemm.mx = rounds_to_mx(p);
  float* h_factor = nullptr;
  if (is_apart(p)) {
    gemm.h_wide = arena.take<float>(int64_t{rows} * gemm.inter_padded);
    h_factor = p.act_format == ActFormat::kMxfp8 ? nullptr : arena.take<float>(rows);
    gemm.h_factor = h_factor;
  }
  gemm.h = arena.take<__nv_bfloat16>(int64_t{rows} * gemm.inter_padded);
  gemm.y = arena.take<uint8_t>(int64_t{slots} * p.hidden * result_bytes(p));
  plan.requantize = {p, schedule, gemm.h_wide, gemm.h, h_factor, rows, gemm.inter_padded, p.act_format, operand.half};
  plan.combine = {p, gemm.y, gemm.y_wide, schedule.overdue, p.remote};
  plan.bytes = arena.used();
  return plan;
}

cudaError_t launch_gemms(const Plan& plan, const GemmArgs& args) {
  static KnownDevices known[kFormats + 3][kFinishes][kShapes];  // two: float16 operands; the last: scales of blocks
  const Problem& p = args.problem;
  const bool half = plan.operand.half;
  const int of_format = has_blocks(p) ? kFormats + 2 : static_cast<int>(p.format);
  const int format = half ? kFormats + (p.format == Format::kNvfp4) : of_format;
  const int shape = static_cast<int>(plan.shape);
  return launch_variant(variant_for(p, half, plan.shape), args, p,
                        known[format][static_cast<int>(finish_of(p))][shape]);
}

// GEMM2 in a launch of its own, where the quantization between the two needs whole rows.
cudaError_t launch_apart(const Plan& plan) {
  GemmArgs args = plan.gemm;
  args.second = false;
  cudaError_t error = launch_gemms(plan, args);
  if (error == cudaSuccess) error = launch_requantize(plan.requantize);
  args.first = false;
  args.second = true;
  return error == cudaSuccess ? launch_gemms(plan, args) : error;
}

cudaError_t run_piece(const RoundedProblem& p, Shape shape) {
  const Plan plan = make_plan(p, shape);
  cudaError_t error = launch_schedule(plan.operand);
  if (error == cudaSuccess) error = launch_operand(plan.operand);
  if (error == cudaSuccess) error = is_apart(p) ? launch_apart(plan) : launch_gemms(plan, plan.gemm);
  if (error == cudaSuccess) error = launch_combine(plan.combine);
  return error;
}

// What belongs to a piece's tokens besides what every problem has.
RoundedProblem with_own(const RoundedProblem& whole, RoundedProblem piece) {
  const int64_t first = (piece.topk_ids - whole.topk_ids) / whole.top_k;
  if (whole.x_factor != nullptr) piece.x_factor += first * (rounds_groups(whole) ? ceil_div(whole.hidden, 128) : 1);
  piece.remote.first = static_cast<int>(first);
  return piece;
}

}  // namespace

size_t prefill_workspace(const RoundedProblem& p, Shape shape) {
  RoundedProblem piece = with_operands(p, shape);
  piece.tokens = tokens_of_piece(piece);
  piece.workspace = nullptr;
  return make_plan(piece, shape).bytes;
}

cudaError_t prefill_run(const RoundedProblem& p, Shape shape) {
  if (p.experts > kMaxExperts) return cudaErrorInvalidValue;
  const RoundedProblem whole = with_operands(p, shape);
  return run_in_pieces(whole, tokens_of_piece(whole),
                       [&](const RoundedProblem& piece) { return run_piece(with_own(whole, piece), shape); });
}

}  // namespace moeq::sm90
