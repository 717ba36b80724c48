// What the launches of a layer of many tokens get, and what their plans have in common, whatever the weights are.
#pragma once
#include <cuda_bf16.h>

#include "schedule.cuh"
#include "../device/async.cuh"
#include "../gemm/gemm_args.cuh"
#include "../launch/launches.h"
#include "../problem/problem.h"
#include "../problem/tiled_problem.h"

namespace moeq::sm90 {

// rows: of operands, as many as slots or twice that.
inline Schedule take_sorted_schedule(Arena& arena, int slots, int rows, int experts) {
  Schedule schedule;
  schedule.tiles_total = arena.take<int>(1);
  schedule.rows_total = arena.take<int>(1);
  schedule.next_item = arena.take<int>(1);
  schedule.finished = arena.take<int>(experts);
  schedule.first_row = arena.take<int>(experts);
  schedule.overdue = arena.take<int>(1);
  schedule.rank = arena.take<SlotRank>(slots);
  schedule.slot_of_row = arena.take<int>(max_rows(rows, experts));
  schedule.tiles = arena.take<TokenTile>(max_token_tiles(rows, experts));
  return schedule;
}

// The expert of a slot, -1 where it is not one of ours: its router weight may be anything. Some ask before they wait.
__device__ __forceinline__ int local_expert(const Problem& p, int64_t slot) {
  const uint32_t id = static_cast<uint32_t>(load_settled(p.topk_ids + slot)) - static_cast<uint32_t>(p.expert_offset);
  return id < static_cast<uint32_t>(p.experts) ? static_cast<int>(id) : -1;
}

// Slots are sorted by expert: by one block, or, where they are many, by a cluster of blocks that count a part of them
// each. Args: a problem, and a schedule that gets ranks; write(count): by one block, a thread an expert.
constexpr int kSortThreads = kMaxExperts;   // one an expert
constexpr int kSortBatch = 8;
constexpr int kSortBlocks = kPortableCluster;
constexpr int kSlotsOfOneBlock = 2 * kSortThreads * kSortBatch;   // more than that: a cluster

// Slots first, first + kSortThreads, ...: all loads before what depends on them.
template <class Args>
__device__ void rank_slots(const Args& args, int* counts, int first, int slots) {
  SlotRank ranks[kSortBatch];
#pragma unroll
  for (int i = 0; i < kSortBatch; i++) {
    const int slot = first + i * kSortThreads;
    ranks[i] = {slot < slots ? local_expert(args.problem, slot) : -1, 0};
  }
#pragma unroll
  for (int i = 0; i < kSortBatch; i++) {
    if (ranks[i].expert >= 0) ranks[i].rank = atomicAdd(&counts[ranks[i].expert], 1);
  }
#pragma unroll
  for (int i = 0; i < kSortBatch; i++) {
    const int slot = first + i * kSortThreads;
    if (slot < slots) args.schedule.rank[slot] = ranks[i];
  }
}

// What blocks before this one have counted comes before its own slots of an expert.
template <class Args>
__device__ void move_ranks(const Args& args, const int* before, int first, int slots) {
  SlotRank ranks[kSortBatch];
#pragma unroll
  for (int i = 0; i < kSortBatch; i++) {
    const int slot = first + i * kSortThreads;
    ranks[i].expert = -1;
    if (slot < slots) ranks[i] = args.schedule.rank[slot];
  }
#pragma unroll
  for (int i = 0; i < kSortBatch; i++) {
    if (ranks[i].expert >= 0)
      args.schedule.rank[first + i * kSortThreads].rank = ranks[i].rank + before[ranks[i].expert];
  }
}

// A call's first launch, behind which others read inputs early: it lets them begin once it has waited.
template <class Args, class Write>
__device__ __forceinline__ void sort_by_block(const Args& args, Write write) {
  wait_for_previous_kernel();
  allow_next_kernel();
  __shared__ int counts[kMaxExperts];
  const int slots = args.problem.tokens * args.problem.top_k;
  counts[threadIdx.x] = 0;
  __syncthreads();
  for (int first = threadIdx.x; first < slots; first += kSortThreads * kSortBatch) {
    rank_slots(args, counts, first, slots);
  }
  __syncthreads();
  write(counts[threadIdx.x]);
}

template <class Args, class Write>
__device__ __forceinline__ void sort_by_cluster(const Args& args, Write write) {
  wait_for_previous_kernel();
  allow_next_kernel();
  __shared__ int counts[kMaxExperts];
  __shared__ int before[kMaxExperts];
  const int slots = args.problem.tokens * args.problem.top_k;
  const int rank = cluster_rank(), of_block = (slots + kSortBlocks - 1) / kSortBlocks;
  const int begin = rank * of_block, end = min(begin + of_block, slots);
  counts[threadIdx.x] = 0;
  __syncthreads();
  for (int first = begin + threadIdx.x; first < end; first += kSortThreads * kSortBatch) {
    rank_slots(args, counts, first, end);
  }
  __syncwarp();  // the barrier is one of whole warps
  cluster_arrive();
  cluster_wait();
  int all = 0;
  for (int block = 0; block < kSortBlocks; block++) {
    if (block == rank) before[threadIdx.x] = all;
    all += load_in_cluster(address_in_block(shared_address(&counts[threadIdx.x]), block));
  }
  cluster_arrive();  // counts of this block are read until all have come here
  __syncthreads();
  if (rank > 0) {
    for (int first = begin + threadIdx.x; first < end; first += kSortThreads * kSortBatch) {
      move_ranks(args, before, first, end);
    }
  } else {
    write(all);
  }
  __syncwarp();
  cluster_wait();
}

template <class Args>
cudaError_t launch_sort(void (*by_block)(Args), void (*by_cluster)(Args), const Args& args) {
  const auto& p = args.problem;
  if (p.tokens * p.top_k > kSlotsOfOneBlock && p.partition.whole_device) {
    return launch_clusters_after(by_cluster, args, 1, kSortBlocks, kSortThreads, p.stream);
  }
  return launch_after(by_block, args, 1, kSortThreads, 0, p.stream);
}

// GEMM1's operand: x rounded, weighted and quantized as asked for, gathered by expert, K padded and in the order of the
// weights' layout.
struct OperandArgs {
  Problem problem;
  Schedule schedule;
  __nv_bfloat16* operand;   // [hidden_padded / 64, rows, 64]
  float* row_gscale;        // [tokens]: where each token has its own
  float* factor;  // [rows]: what products of a row lack; null: nothing
  const float* given_factor;  // [tokens]: the same of values that are codes' already; null: they are none
  int rows;  // max_rows
  int hidden_padded;
  int max_width;  // tokens of a tile
  ActFormat act_format;
  RemoteRows remote;
  bool half;  // values, of e4m3 codes or of float16 hidden states, are stored as float16
  float* group_scale;  // [hidden_padded / 128, rows]: of 128 values of a row each; null: these have none
  const float* given_scale;  // [tokens, hidden_padded / 128]: of codes that are given; null: they are made
};

// The intermediate where GEMM1 does not round it: with a scale of its own per row, or to e4m3.
struct RequantizeArgs {
  Problem problem;
  Schedule schedule;
  const float* wide;  // [rows, inter_padded]
  __nv_bfloat16* h;  // [inter_padded / 64, rows, 64]: the same, quantized
  float* factor;  // [rows]: 1 / gscale; null: there is none
  int rows;  // max_rows
  int inter_padded;
  ActFormat act_format;
  bool half;  // as in OperandArgs
};

struct CombineArgs {
  Problem problem;
  const void* y;  // [slots, hidden]: bfloat16, or float32 if y_wide
  bool y_wide;
  const int* overdue;  // of the schedule; null: no kernel before waits
  RemoteRows remote;
};

cudaError_t launch_schedule(const OperandArgs& args);
cudaError_t launch_operand(const OperandArgs& args);
cudaError_t launch_requantize(const RequantizeArgs& args);
cudaError_t launch_combine(const CombineArgs& args);

// A launch that may begin before the previous kernel of the stream has ended (launches.h).
template <class Args>
cudaError_t launch_dependent(void (*kernel)(Args), const Args& args, dim3 grid, int threads, int shared_bytes) {
  return launch_after(kernel, args, grid, threads, shared_bytes, args.problem.stream);
}

// Results of single slots keep float32 where the output is finer than bfloat16, or their rows are two.
inline bool is_wide(const Problem& p) { return p.splits || p.out_type != OutType::kBfloat16; }
inline int64_t result_bytes(const Problem& p) { return is_wide(p) ? 4 : 2; }

// The longest array decides.
inline int tokens_of_piece(const Problem& p) {
  return tokens_at_once(p, (p.hidden > p.inter ? p.hidden : p.inter) * result_bytes(p) * p.top_k);
}

inline Finish finish_of(const Problem& p) {
  if (!p.gated) return Finish::kPlain;
  return p.activation == Activation::kSilu || p.activation == Activation::kSwigluoai ? Finish::kSwiglu : Finish::kGated;
}

// Both GEMMs in blocks of so many tiles of weight rows; the caller says where the arrays lie.
inline GemmArgs gemms_of(const Problem& p, const Schedule& schedule, int block_tiles) {
  GemmArgs gemm{};
  gemm.problem = p;
  gemm.schedule = schedule;
  gemm.rows = max_rows(p.tokens * p.top_k * rows_of_slot(p), p.experts);
  gemm.y_wide = is_wide(p);
  const int k_step = has_bytes(p.format) ? w4a8::kTileK : kTileK;
  gemm.hidden_padded = ceil_div(p.hidden, k_step) * k_step;
  gemm.inter_padded = ceil_div(p.inter, k_step) * k_step;
  gemm.tiles13 = row_tiles13(p.inter, p.gated);
  gemm.tiles2 = ceil_div(p.hidden, kTileRows);
  gemm.blocks13 = ceil_div(gemm.tiles13, block_tiles);
  gemm.blocks2 = ceil_div(gemm.tiles2, block_tiles);
  gemm.first = gemm.second = true;
  return gemm;
}

// A persistent kernel on all multiprocessors of the stream. known: the kernel's own.
template <class Args>
cudaError_t launch_variant(const Variant<Args>& variant, const Args& args, const Problem& p, KnownDevices& known) {
  const cudaError_t error =
      allow_shared_memory(reinterpret_cast<const void*>(variant.kernel), variant.shared_bytes, known);
  if (error != cudaSuccess) return error;
  return launch_after(variant.kernel, args, p.partition.multiprocessors * variant.blocks, variant.threads,
                      variant.shared_bytes, p.stream);
}

}  // namespace moeq::sm90
