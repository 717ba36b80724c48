// Sizes of a decode launch for very few tokens: what the host allocates and what both sides agree on.
#pragma once
#include "decode_plan.h"

namespace moeq::sm90::few {

constexpr int kWarps = 16;                       // that multiply; one more copies, and four add up
constexpr int kThreads = 32 * kWarps;
constexpr int kFinishers = 4;
constexpr int kBlockThreads = kThreads + 32 + 32 * kFinishers;
constexpr int kWorkers = 8;                      // pairs of warps, each takes every eighth tile
constexpr int kMaxSlots = 128;                   // tokens * top_k
constexpr int kMaxTokens = 8;                    // more take as long in the other kernel, or less
constexpr int kColumns = 8;                      // tokens of an entry at most: the N of mma.m16n8k16
constexpr int kMaxStages = 12;
constexpr int kTileBytes = 2048 + 256;           // that a stage has for a tile, whatever its format
constexpr int kMaxParts = 4;
constexpr int64_t kExchangePairs = 1 << 18;      // of 16 bytes, see decode_exchange.cuh

// What the kernel is compiled for, as code far apart takes long to fetch: W4A16 or W4A4 with given scales where the
// activation is silu or swiglu and nothing has a bias, and everything.
enum class Kind : int { kPlain, kQuantized, kGeneral };

struct Args {
  Problem p;
  int row_tiles[2], k_tiles[2];                  // of GEMM1 and GEMM2
  int slots;
  int columns;                                   // of an entry at most: 1, 2, 4 or 8
  int stage_tiles, stages;
  int x_stride, h_stride;                        // bytes of an operand's row in shared memory
  int x_offset, h_offset, sums_offset, ring_offset;   // in shared memory
  float scale;                                   // what sums of decoded weights lack
  int outputs;                                   // where GEMM2's sums begin in the exchange
  uint8_t parts[2][kMaxSlots + 1];               // equal parts of K for that many entries: all blocks get the same
};

struct Plan {
  Args args;
  Kind kind;
  int grid;
  int shared_bytes;
};

// False where the problem is not one of very few tokens, or not of the plain kind.
cudaError_t make_plan(const Problem& p, Plan& plan, bool& fits);

cudaError_t run(const Plan& plan);

}  // namespace moeq::sm90::few
