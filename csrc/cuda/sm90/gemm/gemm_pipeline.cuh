// Shared memory of the persistent kernels, rings of token stages, of weight stages and of work, and the warps that fill
// them: they load, all by bulk copies, and find out which work comes next.
#pragma once
#include "gemm_args.cuh"
#include "../device/async.cuh"
#include "../device/bounded_wait.cuh"

namespace moeq::sm90 {

constexpr int kWorkSlots = 4;
constexpr int kRowsAPass = 128 / 8;  // eight threads copy the 128 bytes of a row

// Of 16 intermediates: maxima, then what they are rounded with; next to nothing where the format rounds none.
template <class C>
using IntermediateBlocks =
    float2[Sizes<C>::kHasBlocks ? C::kConsumers : 1][Sizes<C>::kHasBlocks ? C::kWarpgroupTiles : 1]
          [Sizes<C>::kHasBlocks ? C::kMaxWidth : 1][2];

// What is multiplied, and what of a tile is on its way to memory.
template <class C>
struct GemmOperands {
  uint8_t tokens[C::kTokenStages][C::kTokenSteps][Sizes<C>::kTokenStepBytes];
  uint8_t staging[C::kConsumers][C::kMaxWidth * 128];  // 64 results of each token
  uint8_t codes[C::kWeightStages][Sizes<C>::kBlockTiles][Sizes<C>::kStageCodes];
  uint8_t scales[C::kWeightStages][Sizes<C>::kBlockTiles][Sizes<C>::kStageScales];
  IntermediateBlocks<C> blocks;
};

// What rows of tokens lack, of each warpgroup; next to nothing where `blocks` has room for them.
template <class C>
using TokenFactors = float[Sizes<C>::kHasBlocks ? 1 : C::kConsumers][Sizes<C>::kHasBlocks ? 1 : C::kMaxWidth];

template <class C>
struct __align__(1024) GemmShared : GemmOperands<C> {
  int slots[C::kConsumers][2][C::kMaxWidth];  // of this work and of the next
  alignas(16) Work work[kWorkSlots];  // two loads take one
  uint64_t tokens_full[C::kTokenStages], tokens_empty[C::kTokenStages];
  uint64_t weights_full[C::kWeightStages], weights_empty[C::kWeightStages];
  uint64_t work_full[kWorkSlots], work_empty[kWorkSlots];
  uint64_t stored[kWorkSlots];  // the intermediate of this work is in memory
  uint64_t work_wanted;
  // Last, as ptxas takes other registers for the branches of products elsewhere: tiles of up to 96 tokens took 3 %
  // longer.
  float biases[C::kConsumers][C::kWarpgroupTiles * kTileRows];
  TokenFactors<C> factors;
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
  fence_barrier_init();
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
  barrier_arrive(once_loaded(shared_address(&shared.work_empty[ring.slot]), work.expert | work.k_tiles));
  ring.advance();
  return work;
}

template <class C>
__device__ __forceinline__ void release_work(GemmShared<C>& shared, Ring<kWorkSlots>& ring) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&shared.work_empty[ring.slot]));
  ring.advance();
}

// The warps that load, all by bulk copies, and the one that finds out which work comes next.

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
      fence_async_proxy();  // GEMM2 reads the intermediate by bulk copies
      add_release(args.schedule.finished + work.expert, 1);
    }
    barrier_arrive(shared_address(&shared.work_empty[ring.slot]));
    ring.advance();
  }
}

// The weights of one piece of work, of as many steps of 64 in K a stage.
template <class C>
struct WeightStream {
  static constexpr int kSteps = kWeightSteps;
  static constexpr int kTiles = Sizes<C>::kBlockTiles;
  static constexpr int kScaleBytes = C::Format::kTileScaleBytes;
  const uint8_t* codes;
  const uint8_t* scales;
  int tiles_apart;  // of K, from one tile of rows to the next
  int real;  // tiles of rows; the last one stands in for those beyond

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

constexpr int kStagesAhead = 3;  // of an item's end: when the next one is asked for

// By one thread. `args`: what WeightStream needs.
template <class C, class Args>
__device__ __forceinline__ void load_weights(const Args& args, GemmShared<C>& shared) {
  constexpr int kSteps = WeightStream<C>::kSteps;
  Ring<kWorkSlots> work_ring;
  Ring<C::kWeightStages> ring;
  while (true) {
    const Work work = take_work(shared, work_ring);
    if (work.expert < 0) return;
    WeightStream<C> weights(args, work);
    const int stages = (work.k_tiles + kSteps - 1) / kSteps;
    const int wanted = max(stages - kStagesAhead, 0) * kSteps;
#pragma unroll 1
    for (int k = 0; k < work.k_tiles; k += kSteps) {
      if (k == wanted) barrier_arrive(shared_address(&shared.work_wanted));
      barrier_wait(shared_address(&shared.weights_empty[ring.slot]), ring.parity ^ 1);
      weights.copy(shared, ring.slot, min(kSteps, work.k_tiles - k));
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

// Where a stage of tokens has their scales, of 128 values of K from its first one on (W8a8Format).
template <class C>
__device__ __forceinline__ uint32_t scales_of_stage(GemmShared<C>&, int) {
  return 0;
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
    const float* scales = work.second ? args.h_scale : args.operand_scale;
    if (work.second) wait_for_intermediate(args, work);
#pragma unroll 1
    for (int k = 0; k < work.k_tiles; k += C::kTokenSteps) {
      barrier_wait(shared_address(&shared.tokens_empty[ring.slot]), ring.parity ^ 1);
      const uint32_t full = shared_address(&shared.tokens_full[ring.slot]);
      const int steps = min(C::kTokenSteps, work.k_tiles - k);
      const bool has_scales = kIsW8a8<typename C::Format> && scales != nullptr && k % 2 == 0;
      const int scale_bytes = has_scales ? work.width * static_cast<int>(sizeof(float)) : 0;
      barrier_expect(full, steps * bytes + scale_bytes);
      if (has_scales) {
        copy_bulk(scales_of_stage(shared, ring.slot), scales + int64_t{k / 2} * args.rows + work.first_row, scale_bytes,
                  full);
      }
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
