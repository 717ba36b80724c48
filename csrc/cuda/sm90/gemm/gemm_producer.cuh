// The warps that load, all by bulk copies, and the one that finds out which work comes next.
#pragma once
#include "../device/bounded_wait.cuh"
#include "gemm_shared.cuh"

namespace moeq::sm90 {

// Takes work items and writes them where everybody finds them: late, so that blocks that are fast take more, and early
// enough for the weights' ring not to run dry. The first one, too, comes from the counter: an item that belonged to a
// block which has no multiprocessor yet would be waited for by others that do not leave theirs.
template <class C>
__device__ __forceinline__ void find_all_work(const GemmArgs& args, GemmShared<C>& shared) {
  const int tiles_total = *args.schedule.tiles_total;
  Ring<kWorkSlots> ring;
  uint32_t wanted_parity = 0;
  int item = atomicAdd(args.schedule.next_item, 1);
  while (true) {
    const Work work = find_work(args, tiles_total, item);
    barrier_wait(shared_address(&shared.work_empty[ring.slot]), ring.parity ^ 1);
    shared.work[ring.slot] = work;
    barrier_arrive(shared_address(&shared.work_full[ring.slot]));
    if (work.expert < 0) return;
    ring.advance();
    barrier_wait(shared_address(&shared.work_wanted), wanted_parity);
    wanted_parity ^= 1;
    item = atomicAdd(args.schedule.next_item, 1);
  }
}

// Tells other blocks that a block's share of an intermediate is in memory. By one thread, so that none of those that
// multiply waits for memory.
template <class C>
__device__ __forceinline__ void announce_intermediates(const GemmArgs& args, GemmShared<C>& shared) {
  Ring<kWorkSlots> ring;
  while (true) {
    const Work work = wait_for_work(shared, ring);
    if (work.expert < 0) return;
    if (!work.second) {
      barrier_wait(shared_address(&shared.stored[ring.slot]), ring.parity);
      fence_async_proxy();   // GEMM2 reads the intermediate by bulk copies
      add_release(args.schedule.finished + work.expert, 1);
    }
    barrier_arrive(shared_address(&shared.work_empty[ring.slot]));
    ring.advance();
  }
}

// The weights of one piece of work.
template <class C>
struct WeightStream {
  static constexpr int kTiles = Sizes<C>::kBlockTiles;
  static constexpr int kScaleBytes = C::Format::kTileScaleBytes;
  const uint8_t* codes;
  const uint8_t* scales;
  int tiles_apart;   // of K, from one tile of rows to the next
  int real;          // tiles of rows; the last one stands in for those beyond

  __device__ WeightStream(const GemmArgs& args, const Work& work) {
    const Problem& p = args.problem;
    const int row_tiles = work.second ? args.tiles2 : args.tiles13, first = work.row_block * kTiles;
    const int64_t tile = (static_cast<int64_t>(work.expert) * row_tiles + first) * work.k_tiles;
    codes = (work.second ? p.w2 : p.w13) + tile * kTileCodeBytes;
    scales = (work.second ? p.w2_scale : p.w13_scale) + tile * kScaleBytes;
    tiles_apart = work.k_tiles;
    real = min(kTiles, row_tiles - first);
  }

  __device__ __forceinline__ void copy(GemmShared<C>& shared, int stage, int steps) {
    const uint32_t full = shared_address(&shared.weights_full[stage]);
    barrier_expect(full, steps * kTiles * (kTileCodeBytes + kScaleBytes));
    int tile = 0;
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
      copy_bulk(shared_address(shared.codes[stage][i]), codes + int64_t{tile} * kTileCodeBytes, steps * kTileCodeBytes,
                full);
      copy_bulk(shared_address(shared.scales[stage][i]), scales + int64_t{tile} * kScaleBytes, steps * kScaleBytes,
                full);
      tile += i + 1 < real ? tiles_apart : 0;
    }
    codes += steps * kTileCodeBytes;
    scales += steps * kScaleBytes;
  }
};

constexpr int kStagesAhead = 3;   // of an item's end: when the next one is asked for

// By one thread.
template <class C>
__device__ __forceinline__ void load_weights(const GemmArgs& args, GemmShared<C>& shared) {
  Ring<kWorkSlots> work_ring;
  Ring<C::kWeightStages> ring;
  while (true) {
    const Work work = take_work(shared, work_ring);
    if (work.expert < 0) return;
    WeightStream<C> weights(args, work);
    const int stages = (work.k_tiles + kWeightSteps - 1) / kWeightSteps;
    const int wanted = max(stages - kStagesAhead, 0) * kWeightSteps;
#pragma unroll 1
    for (int k = 0; k < work.k_tiles; k += kWeightSteps) {
      if (k == wanted) barrier_arrive(shared_address(&shared.work_wanted));
      barrier_wait(shared_address(&shared.weights_empty[ring.slot]), ring.parity ^ 1);
      weights.copy(shared, ring.slot, min(kWeightSteps, work.k_tiles - k));
      ring.advance();
    }
  }
}

// A wait that is too long ends all waits of the grid, and the launch that comes last ends in a trap (combine.cu).
__device__ __forceinline__ void wait_for_intermediate(const GemmArgs& args, const Work& work) {
  BoundedWait wait;
  while (load_acquire(args.schedule.finished + work.expert) < work.arrivals) {
    __nanosleep(64);
    if (wait.is_over()) *args.schedule.overdue = 1;
    if (wait.rests() && load_acquire(args.schedule.overdue) != 0) break;
  }
  fence_async_proxy();
}

// By one thread.
template <class C>
__device__ __forceinline__ void load_tokens(const GemmArgs& args, GemmShared<C>& shared) {
  Ring<kWorkSlots> work_ring;
  Ring<C::kTokenStages> ring;
  while (true) {
    const Work work = take_work(shared, work_ring);
    if (work.expert < 0) return;
    const __nv_bfloat16* tokens = (work.second ? args.h : args.operand) + int64_t{work.first_row} * kTileK;
    const int64_t step = int64_t{args.rows} * kTileK;
    const int bytes = work.width * kTileK * 2;
    if (work.second) wait_for_intermediate(args, work);
#pragma unroll 1
    for (int k = 0; k < work.k_tiles; k += C::kTokenSteps) {
      barrier_wait(shared_address(&shared.tokens_empty[ring.slot]), ring.parity ^ 1);
      const uint32_t full = shared_address(&shared.tokens_full[ring.slot]);
      const int steps = min(C::kTokenSteps, work.k_tiles - k);
      barrier_expect(full, steps * bytes);
#pragma unroll
      for (int i = 0; i < C::kTokenSteps; i++) {
        if (i < steps) copy_bulk(shared_address(shared.tokens[ring.slot][i]), tokens + i * step, bytes, full);
      }
      tokens += C::kTokenSteps * step;
      ring.advance();
    }
  }
}

}  // namespace moeq::sm90
