// Shared memory of the decode kernel, and what all its parts need.
#pragma once
#include "decode_plan.h"
#include "../device/async.cuh"

namespace moeq::sm90::decode {

constexpr int kEnd = 2;   // nothing more of this GEMM; 0, 1: a stage of GEMM1, of GEMM2

// What the producers put into a stage.
struct alignas(16) StageInfo {
  int kind_and_turn;          // kind | part of K << 2 | units of this GEMM before this one << 4
  int entry;
  int row_tile;
  int k_and_tiles;            // first K tile << 8 | number of tiles
};

struct Fixed {
  uint64_t full[kMaxStages];    // a stage's copies have landed: its weights and its tokens' rows
  uint64_t issued[kMaxStages];  // its weights are under way
  uint64_t empty[kMaxStages];   // the worker's four warps have left it
  uint64_t summed[2][2][4];     // of each GEMM: all workers but one have left their sums of 16 rows in a buffer
  uint64_t taken[2][2][4];      // the one has added them up
  StageInfo stages[kMaxStages];
  alignas(16) uint32_t zeros[8];
  uint32_t warp_sums[kThreads / 32];
  float gscales[kGscales];      // of rows that are being quantized
  float pair_amax[kThreads / 32][32];   // of a warp's rows, for each token: half a block of 16
  unsigned long long target;    // of the grid's arrivals
  uint32_t* next_row[2];        // counters of GEMM1's and GEMM2's row tiles beyond each block's first
  int launch;                   // even or odd
  int entries;
  int widest;                   // largest number of tokens of an entry
  int ready;                    // the GEMMs up to this one have their tokens' rows in memory
};

// Of a slot, for the last step.
struct Share {
  float alpha, weight;        // alpha with what the accumulators lack
};

constexpr uint32_t kForeign = 0xffffffffu;

// Views of dynamic shared memory. `place[slot]` is entry << 8 | column, or kForeign.
struct Shared {
  Fixed* fixed;
  float4* sums;               // [2, workers, 4 warps, groups, 32]
  Entry* entries;
  Share* shares;
  uint32_t* place;
  uint16_t* slots;            // sorted by expert, ascending within one
  uint8_t* ring;
};

__host__ __device__ inline int sums_bytes(int groups) {
  return 2 * kThreads * groups * static_cast<int>(sizeof(float4));
}

__host__ __device__ inline int fixed_bytes(int slots, int groups) {
  const int of_slot = static_cast<int>(sizeof(Entry) + sizeof(Share) + sizeof(uint32_t) + sizeof(uint16_t));
  return static_cast<int>(sizeof(Fixed)) + sums_bytes(groups) + slots * of_slot;
}

__device__ __forceinline__ Shared shared_views(uint8_t* base, const Args& args, int groups) {
  static_assert(sizeof(Fixed) % 16 == 0, "what follows is aligned");
  Shared s;
  s.fixed = reinterpret_cast<Fixed*>(base);
  s.sums = reinterpret_cast<float4*>(base + sizeof(Fixed));
  s.entries = reinterpret_cast<Entry*>(base + sizeof(Fixed) + sums_bytes(groups));
  s.shares = reinterpret_cast<Share*>(s.entries + args.slots);
  s.place = reinterpret_cast<uint32_t*>(s.shares + args.slots);
  s.slots = reinterpret_cast<uint16_t*>(s.place + args.slots);
  s.ring = base + args.ring_offset;
  return s;
}

// All threads but the producers'.
__device__ __forceinline__ void sync_workers() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

// Two neighbouring warps; pair 0 to 7.
__device__ __forceinline__ void sync_pair(int pair) { asm volatile("bar.sync %0, 64;" ::"r"(pair + 2) : "memory"); }

// The slot's expert, or -1 if it is not one of ours. Any id may come.
__device__ __forceinline__ int local_expert(const Problem& p, int64_t slot) {
  const uint32_t expert = static_cast<uint32_t>(p.topk_ids[slot]) - static_cast<uint32_t>(p.expert_offset);
  return expert < static_cast<uint32_t>(p.experts) ? static_cast<int>(expert) : -1;
}

// Where this thread block finds GEMM1's operand.
__device__ __forceinline__ __nv_bfloat16* operand_of(const Args& args) {
  const int64_t copy = static_cast<int64_t>(args.operand_rows) * args.p.hidden;
  return args.operand + (args.private_operand ? blockIdx.x * copy : 0);
}

// For the last step; by all workers' threads but the first warp.
__device__ inline void load_shares(const Args& args, const Shared& s) {
  for (int slot = threadIdx.x - 32; slot < args.slots; slot += kThreads - 32) {
    if (s.place[slot] != kForeign) {
      const float alpha = args.p.g2_alphas == nullptr ? 1.0f : args.p.g2_alphas[s.entries[s.place[slot] >> 8].expert];
      s.shares[slot] = {alpha * args.accumulator_scale, args.p.weight_on_input ? 1.0f : args.p.topk_weights[slot]};
    }
  }
}

}  // namespace moeq::sm90::decode
