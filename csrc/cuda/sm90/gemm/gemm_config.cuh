// The sizes of one kernel of the family: how many warpgroups multiply, how many weight rows and tokens at a time. Which
// one is best depends on the tokens an expert has (prefill.cu).
#pragma once
#include <type_traits>

#include "../formats/formats.cuh"
#include "../layout/layout.h"

namespace moeq::sm90 {

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
  // And to mxfp8 beside MXFP4 ones.
  static constexpr bool kQuantizesMx = std::is_same_v<typename Config::Format, Mxfp4Format>;
  static constexpr bool kHasBlocks = kQuantizes || kQuantizesMx;
};

}  // namespace moeq::sm90
