// Sizes of a decode launch for very few tokens: what the host allocates and what both sides agree on.
#pragma once
#include "decode_plan.h"

namespace moeq::sm90::few {

constexpr int kWarps = 16;                       // that multiply; one more copies, and four add up
constexpr int kThreads = 32 * kWarps;
constexpr int kFinishers = 4;
constexpr int kBlockThreads = kThreads + 32 + 32 * kFinishers;
constexpr int kWorkers = 4;                      // groups of four warps, each takes every fourth tile
constexpr int kMaxSlots = 128;                   // tokens * top_k
constexpr int kMaxTokens = 16;
constexpr int kColumns = 8;                      // tokens of an entry at most: the N of mma.m16n8k16
constexpr int kMaxStages = 12;
constexpr int kTileBytes = 2048 + 256;           // that a stage has for a tile, whatever its format
constexpr int kMaxParts = 4;
constexpr int64_t kExchangePairs = 1 << 18;      // of 16 bytes, see decode_exchange.cuh

struct Args {
  Problem p;
  int row_tiles[2], k_tiles[2];                  // of GEMM1 and GEMM2
  int slots;
  int columns;                                   // of an entry at most: 1, 2, 4 or 8
  int stage_tiles, stages;
  int x_stride, h_stride;                        // bytes of an operand's row in shared memory
  int x_offset, h_offset, ring_offset;           // in shared memory
  float scale;                                   // what sums of decoded weights lack
  int outputs;                                   // where GEMM2's sums begin in the exchange
  uint8_t parts[2][kMaxSlots + 1];               // equal parts of K for that many entries: so that all blocks get the same
};

struct Plan {
  Args args;
  int grid;
  int shared_bytes;
};

// False where the problem is not one of very few tokens, or not of the plain kind.
cudaError_t make_plan(const Problem& p, Plan& plan, bool& fits);

cudaError_t run(const Plan& plan);

}  // namespace moeq::sm90::few
