// The sizes of the persistent kernels for weights of 8 bits, and their shared memory. Weights lie in the tiles of
// w4a8_layout.h, 64 rows by 128 values of K; a stage has one of each tile of rows, and both steps of tokens.
//
// A step of 128 in K starts from zero and is added to the sums in float32, times the scales of its rows: that is half
// of a tile's accumulators more, so tiles have fewer tokens than those of 4-bit weights.
#pragma once
#include "gemm_kernel.cuh"
#include "../layout/w4a8_layout.h"

namespace moeq::sm90 {

struct ByteFormat {
  static constexpr int kTileScaleBytes = 0;
  static constexpr float kAccumulatorScale = 1.0f;
};
template <>
inline constexpr bool kHasNeighbours<ByteFormat> = true;

constexpr int kByteSlim = 32, kByteWide = 96;
constexpr int kMxfp8ScaleBytes = 2 * tile_scale_bytes(Format::kMxfp8);   // of a tile

template <int width>
struct ByteConfig {
  static_assert(width == kByteSlim || width == kByteWide);
  using Format = ByteFormat;
  static constexpr int kMaxWidth = width;
  static constexpr int kConsumers = 2;
  static constexpr int kWarpgroupTiles = 2;
  static constexpr int kTokenSteps = 2;
  static constexpr int kTokenStages = 3;
  static constexpr int kWeightStages = width == kByteSlim ? 2 : 3;   // of 128 in K
  static constexpr int kBlocks = width == kByteSlim ? 2 : 1;
  static constexpr int kProducerRegisters = width == kByteSlim ? 24 : 40;
  static constexpr int kConsumerRegisters = width == kByteSlim ? 104 : 232;
};

template <int width>
struct GemmOperands<ByteConfig<width>> {
  using C = ByteConfig<width>;
  uint8_t tokens[C::kTokenStages][C::kTokenSteps][Sizes<C>::kTokenStepBytes];
  uint8_t codes[C::kWeightStages][Sizes<C>::kBlockTiles][w4a8::kFp8Bytes];
  uint8_t staging[C::kConsumers][C::kMaxWidth * 128];
  uint8_t scales[C::kWeightStages][Sizes<C>::kBlockTiles][kMxfp8ScaleBytes];   // where they lie in tiles
};

}  // namespace moeq::sm90
