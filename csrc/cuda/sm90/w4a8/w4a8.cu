// A layer: sort, quantize the tokens, GEMM1, quantize the intermediate, GEMM2, combine. Where tokens are the first
// factor, GEMM1 quantizes.
#include <type_traits>

#include "w4a8_kernel.cuh"
#include "w4a8_shared.cuh"
#include "../decode_few/decode_few.h"
#include "../device/async.cuh"
#include "../device/scans.cuh"
#include "../prefill/prefill_plan.h"

namespace moeq::sm90::w4a8 {
namespace {

// The first launch: slots of each expert are counted, and tiles of tokens listed.
struct ScheduleArgs {
  W4a8Problem problem;
  Schedule schedule;
  int widest;    // tokens of a tile
  bool tokens_first;   // see has_tokens_first
  bool joins;          // see tiles_of_tokens_first
};

__device__ void list_expert(const Schedule& schedule, int expert, int start, int count, int first, int tiles,
                            int width) {
  schedule.start[expert] = start;
  schedule.count[expert] = count;
  for (int row = start + count; row < start + round_up(count, 8); row++) {
    schedule.slot_of_row[row] = -1;
    schedule.place_of_row[row].row = -1;
  }
  for (int i = 0; i < tiles; i++) {
    schedule.tiles[first + i] = {expert, first, tiles, start, count, width, {0, 0}};
  }
}

__device__ void write_schedule(const ScheduleArgs& args, int count) {
  __shared__ int2 warp_sums[kSortThreads / 32];
  const Problem& p = args.problem;
  const Schedule& schedule = args.schedule;
  const int expert = threadIdx.x;
  const int tiles = args.tokens_first ? tiles_of_tokens_first(count, args.joins) : tiles_for(count, args.widest);
  int2 total;
  const auto [start, first] = prefix_sums<kSortThreads>({round_up(count, 8), tiles}, warp_sums, total);
  if (expert < p.experts) {
    list_expert(schedule, expert, start, count, first, tiles,
                args.tokens_first ? 2 * kPartTokens : tile_width(count, tiles, args.widest));
  }
  if (expert == 0) {
    *schedule.tiles_total = total.y;
    schedule.start[p.experts] = total.x;
    schedule.next_item[0] = schedule.next_item[1] = 0;
  }
}

__global__ void __launch_bounds__(kSortThreads, 1) schedule_kernel(const __grid_constant__ ScheduleArgs args) {
  sort_by_block(args, [&](int count) { write_schedule(args, count); });
}

__global__ void __launch_bounds__(kSortThreads, 1) schedule_cluster_kernel(const __grid_constant__ ScheduleArgs args) {
  sort_by_cluster(args, [&](int count) { write_schedule(args, count); });
}

cudaError_t launch_schedule(const W4a8Problem& p, const Schedule& schedule, int widest, bool tokens_first, bool joins) {
  return launch_sort(schedule_kernel, schedule_cluster_kernel, ScheduleArgs{p, schedule, widest, tokens_first, joins});
}

}  // namespace

Variant<GemmArgs> variant_of_tokens_first(Finish finish) {
  return finish == Finish::kSwiglu ? variant_of<TokensFirst, Finish::kSwiglu>()
                                   : variant_of<TokensFirst, Finish::kOutput>();
}

// Not of Finish::kLinear, which nobody has timed.
template <template <int> class Policy>
Variant<GemmArgs> variant_that_knows(Finish finish, bool wide) {
  if (finish == Finish::kSwiglu) {
    return wide ? variant_of<Policy<kMaxWidth>, Finish::kSwiglu>() : variant_of<Policy<kMaxSingle>, Finish::kSwiglu>();
  }
  return wide ? variant_of<Policy<kMaxWidth>, Finish::kOutput>() : variant_of<Policy<kMaxSingle>, Finish::kOutput>();
}

Variant<GemmArgs> variant_for(Weights weights, bool mx, Finish finish, int widest, bool knows) {
  const bool wide = widest == kMaxWidth;
  switch (weights) {
    case Weights::kPacked:
      if (widest == kMaxNarrow) return mx ? variant_of<PackedMxNarrow>(finish) : variant_of<PackedNarrow>(finish);
      if (knows) return mx ? variant_that_knows<KnownMx>(finish, wide) : variant_that_knows<Known>(finish, wide);
      return mx ? variant_of<PackedMx>(finish, wide) : variant_of<Packed>(finish, wide);
    case Weights::kRows:
      return variant_of<Rows>(finish, wide);
    default:
      return variant_of<Blocks>(finish, wide);
  }
}

namespace {

struct Plan {
  QuantizeArgs tokens, intermediate;
  GemmArgs first, second;
  CombineArgs combine;
  int rows;
  bool tokens_first;
  size_t bytes;
};

Schedule take_schedule(Arena& arena, int slots, int experts) {
  Schedule schedule;
  schedule.tiles_total = arena.take<int>(1);
  schedule.next_item = arena.take<int>(2);
  schedule.start = arena.take<int>(experts + 1);
  schedule.count = arena.take<int>(experts);
  schedule.rank = arena.take<SlotRank>(slots);
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

// Whether tiles are wide: where experts have so many tokens that their weights are no matter. Any number is right.
bool has_wide_tiles(const Problem& p) { return int64_t{p.tokens} * p.top_k > int64_t{kMaxSingle} * p.experts; }

// Where weights take longer than products.
bool has_large_experts(const Problem& p) { return int64_t{p.hidden} * p.inter >= kLargeValues; }

// Whether tokens are the first factor (w4a8_tokens_first.cuh): where experts have so many in the mean that tiles of 64
// lose less than a launch between the GEMMs, and its operand in float32, cost.
bool has_tokens_first(const W4a8Problem& p) {
  const int least = has_large_experts(p) ? 16 : kMaxSingle;  // no more than that: wide tiles have no kernel with silu
  return p.weights == Weights::kBlocks && is_in_place(p) && int64_t{p.tokens} * p.top_k > int64_t{least} * p.experts;
}

Plan make_prefill_plan(const W4a8Problem& p) {
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
  plan.tokens_first = has_tokens_first(p);
  float* h = plan.tokens_first ? nullptr : arena.take<float>(rows * h_columns(p));
  void* y = arena.take<uint8_t>(int64_t{slots} * p.hidden * (wide ? 4 : 2));
  plan.tokens = {p, schedule, nullptr, false, operand13, factor13, k_tiles13};
  plan.intermediate = {p, schedule, h, is_in_place(p), operand2, factor2, k_tiles2};
  plan.first = {p,          schedule,
                operand13,  factor13,
                p.w13,      p.w13_scale,
                p.scales13, h,
                nullptr,    false,
                p.gated,    schedule.next_item,
                k_tiles13,  tiles(p.gated ? 2 * p.inter : p.inter, kTileRows)};
  plan.second = {p,         schedule,
                 operand2,  factor2,
                 p.w2,      p.w2_scale,
                 p.scales2, nullptr,
                 y,         wide,
                 false,     schedule.next_item + 1,
                 k_tiles2,  tiles(p.hidden, kTileRows)};
  plan.first.codes = operand2;
  plan.first.code_factor = factor2;
  if (has_int4(p)) {
    plan.tokens.order = plan.intermediate.order = kInt4Order;
    plan.first.half_tiles = tiles(p.hidden, kTileK / 2);
    plan.second.half_tiles = tiles(p.inter, kTileK / 2);
  }
  plan.combine = {p, y, wide, nullptr};
  plan.rows = rows;
  plan.bytes = arena.used();
  return plan;
}

// Whether tiles hold few tokens, which leaves more shared memory to weights under way.
bool has_narrow_tiles(const Problem& p) { return int64_t{p.tokens} * p.top_k <= int64_t{kNarrowTokens} * p.experts; }

// Tokens of a tile at most, of INT4: those of three warpgroups, but where experts are large and have many tokens, which
// are read once for two halves then, and where GEMM2 has less than two rounds of such blocks for the multiprocessors.
int widest_of_int4(const Problem& p) {
  if (has_wide_tiles(p) && has_large_experts(p)) return kMaxWidth;
  const int64_t full = int64_t{p.tokens} * p.top_k / kMaxPaired, token_tiles = full > p.experts ? full : p.experts;
  if (token_tiles * tiles(p.hidden, 3 * kTileRows) < 2 * p.partition.multiprocessors) return kMaxSingle;
  return has_narrow_tiles(p) ? kMaxNarrow : kMaxPaired;
}

// Of others: few where experts have few and weights have 4 bits.
int widest_of(const W4a8Problem& p) {
  if (has_int4(p)) return widest_of_int4(p);
  if (has_wide_tiles(p)) return kMaxWidth;
  return p.weights == Weights::kPacked && has_narrow_tiles(p) ? kMaxNarrow : kMaxSingle;
}

// By its place among the widths that there are.
int index_of(int widest) { return widest == kMaxWidth ? 2 : widest == kMaxNarrow ? 1 : widest == kMaxPaired ? 3 : 0; }

// Whether there is a main loop for each width of a tile: faster where K is long and experts have some tokens in the
// mean, slower in Qwen3-30B's layers.
bool knows_widths(const W4a8Problem& p, Finish finish, int widest) {
  constexpr int kSome = 32;
  return p.weights == Weights::kPacked && widest != kMaxNarrow && finish != Finish::kLinear && has_large_experts(p) &&
         int64_t{p.tokens} * p.top_k >= int64_t{kSome} * p.experts;
}

cudaError_t launch_gemm(const GemmArgs& args, Finish finish) {
  static KnownDevices known[4][3][3], known_int4[2][3][4], known_tokens_first[3], known_widths[2][3][2];
  const W4a8Problem& p = args.problem;
  if (has_tokens_first(p)) {
    return launch_variant(variant_of_tokens_first(finish), args, p, known_tokens_first[static_cast<int>(finish)]);
  }
  const int widest = widest_of(p), width = index_of(widest);
  if (has_int4(p)) {
    const bool zeros = has_zero_points(p);
    return launch_variant(int4_variant(zeros, finish, widest), args, p,
                          known_int4[zeros][static_cast<int>(finish)][width]);
  }
  const bool mx = has_mx_scales(p);
  const int weights = mx ? 3 : static_cast<int>(p.weights), at = static_cast<int>(finish);
  const bool knows = knows_widths(p, finish, widest);
  return launch_variant(variant_for(p.weights, mx, finish, widest, knows), args, p,
                        knows ? known_widths[mx][at][width / 2] : known[weights][at][width]);
}

cudaError_t run_piece(const W4a8Problem& p) {
  const Plan plan = make_prefill_plan(p);
  const int widest = plan.tokens_first ? TokensFirst::kWidth : widest_of(p);
  cudaError_t error = launch_schedule(p, plan.tokens.schedule, widest, plan.tokens_first, has_large_experts(p));
  if (error == cudaSuccess) error = launch_quantize_tokens(plan.tokens);
  if (error == cudaSuccess) error = launch_gemm(plan.first, is_in_place(p) ? Finish::kSwiglu : Finish::kLinear);
  if (error == cudaSuccess && !plan.tokens_first) error = launch_quantize_intermediate(plan.intermediate, plan.rows);
  if (error == cudaSuccess) error = launch_gemm(plan.second, Finish::kOutput);
  if (error == cudaSuccess) error = launch_combine(plan.combine);
  return error;
}

// The longest array decides: the intermediate in float32, or, where there is none, codes or results.
int tokens_of_piece(const W4a8Problem& p) {
  const int64_t y = int64_t{p.hidden} * (p.out_type == OutType::kFloat32 ? 4 : 2);
  const int64_t longest = has_tokens_first(p) ? (y > p.inter ? y : p.inter) : h_columns(p) * 4;
  return tokens_at_once(p, longest * p.top_k);
}

// Of tokens that are quantized already, codes have other sizes than piece_of knows.
W4a8Problem with_codes(const W4a8Problem& whole, W4a8Problem piece) {
  if (whole.x_scale == nullptr) return piece;
  const int64_t first = (piece.topk_ids - whole.topk_ids) / whole.top_k;
  piece.x = static_cast<const uint8_t*>(whole.x) + first * whole.hidden;
  piece.x_scale = whole.x_scale + first * (whole.weights == Weights::kBlocks ? tiles(whole.hidden, kTileK) : 1);
  return piece;
}

// decodes: whether the decode kernel runs the problem.
cudaError_t make_decode_plan(const W4a8Problem& p, few::Plan& plan, bool& decodes) {
  decodes = p.tokens <= p.decode_tokens;
  return decodes ? few::make_fp8_plan(p, plan, decodes) : cudaSuccess;
}

}  // namespace
}  // namespace moeq::sm90::w4a8

namespace moeq::sm90 {

size_t w4a8_workspace(const W4a8Problem& p) {
  few::Plan plan;
  bool decodes = false;
  if (w4a8::make_decode_plan(p, plan, decodes) == cudaSuccess && decodes) {
    return p.partition.whole_device ? 0 : few::exchange_bytes(plan);
  }
  W4a8Problem piece = p;
  piece.workspace = nullptr;
  piece.tokens = w4a8::tokens_of_piece(p);
  const size_t bytes = w4a8::make_prefill_plan(piece).bytes;
  piece.tokens = piece.tokens > 0 ? p.tokens % piece.tokens : 0;  // the last one may have other arrays
  const size_t last = piece.tokens > 0 ? w4a8::make_prefill_plan(piece).bytes : 0;
  return bytes > last ? bytes : last;
}

cudaError_t w4a8_run(const W4a8Problem& p) {
  few::Plan plan;
  bool decodes = false;
  const cudaError_t error = w4a8::make_decode_plan(p, plan, decodes);
  if (error != cudaSuccess || decodes) return error != cudaSuccess ? error : few::run_fp8(plan);
  return run_in_pieces(p, w4a8::tokens_of_piece(p),
                       [&](const W4a8Problem& piece) { return w4a8::run_piece(w4a8::with_codes(p, piece)); });
}

}  // namespace moeq::sm90
