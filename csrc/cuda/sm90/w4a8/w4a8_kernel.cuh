// The persistent kernel of one GEMM, and what a launch has to know of it.
#pragma once
#include <type_traits>

#include "w4a8_epilogue.cuh"
#include "w4a8_mainloop.cuh"
#include "w4a8_shared.cuh"
#include "w4a8_tokens_first.cuh"
#include "../device/async.cuh"
#include "../prefill/prefill_plan.h"

namespace moeq::sm90::w4a8 {

// The warp that loads. What is loaded is contiguous, so that a stage is a handful of bulk copies.

// Items of an expert: for each block of weight rows one after another all its tiles, so that weights come from the
// cache from the second tile on.
struct Item {
  int index;
  TokenTile tile;   // expert -1: none
};

__device__ __forceinline__ Item load_item(const GemmArgs& args, int index, int blocks, int items) {
  Item item;
  item.index = index;
  item.tile.expert = -1;
  if (index < items) item.tile = args.schedule.tiles[index / blocks];
  return item;
}

template <class Policy>
__device__ __forceinline__ Work work_of(const Item& item, int blocks) {
  Work work{-1, 0, 0, 0, 0, 0, 0};
  const TokenTile& tile = item.tile;
  if (tile.expert < 0) return work;
  const int within = item.index - tile.first * blocks;
  const int first_token = within % tile.tiles * tile.width;
  work.expert = tile.expert;
  work.row_block = within / tile.tiles;
  work.width = tile.width;
  work.rows = min(tile.width, tile.count - first_token);
  if constexpr (std::is_same_v<Policy, TokensFirst>) {   // the last tile has what is left
    if (within % tile.tiles == tile.tiles - 1) work.rows = tile.count - first_token;
    work.width = round_up(work.rows, 8);
  }
  work.first_row = tile.start + first_token;
  work.start = tile.start;
  work.padded = round_up(tile.count, 8);
  return work;
}

// What one lane copies into each stage: lane 0 the tokens, one for each row tile its weights, then one for each its
// scales, or one the scales of the tokens.
struct Stream {
  const void* from;
  int stride, bytes;
  uint32_t to, to_stride;
};

template <class Policy>
constexpr int kStreams = 1 + Policy::kBlockTiles +
                         (Policy::kTileScales > 0 ? Policy::kBlockTiles
                          : Policy::kGroups       ? 1
                                                  : 0);

template <class Policy>
__device__ __forceinline__ Stream stream_of_tokens(const GemmArgs& args, GemmShared<Policy>& shared, const Work& work,
                                                   bool groups) {
  const int local = work.first_row - work.start, many = min(work.width, work.padded - local);
  const int64_t at = int64_t{work.start} * args.k_tiles + local;
  if (Policy::kGroups && groups) {
    return {args.factor + at, work.padded * 4, many * 4, shared_address(shared.groups), Policy::kWidth * 4};
  }
  return {args.operand + at * kTileK, work.padded * kTileK, many * kTileK, shared_address(shared.tokens),
          Policy::kWidth * kTileK};
}

template <class Policy>
__device__ __forceinline__ Stream stream_of(const GemmArgs& args, GemmShared<Policy>& shared, const Work& work,
                                            int lane) {
  if (lane == 0 || (Policy::kGroups && lane > Policy::kBlockTiles))
    return stream_of_tokens(args, shared, work, lane > 0);
  const int tile = (lane - 1) % Policy::kBlockTiles;
  const int64_t row_tile =
      int64_t{work.expert} * args.row_tiles + min(work.row_block * Policy::kBlockTiles + tile, args.row_tiles - 1);
  if constexpr (Policy::kInt4) {
    if (lane <= Policy::kBlockTiles) {
      return {args.weights + row_tile * args.half_tiles * (Policy::kTileBytes / 2), Policy::kTileBytes,
              Policy::kTileBytes, shared_address(shared.weights) + tile * Policy::kTileBytes,
              Policy::kBlockTiles * Policy::kTileBytes};
    }
    // Of the first of a step's two tiles: both have the same ones.
    return {args.scales + row_tile * args.half_tiles * Policy::kTileScales, 2 * Policy::kTileScales,
            Policy::kTileScales, shared_address(shared.scales) + tile * Policy::kTileScales,
            Policy::kBlockTiles * Policy::kTileScales};
  }
  if (lane <= Policy::kBlockTiles) {
    return {args.weights + row_tile * args.k_tiles * Policy::kTileBytes, Policy::kTileBytes, Policy::kTileBytes,
            shared_address(shared.weights) + tile * Policy::kTileBytes, Policy::kBlockTiles * Policy::kTileBytes};
  }
  return {args.scales + row_tile * (args.k_tiles * Policy::kTileScales + kTileRows), Policy::kTileScales,
          Policy::kTileScales, shared_address(shared.scales) + tile * Policy::kTileScales,
          Policy::kBlockTiles * Policy::kTileScales};
}

// Also what its tokens' results are multiplied by, and where they go.
template <class Policy>
__device__ __forceinline__ void publish(const GemmArgs& args, GemmShared<Policy>& shared, const Work& work, int slot) {
  const uint32_t full = shared_address(&shared.work_full[slot]);
  shared.work[slot] = work;
  if (work.expert < 0) {
    barrier_arrive(full);
    return;
  }
  const int bytes = round_up(work.rows, 8) * 4;
  barrier_expect(full, (Policy::kGroups ? 1 : 2) * bytes);
  copy_bulk(shared_address(shared.slots[slot]), args.schedule.slot_of_row + work.first_row, bytes, full);
  if (Policy::kGroups) return;
  copy_bulk(shared_address(shared.factor[slot]), args.factor + work.first_row, bytes, full);
}

// Steps of a tile, one after another.
template <class Policy>
struct Copies {
  Stream stream;
  int lane, bytes;

