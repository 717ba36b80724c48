// The host's part of a decode launch: sizes and the division of the workspace.
#include "decode_shared.cuh"
#include "../formats/formats.cuh"
#include "../problem/workspace.h"

namespace moeq::sm90::decode {

namespace {

// One reading of weights serves 8 * groups tokens of an expert. Wider stages leave less of the ring, so no wider than
// twice the mean: an expert with more tokens is read again.
int groups_for(const Problem& p) {
  const int twice_mean = 2 * p.tokens * p.top_k / (p.experts < 1 ? 1 : p.experts);
  const int most = twice_mean < p.tokens ? twice_mean : p.tokens;
  return most <= 8 ? 1 : most <= 16 ? 2 : 4;
}

// A row tile of a long K is much for one thread block: the last ones would keep few blocks busy.
int output_parts_for(int k_tiles) {
  constexpr int kLongest = 64;
  int parts = 1;
  while (parts < 4 && (k_tiles > kLongest * parts || k_tiles % parts != 0)) {
    ++parts;
  }
  return k_tiles % parts == 0 ? parts : 1;
}

template <class Format>
void set_format(Args& args) {
  args.tile_scale_bytes = Format::kTileScaleBytes;
  args.accumulator_scale = Format::kAccumulatorScale;
}

void set_format_of(const Problem& p, Args& args) {
  switch (p.format) {
    case Format::kNvfp4:
      return set_format<Nvfp4Format>(args);
    case Format::kMxfp4:
      return set_format<Mxfp4Format>(args);
    case Format::kInt4Per32:
      return set_format<Int4Format<32>>(args);
    case Format::kInt4Per64:
      return set_format<Int4Format<64>>(args);
    case Format::kInt4Zero:
    case Format::kInt4ZeroBf16:
      return set_format<Int4SumsFormat>(args);
    case Format::kInt4ZeroPer32:
      return set_format<Int4ZeroFormat<true, 32>>(args);
    case Format::kInt4Float:
      return set_format<Int4FloatSumsFormat>(args);
  }
}

// Whether sums of products of rows that are rounded so have to be multiplied by a factor of the row: scales of NVFP4
// that are given are within the alphas.
bool have_factors(ActFormat format, ActScale scale) {
  return format == ActFormat::kNvfp4 ? scale == ActScale::kToken
                                     : format == ActFormat::kFp8 && scale != ActScale::kNone;
}

// Takes from the arena what rounding needs.
void place_operands(const RoundedProblem& p, Arena& arena, int grid, Args& args) {
  const bool by_slot = operand_by_slot(p);
  args.act_format = p.act_format;
  args.operand = nullptr;
  args.operand_factor = args.h_factor = args.wide = nullptr;
  args.operand_rows = by_slot ? args.slots : p.tokens;
  args.private_operand = args.operand_rows * (p.hidden / 16) <= kPrivateBlocks;
  if (makes_operand(p)) {
    const size_t copies = args.private_operand ? grid : 1;
    args.operand = arena.take<__nv_bfloat16>(copies * args.operand_rows * p.hidden);
  }
  if (have_factors(p.act_format, p.a1)) {
    args.operand_factor = arena.take<float>(args.operand_rows);
  }
  args.sums_factor = p.x_factor != nullptr ? p.x_factor : args.operand_factor;
  args.slots_of_factor = by_slot ? 1 : p.top_k;
  if (p.a2 == ActScale::kToken || (p.act_format != ActFormat::kNvfp4 && p.a2 != ActScale::kNone)) {
    args.wide = arena.take<float>(static_cast<size_t>(args.slots) * p.inter);
  }
  if (have_factors(p.act_format, p.a2)) {
    args.h_factor = arena.take<float>(args.slots);
  }
}

}  // namespace

cudaError_t make_plan(const RoundedProblem& p, Plan& plan) {
  int device = 0, shared = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error != cudaSuccess) {
    return error;
  }
  plan.grid = p.partition.multiprocessors;
  plan.groups = groups_for(p);
  const size_t slots = static_cast<size_t>(p.tokens) * p.top_k;
  Args& args = plan.args;
  args.p = p;
  args.slots = static_cast<int>(slots);
  set_format_of(p, args);
  args.row_tiles[0] = row_tiles13(p.inter, p.gated);
  args.k_tiles[0] = k_tiles(p.hidden);
  args.row_tiles[1] = ceil_div(p.hidden, kTileRows);
  args.k_tiles[1] = k_tiles(p.inter);
  Arena arena(p.workspace);
  args.state = p.partition.whole_device ? nullptr : arena.take<State>(1);
  args.h = arena.take<__nv_bfloat16>(slots * p.inter);
  args.output_parts = output_parts_for(args.k_tiles[1]);
  args.y = arena.take<float>(args.output_parts * slots * p.hidden);
  place_operands(p, arena, plan.grid, args);
  plan.workspace = arena.used();
  args.ring_offset = (fixed_bytes(args.slots, plan.groups) + 127) / 128 * 128;
  args.ring_bytes = shared - args.ring_offset;
  plan.shared_bytes = shared;
  return cudaSuccess;
}

}  // namespace moeq::sm90::decode
