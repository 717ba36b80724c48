// The warps that load, all by bulk copies, and the one that finds out which work comes next.
#pragma once
#include "gemm_shared.cuh"

namespace moeq::sm90 {

// Takes work items and writes them where everybody finds them, at most one ahead of the consumers.
__device__ __forceinline__ void find_all_work(const GemmArgs& args, GemmShared& shared) {
  const int tiles_total = *args.schedule.tiles_total;
  Ring<kWorkSlots> ring;
  int item = blockIdx.x;
  while (true) {
    const Work work = find_work(args, tiles_total, item);
    barrier_wait_idle(shared_address(&shared.work_empty[ring.slot]), ring.parity ^ 1);
    shared.work[ring.slot] = work;
    barrier_arrive(shared_address(&shared.work_full[ring.slot]));
    if (work.expert < 0) return;
    ring.advance();
    item = gridDim.x + atomicAdd(args.schedule.next_item, 1);
  }
}

// One lane's share of the weights: lanes 0 to 3 copy a tile's codes, 4 to 7 its scales.
struct WeightStream {
  const uint8_t* from;
  int bytes;   // of a step

  __device__ WeightStream(const GemmArgs& args, const Work& work, int lane) {
    const Problem& p = args.problem;
    const int row_tiles = work.second ? args.tiles2 : args.tiles13;
    const bool scales = lane >= kBlockTiles;
    const int row_tile = min(work.row_block * kBlockTiles + lane % kBlockTiles, row_tiles - 1);
    bytes = scales ? kTileScaleBytes : kTileCodeBytes;
    const uint8_t* base = work.second ? (scales ? p.w2_scale : p.w2) : (scales ? p.w13_scale : p.w13);
    from = base + (static_cast<int64_t>(work.expert) * row_tiles + row_tile) * work.k_tiles * bytes;
  }

  __device__ __forceinline__ void copy(GemmShared& shared, int stage, int lane, int steps) {
    const uint32_t full = shared_address(&shared.weights_full[stage]);
    if (lane == 0) barrier_expect(full, steps * kBlockTiles * (kTileCodeBytes + kTileScaleBytes));
    const int tile = lane % kBlockTiles;
    uint8_t* to = lane < kBlockTiles ? shared.codes[stage][tile] : shared.scales[stage][tile];
    if (lane < 2 * kBlockTiles) copy_bulk(shared_address(to), from, steps * bytes, full);
    from += steps * bytes;
  }
};

__device__ __forceinline__ void wait_for_intermediate(const GemmArgs& args, const Work& work) {
  while (load_acquire(args.schedule.finished + work.expert) < work.arrivals) __nanosleep(64);
  fence_async_proxy();
}

// By a whole warp.
__device__ __forceinline__ void load_all(const GemmArgs& args, GemmShared& shared) {
  const int lane = threadIdx.x % 32;
  Ring<kWorkSlots> work_ring;
  Ring<kTokenStages> token_ring;
  Ring<kWeightStages> weight_ring;
  while (true) {
    const Work work = wait_for_work(shared, work_ring);
    release_work(shared, work_ring);
    if (work.expert < 0) return;
    WeightStream weights(args, work, lane);
    const __nv_bfloat16* tokens = (work.second ? args.h : args.operand) + int64_t{work.first_row} * kTileK;
    const int64_t step = int64_t{args.rows} * kTileK;
    for (int k = 0; k < work.k_tiles; k++) {
      if (k % kWeightSteps == 0) {
        barrier_wait(shared_address(&shared.weights_empty[weight_ring.slot]), weight_ring.parity ^ 1);
        weights.copy(shared, weight_ring.slot, lane, min(kWeightSteps, work.k_tiles - k));
        weight_ring.advance();
      }
      if (k == 0 && work.second) wait_for_intermediate(args, work);
      barrier_wait(shared_address(&shared.tokens_empty[token_ring.slot]), token_ring.parity ^ 1);
      if (lane == 0) {
        const uint32_t full = shared_address(&shared.tokens_full[token_ring.slot]);
        barrier_expect(full, work.width * kTileK * 2);
        copy_bulk(shared_address(shared.tokens[token_ring.slot]), tokens, work.width * kTileK * 2, full);
      }
      tokens += step;
      token_ring.advance();
    }
  }
}

}  // namespace moeq::sm90
