// Decode: a whole MoE layer of few tokens in one launch.
//
// One thread block per multiprocessor, all of them resident (a cooperative launch). Each works out the routing alone.
// The row tiles of all active experts are dealt out to the blocks; two warps of each copy them into a ring in shared
// memory, sixteen multiply them on the tensor cores. Two grid barriers: the intermediate must be complete before GEMM2
// multiplies it (its weights are under way by then), and GEMM2's sums before they are combined.
#include "decode_kernel.cuh"
#include "decode_plan.h"
#include "decode_shared.cuh"
#include "../decode_few/decode_few.h"
#include "../formats/formats.cuh"
#include "../launch/launches.h"
#include "../layout/layout.h"

namespace moeq::sm90::decode {

namespace {

// What depends on the format of weights.
struct OfFormat {
  int tile_scale_bytes;
  float accumulator_scale;
  const void* (*kernel)(int groups);
};

template <class Format>
constexpr OfFormat of_format() {
  return {Format::kTileScaleBytes, Format::kAccumulatorScale, kernel_for<Format>};
}

OfFormat of_format(Format format) {
  switch (format) {
    case Format::kMxfp4:
      return of_format<Mxfp4Format>();
    case Format::kInt4Per32:
      return of_format<Int4Format<32>>();
    case Format::kInt4Per64:
      return of_format<Int4Format<64>>();
    case Format::kInt4Zero:
    case Format::kInt4ZeroBf16:
      return of_format<Int4SumsFormat>();
    case Format::kInt4ZeroPer32:
      return of_format<Int4ZeroFormat<true, 32>>();
    case Format::kInt4Float:
      return of_format<Int4FloatSumsFormat>();
    default:
      return of_format<Nvfp4Format>();
  }
}

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
  const OfFormat format = of_format(p.format);
  args.tile_scale_bytes = format.tile_scale_bytes;
  args.accumulator_scale = format.accumulator_scale;
  plan.kernel = format.kernel(plan.groups);
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

namespace {

__device__ State whole_device_state;   // of launches that take the whole device

// Clears a launch's own state, in its workspace, or finds that of the whole device.
cudaError_t give_state(Args& args) {
  if (args.state != nullptr) {
    return cudaMemsetAsync(args.state, 0, sizeof(State), args.p.stream);
  }
  static KnownAddresses known;
  void* state = nullptr;
  const cudaError_t error = find_variable(whole_device_state, known, state);
  args.state = static_cast<State*>(state);
  return error;
}

}  // namespace
}  // namespace moeq::sm90::decode

namespace moeq::sm90 {

// Whether the kernel for very few tokens takes a problem, and how.
static cudaError_t make_few_plan(const RoundedProblem& p, few::Plan& plan, bool& few) {
  return rounds_to_e4m3(p) ? few::make_e4m3_plan(p, plan, few) : few::make_plan(p, plan, few);
}

// Beyond it, weights of 8 bits and float16 hidden states are for the prefill kernel for few tokens, all others for the
// kernel with grid barriers.
static bool is_for_prefill(const Problem& p) { return has_bytes(p.format) || p.x_half; }

// Narrow tiles where few experts have too little work for two blocks on each multiprocessor.
static Shape shape_of_others(const Problem& p) {
  constexpr int kBusyBlocks = 384, kBlockRows = 4 * kTileRows;
  const int slots = p.tokens * p.top_k, experts = slots < p.experts ? slots : p.experts;
  const bool is_little = experts * ceil_div(p.hidden, kBlockRows) < kBusyBlocks;
  return p.splits && !has_bytes(p.format) && is_little ? Shape::kNarrow : Shape::kSlim;
}

int decode_max_tokens(const Problem& p) { return p.top_k < 1 ? 0 : decode::kMaxSlots / p.top_k; }

size_t decode_workspace(const RoundedProblem& p) {
  few::Plan few_plan;
  bool few = false;
  if (make_few_plan(p, few_plan, few) != cudaSuccess || !few) {
    decode::Plan plan;
    return is_for_prefill(p)                           ? prefill_workspace(p, shape_of_others(p))
           : decode::make_plan(p, plan) == cudaSuccess ? plan.workspace
                                                       : 0;
  }
  return p.partition.whole_device ? 0 : few::exchange_bytes(few_plan);
}

cudaError_t decode_run(const RoundedProblem& p) {
  if (p.tokens > decode_max_tokens(p)) {
    return cudaErrorInvalidValue;
  }
  if (p.tokens == 0) {
    return cudaSuccess;
  }
  few::Plan few_plan;
  bool few = false;
  cudaError_t error = make_few_plan(p, few_plan, few);
  if (error != cudaSuccess || few) {
    return error != cudaSuccess ? error : rounds_to_e4m3(p) ? few::run_e4m3(few_plan) : few::run(few_plan);
  }
  if (is_for_prefill(p)) {
    return prefill_run(p, shape_of_others(p));
  }
  decode::Plan plan;
  error = decode::make_plan(p, plan);
  if (error != cudaSuccess) {
    return error;
  }
  static KnownDevices known[kFormats][5];
  error = allow_shared_memory(plan.kernel, plan.shared_bytes, known[static_cast<int>(p.format)][plan.groups]);
  if (error == cudaSuccess) {
    error = decode::give_state(plan.args);
  }
  if (error != cudaSuccess) {
    return error;
  }
  return launch_together(plan.kernel, plan.args, plan.grid, decode::kBlockThreads, plan.shared_bytes, p.stream, false);
}

}  // namespace moeq::sm90
