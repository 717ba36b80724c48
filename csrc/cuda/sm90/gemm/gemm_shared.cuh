// Shared memory of the persistent kernel: rings of token stages, of weight stages and of work.
#pragma once
#include "gemm_args.cuh"
#include "../device/gemm_async.cuh"
#include "../device/ring.cuh"

namespace moeq::sm90 {

constexpr int kWorkSlots = 4;
constexpr int kRowsAPass = 128 / 8;   // eight threads copy the 128 bytes of a row

// What is multiplied, and what of a tile is on its way to memory.
template <class C>
struct GemmOperands {
  uint8_t tokens[C::kTokenStages][C::kTokenSteps][Sizes<C>::kTokenStepBytes];
  uint8_t staging[C::kConsumers][C::kMaxWidth * 128];   // 64 results of each token
  uint8_t codes[C::kWeightStages][Sizes<C>::kBlockTiles][Sizes<C>::kStageCodes];
  uint8_t scales[C::kWeightStages][Sizes<C>::kBlockTiles][Sizes<C>::kStageScales];
  // Of 16 intermediates: maxima, then BlockFactors; next to nothing where the format rounds none.
  float2 blocks[Sizes<C>::kHasBlocks ? C::kConsumers : 1][Sizes<C>::kHasBlocks ? C::kWarpgroupTiles : 1]
               [Sizes<C>::kHasBlocks ? C::kMaxWidth : 1][2];
};

template <class C>
struct __align__(1024) GemmShared : GemmOperands<C> {
  int slots[C::kConsumers][2][C::kMaxWidth];  // of this work and of the next
  Work work[kWorkSlots];
  uint64_t tokens_full[C::kTokenStages], tokens_empty[C::kTokenStages];
  uint64_t weights_full[C::kWeightStages], weights_empty[C::kWeightStages];
  uint64_t work_full[kWorkSlots], work_empty[kWorkSlots];
  uint64_t stored[kWorkSlots];  // the intermediate of this work is in memory
  uint64_t work_wanted;
};

template <int size>
__device__ __forceinline__ void init_ring(uint64_t (&full)[size], uint64_t (&empty)[size], int readers) {
  for (int i = 0; i < size; i++) {
    barrier_init(shared_address(&full[i]), 1);
    barrier_init(shared_address(&empty[i]), readers);
  }
}

template <class C>
__device__ __forceinline__ void init_barriers(GemmShared<C>& shared) {
  init_ring(shared.tokens_full, shared.tokens_empty, 4 * C::kConsumers);
  init_ring(shared.weights_full, shared.weights_empty, 4 * C::kConsumers);
  init_ring(shared.work_full, shared.work_empty, 4 * C::kConsumers + 3);
  for (int i = 0; i < kWorkSlots; i++) barrier_init(shared_address(&shared.stored[i]), 4 * C::kConsumers);
  barrier_init(shared_address(&shared.work_wanted), 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The next piece of work, once it has been found. The slot stays taken until `release_work`.
template <class C>
__device__ __forceinline__ Work wait_for_work(GemmShared<C>& shared, const Ring<kWorkSlots>& ring) {
  barrier_wait(shared_address(&shared.work_full[ring.slot]), ring.parity);
  return shared.work[ring.slot];
}

// The same by one thread, which keeps nothing in the slot.
template <class C>
__device__ __forceinline__ Work take_work(GemmShared<C>& shared, Ring<kWorkSlots>& ring) {
  const Work work = wait_for_work(shared, ring);
  barrier_arrive(shared_address(&shared.work_empty[ring.slot]));
  ring.advance();
  return work;
}

template <class C>
__device__ __forceinline__ void release_work(GemmShared<C>& shared, Ring<kWorkSlots>& ring) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&shared.work_empty[ring.slot]));
  ring.advance();
}

}  // namespace moeq::sm90
