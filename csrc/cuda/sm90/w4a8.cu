// A layer: sort, quantize the tokens, GEMM1, quantize the intermediate, GEMM2, combine.
#include "prefill_kernels.cuh"
#include "w4a8_gemm.cuh"
#include "w4a8_quantize.cuh"

namespace moeq::sm90 {
namespace w4a8 {
namespace {

// Of the intermediate; more tokens than fit are done piece by piece.
constexpr int64_t kPieceBytes = int64_t{1} << 30;

// Hands out pieces of the workspace; with a null base it only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<uint8_t*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(base_ + used_);
    used_ += (count * sizeof(T) + 255) / 256 * 256;
    return piece;
  }
  size_t used() const { return used_; }

 private:
  uint8_t* base_;
  size_t used_ = 0;
};

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

int tokens_at_once(const Problem& p) {
  const int64_t row = int64_t{p.inter} * halves_of_h(p) * 4 * p.top_k;
  const int64_t tokens = kPieceBytes / row / 256 * 256;
  return static_cast<int>(tokens < 256 ? 256 : tokens < p.tokens ? tokens : p.tokens);
}

W4a8Problem piece_of(const W4a8Problem& p, int first, int count) {
  W4a8Problem piece = p;
  const int64_t row = int64_t{first} * p.hidden;
  piece.tokens = count;
  piece.x = static_cast<const uint16_t*>(p.x) + row;
  piece.topk_ids = p.topk_ids + int64_t{first} * p.top_k;
  piece.topk_weights = p.topk_weights + int64_t{first} * p.top_k;
  piece.out = static_cast<uint8_t*>(p.out) + row * (p.out_type == OutType::kFloat32 ? 4 : 2);
  return piece;
}

}  // namespace
}  // namespace w4a8

size_t w4a8_workspace(const W4a8Problem& p) {
  W4a8Problem piece = p;
  piece.tokens = w4a8::tokens_at_once(p);
  piece.workspace = nullptr;
  return w4a8::make_plan(piece).bytes;
}

cudaError_t w4a8_run(const W4a8Problem& p) {
  const int step = w4a8::tokens_at_once(p);
  for (int first = 0; first < p.tokens; first += step) {
    const int left = p.tokens - first;
    const cudaError_t error = w4a8::run_piece(w4a8::piece_of(p, first, left < step ? left : step));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace moeq::sm90
