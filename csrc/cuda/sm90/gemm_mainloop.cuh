// A warpgroup's share of a tile: 128 weight rows, decoded in registers, times `width` tokens in shared memory.
#pragma once
#include "decode_nvfp4.cuh"
#include "gemm_shared.cuh"
#include "gemm_wgmma.cuh"

namespace moeq::sm90 {

// acc[m][4 * j + 2 * h + b]: row 16 * warp + lane / 4 + 8 * h of tile m, token 8 * j + lane % 4 * 2 + b.
using Accumulators = float[kWarpgroupTiles][kMaxWidth / 2];

// How a tile's bytes become the fragments of its four K-steps; another format of weights needs another such struct.
struct Nvfp4Tile {
  uint4 codes;
  uint32_t scales;

  // From this thread's places in the first tile of the step.
  __device__ __forceinline__ void load(uint32_t code_address, uint32_t scale_address, int tile) {
    const uint32_t code_at = code_address + tile * kStageCodes, scale_at = scale_address + tile * kStageScales;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(codes.x), "=r"(codes.y), "=r"(codes.z), "=r"(codes.w)
                 : "r"(code_at)
                 : "memory");
    uint16_t pair;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(pair) : "r"(scale_at) : "memory");
    scales = pair;
  }

  __device__ __forceinline__ void decode(uint32_t (&fragments)[4][4]) const {
    const uint32_t low = scale_pair(scales, 0), high = scale_pair(scales, 1);
    decode_step(codes.x, low, high, fragments[0]);
    decode_step(codes.y, low, high, fragments[1]);
    decode_step(codes.z, low, high, fragments[2]);
    decode_step(codes.w, low, high, fragments[3]);
  }
};

// Where a warpgroup is in the rings, from tile to tile, and this thread's places in the first stage of weights.
struct Consumer {
  Ring<kTokenStages> tokens;
  Ring<kWeightStages> weights;
  uint32_t codes, scales;

  __device__ Consumer(GemmShared& shared, int warpgroup) {
    const int thread = threadIdx.x % 128, tile = warpgroup * kWarpgroupTiles;
    codes = shared_address(shared.codes[0][tile]) + thread * 16;
    scales = shared_address(shared.scales[0][tile]) + thread * 2;
  }
};

__device__ __forceinline__ void arrive_once_a_warp(uint32_t barrier, int lane) {
  if (lane == 0) barrier_arrive(barrier);
}

// While the tensor cores multiply one tile of 64 rows, the next one is decoded.
template <class Tile>
__device__ __forceinline__ void multiply_tile(Accumulators& acc, GemmShared& shared, Consumer& at, const Work& work) {
  uint32_t fragments[kWarpgroupTiles][4][4];
#pragma unroll
  for (int m = 0; m < kWarpgroupTiles; m++) {
#pragma unroll
    for (int i = 0; i < kMaxWidth / 2; i++) acc[m][i] = 0.0f;
  }
  const int index = work.width / 8 - 1, k_tiles = work.k_tiles, lane = threadIdx.x % 32;
  uint32_t previous = 0;   // the barrier that tells that the step before has been read
  uint32_t codes = 0, scales = 0;
  Tile tile;
  for (int k = 0; k < k_tiles; k++) {
    const int step = k % kWeightSteps;
    if (step == 0) {
      codes = at.codes + at.weights.slot * kBlockTiles * kStageCodes;
      scales = at.scales + at.weights.slot * kBlockTiles * kStageScales;
      barrier_wait(shared_address(&shared.weights_full[at.weights.slot]), at.weights.parity);
      tile.load(codes, scales, 0);
    }
    barrier_wait(shared_address(&shared.tokens_full[at.tokens.slot]), at.tokens.parity);
    const uint32_t tokens = shared_address(shared.tokens[at.tokens.slot]) / 16 | 1 << 16;
    const bool last_step = step == kWeightSteps - 1 || k == k_tiles - 1;
#pragma unroll
    for (int m = 0; m < kWarpgroupTiles; m++) {
      const Tile current = tile;
      if (m < kWarpgroupTiles - 1) {
        tile.load(codes, scales, m + 1);
      } else if (!last_step) {
        codes += kTileCodeBytes;
        scales += kTileScaleBytes;
        tile.load(codes, scales, 0);
      }
      wgmma_wait<kWarpgroupTiles - 1>();   // fragments[m] are free again
      if (m == kWarpgroupTiles - 1 && previous != 0) arrive_once_a_warp(previous, lane);
      current.decode(fragments[m]);
      multiply_step(acc[m], fragments[m], tokens, index);
    }
    if (last_step) {
      __syncwarp();
      arrive_once_a_warp(shared_address(&shared.weights_empty[at.weights.slot]), lane);
      at.weights.advance();
    }
    previous = shared_address(&shared.tokens_empty[at.tokens.slot]);
    at.tokens.advance();
  }
  wgmma_wait<0>();
  arrive_once_a_warp(previous, lane);
}

}  // namespace moeq::sm90
