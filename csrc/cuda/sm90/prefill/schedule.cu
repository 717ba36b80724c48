// The first launch of a prefill: one block sorts the slots by expert and divides the experts' tokens into tiles.
#include "../device/gemm_async.cuh"
#include "prefill_kernels.cuh"
#include "../device/prefix_sum.cuh"

namespace moeq::sm90 {
namespace {

constexpr int kThreads = kMaxExperts;   // one an expert
constexpr int kBatch = 8;

__device__ void list_tiles(const Schedule& schedule, int expert, int start, int count, int first, int tiles) {
  const int groups = (count + 7) / 8;
  for (int i = 0; i < tiles; i++) {
    const int token = i * groups / tiles * 8, end = (i + 1) * groups / tiles * 8;
    schedule.tiles[first + i] = {expert, first, tiles, start + token, min(end, count) - token, end - token, {0, 0}};
  }
}

// Slots first, first + kThreads, ...: all loads before what depends on them.
__device__ void rank_slots(const OperandArgs& args, int* counts, int first, int slots) {
  SlotRank ranks[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; i++) {
    const int slot = first + i * kThreads;
    ranks[i] = {slot < slots ? local_expert(args.problem, slot) : -1, 0};
  }
#pragma unroll
  for (int i = 0; i < kBatch; i++) {
    if (ranks[i].expert >= 0) ranks[i].rank = atomicAdd(&counts[ranks[i].expert], 1);
  }
#pragma unroll
  for (int i = 0; i < kBatch; i++) {
    const int slot = first + i * kThreads;
    if (slot < slots) args.schedule.rank[slot] = ranks[i];
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
  const int tiles = tiles_for(count, args.max_width);
  int rows_total, tiles_total;
  const int start = prefix_sum<kThreads>((count + 7) / 8 * 8, warp_sums, rows_total);
  const int first = prefix_sum<kThreads>(tiles, warp_sums, tiles_total);
  list_tiles(schedule, expert, start, count, first, tiles);
  if (expert < p.experts) {
    schedule.finished[expert] = 0;
    schedule.first_row[expert] = start;
  }
  if (expert == 0) {
    *schedule.tiles_total = tiles_total;
    *schedule.rows_total = rows_total;
    *schedule.next_item = 0;
    *schedule.overdue = 0;
  }
}

}  // namespace

cudaError_t launch_schedule(const OperandArgs& args) { return launch_dependent(schedule_kernel, args, 1, kThreads, 0); }

}  // namespace moeq::sm90
