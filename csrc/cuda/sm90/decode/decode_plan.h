// Sizes of a decode launch: what the host allocates and what both sides agree on.
#pragma once
#include "../layout/layout.h"
#include "../problem/tiled_problem.h"

#include <cuda_bf16.h>

namespace moeq::sm90::decode {

constexpr int kWorkers = 4;                 // warpgroups of a thread block; each takes every fourth stage
constexpr int kThreads = 128 * kWorkers;    // that multiply; two warps more copy
constexpr int kBlockThreads = kThreads + 64;
constexpr int kStageTiles = 16;  // tiles of one row that a stage holds at most; fewer where tokens need room
constexpr int kLeastStageTiles = 8;  // with fewer, some sizes would not divide among the workers
constexpr int kMaxStages = 16;
constexpr int kPrivateBlocks = 1024;  // of 16 values; more of an operand are made by all thread blocks together
constexpr int kGscales = 64;
constexpr int kGroupTokens = 8;  // the N of mma.m16n8k16

// One expert's slots, or up to 8 * groups of them. Routing makes at most one entry for each slot.
struct Entry {
  uint16_t expert, first, count, unused;
};

// What thread blocks must know of each other. Launches that take the whole device follow each other here without
// anybody zeroing it: a launch adds kArrivals for each block to `arrivals`, so the count says which launch this is, and
// launches take turns at the two sets of `taken`, each clearing the other's. That needs launches never to overlap, and
// all to be of one size: each takes all shared memory of all multiprocessors (and all at once: it is cooperative), so a
// block of the next one can only start where one of this one has ended, which is after the last arrival of all. Any
// other launch, of a green context or under MPS, has a state of its own in its workspace, zeroed before it.
struct State {
  alignas(128) unsigned long long arrivals;
  alignas(128) uint32_t taken[2][2][32];
};
constexpr int kArrivals = 4;

// Everything the kernel gets.
struct Args {
  Problem p;
  State* state;
  int row_tiles[2], k_tiles[2];  // of GEMM1 and GEMM2
  int slots;  // tokens * top_k
  __nv_bfloat16* operand;  // GEMM1's, [tokens or slots, hidden], where it is not x itself
  int operand_rows;
  bool private_operand;  // each block makes all of it for itself: [blocks, rows, hidden]
  ActFormat act_format;  // what p.a1 and p.a2 round to
  float* operand_factor;  // [operand_rows]: what products of rounded rows lack; null: nothing
  const float* sums_factor;  // operand_factor, or that of tokens which the caller has rounded; null: 1
  int slots_of_factor;  // neighbouring slots that have one
  float* wide;  // [slots, inter] before it is rounded, where not GEMM1 does that; or null
  __nv_bfloat16* h;  // [slots, inter]
  float* h_factor;  // [slots], as operand_factor
  float* y;  // [output_parts, slots, hidden]
  int output_parts;  // equal parts of GEMM2's K, units of work of their own
  int tile_scale_bytes;  // of the weights' format
  float accumulator_scale;
  int ring_offset, ring_bytes;  // in shared memory
};

struct Plan {
  Args args;
  const void* kernel;
  int groups;  // of eight tokens, that one reading of weights serves
  int grid;
  int shared_bytes;
  size_t workspace;  // bytes
};

inline bool makes_operand(const Problem& p) { return p.a1 != ActScale::kNone || p.weight_on_input; }
__host__ __device__ inline bool operand_by_slot(const Problem& p) { return p.a1 == ActScale::kExpert; }

cudaError_t make_plan(const RoundedProblem& p, Plan& plan);

}  // namespace moeq::sm90::decode
