// Both GEMMs of a layer in one persistent kernel. Some warpgroups multiply, one loads.
#pragma once
#include "gemm_finish.cuh"
#include "gemm_finish_gated.cuh"
#include "gemm_pipeline.cuh"

namespace moeq::sm90 {

// One warpgroup's share of all work: begin(work, staging, slots, at) before a tile is multiplied, end(work, sums,
// staging, slots, at) after it; at: the work's place in its ring.
template <class C, class Begin, class End>
__device__ __forceinline__ void consume(const GemmArgs& args, GemmShared<C>& shared, Begin begin, End end) {
  Staging staging(shared, threadIdx.x / 128);
  Ring<kWorkSlots> work_ring;
  Consumer<C> at(shared, staging.warpgroup);
  while (true) {
    const Work work = wait_for_work(shared, work_ring);
    if (work.expert < 0) break;
    fetch_alphas<typename C::Format>(args.problem, work, staging);
    staging.work_slot = work_ring.slot;
    int* slots = shared.slots[staging.warpgroup][work_ring.slot % 2];
    begin(work, staging, slots, work_ring.slot);
    Accumulators<C> acc;
    begin_tile(at, args, work);
    multiply_tile(acc, shared, at, work);
    end(work, acc, staging, slots, work_ring.slot);
    release_work(shared, work_ring);
  }
}

// What a block of a kernel does, in 1024 bytes more than Shared. `weights`: what WeightStream needs. start: of barriers
// that only this kernel has; find: by one thread, which takes work; last: by those that load, of whose threads those
// from 96 on have nothing else to do.
template <class C, class Shared, class WeightArgs, class Start, class Find, class Last, class Consume>
__device__ __forceinline__ void run_block(const GemmArgs& args, const WeightArgs& weights, Start start, Find find,
                                          Last last, Consume consume_all) {
  extern __shared__ uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<Shared*>(dynamic_shared + (1024 - shared_address(dynamic_shared) % 1024) % 1024);
  if (threadIdx.x == 0) {
    start(shared);
    init_barriers<C>(shared);
  }
  __syncthreads();
  wait_for_previous_kernel();
  if (threadIdx.x >= 128 * C::kConsumers) {
    registers_shrink<C::kProducerRegisters>();
    const int thread = threadIdx.x - 128 * C::kConsumers;
    if (thread == 0) load_weights(weights, shared);
    if (thread == 32) load_tokens<C>(args, shared);
    if (thread == 64) find(shared);
    last(shared, thread);
    allow_next_kernel();
  } else {
    registers_grow<C::kConsumerRegisters>();
    consume_all(shared);
  }
}

// By all threads that multiply, before the first piece of work.
template <class C>
__device__ __forceinline__ void prepare_consumers(const GemmArgs&, GemmShared<C>&) {}

template <class C, Finish finish>
__device__ __forceinline__ void consume_both(const GemmArgs& args, GemmShared<C>& shared) {
  prepare_consumers(args, shared);
  const auto begin = [&](const Work& work, Staging& staging, int* slots, int) {
    if (work.second) prefetch_slots(args, work, staging, slots);
    if constexpr (kRounds<typename C::Format>) {
      const float* factors = work.second ? args.h_factor : args.operand_factor;
      if (work.second ? factors != nullptr : needs_factors<finish>(args)) prefetch_factors<C>(factors, work, staging);
    }
    prefetch_biases<C>(args.problem, work, staging);
  };
  consume<C>(args, shared, begin,
             [&](const Work& work, Accumulators<C>& acc, const Staging& staging, int* slots, int at) {
               if (work.second) {
                 finish_second<C>(args, shared, work, acc, staging, slots);
               } else {
                 if constexpr (finish == Finish::kPlain) {
                   finish_plain<C>(args, shared, work, acc, staging);
                 } else {
                   finish_gated<C, finish>(args, shared, work, acc, staging);
                 }
                 __syncwarp();
                 arrive_once_a_warp(shared_address(&shared.stored[at]), staging.lane);
               }
             });
}

// A layer's kernel: GEMM2's tiles wait for what GEMM1's announce.
template <class C, Finish finish, class WeightArgs>
__device__ __forceinline__ void run_both(const GemmArgs& args, const WeightArgs& weights) {
  run_block<C, GemmShared<C>>(
      args, weights, [](auto&) {}, [&](auto& shared) { find_all_work(args, shared); },
      [&](auto& shared, int thread) {
        if (thread == 96) announce_intermediates(args, shared);
      },
      [&](auto& shared) { consume_both<C, finish>(args, shared); });
}

template <class C, Finish finish>
__global__ void __launch_bounds__(Sizes<C>::kThreads, C::kBlocks) gemm_kernel(const __grid_constant__ GemmArgs args) {
  run_both<C, finish>(args, args);
}

template <class C, class Shared, class Args>
Variant<Args> variant_of(void (*kernel)(Args)) {
  constexpr int kMemory = 228 * 1024, kReserved = 1024;   // of a multiprocessor, and by each block
  static_assert(C::kBlocks * (sizeof(Shared) + 1024 + kReserved) <= kMemory, "blocks share it");
  return {kernel, sizeof(Shared) + 1024, Sizes<C>::kThreads, C::kBlocks, Sizes<C>::kBlockTiles, C::kMaxWidth};
}

template <class C, Finish finish>
GemmVariant variant_of() {
  return variant_of<C, GemmShared<C>>(gemm_kernel<C, finish>);
}

// A format's shapes of tiles.
template <class Format>
struct ConfigsOf {
  using Slim = SlimConfig<SlimFormat<Format>>;
  using Narrow = NarrowConfig<Format>;
  using Wide = WideConfig<Format>;
};

// Slim tiles of float16 are those of two bfloat16 each: the rate of memory decides there.
template <>
struct ConfigsOf<Nvfp4HalfFormat> {
  using Slim = NarrowConfig<Nvfp4HalfFormat>;
  using Narrow = Slim;
  using Wide = WideConfig<Nvfp4HalfFormat>;
};

template <class Format, Finish finish>
GemmVariants gemm_variants() {
  using Configs = ConfigsOf<Format>;
  return {{variant_of<typename Configs::Slim, finish>(), variant_of<typename Configs::Narrow, finish>(),
           variant_of<typename Configs::Wide, finish>()}};
}

}  // namespace moeq::sm90
