// The launches of a prefill besides the GEMMs.
#pragma once
#include <cuda_bf16.h>

#include "../launch/dependent_launch.h"
#include "../problem/rounded_problem.h"
#include "schedule.cuh"
#include "../problem/workspace.h"

namespace moeq::sm90 {

inline Schedule take_sorted_schedule(Arena& arena, int slots, int experts) {
  Schedule schedule;
  schedule.tiles_total = arena.take<int>(1);
  schedule.rows_total = arena.take<int>(1);
  schedule.next_item = arena.take<int>(1);
  schedule.finished = arena.take<int>(experts);
  schedule.first_row = arena.take<int>(experts);
  schedule.overdue = arena.take<int>(1);
  schedule.rank = arena.take<SlotRank>(slots);
  schedule.slot_of_row = arena.take<int>(max_rows(slots, experts));
  schedule.tiles = arena.take<TokenTile>(max_token_tiles(slots, experts));
  return schedule;
}

// The expert of a slot, -1 where it is not one of ours: its router weight may be anything.
__device__ __forceinline__ int local_expert(const Problem& p, int64_t slot) {
  const uint32_t id = static_cast<uint32_t>(p.topk_ids[slot]) - static_cast<uint32_t>(p.expert_offset);
  return id < static_cast<uint32_t>(p.experts) ? static_cast<int>(id) : -1;
}

// GEMM1's operand: x rounded, weighted and quantized as asked for, gathered by expert, K padded and in the order of the
// weights' layout.
struct OperandArgs {
  Problem problem;
  Schedule schedule;
  __nv_bfloat16* operand;   // [hidden_padded / 64, rows, 64]
  float* row_gscale;        // [tokens]: where each token has its own
  float* factor;  // [tokens]: 1 / row_gscale; e4m3 with a gscale of each expert: [slots]; null: there is none
  int rows;  // max_rows
  int hidden_padded;
  int max_width;  // tokens of a tile
  ActFormat act_format;
  RemoteRows remote;
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
cudaError_t launch_e4m3_operand(const OperandArgs& args);  // launch_operand's, and launch_requantize's
cudaError_t launch_e4m3_requantize(const RequantizeArgs& args);
cudaError_t launch_bf16_operand(const OperandArgs& args);  // K in its own order, nothing quantized
cudaError_t launch_requantize(const RequantizeArgs& args);
cudaError_t launch_combine(const CombineArgs& args);

// A launch that may begin before the previous kernel of the stream has ended (dependent_launch.h).
template <class Args>
cudaError_t launch_dependent(void (*kernel)(Args), const Args& args, dim3 grid, int threads, int shared_bytes) {
  return launch_after(kernel, args, grid, threads, shared_bytes, args.problem.stream);
}

}  // namespace moeq::sm90
