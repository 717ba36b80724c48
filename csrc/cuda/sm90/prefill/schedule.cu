// The first launch of a prefill: the slots are sorted by expert, and the experts' tokens divided into tiles. By one
// block, or, where slots are many, by a cluster of blocks that count a part of them each.
#include "../device/async.cuh"
#include "../device/scans.cuh"
#include "../launch/launches.h"
#include "prefill_plan.h"

namespace moeq::sm90 {
namespace {

constexpr int kThreads = kSortThreads;

__device__ void list_tiles(const Schedule& schedule, int expert, int start, int count, int first, int tiles) {
  const int groups = (count + 7) / 8;
  for (int i = 0; i < tiles; i++) {
    const int token = i * groups / tiles * 8, end = (i + 1) * groups / tiles * 8;
    schedule.tiles[first + i] = {expert, first, tiles, start + token, min(end, count) - token, end - token, {0, 0}};
  }
}

// By one block, a thread an expert. `slots`: of the expert.
__device__ void write_schedule(const OperandArgs& args, int slots) {
  __shared__ int2 warp_sums[kThreads / 32];
  const Schedule& schedule = args.schedule;
  const int expert = threadIdx.x, count = slots * rows_of_slot(args.problem);
  const int tiles = tiles_for(count, args.max_width);
  int2 total;
  const auto [start, first] = prefix_sums<kThreads>({(count + 7) / 8 * 8, tiles}, warp_sums, total);
  list_tiles(schedule, expert, start, count, first, tiles);
  if (expert < args.problem.experts) {
    schedule.finished[expert] = 0;
    schedule.first_row[expert] = start;
  }
  if (expert == 0) {
    *schedule.tiles_total = total.y;
    *schedule.rows_total = total.x;
    *schedule.next_item = 0;
    *schedule.overdue = 0;
  }
}

__global__ void __launch_bounds__(kThreads) schedule_kernel(const __grid_constant__ OperandArgs args) {
  sort_by_block(args, [&](int slots) { write_schedule(args, slots); });
}

__global__ void __launch_bounds__(kThreads) schedule_cluster_kernel(const __grid_constant__ OperandArgs args) {
  sort_by_cluster(args, [&](int slots) { write_schedule(args, slots); });
}

}  // namespace

cudaError_t launch_schedule(const OperandArgs& args) {
  return launch_sort(schedule_kernel, schedule_cluster_kernel, args);
}

}  // namespace moeq::sm90
