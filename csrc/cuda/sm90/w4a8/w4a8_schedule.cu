// The first launch: one block counts the slots of each expert, and lists tiles of tokens.
#include "../device/async.cuh"
#include "../device/scans.cuh"
#include "w4a8_shared.cuh"

namespace moeq::sm90::w4a8 {
namespace {

constexpr int kThreads = 1024;

struct ScheduleArgs {
  W4a8Problem problem;
  Schedule schedule;
  int widest;    // tokens of a tile
};

__device__ void list_expert(const Schedule& schedule, int expert, int start, int count, int first, int tiles) {
  schedule.start[expert] = start;
  schedule.count[expert] = count;
  for (int row = start + count; row < start + round_up(count, 8); row++) {
    schedule.slot_of_row[row] = -1;
    schedule.place_of_row[row].row = -1;
  }
  for (int i = 0; i < tiles; i++) {
    schedule.tiles[first + i] = {expert, first, tiles, start, count, tile_width(count, tiles), {0, 0}};
  }
}

__global__ void __launch_bounds__(kThreads, 1) schedule_kernel(const __grid_constant__ ScheduleArgs args) {
  __shared__ int counts[kMaxExperts];
  __shared__ int warp_sums[kThreads / 32];
  wait_for_previous_kernel();
  allow_next_kernel();
  const Problem& p = args.problem;
  const Schedule& schedule = args.schedule;
  const int slots = p.tokens * p.top_k, expert = threadIdx.x;
  counts[expert] = 0;
  __syncthreads();
#pragma unroll 8
  for (int slot = threadIdx.x; slot < slots; slot += kThreads) {
    const int64_t id = int64_t{p.topk_ids[slot]} - p.expert_offset;
    const int expert = id >= 0 && id < p.experts ? static_cast<int>(id) : -1;
    schedule.rank[slot] = {expert, expert >= 0 ? atomicAdd(&counts[expert], 1) : 0};
  }
  __syncthreads();
  const int count = counts[expert], tiles = tiles_for(count, args.widest);
  int rows_total, tiles_total;
  const int start = prefix_sum<kThreads>(round_up(count, 8), warp_sums, rows_total);
  const int first = prefix_sum<kThreads>(tiles, warp_sums, tiles_total);
  if (expert < p.experts) list_expert(schedule, expert, start, count, first, tiles);
  if (expert == 0) {
    *schedule.tiles_total = tiles_total;
    schedule.start[p.experts] = rows_total;
    schedule.next_item[0] = schedule.next_item[1] = 0;
  }
}

}  // namespace

cudaError_t launch_schedule(const W4a8Problem& p, const Schedule& schedule, int widest) {
  return launch_after(schedule_kernel, ScheduleArgs{p, schedule, widest}, 1, kThreads, 0, p.stream);
}

}  // namespace moeq::sm90::w4a8
