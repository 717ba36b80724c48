// Both GEMMs of a layer of bfloat16 weights in one persistent kernel. As gemm_kernel.cuh, but for how weights are
// copied and multiplied.
#pragma once
#include "bf16_config.cuh"
#include "../device/wgmma_bf16.cuh"

namespace moeq::sm90 {

__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, int k, int row, int eight, int expert,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
      "l"(&map), "r"(k), "r"(row), "r"(0), "r"(eight), "r"(expert), "r"(barrier)
      : "memory");
}

// By one thread.
__device__ __forceinline__ void load_weights(const Bf16Args& args, GemmShared<Bf16Config>& shared) {
  Ring<kWorkSlots> work_ring;
  Ring<Bf16Config::kWeightStages> ring;
  while (true) {
    const Work work = take_work(shared, work_ring);
    if (work.expert < 0) return;
    const CUtensorMap& map = work.second ? args.w2 : args.w13;
    const bool turns = !work.second && args.gemm.problem.gated;
    const int first = work.row_block * kBf16BlockRows;
    const int row = turns ? 0 : first, eight = turns ? first / 16 : 0;
    const int wanted = max(work.k_tiles - kStagesAhead, 0);
#pragma unroll 1
    for (int k = 0; k < work.k_tiles; k++) {
      if (k == wanted) barrier_arrive(shared_address(&shared.work_wanted));
      barrier_wait(shared_address(&shared.weights_empty[ring.slot]), ring.parity ^ 1);
      const uint32_t full = shared_address(&shared.weights_full[ring.slot]);
      barrier_expect(full, sizeof(shared.weights[0]));
      copy_box(shared_address(shared.weights[ring.slot]), map, k * kTileK, row, eight, work.expert, full);
      ring.advance();
    }
  }
}

// Where a warpgroup is in the rings, from tile to tile.
template <>
struct Consumer<Bf16Config> {
  Ring<Bf16Config::kTokenStages> tokens;
  Ring<Bf16Config::kWeightStages> weights;
  int first_tile;   // of the warpgroup's in a stage of weights

  __device__ Consumer(GemmShared<Bf16Config>&, int warpgroup) : first_tile(warpgroup * Bf16Config::kWarpgroupTiles) {}
};

// One warpgroup's multiplication of a tile, with both operands in shared memory.
__device__ __forceinline__ void multiply_tile(Accumulators<Bf16Config>& acc, GemmShared<Bf16Config>& shared,
                                              Consumer<Bf16Config>& at, const Work& work) {
  clear<Bf16Config>(acc);
  const int index = work.width / 8 - 1, lane = threadIdx.x % 32;
  uint32_t tokens_read = 0, weights_read = 0;   // the barriers that tell that the stages before have been read
#pragma unroll 1
  for (int k = 0; k < work.k_tiles; k++) {
    barrier_wait(shared_address(&shared.weights_full[at.weights.slot]), at.weights.parity);
    barrier_wait(shared_address(&shared.tokens_full[at.tokens.slot]), at.tokens.parity);
    const uint32_t a = shared_address(shared.weights[at.weights.slot][at.first_tile]);
    const uint32_t b = shared_address(shared.tokens[at.tokens.slot]);
    multiply_shared<Bf16Config::kMaxWidth>(acc[0], a / 16 | 1 << 16, b / 16 | 1 << 16, index);
    wgmma_wait<1>();
    if (k > 0) {
      arrive_once_a_warp(tokens_read, lane);
      arrive_once_a_warp(weights_read, lane);
    }
    tokens_read = shared_address(&shared.tokens_empty[at.tokens.slot]);
    weights_read = shared_address(&shared.weights_empty[at.weights.slot]);
    at.tokens.advance();
    at.weights.advance();
  }
  wgmma_wait<0>();
  arrive_once_a_warp(tokens_read, lane);
  arrive_once_a_warp(weights_read, lane);
}

template <Finish finish>
__global__ void __launch_bounds__(Sizes<Bf16Config>::kThreads, 1) bf16_kernel(const __grid_constant__ Bf16Args args) {
  run_block<Bf16Config, finish>(args.gemm, args);
}

template <Finish finish>
Bf16Kernel bf16_kernel_of() {
  using C = Bf16Config;
  return {bf16_kernel<finish>, sizeof(GemmShared<C>) + 1024, Sizes<C>::kThreads, Sizes<C>::kBlockTiles, C::kMaxWidth};
}

}  // namespace moeq::sm90
