// A layer of bfloat16 weights on many tokens: sort and gather, both GEMMs in one persistent kernel, combine. As
// prefill.cu, but that weights are copied as the checkpoint has them, by tensor maps, and are wgmma's A operand as they
// lie in shared memory, so that accumulators have nearly all of the registers: 256 rows by up to 192 tokens.

#include "../gemm/gemm_kernel.cuh"
#include "../launch/launches.h"
#include "../prefill/prefill_plan.h"

namespace moeq::sm90 {

// The weights as the copy engine sees them: K, eight rows, halves (gate and up), eights of rows, experts. A box is 64
// of K by 256 rows, gate and up rows of w13 in turns of eight as the epilogue wants them, swizzled over 128 bytes.
// Where there are no halves, the rows of an expert are the second dimension.
struct Bf16Args {
  GemmArgs gemm;
  CUtensorMap w13, w2;
};

struct Bf16Format {
  static constexpr int kTileScaleBytes = 0;
  static constexpr float kAccumulatorScale = 1.0f;
};
template <>
inline constexpr bool kKeepsOrder<Bf16Format> = true;

struct Bf16Config {
  using Format = Bf16Format;
  static constexpr int kMaxWidth = 192;
  static constexpr int kConsumers = 2;
  static constexpr int kWarpgroupTiles = 2;
  static constexpr int kTokenSteps = 1;
  static constexpr int kTokenStages = 3;
  static constexpr int kWeightStages = 3;  // of one step of 64 in K
  static constexpr int kBlocks = 1;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;
};

constexpr int kBf16TileBytes = kTileRows * kTileK * 2;
constexpr int kBf16BlockRows = Sizes<Bf16Config>::kBlockTiles * kTileRows;

template <>
struct GemmOperands<Bf16Config> {
  using C = Bf16Config;
  uint8_t tokens[C::kTokenStages][C::kTokenSteps][Sizes<C>::kTokenStepBytes];
  uint8_t weights[C::kWeightStages][Sizes<C>::kBlockTiles][kBf16TileBytes];
  uint8_t staging[C::kConsumers][C::kMaxWidth * 128];
};

__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, int k, int row, int eight, int expert,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
      "l"(&map), "r"(k), "r"(row), "r"(0), "r"(eight), "r"(expert), "r"(barrier)
      : "memory");
}

template <>
struct WeightStream<Bf16Config> {
  static constexpr int kSteps = 1;
  const CUtensorMap& map;
  int row, eight, expert, k;

  __device__ WeightStream(const Bf16Args& args, const Work& work)
      : map(work.second ? args.w2 : args.w13), expert(work.expert), k(0) {
    const bool turns = !work.second && args.gemm.problem.gated;
    const int first = work.row_block * kBf16BlockRows;
    row = turns ? 0 : first;
    eight = turns ? first / 16 : 0;
  }

  __device__ __forceinline__ void copy(GemmShared<Bf16Config>& shared, int stage, int) {
    const uint32_t full = shared_address(&shared.weights_full[stage]);
    barrier_expect(full, sizeof(shared.weights[0]));
    copy_box(shared_address(shared.weights[stage]), map, k * kTileK, row, eight, expert, full);
    k++;
  }
};

// Activations are never rounded: no row lacks anything, and nobody asks for factors.
__device__ __forceinline__ void prepare_consumers(const GemmArgs&, GemmShared<Bf16Config>& shared) {
  using C = Bf16Config;
  float* factors = &shared.factors[0][0];
  for (int i = threadIdx.x; i < C::kConsumers * C::kMaxWidth; i += 128 * C::kConsumers) factors[i] = 1.0f;
  synchronize_consumers<C>();
}

// Where a warpgroup is in the rings, from tile to tile.
template <>
struct Consumer<Bf16Config> {
  Ring<Bf16Config::kTokenStages> tokens;
  Ring<Bf16Config::kWeightStages> weights;
  int first_tile;  // of the warpgroup's in a stage of weights

  __device__ Consumer(GemmShared<Bf16Config>&, int warpgroup) : first_tile(warpgroup * Bf16Config::kWarpgroupTiles) {}
};

// One warpgroup's multiplication of a tile, with both operands in shared memory.
__device__ __forceinline__ void multiply_tile(Accumulators<Bf16Config>& acc, GemmShared<Bf16Config>& shared,
                                              Consumer<Bf16Config>& at, const Work& work) {
  clear<Bf16Config>(acc);
  const int index = work.width / 8 - 1, lane = threadIdx.x % 32;
  uint32_t tokens_read = 0, weights_read = 0;  // the barriers that tell that the stages before have been read
#pragma unroll 1
  for (int k = 0; k < work.k_tiles; k++) {
    barrier_wait(shared_address(&shared.weights_full[at.weights.slot]), at.weights.parity);
    barrier_wait(shared_address(&shared.tokens_full[at.tokens.slot]), at.tokens.parity);
    const uint32_t a = shared_address(shared.weights[at.weights.slot][at.first_tile]);
    const uint32_t b = shared_address(shared.tokens[at.tokens.slot]);
    multiply_shared<Bf16Config::kMaxWidth>(acc[0], a / 16 | 1 << 16, b / 16 | 1 << 16, index);
    wgmma_wait<1>();
    if (k > 0) {
      arrive_once_a_warp(tokens_read, lane);
      arrive_once_a_warp(weights_read, lane);
    }
    tokens_read = shared_address(&shared.tokens_empty[at.tokens.slot]);
    weights_read = shared_address(&shared.weights_empty[at.weights.slot]);
    at.tokens.advance();
    at.weights.advance();
  }
  wgmma_wait<0>();
  arrive_once_a_warp(tokens_read, lane);
  arrive_once_a_warp(weights_read, lane);
}

