// The sizes of the persistent kernel for bfloat16 weights, and its shared memory. Weights are wgmma's A operand as they
// lie in shared memory, so that accumulators have nearly all of the registers: 256 rows by up to 192 tokens.
#pragma once
#include "bf16_variant.h"
#include "../gemm/gemm_kernel.cuh"

namespace moeq::sm90 {

struct Bf16Format {
  static constexpr int kTileScaleBytes = 0;
  static constexpr float kAccumulatorScale = 1.0f;
};
template <>
inline constexpr bool kKeepsOrder<Bf16Format> = true;

struct Bf16Config {
  using Format = Bf16Format;
  static constexpr int kMaxWidth = 192;
  static constexpr int kConsumers = 2;
  static constexpr int kWarpgroupTiles = 2;
  static constexpr int kTokenSteps = 1;
  static constexpr int kTokenStages = 3;
  static constexpr int kWeightStages = 3;  // of one step of 64 in K
  static constexpr int kBlocks = 1;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;
};

constexpr int kBf16TileBytes = kTileRows * kTileK * 2;
constexpr int kBf16BlockRows = Sizes<Bf16Config>::kBlockTiles * kTileRows;

template <>
struct GemmOperands<Bf16Config> {
  using C = Bf16Config;
  uint8_t tokens[C::kTokenStages][C::kTokenSteps][Sizes<C>::kTokenStepBytes];
  uint8_t weights[C::kWeightStages][Sizes<C>::kBlockTiles][kBf16TileBytes];
  uint8_t staging[C::kConsumers][C::kMaxWidth * 128];
};

}  // namespace moeq::sm90
