// The first launch of a prefill: one block sorts the slots by expert and divides the experts' tokens into tiles.
#include "gemm_async.cuh"
#include "prefill_kernels.cuh"

namespace moeq::sm90 {
namespace {

constexpr int kThreads = kMaxExperts;   // one an expert
constexpr int kBatch = 8;

// Exclusive prefix sums over the experts, one a thread; returns the total in `total`.
__device__ int prefix_sum(int value, int* warp_sums, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = 0, all = 0;
  for (int i = 0; i < kThreads / 32; i++) {
    const int of_warp = warp_sums[i];
    before += i < warp ? of_warp : 0;
    all += of_warp;
  }
  total = all;
  __syncthreads();
  return before + sum - value;
}

__device__ void list_tiles(const Schedule& schedule, int expert, int start, int count, int first, int tiles) {
  for (int i = 0; i < tiles; i++) {
    schedule.tiles[first + i] = {expert, first, tiles, start, count, tile_width(count, tiles), {0, 0}};
  }
}

// Slots first, first + kThreads, ...: all loads before what depends on them.
__device__ void rank_slots(const OperandArgs& args, int* counts, int first, int slots) {
  int ids[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; i++) {
    const int slot = first + i * kThreads;
    ids[i] = slot < slots ? local_expert(args.problem, slot) : -1;
  }
#pragma unroll
  for (int i = 0; i < kBatch; i++) {
    if (ids[i] >= 0) ids[i] = atomicAdd(&counts[ids[i]], 1);
  }
#pragma unroll
  for (int i = 0; i < kBatch; i++) {
    const int slot = first + i * kThreads;
    if (slot < slots) args.schedule.rank[slot] = ids[i];
  }
}

__global__ void __launch_bounds__(kThreads) schedule_kernel(const __grid_constant__ OperandArgs args) {
  wait_for_previous_kernel();
  allow_next_kernel();
  __shared__ int counts[kMaxExperts];
  __shared__ int warp_sums[kThreads / 32];
  const Problem& p = args.problem;
  const Schedule& schedule = args.schedule;
  const int slots = p.tokens * p.top_k, expert = threadIdx.x;
  counts[expert] = 0;
  __syncthreads();
  for (int first = threadIdx.x; first < slots; first += kThreads * kBatch) rank_slots(args, counts, first, slots);
  __syncthreads();
  const int count = counts[expert];
  const int tiles = tiles_for(count);
  int rows_total, tiles_total;
  const int start = prefix_sum((count + 7) / 8 * 8, warp_sums, rows_total);
  const int first = prefix_sum(tiles, warp_sums, tiles_total);
  list_tiles(schedule, expert, start, count, first, tiles);
  if (expert < p.experts) {
    schedule.finished[expert] = 0;
    schedule.first_row[expert] = start;
  }
  if (expert == 0) {
    *schedule.tiles_total = tiles_total;
    *schedule.rows_total = rows_total;
    *schedule.next_item = 0;
  }
}

}  // namespace

cudaError_t launch_schedule(const OperandArgs& args) { return launch_dependent(schedule_kernel, args, 1, kThreads, 0); }

}  // namespace moeq::sm90
