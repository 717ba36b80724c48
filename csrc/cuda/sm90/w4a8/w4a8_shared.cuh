// Shared memory of the persistent kernel: a ring of stages, each one step of 128 in K, and a ring of work.
#pragma once
#include "../device/async.cuh"
#include "w4a8_schedule.cuh"

namespace moeq::sm90::w4a8 {

struct GemmArgs {
  W4a8Problem problem;
  Schedule schedule;
  const uint8_t* operand;    // see w4a8_schedule.cuh
  const float* factor;       // [rows] of the operand; kBlocks: [k tiles, rows], as the operand lies
  const uint8_t* weights;    // [experts, row tiles, k tiles, bytes of a tile]
  const uint8_t* scales;     // kPacked: [experts, row tiles, scales of the row tile, then its exponents]
  WeightScales weight_scales;
  float* h;                  // GEMM1: [rows, inter] activated, or [rows, halves * inter] not yet
  void* y;                   // GEMM2: [slots, hidden], bfloat16 or float32 if y_wide
  bool y_wide;
  bool gated;                // gate and up rows alternate
  int* next_item;
  int k_tiles, row_tiles;
};

constexpr int kBlockTiles = 2;                              // row tiles of a block, one a warpgroup
constexpr int kWorkSlots = 2;
constexpr int kConsumerThreads = 128 * kBlockTiles;
constexpr int kGemmThreads = kConsumerThreads + 128;

// Tiles of at most `width` tokens: kMaxWidth, or kMaxSingle and a longer ring of stages.
template <int width>
struct Packed {
  static constexpr int kWidth = width;
  static constexpr int kStages = width <= kMaxSingle ? 7 : 5;
  static constexpr int kTileBytes = kPackedBytes;
  static constexpr int kTileScales = kScaleBytes;
  static constexpr bool kGroups = false;                    // scales of tokens for each 128 of K
};

template <int width>
struct Rows {
  static constexpr int kWidth = width;
  static constexpr int kStages = width <= kMaxSingle ? 6 : 4;
  static constexpr int kTileBytes = kFp8Bytes;
  static constexpr int kTileScales = 0;
  static constexpr bool kGroups = false;
};

template <int width>
struct Blocks : Rows<width> {
  static constexpr bool kGroups = true;
};

// A tile of tokens times a block of weight rows.
struct Work {
  int expert;      // -1: no more work
  int row_block;
  int width;
  int rows;        // tokens that exist, of `width`
  int first_row;   // of the operand
  int start;       // of the expert's rows in the operand
  int padded;      // rows of the expert there
};

// What the sums of a block's rows are multiplied by, and what is added.
struct RowFactors {
  float scale[kBlockTiles * kTileRows];   // of the expert, times that of the row
  float bias[kBlockTiles * kTileRows];
};

template <class Policy>
struct __align__(1024) GemmShared {
  uint8_t tokens[Policy::kStages][Policy::kWidth * kTileK];
  uint8_t weights[Policy::kStages][kBlockTiles * Policy::kTileBytes];
  uint8_t scales[Policy::kStages][kBlockTiles * Policy::kTileScales + (Policy::kTileScales == 0 ? 16 : 0)];
  alignas(16) float groups[Policy::kGroups ? Policy::kStages : 1][Policy::kGroups ? Policy::kWidth : 4];
  Work work[kWorkSlots];
  alignas(16) float factor[kWorkSlots][Policy::kWidth];   // of the work's tokens
  alignas(16) int slots[kWorkSlots][Policy::kWidth];
  RowFactors rows[kWorkSlots];
  uint64_t full[Policy::kStages], empty[Policy::kStages];
  uint64_t work_full[kWorkSlots], work_empty[kWorkSlots], rows_full[kWorkSlots];
};

template <class Policy>
__device__ __forceinline__ void init_barriers(GemmShared<Policy>& shared) {
  for (int i = 0; i < Policy::kStages; i++) {
    barrier_init(shared_address(&shared.full[i]), 1);
    barrier_init(shared_address(&shared.empty[i]), kConsumerThreads / 32);
  }
  for (int i = 0; i < kWorkSlots; i++) {
    barrier_init(shared_address(&shared.work_full[i]), 1);
    barrier_init(shared_address(&shared.rows_full[i]), 32);
    barrier_init(shared_address(&shared.work_empty[i]), kConsumerThreads / 32);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace moeq::sm90::w4a8