template <Finish finish>
__global__ void __launch_bounds__(Sizes<Bf16Config>::kThreads, 1) bf16_kernel(const __grid_constant__ Bf16Args args) {
  run_both<Bf16Config, finish>(args.gemm, args);
}

template <Finish finish>
Variant<Bf16Args> bf16_variant() {
  return variant_of<Bf16Config, GemmShared<Bf16Config>>(bf16_kernel<finish>);
}

// GEMM1's operand: tokens gathered by expert, K in its own order and padded.
namespace {

constexpr int kThreads = 256;
constexpr int kPiece = 8;  // values of a thread: 16 bytes

__device__ uint4 load_piece(const Problem& p, int token, int column) {
  if (column >= p.hidden) return make_uint4(0, 0, 0, 0);
  uint4 piece = load_settled(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.x) +
                                                            static_cast<int64_t>(token) * p.hidden + column));
  if (p.weight_on_input) {
    __nv_bfloat16* values = reinterpret_cast<__nv_bfloat16*>(&piece);
    const float weight = load_settled(p.topk_weights + token);
#pragma unroll
    for (int i = 0; i < kPiece; i++) values[i] = __float2bfloat16_rn(__bfloat162float(values[i]) * weight);
  }
  return piece;
}

// 16 bytes of a token for each of its experts, where wgmma's swizzle has them in the row.
__global__ void __launch_bounds__(kThreads) bf16_operand_kernel(const __grid_constant__ OperandArgs args) {
  const Problem& p = args.problem;
  const int pieces = args.hidden_padded / kPiece;
  const int64_t unit = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const bool real = unit < int64_t{p.tokens} * pieces;
  const int token = real ? unit / pieces : 0, piece = unit % pieces;
  const uint4 values = load_piece(p, token, piece * kPiece);
  wait_for_previous_kernel();
  allow_next_kernel();
  if (!real) return;
  __nv_bfloat16* k_tile = args.operand + int64_t{piece / 8} * args.rows * 64;
#pragma unroll 4
  for (int j = 0; j < p.top_k; j++) {
    const int64_t slot = int64_t{token} * p.top_k + j;
    const auto [expert, rank] = args.schedule.rank[slot];
    if (expert < 0) continue;
    const int row = args.schedule.first_row[expert] + rank;
    if (piece == 0) args.schedule.slot_of_row[row] = slot;
    *reinterpret_cast<uint4*>(k_tile + int64_t{row} * 64 + (piece % 8 ^ row % 8) * 8) = values;
  }
}

cudaError_t launch_operand_in_order(const OperandArgs& args) {
  const int64_t units = int64_t{args.problem.tokens} * (args.hidden_padded / kPiece);
  return launch_dependent(bf16_operand_kernel, args, static_cast<unsigned>((units + kThreads - 1) / kThreads), kThreads,
                          0);
}

Variant<Bf16Args> variant_for(const Problem& p) {
  switch (finish_of(p)) {
    case Finish::kSwiglu:
      return bf16_variant<Finish::kSwiglu>();
    case Finish::kGated:
      return bf16_variant<Finish::kGated>();
    default:
      return bf16_variant<Finish::kPlain>();
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
  const Variant<Bf16Args> variant = variant_for(p);
  const Schedule schedule = take_sorted_schedule(arena, slots, slots, p.experts);
  GemmArgs& gemm = plan.gemm.gemm;
  gemm = gemms_of(p, schedule, variant.block_tiles);
  plan.operand = {p, schedule, nullptr, nullptr, nullptr, nullptr, gemm.rows, gemm.hidden_padded, variant.max_width};
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
  static KnownDevices known[kFinishes];
  const Problem& p = args.gemm.problem;
  const Variant<Bf16Args> variant = variant_for(p);
  const cudaError_t error = make_maps(args, variant.block_tiles);
  return error == cudaSuccess ? launch_variant(variant, args, p, known[static_cast<int>(finish_of(p))]) : error;
}

cudaError_t run_piece(const Problem& p) {
  Plan plan = make_plan(p);
  cudaError_t error = launch_schedule(plan.operand);
  if (error == cudaSuccess) error = launch_operand_in_order(plan.operand);
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
