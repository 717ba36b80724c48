// Both GEMMs of a layer in one persistent kernel. Some warpgroups multiply, one loads.
#pragma once
#include "gemm_finish_gated.cuh"
#include "gemm_finish_plain.cuh"
#include "gemm_finish_second.cuh"
#include "gemm_producer.cuh"
#include "gemm_variant.h"

namespace moeq::sm90 {

template <class C, Finish finish>
__device__ __forceinline__ void consume(const GemmArgs& args, GemmShared<C>& shared) {
  Staging staging(shared, threadIdx.x / 128);
  Ring<kWorkSlots> work_ring;
  Consumer<C> at(shared, staging.warpgroup);
  while (true) {
    const Work work = wait_for_work(shared, work_ring);
    if (work.expert < 0) break;
    fetch_alphas<typename C::Format>(args.problem, work, staging);
    int* slots = shared.slots[staging.warpgroup][work_ring.slot % 2];
    if (work.second) prefetch_slots(args, work, staging, slots);
    Accumulators<C> acc;
    begin_tile(at, args, work);
    multiply_tile(acc, shared, at, work);
    if (work.second) {
      finish_second<C>(args, shared, work, acc, staging, slots);
    } else {
      if constexpr (finish == Finish::kPlain) {
        finish_plain<C>(args, work, acc, staging);
      } else {
        finish_gated<C, finish>(args, shared, work, acc, staging);
      }
      __syncwarp();
      arrive_once_a_warp(shared_address(&shared.stored[work_ring.slot]), staging.lane);
    }
    release_work(shared, work_ring);
  }
}

// What a block of the kernel does, in 1024 bytes more than GemmShared. `weights`: what load_weights needs.
template <class C, Finish finish, class WeightArgs>
__device__ __forceinline__ void run_block(const GemmArgs& args, const WeightArgs& weights) {
  extern __shared__ uint8_t dynamic_shared[];
  auto& shared =
      *reinterpret_cast<GemmShared<C>*>(dynamic_shared + (1024 - shared_address(dynamic_shared) % 1024) % 1024);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  wait_for_previous_kernel();
  if (threadIdx.x >= 128 * C::kConsumers) {
    registers_shrink<C::kProducerRegisters>();
    const int thread = threadIdx.x - 128 * C::kConsumers;
    if (thread == 0) load_weights(weights, shared);
    if (thread == 32) load_tokens(args, shared);
    if (thread == 64) find_all_work(args, shared);
    if (thread == 96) announce_intermediates(args, shared);
    allow_next_kernel();
  } else {
    registers_grow<C::kConsumerRegisters>();
    consume<C, finish>(args, shared);
  }
}

template <class C, Finish finish>
__global__ void __launch_bounds__(Sizes<C>::kThreads, C::kBlocks) gemm_kernel(const __grid_constant__ GemmArgs args) {
  run_block<C, finish>(args, args);
}

template <class C, Finish finish>
GemmVariant variant_of() {
  constexpr int kMemory = 228 * 1024, kReserved = 1024;   // of a multiprocessor, and by each block
  static_assert(C::kBlocks * (sizeof(GemmShared<C>) + 1024 + kReserved) <= kMemory, "blocks share it");
  return {gemm_kernel<C, finish>, sizeof(GemmShared<C>) + 1024,
          Sizes<C>::kThreads,     C::kBlocks,
          Sizes<C>::kBlockTiles,  C::kMaxWidth};
}

template <class Format, Finish finish>
GemmVariants gemm_variants() {
  return {{variant_of<SlimConfig<SlimFormat<Format>>, finish>(), variant_of<NarrowConfig<Format>, finish>(),
           variant_of<WideConfig<Format>, finish>()}};
}

}  // namespace moeq::sm90
