// What the host and the kernels of GEMMs on fp8 activations know of each other: which rows of the token operand belong
// to which expert, in which tiles they are multiplied, arguments, and shared memory.
//
// The operand holds the rows of an expert together, their number rounded up to 8: [k tiles, rows, 128 bytes], swizzled
// as wgmma reads it, so that any tile of tokens is one bulk copy.
#pragma once
#include <type_traits>

#include "../device/async.cuh"
#include "../launch/launches.h"
#include "../layout/w4a8_layout.h"
#include "../prefill/schedule.cuh"
#include "../problem/tiled_problem.h"

namespace moeq::sm90::w4a8 {

struct PackedNvfp4;
struct PackedMxfp4;   // of weights_packed.cuh
struct PackedInt4;
struct PackedInt4Zero;  // of weights_int4_e4m3.cuh

constexpr int kMaxWidth = 256;      // tokens of a tile
constexpr int kMaxSingle = 160;     // up to here one instruction spans the tile
constexpr int kMaxNarrow = 72;      // where experts have few tokens: more stages, as weights are what is waited for
constexpr int kMaxPaired = 144;     // two instructions of up to kMaxNarrow tokens, of three warpgroups
constexpr int kNarrowTokens = 40;   // of an expert, in the mean, up to which tiles are so narrow

struct TokenTile {
  int expert;
  int first;    // index of the expert's first tile
  int tiles;    // of the expert
  int start;    // of the expert's rows in the operand
  int count;    // of its tokens
  int width;    // of the tiles: a width that the kernels have
  int unused[2];
};

// Where a row lies: itself, and the rows of its expert, their number rounded up to 8.
struct Place {
  int row;      // -1: nobody's
  int expert;
  int start, rows;
};

struct Schedule {
  int* tiles_total;    // [1]
  int* next_item;      // [2]: of the GEMMs
  int* start;          // [experts + 1]: first row, a multiple of 8
  int* count;          // [experts]
  SlotRank* rank;      // [slots]
  int* slot_of_row;    // [rows]; -1: nobody's. Written when tokens are quantized, but for the -1
  Place* place_of_row; // [rows], likewise
  TokenTile* tiles;    // [max_tiles]
};

__host__ __device__ constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }

inline int least_of(int a, int b) { return a < b ? a : b; }
inline int max_rows(int slots, int experts) { return round_up(slots + 7 * least_of(slots, experts), 8); }
// An expert's tiles hold at least so many tokens each but for one: `fill_tiles` below.
constexpr int kLeastTokens = 64;
inline int max_tiles(int slots, int experts) { return least_of(slots, experts) + slots / kLeastTokens; }

// widest: tokens of a tile at most.
__host__ __device__ constexpr int round_width(int tokens, int widest) {
  const bool by_sixteen = widest == kMaxPaired ? tokens > kMaxNarrow
                          : tokens <= 96       ? widest != kMaxNarrow
                                               : tokens > kMaxSingle;
  return round_up(tokens, by_sixteen ? 16 : 8);
}

__host__ __device__ constexpr int tile_width(int count, int tiles, int widest) {
  return round_width((count + tiles - 1) / tiles, widest);
}

// Tile after tile: what its tokens cost, but no less than decoding the weights does, and some time between tiles.
__host__ __device__ constexpr int tiles_cost(int count, int tiles, int widest) {
  const int width = tile_width(count, tiles, widest);
  return tiles * (16 + (width < 64 ? 64 : width));
}

// Tiles of at most `widest` tokens.
__host__ __device__ constexpr int tiles_for(int count, int widest) {
  const int least = (count + widest - 1) / widest;
  return least > 1 && tiles_cost(count, least + 1, widest) < tiles_cost(count, least, widest) ? least + 1 : least;
}

constexpr bool fill_tiles(int widest) {
  for (int count = 1; count <= 16 * kMaxWidth; count++) {
    if (tiles_for(count, widest) > 1 + count / kLeastTokens) return false;
  }
  return true;
}
static_assert(fill_tiles(kMaxWidth) && fill_tiles(kMaxSingle) && fill_tiles(kMaxNarrow) && fill_tiles(kMaxPaired),
              "Schedule::tiles has room for no more");