  __device__ __forceinline__ Copies(const GemmArgs& args, GemmShared<Policy>& shared, const Work& work)
      : lane(threadIdx.x % 32) {
    stream = stream_of(args, shared, work, lane < kStreams<Policy> ? lane : 0);
    const int token_bytes = __shfl_sync(0xffffffffu, stream.bytes, 0);
    bytes = token_bytes + Policy::kBlockTiles * (Policy::kTileBytes + Policy::kTileScales) +
            (Policy::kGroups ? token_bytes / kTileK * 4 : 0);
  }

  __device__ __forceinline__ void issue(GemmShared<Policy>& shared, Ring<Policy::kStages>& ring, int steps) {
    for (int k = 0; k < steps; k++) {
      barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
      const uint32_t full = shared_address(&shared.full[ring.slot]);
      if (lane == 0) barrier_expect(full, bytes);
      if (lane < kStreams<Policy>) copy_bulk(stream.to + ring.slot * stream.to_stride, stream.from, stream.bytes, full);
      stream.from = static_cast<const uint8_t*>(stream.from) + stream.stride;
      ring.advance();
    }
  }

  // INT4: steps have one tile of weights from here on. Whatever lies in the other's place is multiplied by zeros.
  __device__ __forceinline__ void halve() {
    bytes -= Policy::kBlockTiles * (Policy::kTileBytes / 2);
    if (lane >= 1 && lane <= Policy::kBlockTiles) stream.bytes = Policy::kTileBytes / 2;
  }
};

// One warp. The next item is asked for before a tile's first half is copied and looked up before its second half.
template <class Policy>
__device__ __forceinline__ void produce(const GemmArgs& args, GemmShared<Policy>& shared) {
  const int blocks = (args.row_tiles + Policy::kBlockTiles - 1) / Policy::kBlockTiles,
            items = *args.schedule.tiles_total * blocks;
  const int lane = threadIdx.x % 32;
  Ring<kWorkSlots> work_ring;
  Ring<Policy::kStages> ring;
  Item item = load_item(args, blockIdx.x, blocks, items);
  while (true) {
    const Work work = work_of<Policy>(item, blocks);
    barrier_wait(shared_address(&shared.work_empty[work_ring.slot]), work_ring.parity ^ 1);
    if (lane == 0) publish(args, shared, work, work_ring.slot);
    work_ring.advance();
    if (work.expert < 0) break;
    int next = 0;
    if (lane == 0) next = gridDim.x + atomicAdd(args.next_item, 1);
    Copies<Policy> copies(args, shared, work);
    const int first = args.k_tiles / 2;
    copies.issue(shared, ring, first);
    item = load_item(args, __shfl_sync(0xffffffffu, next, 0), blocks, items);
    if constexpr (Policy::kInt4) {
      copies.issue(shared, ring, args.half_tiles / 2 - first);
      if (args.half_tiles % 2 == 0) continue;
      copies.halve();
      copies.issue(shared, ring, 1);
    } else {
      copies.issue(shared, ring, args.k_tiles - first);
    }
  }
}

// The persistent kernel of one GEMM. Two warpgroups multiply, or three, a warp of another one loads.
template <class Policy, Finish finish, class P>
__device__ __forceinline__ void make_tile(const GemmArgs& args, GemmShared<Policy>& shared, Ring<Policy::kStages>& ring,
                                          const Work& work, int warpgroup, const Ring<kWorkSlots>& works) {
  const Span<P> span(work.width);
  Sums<P> sums = {};
  const Steps steps{kept(args.k_tiles), kept(threadIdx.x % 128)};
  if constexpr (kKnowsWidths<Policy>) {
    multiply_width<0>(sums, shared, ring, warpgroup, span, steps);
  } else if constexpr (Policy::kTileScales > 0) {
    multiply_decoded(sums, shared, ring, warpgroup, span, steps);
  } else {
    multiply_bytes<finish == Finish::kOutput>(sums, shared, ring, warpgroup, span, steps, args, work);
  }
  store<Policy, finish, P>(args, shared, work, sums, span.tokens, warpgroup, works.slot, works.parity);
}

template <class Policy, Finish finish>
__device__ __forceinline__ void consume(const GemmArgs& args, GemmShared<Policy>& shared) {
  // From one lane, so that the compiler knows it to be uniform: operand descriptors are made of it.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  Ring<kWorkSlots> work_ring;
  Ring<Policy::kStages> ring;
  while (true) {
    barrier_wait(shared_address(&shared.work_full[work_ring.slot]), work_ring.parity);
    const Work work = shared.work[work_ring.slot];
    if (work.expert < 0) break;
    constexpr bool paired = Policy::kWidth == kMaxPaired;
    using Narrowest = std::conditional_t<Policy::kWidth == kMaxNarrow || paired, Short, Whole>;
    using Widest = std::conditional_t<paired, Shorts, Halves>;
    if constexpr (std::is_same_v<Policy, TokensFirst>) {
      make_tile<finish>(args, shared, ring, work, warpgroup, work_ring);
    } else if (paired ? work.width <= kMaxNarrow : Policy::kWidth <= kMaxSingle || work.width <= kMaxSingle) {
      make_tile<Policy, finish, Narrowest>(args, shared, ring, work, warpgroup, work_ring);
    } else {
      make_tile<Policy, finish, Widest>(args, shared, ring, work, warpgroup, work_ring);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&shared.work_empty[work_ring.slot]));
    work_ring.advance();
  }
}

