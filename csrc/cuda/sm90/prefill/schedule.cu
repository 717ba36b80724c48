// The first launch of a prefill: the slots are sorted by expert, and the experts' tokens divided into tiles. By one
// block, or, where slots are many, by a cluster of blocks that count a part of them each.
#include "../device/cluster.cuh"
#include "../device/gemm_async.cuh"
#include "../device/prefix_sum.cuh"
#include "../launch/cluster_launch.h"
#include "prefill_kernels.cuh"

namespace moeq::sm90 {
namespace {

constexpr int kThreads = kMaxExperts;   // one an expert
constexpr int kBatch = 8;
constexpr int kClusterBlocks = kPortableCluster;
constexpr int kSlotsOfOneBlock = 2 * kThreads * kBatch;   // more than that: a cluster

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

// What blocks before this one have counted comes before its own slots of an expert.
__device__ void move_ranks(const OperandArgs& args, const int* before, int first, int slots) {
  SlotRank ranks[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; i++) {
    const int slot = first + i * kThreads;
    ranks[i].expert = -1;
    if (slot < slots) ranks[i] = args.schedule.rank[slot];
  }
#pragma unroll
  for (int i = 0; i < kBatch; i++) {
    if (ranks[i].expert >= 0) args.schedule.rank[first + i * kThreads].rank = ranks[i].rank + before[ranks[i].expert];
  }
}

// By one block, a thread an expert.
__device__ void write_schedule(const OperandArgs& args, int count) {
  __shared__ int warp_sums[kThreads / 32];
  const Schedule& schedule = args.schedule;
  const int expert = threadIdx.x, tiles = tiles_for(count, args.max_width);
  int rows_total, tiles_total;
  const int start = prefix_sum<kThreads>((count + 7) / 8 * 8, warp_sums, rows_total);
  const int first = prefix_sum<kThreads>(tiles, warp_sums, tiles_total);
  list_tiles(schedule, expert, start, count, first, tiles);
  if (expert < args.problem.experts) {
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

__global__ void __launch_bounds__(kThreads) schedule_kernel(const __grid_constant__ OperandArgs args) {
  wait_for_previous_kernel();
  allow_next_kernel();
  __shared__ int counts[kMaxExperts];
  const int slots = args.problem.tokens * args.problem.top_k;
  counts[threadIdx.x] = 0;
  __syncthreads();
  for (int first = threadIdx.x; first < slots; first += kThreads * kBatch) rank_slots(args, counts, first, slots);
  __syncthreads();
  write_schedule(args, counts[threadIdx.x]);
}

__global__ void __launch_bounds__(kThreads) schedule_cluster_kernel(const __grid_constant__ OperandArgs args) {
  wait_for_previous_kernel();
  allow_next_kernel();
  __shared__ int counts[kMaxExperts];
  __shared__ int before[kMaxExperts];
  const int slots = args.problem.tokens * args.problem.top_k;
  const int rank = cluster_rank(), of_block = (slots + kClusterBlocks - 1) / kClusterBlocks;
  const int begin = rank * of_block, end = min(begin + of_block, slots);
  counts[threadIdx.x] = 0;
  __syncthreads();
  for (int first = begin + threadIdx.x; first < end; first += kThreads * kBatch) rank_slots(args, counts, first, end);
  __syncwarp();  // the barrier is one of whole warps
  cluster_arrive();
  cluster_wait();
  int all = 0;
  for (int block = 0; block < kClusterBlocks; block++) {
    if (block == rank) before[threadIdx.x] = all;
    all += load_in_cluster(address_in_block(shared_address(&counts[threadIdx.x]), block));
  }
  cluster_arrive();  // counts of this block are read until all have come here
  __syncthreads();
  if (rank > 0) {
    for (int first = begin + threadIdx.x; first < end; first += kThreads * kBatch) move_ranks(args, before, first, end);
  } else {
    write_schedule(args, all);
  }
  __syncwarp();
  cluster_wait();
}

}  // namespace

cudaError_t launch_schedule(const OperandArgs& args) {
  const Problem& p = args.problem;
  if (p.tokens * p.top_k > kSlotsOfOneBlock && p.partition.whole_device) {
    return launch_clusters_after(schedule_cluster_kernel, args, 1, kClusterBlocks, kThreads, p.stream);
  }
  return launch_dependent(schedule_kernel, args, 1, kThreads, 0);
}

}  // namespace moeq::sm90
