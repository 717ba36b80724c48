// What the host and the persistent kernels of both GEMMs know of each other: sizes, arguments, the order of work, and
// what a launch has to know of a kernel.
#pragma once
#include <cuda_bf16.h>
#include <type_traits>

#include "../formats/formats.cuh"
#include "../layout/layout.h"
#include "../prefill/schedule.cuh"
#include "../problem/problem.h"

namespace moeq::sm90 {

// e4m3 weights in the tiles of w4a8_layout.h beside bfloat16 operands, with scales of rows or of what has many, and
// MXFP8: one format as far as these kernels are concerned.
struct ByteFormat {
  static constexpr int kTileScaleBytes = 0;
  static constexpr float kAccumulatorScale = 1.0f;
};

// e4m3 weights beside activations that are e4m3 codes, or float16: all become float16, which holds the values of codes.
struct W8a8Format : ByteFormat {};
template <class Format>
inline constexpr bool kIsW8a8 = std::is_same_v<Format, W8a8Format>;

// The same with scales of 128 x 128; and int8 weights, with scales of rows.
struct ByteBlockFormat : ByteFormat {};
struct ByteInt8Format : ByteFormat {};
template <class Format>
inline constexpr bool kIsInt8 = std::is_same_v<Format, ByteInt8Format>;
template <class Format>
inline constexpr bool kIsByte = std::is_same_v<Format, ByteFormat>;

// Whether operands are float16.
template <class Format>
inline constexpr bool kIsHalf = kIsW8a8<Format> || std::is_same_v<Format, Nvfp4HalfFormat>;

constexpr int kWeightSteps = 2;  // steps of 64 in K in a stage of weights

// Many tokens an expert: two warpgroups with all the registers, 128 rows and up to 160 tokens each. Each decodes while
// the tensor cores work for it.
template <class F>
struct WideConfig {
  using Format = F;
  static constexpr int kMaxWidth = 160;  // tokens of a tile: what the accumulators hold
  static constexpr int kConsumers = 2;  // warpgroups that multiply; one more loads
  static constexpr int kWarpgroupTiles = 2;  // tiles of 64 weight rows that each has at a time
  static constexpr bool kTakesTurns = false;  // a warpgroup decodes or multiplies, and others fill the gaps
  static constexpr int kTokenSteps = 1;  // steps of 64 in K in a stage of tokens
  static constexpr int kTokenStages = 5;
  static constexpr int kWeightStages = 4;
  static constexpr int kBlocks = 1;  // of a multiprocessor
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
};

// Decoding takes about as long as multiplying: four warpgroups hide each other's latencies.
template <class F>
struct NarrowConfig {
  using Format = F;
  static constexpr int kMaxWidth = 96;
  static constexpr int kConsumers = 4;
  static constexpr int kWarpgroupTiles = 1;
  static constexpr bool kTakesTurns = true;
  static constexpr int kTokenSteps = 2;
  static constexpr int kTokenStages = 3;
  static constexpr int kWeightStages = 5;
  static constexpr int kBlocks = 1;
  static constexpr int kProducerRegisters = 32;
  static constexpr int kConsumerRegisters = 112;
};

// Few tokens an expert: the rate of memory decides, and two blocks on a multiprocessor fill each other's epilogues.
template <class F>
struct SlimConfig {
  using Format = F;
  static constexpr int kMaxWidth = 32;
  static constexpr int kConsumers = 2;
  static constexpr int kWarpgroupTiles = 2;
  static constexpr bool kTakesTurns = true;
  static constexpr int kTokenSteps = 2;
  static constexpr int kTokenStages = 3;
  static constexpr int kWeightStages = F::kTileScaleBytes > 256 ? 3 : 4;  // two blocks share a multiprocessor's memory
  static constexpr int kBlocks = 2;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 104;
};

// Where tiles are narrow, scaling sums is less than what weights with float16 or float32 scales take in registers.
template <class Format>
using SlimFormat =
    std::conditional_t<std::is_same_v<Format, Int4ZeroFormat<true>>, Int4SumsFormat,
                       std::conditional_t<std::is_same_v<Format, Int4FloatFormat>, Int4FloatSumsFormat, Format>>;

// What follows from them.
template <class Config>
struct Sizes {
  static constexpr int kBlockTiles = Config::kConsumers * Config::kWarpgroupTiles;
  static constexpr int kThreads = 128 * (Config::kConsumers + 1);
  static constexpr int kTokenStepBytes = Config::kMaxWidth * kTileK * 2;
  static constexpr int kStageCodes = kWeightSteps * kTileCodeBytes;  // of one tile of rows
  static constexpr int kStageScales = kWeightSteps * Config::Format::kTileScaleBytes;
  static constexpr int kGatedColumns = Config::kWarpgroupTiles * kTileRows / 2;  // of a warpgroup
  // Activations are quantized to NVFP4 only beside NVFP4 weights.
  static constexpr bool kQuantizes = std::is_same_v<typename Config::Format, Nvfp4Format>;
  // And to mxfp8 beside MXFP4 and MXFP8 ones.
  static constexpr bool kQuantizesMx =
      std::is_same_v<typename Config::Format, Mxfp4Format> || std::is_same_v<typename Config::Format, ByteFormat>;
  static constexpr bool kHasBlocks = kQuantizes || kQuantizesMx;
};

// What the persistent kernel of both GEMMs reads and writes.
struct GemmArgs {
  Problem problem;
  Schedule schedule;
  const __nv_bfloat16* operand;  // [hidden_padded / 64, rows, 64]; float16 where kIsHalf
  const float* operand_factor;  // [rows]: what products of a row lack; null: nothing
  const float* operand_scale;  // W8a8Format: [hidden_padded / 128, rows], of 128 values of K each; null: 1
  __nv_bfloat16* h;  // [inter_padded / 64, rows, 64], likewise
  float* h_scale;  // [inter_padded / 128, rows], likewise; null: groups of the intermediate are not rounded
  float* h_wide;  // [rows, inter_padded] in natural order, where quantization needs whole rows; or null
  const float* h_factor;  // [rows], likewise
  void* y;  // [slots, hidden] by slot: bfloat16, or float32 if y_wide
  bool y_wide;
  int rows;  // max_rows
  int hidden_padded, inter_padded;
  int tiles13, tiles2;  // of 64 rows, an expert
  int blocks13, blocks2;  // of as many tiles as a thread block multiplies at a time
  bool first, second;  // which of the GEMMs to do
  bool mx;  // the intermediate is rounded to mxfp8
};

// A tile of tokens times a block of weight rows. GEMM2's wait until their expert's GEMM1 is finished: they come after
// all of GEMM1's, which wait for nothing, so that someone always works.
struct Work {
  int expert;  // -1: no more work
  int second;  // GEMM2
  int row_block;
  int width;  // tokens, a multiple of 8
  int rows;  // of them real
  int first_row;  // a multiple of 8
  int k_tiles;
  int arrivals;  // in `finished` that mark the end of the expert's GEMM1
};

__device__ __forceinline__ Work find_work(const GemmArgs& args, int tiles_total, int item) {
  Work work{-1, 0, 0, 0, 0, 0, 0, 0};
  const int items13 = args.first ? tiles_total * args.blocks13 : 0;
  work.second = item >= items13;
  const int blocks = work.second ? args.blocks2 : args.blocks13;
  const int local = work.second ? item - items13 : item;
  if (work.second && (!args.second || local >= tiles_total * blocks)) return work;
  // Items of an expert: for each block of weight rows one after another all its tiles, so that weights come from the
  // cache from the second tile on.
  const TokenTile some = args.schedule.tiles[local / blocks];  // of the expert
  const int within = local - some.first * blocks;
  const TokenTile tile = args.schedule.tiles[some.first + within % some.tiles];
  work.expert = tile.expert;
  work.row_block = within / tile.tiles;
  work.rows = tile.rows;
  work.width = tile.width;
  work.first_row = tile.start;
  work.k_tiles = (work.second ? args.inter_padded : args.hidden_padded) / kTileK;
  work.arrivals = args.first ? tile.tiles * args.blocks13 : 0;
  return work;
}

// The end of GEMM1: silu and swigluoai, the other gated activations, those without a gate.
enum class Finish { kSwiglu, kGated, kPlain };
constexpr int kFinishes = 3;

// A persistent kernel, and what a launch has to know of it.
template <class Args>
struct Variant {
  void (*kernel)(Args);
  int shared_bytes;
  int threads;
  int blocks;  // of a multiprocessor
  int block_tiles;  // of 64 weight rows that a thread block multiplies at a time
  int max_width;  // tokens of a tile
};
using GemmVariant = Variant<GemmArgs>;

struct GemmVariants {
  GemmVariant of_shape[kShapes];
};

// The kernels of both GEMMs, of a format (gemm_fp4.cu and others).
template <class Format, Finish finish>
GemmVariants gemm_variants();

// Those of one GEMM at a time, with adapters beside the weights (problem/tiled_problem.h).
struct RowsArgs : GemmArgs {
  const __nv_bfloat16* low;  // [slots, rank_chunks(ranks), 2, kRankChunk]; null: no adapters
  const __nv_bfloat16* factor;  // [experts, rows of the weights, ranks]
  int ranks;  // a multiple of 8
  __nv_bfloat16* hidden_rows;  // [slots, inter] by slot: the intermediate; null: h alone
  int* next_of_second;  // the schedule's next_item of the launch of GEMM2, which GEMM1's sets to 0; or null
};
using RowsVariant = Variant<RowsArgs>;

template <class Format, Shape shape>
RowsVariant rows_variant();

}  // namespace moeq::sm90