template <class Policy, Finish finish>
__global__ void __launch_bounds__(kGemmThreads<Policy>, 1) gemm_kernel(const __grid_constant__ GemmArgs args) {
  extern __shared__ uint8_t dynamic_shared[];
  GemmShared<Policy>& shared =
      *reinterpret_cast<GemmShared<Policy>*>(dynamic_shared + (1024 - shared_address(dynamic_shared) % 1024) % 1024);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  allow_next_kernel();
  wait_for_previous_kernel();
  constexpr bool three = Policy::kBlockTiles == 3;
  if (threadIdx.x >= kConsumerThreads<Policy>) {
    registers_shrink<three ? 56 : 40>();
    const int warp = (threadIdx.x - kConsumerThreads<Policy>) / 32;
    if (warp == 0) produce(args, shared);
    if (warp == 1) load_rows<Policy, finish>(args, shared);
  } else {
    registers_grow<three ? 152 : 232>();
    consume<Policy, finish>(args, shared);
  }
}

template <class Policy, Finish finish>
Variant<GemmArgs> variant_of() {
  return {gemm_kernel<Policy, finish>, sizeof(GemmShared<Policy>) + 1024,
          kGemmThreads<Policy>,        1,
          Policy::kBlockTiles,         Policy::kWidth};
}

template <class Policy>
Variant<GemmArgs> variant_of(Finish finish) {
  switch (finish) {
    case Finish::kSwiglu:
      if constexpr (!std::is_same_v<Policy, Blocks<kMaxWidth>>) return variant_of<Policy, Finish::kSwiglu>();
      return {};   // tokens are the first factor there
    case Finish::kLinear:
      return variant_of<Policy, Finish::kLinear>();
    default:
      return variant_of<Policy, Finish::kOutput>();
  }
}

template <template <int> class Policy>
Variant<GemmArgs> variant_of(Finish finish, bool wide) {
  return wide ? variant_of<Policy<kMaxWidth>>(finish) : variant_of<Policy<kMaxSingle>>(finish);
}

// The kernels of INT4 weights (w4a8_int4.cu). zeros: weights have zero points, or float16 scales. widest: of
// widest_of_int4.
Variant<GemmArgs> int4_variant(bool zeros, Finish finish, int widest);

}  // namespace moeq::sm90::w4a8