// Rows of activations -> rows of the token operand, in w4a8_quantize.cu.
struct QuantizeArgs {
  W4a8Problem problem;
  Schedule schedule;
  const float* h;      // of GEMM1: [rows, inter] activated, or [rows, halves * inter] not yet
  bool activated;
  uint8_t* operand;    // [rows, K padded], see the head of this file
  float* factor;       // [rows]: multiplies accumulators; kBlocks: [k tiles, rows], as the operand lies
  int k_tiles;
  uint32_t order = 0x3210;  // of each four values' bytes, as __byte_perm has it
};

cudaError_t launch_quantize_tokens(const QuantizeArgs& args);
cudaError_t launch_quantize_intermediate(const QuantizeArgs& args, int rows);

// The bytes of four values where weights are INT4 (weights_int4_e4m3.cuh).
constexpr uint32_t kInt4Order = 0x3120;

// Shared memory of the persistent kernel: a ring of stages, each one step of 128 in K, and a ring of work.
struct GemmArgs {
  W4a8Problem problem;
  Schedule schedule;
  const uint8_t* operand;    // see w4a8_shared.cuh
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
  uint8_t* codes;            // TokensFirst, GEMM1: the operand of GEMM2, and
  float* code_factor;        // its groups' scales
  int half_tiles;            // INT4: K in tiles of 64, as layout.h has them
};

constexpr int kWorkSlots = 2;

// Tiles of at most `width` tokens: kMaxWidth, or kMaxSingle and a longer ring of stages.
template <int width, class Codes_, int tiles = 2, int stages = width <= kMaxSingle ? 7 : 5>
struct PackedCodes {
  using Codes = Codes_;
  static constexpr int kWidth = width;
  static constexpr int kBlockTiles = tiles;   // row tiles of a block, one a warpgroup
  static constexpr int kStages = stages;
  static constexpr int kWarpgroups = tiles;                 // that multiply
  static constexpr int kTileBytes = kPackedBytes;
  static constexpr int kTileScales = Codes::kScaleBytes;
  static constexpr bool kGroups = false;                    // scales of tokens for each 128 of K
  static constexpr bool kInt4 = Codes::kInt4;  // in the layout of layout.h, rows' scales for each 128 of K
};

template <int width>
using Packed = PackedCodes<width, PackedNvfp4>;
template <int width>
using PackedMx = PackedCodes<width, PackedMxfp4>;
using PackedNarrow = PackedCodes<kMaxNarrow, PackedNvfp4, 3, 9>;  // scales take the room of a stage
using PackedMxNarrow = PackedCodes<kMaxNarrow, PackedMxfp4, 3, 10>;
template <int width>
using Int4 = PackedCodes<width, PackedInt4>;
template <int width>
using Int4Zero = PackedCodes<width, PackedInt4Zero>;
using Int4Narrow = PackedCodes<kMaxNarrow, PackedInt4, 3, 10>;
using Int4Paired = PackedCodes<kMaxPaired, PackedInt4, 3, 7>;
using Int4ZeroPaired = PackedCodes<kMaxPaired, PackedInt4Zero, 3, 6>;
using Int4ZeroNarrow = PackedCodes<kMaxNarrow, PackedInt4Zero, 3, 9>;

template <int width>
struct Rows {
  static constexpr int kWidth = width;
  static constexpr int kBlockTiles = 2;
  static constexpr int kWarpgroups = 2;
  static constexpr int kStages = width <= kMaxSingle ? 6 : 4;
  static constexpr int kTileBytes = kFp8Bytes;
  static constexpr int kTileScales = 0;
  static constexpr bool kGroups = false;
  static constexpr bool kInt4 = false;
};

template <int width>
struct Blocks : Rows<width> {
  static constexpr bool kGroups = true;
};

