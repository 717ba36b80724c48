// Shared memory of the persistent kernel: rings of token stages, of weight stages and of work.
#pragma once
#include "gemm_args.cuh"
#include "gemm_async.cuh"
#include "ring.cuh"

namespace moeq::sm90 {

constexpr int kTokenStages = 5;                                // of 64 in K
constexpr int kWeightStages = 4;                               // of 128 in K
constexpr int kWeightSteps = 2;                                // steps of 64 in a stage of weights
constexpr int kWorkSlots = 2;
constexpr int kGemmThreads = 128 * (kConsumers + 1);
constexpr int kWarpgroupTiles = kBlockTiles / kConsumers;
constexpr int kTokenBytes = kMaxWidth * kTileK * 2;
constexpr int kStageCodes = kWeightSteps * kTileCodeBytes;     // of one tile of rows
constexpr int kStageScales = kWeightSteps * kTileScaleBytes;
constexpr int kStagingBytes = kMaxWidth * 128;                 // of a warpgroup: 64 results of each token
constexpr int kRowsAPass = 128 / 8;                            // eight threads copy the 128 bytes of a row
constexpr int kPasses = kMaxWidth / kRowsAPass;

struct __align__(1024) GemmShared {
  uint8_t tokens[kTokenStages][kTokenBytes];
  uint8_t staging[kConsumers][kStagingBytes];
  uint8_t codes[kWeightStages][kBlockTiles][kStageCodes];
  uint8_t scales[kWeightStages][kBlockTiles][kStageScales];
  float2 blocks[kConsumers][kWarpgroupTiles][kMaxWidth][2];   // of 16 intermediates: maxima, then BlockFactors
  int slots[kConsumers][kMaxWidth];
  Work work[kWorkSlots];
  uint64_t tokens_full[kTokenStages], tokens_empty[kTokenStages];
  uint64_t weights_full[kWeightStages], weights_empty[kWeightStages];
  uint64_t work_full[kWorkSlots], work_empty[kWorkSlots];
};

template <int size>
__device__ __forceinline__ void init_ring(uint64_t (&full)[size], uint64_t (&empty)[size], int readers) {
  for (int i = 0; i < size; i++) {
    barrier_init(shared_address(&full[i]), 1);
    barrier_init(shared_address(&empty[i]), readers);
  }
}

__device__ __forceinline__ void init_barriers(GemmShared& shared) {
  init_ring(shared.tokens_full, shared.tokens_empty, 4 * kConsumers);
  init_ring(shared.weights_full, shared.weights_empty, 4 * kConsumers);
  init_ring(shared.work_full, shared.work_empty, 4 * kConsumers + 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The next piece of work, once the producer has found it. The slot stays taken until `release_work`.
__device__ __forceinline__ Work wait_for_work(GemmShared& shared, const Ring<kWorkSlots>& ring) {
  barrier_wait(shared_address(&shared.work_full[ring.slot]), ring.parity);
  return shared.work[ring.slot];
}

__device__ __forceinline__ void release_work(GemmShared& shared, Ring<kWorkSlots>& ring) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&shared.work_empty[ring.slot]));
  ring.advance();
}

}  // namespace moeq::sm90