// As Blocks, but tokens are the first factor, in tiles of 128 and what is left (w4a8_tokens_first.cuh).
constexpr int kPartTokens = 64;  // of a warpgroup
constexpr int kRestTokens = 16;
struct TokensFirst : Blocks<2 * kPartTokens + kRestTokens> {
  static constexpr int kBlockTiles = 4;
  static constexpr int kStages = 4;
};

template <class Policy>
constexpr bool kIsTokensFirst = std::is_same_v<Policy, TokensFirst>;

// Tiles of an expert for TokensFirst: 128 tokens, the last one fewer, or, if what is left joins it, up to 144.
__host__ __device__ inline int tiles_of_tokens_first(int count, bool joins) {
  constexpr int kTokens = 2 * kPartTokens;
  return (count + kTokens - 1) / kTokens - (joins && count > kTokens && (count - 1) % kTokens < kRestTokens ? 1 : 0);
}

// A tile of tokens times a block of weight rows.
struct Work {
  int expert;  // -1: no more work
  int row_block;
  int width;
  int rows;  // tokens that exist, of `width`
  int first_row;  // of the operand
  int start;  // of the expert's rows in the operand
  int padded;  // rows of the expert there
};

template <class Policy>
constexpr int kConsumerThreads = 128 * Policy::kWarpgroups;
template <class Policy>
constexpr int kGemmThreads = kConsumerThreads<Policy> + 128;

// What the sums of a block's rows are multiplied by, and what is added.
template <int tiles>
struct WeightRows {
  float scale[tiles * kTileRows];  // of the expert, times that of the row
  float bias[tiles * kTileRows];
};

template <class Policy>
struct __align__(1024) GemmShared {
  uint8_t tokens[Policy::kStages][Policy::kWidth * kTileK];
  uint8_t weights[Policy::kStages][Policy::kBlockTiles * Policy::kTileBytes];
  uint8_t scales[Policy::kStages][Policy::kBlockTiles * Policy::kTileScales + (Policy::kTileScales == 0 ? 16 : 0)];
  alignas(16) float groups[Policy::kGroups ? Policy::kStages : 1][Policy::kGroups ? Policy::kWidth : 4];
  Work work[kWorkSlots];
  // Of the work's tokens; where groups have their own, maxima that warpgroups exchange.
  alignas(16) float factor[kWorkSlots][kIsTokensFirst<Policy> ? 256 : Policy::kWidth];
  alignas(16) int slots[kWorkSlots][Policy::kWidth];
  WeightRows<Policy::kBlockTiles> rows[kWorkSlots];
  // TokensFirst: a thread's sums of the rest, which has no registers left.
  alignas(16)
      float4 rest[kIsTokensFirst<Policy> ? kRestTokens / 4 : 0][kIsTokensFirst<Policy> ? kConsumerThreads<Policy> : 0];
  // INT4: a warp's results of 16 tokens and its 16 rows, on their way to memory.
  alignas(16) uint4 results[Policy::kInt4 ? kConsumerThreads<Policy> / 32 : 0][Policy::kInt4 ? 32 : 0];
  uint64_t full[Policy::kStages], empty[Policy::kStages];
  uint64_t work_full[kWorkSlots], work_empty[kWorkSlots], rows_full[kWorkSlots];
};

template <class Policy>
__device__ __forceinline__ void init_barriers(GemmShared<Policy>& shared) {
  for (int i = 0; i < Policy::kStages; i++) {
    barrier_init(shared_address(&shared.full[i]), 1);
    barrier_init(shared_address(&shared.empty[i]), kConsumerThreads<Policy> / 32);
  }
  for (int i = 0; i < kWorkSlots; i++) {
    barrier_init(shared_address(&shared.work_full[i]), 1);
    barrier_init(shared_address(&shared.rows_full[i]), 32);
    barrier_init(shared_address(&shared.work_empty[i]), kConsumerThreads<Policy> / 32);
  }
  fence_barrier_init();
}

}  // namespace moeq::sm90::w4a8
